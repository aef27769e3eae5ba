"""Which cases of a parametrized test run without ``--all``."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

import pytest

every_case = False
"""Whether pytest was given --all; set before tests are collected."""


def examples(count: int) -> int:
    """Return how many examples of a property to try: `count` with --all, else a quarter."""
    return count if every_case else max(5, count // 4)


def full(*values: object) -> list[object]:
    """Return values of a parameter that are tried only with --all."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def full_cases(*cases: tuple) -> list:
    """Return cases (tuples of arguments) of a parametrized test that run only with --all."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


def selected(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the items that cover their test functions, except those marked ``full``.

    A function with two parameters runs with each value of each. With more parameters it runs with
    each pair of values that some case has (pairwise testing). The choice is greedy and does not
    depend on chance.
    """
    functions = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("full"):
            functions[item.nodeid.partition("[")[0]].append(item)
    return {cases[index] for cases in functions.values() for index in _covering(_axes(cases))}


def _axes(cases: list[pytest.Item]) -> list[tuple[int, ...]]:
    """Return the value's number of each case, for each independent parameter that varies."""
    if not hasattr(cases[0], "callspec"):
        return [()] * len(cases)
    columns = set()
    for name in cases[0].callspec.params:
        values = [id(case.callspec.params.get(name)) for case in cases]
        columns.add(tuple(map(values.index, values)))
    return list(zip(*sorted(column for column in columns if any(column)), strict=True)) or [()]


def _covering(cases: list[tuple[int, ...]]) -> list[int]:
    """Return numbers of cases that have all values of two axes, or all pairs of more."""
    size = 1 if len(cases[0]) < 3 else 2
    parts = [set(itertools.combinations(enumerate(case), size)) for case in cases]
    missing, numbers = set().union(*parts), []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(parts[number] & missing))
        numbers.append(best)
        missing -= parts[best]
    return numbers or [0]
