"""Types of values from outside: valid values, and one-line errors."""

from typing import Annotated, Literal

import numpy as np
import pytest
from helpers.error_cases import refused
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from flexgen_h2o.config.validation import Count, Share, StrictStruct, Text, mapping_of, validate
from flexgen_h2o.errors import UserError

Positive = Annotated[float, Meta(gt=0, le=1e18)]


class Inner(StrictStruct):
    rates: mapping_of((16, 8), Positive)


class Outer(StrictStruct):
    name: Text
    inner: Inner | None = None
    places: dict[Annotated[int, Meta(ge=1)], Share] = {}
    names: tuple[Literal["a", "b"], ...] = ()

    def __post_init__(self) -> None:
        if self.name in self.names:
            raise ValueError("its own name is among the names")


KINDS = (bool, int, float, str, Count, Share, Positive, Text, Count | None, Literal["a", 4],
         tuple[Count, ...], dict[str, Share], mapping_of((16, 8), Positive), Outer, Outer | None)
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4),
                  st.sampled_from([10**400, "inner", "rates", "name", "a"]))
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    plain.filter(lambda key: key == key), inner, max_size=3), max_leaves=8)


@given(kind=st.sampled_from(KINDS), value=values)
def test_invalid_values_raise_one_line_errors(kind, value):
    try:
        validated = validate(kind, value, "value")
    except UserError as error:
        assert str(error).startswith("value") and "\n" not in str(error) and len(str(error)) < 300
    else:
        assert validate(kind, validated, "value") == validated


@pytest.mark.parametrize("kind, value, words", [
    (int, True, "an integer, got True"), (Count, 0, "at least 1, got 0"),
    (float, float("nan"), "finite number, got nan"), (Positive, 1e300, "at most 1e+18"),
    (bool, 1, "true or false, got 1"), (Text, " ", "text that is not empty"),
    (Literal["a", 4], "b", "one of a, 4, got 'b'"), (Outer, {"nam": "x"}, "`nam`"),
    (Outer, {"name": "x", "inner": {"rates": {16: 1}}}, "`$.inner.rates`"),
    (Outer, {"name": "x", "inner": {"rates": {16: 1, 8: 0}}}, "`$.inner.rates[...]`"),
    (Outer, {"name": "x", "places": {0: 1}}, "at `key` in `$.places`"),
    (Outer, {"name": "x", "names": ["a", "c"]}, "`$.names[1]`"),
    (Outer, {"name": "a", "names": ["a"]}, "its own name is among the names"),
    (Count, np.float64(3), "an integer")])
def test_errors_name_path_and_problem(kind, value, words):
    assert refused(lambda: validate(kind, value, "value"), words).startswith("value")


def test_numbers_of_numpy_are_numbers():
    assert validate(Count, np.int64(3), "value") == 3
    assert validate(Share, np.float32(0.5), "value") == 0.5
