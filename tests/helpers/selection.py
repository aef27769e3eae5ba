"""Which cases of a parametrized test run without ``--all``."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

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


def pairwise(axes: dict[str, Sequence], allowed: Callable[[dict], bool] = lambda case: True, *,
             arrays: int = 1) -> list[dict]:
    """Return cases that have each allowed pair of values of two axes, `arrays` times over.

    The choice is greedy: a case begins with a missing pair, and takes of each other axis the value
    that completes most missing pairs. It does not depend on chance. `allowed` judges cases, also
    those that lack axes.
    """
    names, cases = list(axes), []
    for number in range(arrays):
        rng = random.Random(number)
        missing = {((a, i), (b, j)): None for a, b in itertools.combinations(names, 2)
                   for i in range(len(axes[a])) for j in range(len(axes[b]))
                   if allowed({a: axes[a][i], b: axes[b][j]})}
        while missing:
            chosen = dict(next(iter(missing)))
            for name in sorted(names, key=lambda name: (name not in chosen, rng.random())):
                if name in chosen:
                    continue
                order = rng.sample(range(len(axes[name])), len(axes[name]))
                chosen[name] = max(
                    (i for i in order if allowed(_values(axes, chosen | {name: i}))),
                    key=lambda i: sum(pair in missing for pair in _pairs(names, chosen, name, i)))
            for pair in itertools.combinations([(name, chosen[name]) for name in names], 2):
                missing.pop(pair, None)
            cases.append(_values(axes, chosen))
    return cases


def _values(axes: dict[str, Sequence], chosen: dict[str, int]) -> dict:
    return {name: axes[name][number] for name, number in chosen.items()}


def _pairs(names: list[str], chosen: dict[str, int], name: str, number: int) -> Iterator[tuple]:
    """Yield the pairs of a value with those that are chosen, in the order of names."""
    for other, value in chosen.items():
        pair = (other, value), (name, number)
        yield pair if names.index(other) < names.index(name) else pair[::-1]


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
