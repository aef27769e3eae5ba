"""Validation of values from files, flags and calls against types, with msgspec. No torch.

A type is bool, int, float or str, one of them with bounds (``Annotated[int, Meta(ge=1)]``), a
``Literal``, a list or mapping of types, or a subclass of `StrictStruct`; ``| None`` may follow. An
error is one line that names the value and says what it must be.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
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
Share = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(pattern=r"\S")]
"""Text that is not empty."""

_WORDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
_BOUNDS = {"gt": "greater than", "ge": "at least", "le": "at most"}


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping with known keys: the fields of a subclass. Fields with a default may be absent.

    `__post_init__` may raise `ValueError` for values that contradict each other.
    """


def validate(kind: Any, value: object, name: str) -> Any:
    """Return `value` as `kind`. Text is not converted to numbers, nor 1 to a bool.

    Raises
    ------
    UserError
        One line that begins with `name` and the keys of the wrong value: "NAME must be at least 1,
        got 0", "cpu.yaml: compute: unknown key 'tflops'".
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # numpy scalars too
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    try:
        found = msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):
        raise UserError(_complaint(kind, value, name)) from None
    if not _finite(found):
        raise UserError(f"{name} must be a finite number, got {found}")
    if isinstance(found, str):
        check_text(name, found)
    return found


def mapping_of(keys: Iterable[object], kind: Any) -> Any:
    """Return the type of a mapping from exactly these keys to a `kind`."""
    keys = tuple(keys)
    return Annotated[dict[Literal[keys], kind], Meta(min_length=len(keys))]  # type: ignore


def check_keys(values: Iterable[object], known: Iterable[object], where: str) -> None:
    """Raise `UserError` for an unknown key, with the nearest known one."""
    names = list(map(str, known))
    for key in values:
        if str(key) not in names:
            hint = did_you_mean(str(key), names, f"it takes {', '.join(names)}")
            raise UserError(f"{where}: unknown key {short_repr(key)}{hint}")


def _complaint(kind: Any, value: object, name: str) -> str:
    """Return the error message of a value at the first place that does not fit `kind`."""
    kind, rules = _bare(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    wanted = _WORDS.get(kind, "a list")
    if origin is dict or isinstance(kind, type) and issubclass(kind, StrictStruct):
        return _complaint_of_mapping(kind, rules, value, name)
    if origin is Literal:
        wanted = f"one of {', '.join(map(str, arguments))}"
    elif origin is tuple and isinstance(value, (list, tuple)):
        place = next(place for place, each in enumerate(value) if not _fits(arguments[0], each))
        return _complaint(arguments[0], value[place], f"{name} {place + 1}")
    elif rules.pattern is not None:
        wanted = "text that is not empty"
    elif _fits(kind, value) and _finite(value):  # out of bounds
        wanted = next(f"{words} {bound:g}" if isinstance(bound, float) else f"{words} {bound}"
                      for rule, words in _BOUNDS.items()
                      if (bound := getattr(rules, rule)) is not None
                      and not _fits(Annotated[kind, Meta(**{rule: bound})], value))
    return f"{name} must be {wanted}, got {short_repr(value)}"


def _complaint_of_mapping(kind: Any, rules: Meta, value: object, name: str) -> str:
    if not isinstance(value, Mapping):
        return f"{name} must hold lines of `key: value`, got {short_repr(value)}"
    if get_origin(kind) is dict:
        key_kind, inner = get_args(kind)
        bare, about = _bare(key_kind)
        for key in value:
            if get_origin(bare) is not Literal and not _fits(key_kind, key):
                return _complaint(key_kind, key, f"{name}: {about.title or 'a key'}")
        known = dict.fromkeys(get_args(bare) if get_origin(bare) is Literal else value, inner)
        needed = list(known) if rules.min_length else []
    else:
        fields = msgspec.structs.fields(kind)
        known = {each.name: each.type for each in fields}
        needed = [each.name for each in fields if each.required]
    check_keys(value, known, name)
    if rules.min_length and not value:
        return f"{name} is empty: {rules.description or 'add a line'}"
    for key in needed:
        if key not in value:
            return f"{name}: the key {key} is missing; add it"
    for key, each in value.items():
        if not _fits(known[key], each):
            return _complaint(known[key], each, f"{name}: {key}")
    return f"{name}: {_refusal(kind, value)}"


def _bare(kind: Any) -> tuple[Any, Meta]:
    """Return a type without ``| None`` and bounds, and the bounds."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is Annotated:
        kind, rules = get_args(kind)
        return kind, rules
    return kind, Meta()


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _fits(kind: Any, value: object) -> bool:
    return _refusal(kind, value) is None


def _refusal(kind: Any, value: object) -> Exception | None:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # a lone surrogate
        return error
    return None


def check_bool(name: str, value: object) -> None:
    """Raise `UserError` unless `value` is True or False."""
    validate(bool, value, name)


def check_int(name: str, value: object, *, low: int | None = None, high: int | None = None) -> None:
    """Raise `UserError` unless `value` is an integer (and no bool) in low..high."""
    validate(Annotated[int, Meta(ge=low, le=high)], value, name)


def check_number(
    name: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> float:
    """Return `value`. Raises `UserError` unless it is finite and in low..high or (above, high]."""
    bounds = Meta(ge=low, le=high) if above is None else Meta(gt=above, le=high)
    return validate(Annotated[float, bounds], value, name)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise `UserError` unless `value` is one of `choices`."""
    validate(Literal[tuple(choices)], value, name)


_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")


def check_arguments(function: Callable[_Options, _Result]) -> Callable[_Options, _Result]:
    """Decorate a function so that unknown keywords and wrong types raise `UserError`.

    Types are checked by type hints that are a class or a union of classes.
    """
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: _Options.args, **options: _Options.kwargs) -> _Result:
        for name in () if takes_all else options:
            if name not in parameters:
                raise UserError(f"{owner} has no option {name!r}"
                                + did_you_mean(name, names[1:], f"see help({owner})"))
        given: dict[str, object] = {**dict(zip(names, args, strict=False)), **options}
        for name, hint in get_type_hints(function).items():
            kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            if name in given and all(map(_is_class, kinds)):
                _check(name, given[name], kinds)
        return function(*args, **options)

    return checked


def _is_class(hint: Any) -> bool:
    return isinstance(hint, type) and get_origin(hint) is None and hint is not Any


def _check(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if value is None and NoneType in kinds:
        return
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    if len(kinds) == 1 and kinds[0] in (bool, int, float, str):
        validate(kinds[0], value, name)
    elif not isinstance(value, kinds):
        advice = ""
        if isinstance(value, Mapping) and len(kinds) == 1:
            fields = ", ".join(f"{key}={each!r}" for key, each in value.items())
            advice = f": write {kinds[0].__name__}({fields})"
        raise UserError(f"{name} must be {' or '.join(map(_words, kinds))}, got {short_repr(value)}"
                        f"{advice}")
    elif isinstance(value, str):
        check_text(name, value)


def _words(kind: Any) -> str:
    if kind in (str, os.PathLike):
        return {str: "text"}.get(kind, "a path")
    # a Policy, an H2OConfig
    return f"{'an' if kind.__name__[0] in 'AEHIOi' else 'a'} {kind.__name__}"
