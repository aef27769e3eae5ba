"""Structured outputs: the form that generated text must have. No torch."""

from __future__ import annotations

import json as json_module
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flexgen_h2o.errors import UserError, check_text, short_repr

_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,24}"}
"""Options of JSON schemas. Models that may write any number of blanks between two values sometimes
never end."""
_CRASHING = re.compile(r"-922337203685477\d{4}(?!\d)")
"""Integers near -2**63, whose constants overflow the stack of llguidance 1.9."""
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([0-9.]+)')
_LARGEST_MULTIPLE = 100_000
"""Bound of the states that llguidance 1.9 needs for ``multipleOf``: 0.7 s. Its own limits do not
count them."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form of a generated text: vLLM's `StructuredOutputsParams`. Give exactly one field.

    Parameters
    ----------
    json : str or mapping, optional
        A JSON schema, as text or as an object. It is kept as text.
    regex : str, optional
        A regular expression in the syntax of Rust's `regex`, for the whole text.
    choice : sequence of str, optional
        The text is one of these.
    grammar : str, optional
        A context-free grammar, in llguidance's dialect of Lark or in llama.cpp's GBNF.
    json_object : bool
        The text is any JSON object.

    Raises
    ------
    UserError
        No field or more than one is given, or a value is of a wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self)]
        present = [name for name in names if getattr(self, name) not in (None, False)]
        if len(present) != 1:
            raise UserError(f"structured_outputs must have exactly one of {', '.join(names)}, got "
                            f"{', '.join(present) or 'none'}")
        name, value = present[0], getattr(self, present[0])
        if name == "json" and isinstance(value, Mapping):
            value = _as_json(value)
        elif name == "choice":
            value = self._checked_choice(value)
        elif name == "json_object":
            if value is not True:
                raise UserError(f"json_object must be true or false, got {short_repr(value)}")
            return
        else:
            check_text(f"structured_outputs' {name}", value)
        object.__setattr__(self, name, value)  # frozen, but kept hashable

    @staticmethod
    def _checked_choice(texts: object) -> tuple[str, ...]:
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise UserError("structured_outputs' choice must be a list of texts, not empty, got "
                            f"{short_repr(texts)}")
        for text in texts:
            check_text("each of structured_outputs' choice", text)
        return tuple(texts)

    def compile(self) -> str:
        """Return the grammar for llguidance, checked.

        Raises
        ------
        UserError
            llguidance is not installed, or does not accept the schema, expression or grammar. Its
            limits bound time and memory.
        """
        try:
            import llguidance
        except ImportError:
            raise UserError("structured_outputs need llguidance: pip install llguidance, which the "
                            "extra flexgen-h2o[structured-outputs] brings") from None
        name, text = next((field.name, getattr(self, field.name)) for field in fields(self)
                          if getattr(self, field.name) not in (None, False))
        if name in ("json", "grammar") and (number := _CRASHING.search(text)):
            raise UserError(f"structured_outputs' {name} has the number {number[0]}, which "
                            "llguidance cannot take: use one that is not near -2**63")
        if name in ("json", "grammar") and _common_multiple(text) > _LARGEST_MULTIPLE:
            raise UserError(f"structured_outputs' {name} has values of multipleOf that would take "
                            "gigabytes: their least common multiple, in units of their last "
                            f"digits, must be at most {_LARGEST_MULTIPLE:,}")
        try:
            if name in ("json", "json_object"):
                schema = '{"type": "object"}' if name == "json_object" else text
                grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=_OPTIONS)
            else:
                source = json_module.dumps(text) if name == "choice" else text
                grammar = llguidance.grammar_from(name, source)
        except ValueError as error:
            raise UserError(f"structured_outputs' {name}: {error}") from None
        refused, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
        if refused:
            raise UserError(f"structured_outputs' {name}: {messages[0]}")
        return grammar


def _common_multiple(text: str) -> int:
    """Return the least common multiple of all `multipleOf`, in units of their last digits."""
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
    digits = (number.replace(".", "").strip("0")[:20] for number in _MULTIPLE_OF.findall(text))
    return math.lcm(*(int(number or 1) for number in digits))


def _as_json(schema: Mapping[str, Any]) -> str:
    try:
        return json_module.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"structured_outputs' json is not a JSON schema: {error}") from None
