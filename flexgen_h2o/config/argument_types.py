"""Arguments of public calls, held against the type hints of what takes them. No torch."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from flexgen_h2o.config import schema
from flexgen_h2o.errors import UserError, check_text, shown

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")


def typed(function: Callable[_Options, _Result]) -> Callable[_Options, _Result]:
    """Let a call raise `UserError` for an argument that is not of its type hint's classes.

    Hints that are more than a class, or a union of some, are left to the function itself.
    """
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: _Options.args, **options: _Options.kwargs) -> _Result:
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
        schema.checked(kinds[0], value, name)
    elif not isinstance(value, kinds):
        advice = ""
        if isinstance(value, Mapping) and len(kinds) == 1:
            fields = ", ".join(f"{key}={each!r}" for key, each in value.items())
            advice = f": write {kinds[0].__name__}({fields})"
        raise UserError(f"{name} must be {' or '.join(map(_words, kinds))}, got {shown(value)}"
                        f"{advice}")
    elif isinstance(value, str):
        check_text(name, value)


def _words(kind: Any) -> str:
    if kind in (str, os.PathLike):
        return {str: "text"}.get(kind, "a path")
    # As they are read aloud: a Policy, an H2OConfig.
    return f"{'an' if kind.__name__[0] in 'AEHIOi' else 'a'} {kind.__name__}"
