"""Validation of values from files, flags and calls against types, with msgspec. No torch.

A type is bool, int, float or str, one of them with bounds (``Annotated[int, Meta(ge=1)]``), a
``Literal``, a list or mapping of types, or a subclass of `StrictStruct`; ``| None`` may follow. An
error is one line that names the value and the expected values.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from flexgen_h2o.errors import UserError, check_text, did_you_mean, short_repr

Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, Meta(pattern=r"\S")]
"""Text that is not empty."""

_WORDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
_BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("greater than", operator.gt), "ge": ("at least", operator.ge),
    "le": ("at most", operator.le)}


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping with known keys: the fields of a subclass. Fields with a default may be absent.

    `__post_init__` may raise `ValueError` for values that contradict each other.
    """


def validate(hint: Any, value: object, name: str) -> Any:
    """Return `value` as the type `hint`. Text is not converted to numbers, nor 1 to a bool.

    Raises
    ------
    UserError
        "NAME must be at least 1, got 0", or msgspec's message for a list or mapping: "cpu.yaml:
        Object contains unknown field `tflops` - at `$.compute`".
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # numpy scalars too
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    try:
        converted = msgspec.convert(value, hint)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError("not finite")
    except ValueError as error:  # ValidationError, and UnicodeEncodeError for a lone surrogate
        expected = _expected(hint, value)
        raise UserError(f"{name}: {error}" if expected is None else
                        f"{name} must be {expected}, got {short_repr(value)}") from None
    if isinstance(converted, str):
        check_text(name, converted)
    return converted


def _expected(hint: Any, value: object) -> str | None:
    """Return the description of a scalar type, or of its bound that `value` exceeds, if any."""
    (hint,) = (member for member in _members(hint) if member is not NoneType)
    hint, bounds = get_args(hint) if get_origin(hint) is Annotated else (hint, Meta())
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if bounds.pattern is not None:
        return "text that is not empty"
    if type(value) in (hint, int) and (not isinstance(value, float) or math.isfinite(value)):
        for rule, (words, holds) in _BOUNDS.items():
            bound = getattr(bounds, rule)
            if bound is not None and not holds(value, bound):
                return f"{words} {bound:g}" if isinstance(bound, float) else f"{words} {bound}"
    return _WORDS.get(hint)


def mapping_of(keys: Iterable[object], values: Any) -> Any:
    """Return the type of a mapping with exactly these keys and the type of its values."""
    keys = tuple(keys)
    return Annotated[dict[Literal[keys], values], Meta(min_length=len(keys))]  # type: ignore


def check_keys(values: Iterable[object], known: Iterable[object], where: str) -> None:
    """Raise `UserError` for an unknown key, with the nearest known one."""
    names = list(map(str, known))
    for key in values:
        if str(key) not in names:
            hint = did_you_mean(str(key), names, f"it takes {', '.join(names)}")
            raise UserError(f"{where}: unknown key {short_repr(key)}{hint}")


def check_bool(name: str, value: object) -> None:
    """Raise `UserError` unless `value` is True or False."""
    validate(bool, value, name)


def check_int(name: str, value: object, *, ge: int | None = None, le: int | None = None) -> None:
    """Raise `UserError` unless `value` is an integer (and no bool) in ge..le."""
    validate(Annotated[int, Meta(ge=ge, le=le)], value, name)


def check_number(name: str, value: object, *, ge: float | None = None, gt: float | None = None,
                 le: float | None = None) -> float:
    """Return `value`. Raises `UserError` unless it is finite and in the bounds ge, gt and le."""
    bounds = Meta(ge=ge, le=le) if gt is None else Meta(gt=gt, le=le)
    return validate(Annotated[float, bounds], value, name)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise `UserError` unless `value` is one of `choices`."""
    validate(Literal[tuple(choices)], value, name)


def check_fields(options: Any) -> None:
    """Check the fields of a dataclass by their types: scalars with bounds, and classes.

    Fields of other types, such as sequences, are left to the caller. Raises `UserError`.
    """
    for name, hint in _field_types(type(options)).items():  # type: ignore[arg-type]
        if all(map(_is_class, _members(hint))):
            _check(name, getattr(options, name), _members(hint))
        else:
            validate(hint, getattr(options, name), name)


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    """Return the types that `check_fields` checks, by field."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)
            if all(_is_class(hint) or get_origin(hint) is Annotated
                   for hint in _members(hints[field.name]))}


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")


def check_arguments(function: Callable[_Options, _Result]) -> Callable[_Options, _Result]:
    """Decorate a function so that unknown keywords and wrong types raise `UserError`.

    Types are checked by type hints that are a class or a union of classes.
    """
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: _Options.args, **options: _Options.kwargs) -> _Result:
        for name in () if takes_all else options:
            if name not in parameters:
                raise UserError(f"{owner} has no option {name!r}"
                                + did_you_mean(name, names[1:], f"see help({owner})"))
        values: dict[str, object] = {**dict(zip(names, args, strict=False)), **options}
        for name, hint in get_type_hints(function).items():
            if name in values and all(map(_is_class, _members(hint))):
                _check(name, values[name], _members(hint))
        return function(*args, **options)

    return checked


def _is_class(hint: Any) -> bool:
    return isinstance(hint, type) and get_origin(hint) is None and hint is not Any


def _check(name: str, value: object, types: tuple[type, ...]) -> None:
    if value is None and NoneType in types:
        return
    types = tuple(expected for expected in types if expected is not NoneType)
    if len(types) == 1 and types[0] in (bool, int, float, str):
        validate(types[0], value, name)
    elif not isinstance(value, types):
        advice = ""
        if isinstance(value, Mapping) and len(types) == 1:
            fields = ", ".join(f"{key}={field_value!r}" for key, field_value in value.items())
            advice = f": write {types[0].__name__}({fields})"
        raise UserError(f"{name} must be {' or '.join(map(_words, types))}, got {short_repr(value)}"
                        f"{advice}")
    elif isinstance(value, str):
        check_text(name, value)


def _words(expected: type) -> str:
    if expected in (str, os.PathLike):
        return "text" if expected is str else "a path"
    # a Policy, an H2OConfig
    return f"{'an' if expected.__name__[0] in 'AEHIOi' else 'a'} {expected.__name__}"
