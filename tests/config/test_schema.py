"""Types of values from outside: what fits comes back, and what does not is told in one line."""

from __future__ import annotations

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
        found = validate(kind, value, "here")
    except UserError as error:
        assert str(error).startswith("here") and "\n" not in str(error) and len(str(error)) < 300
    else:
        assert validate(kind, found, "here") == found


@pytest.mark.parametrize("kind, value, said", [
    (int, True, "here must be an integer, got True"),
    (Count, 0, "here must be at least 1, got 0"),
    (float, float("nan"), "here must be a finite number, got nan"),
    (Positive, 1e300, "here must be at most 1e+18, got 1e+300"),
    (bool, 1, "here must be true or false, got 1"),
    (Text, " ", "here must be text that is not empty, got ' '"),
    (Literal["a", 4], "b", "here must be one of a, 4, got 'b'"),
    (Outer, {"nam": "x"}, "here: Object contains unknown field `nam`"),
    (Outer, {"name": "x", "inner": {"rates": {16: 1}}},
     "here: Expected `object` of length >= 2 - at `$.inner.rates`"),
    (Outer, {"name": "x", "inner": {"rates": {16: 1, 8: 0}}},
     "here: Expected `float` > 0.0 - at `$.inner.rates[...]`"),
    (Outer, {"name": "x", "places": {0: 1}}, "here: Expected `int` >= 1 - at `key` in `$.places`"),
    (Outer, {"name": "x", "names": ["a", "c"]}, "here: Invalid enum value 'c' - at `$.names[1]`"),
    (Outer, {"name": "a", "names": ["a"]}, "here: its own name is among the names"),
])
def test_errors_name_path_and_problem(kind, value, said):
    with pytest.raises(UserError) as caught:
        validate(kind, value, "here")
    assert str(caught.value) == said


def test_numbers_of_numpy_are_numbers():
    assert validate(Count, np.int64(3), "here") == 3
    assert validate(Share, np.float32(0.5), "here") == 0.5
    refused(lambda: validate(Count, np.float64(3), "here"), match="must be an integer")
