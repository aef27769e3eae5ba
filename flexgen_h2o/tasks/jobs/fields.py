"""The fields of a request's body in OpenAI's API: those that count, those that may be ignored.

A field that would change the answer and is not supported is refused, unless its value is the one
that changes nothing. A null is as if the field were not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from flexgen_h2o.config import schema
from flexgen_h2o.errors import UserError, shown

MOST_CHOICES = 2048
"""Choices of a request, for all of its prompts together."""

Bias = Annotated[float, Meta(ge=-100, le=100)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]

_Tokens = Annotated[int, Meta(ge=1, le=2**30)]
_BOTH: dict[str, Any] = {
    "model": schema.Text, "max_tokens": _Tokens,
    "temperature": Annotated[float, Meta(ge=0, le=2)], "top_p": schema.Share, "stop": None,
    "seed": Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)],
    "n": Annotated[int, Meta(ge=1, le=128)], "presence_penalty": _Penalty,
    "frequency_penalty": _Penalty,
    # vLLM's
    "top_k": Annotated[int, Meta(ge=-1, le=2**30)], "min_p": schema.Share,
    "repetition_penalty": Annotated[float, Meta(gt=0)],
    "min_tokens": Annotated[int, Meta(ge=0, le=2**30)], "ignore_eos": bool,
    "stop_token_ids": tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], "logit_bias": None,
    "add_special_tokens": bool, "skip_special_tokens": bool, "return_token_ids": bool,
}
CHAT = _BOTH | {
    "messages": None, "max_completion_tokens": _Tokens, "logprobs": bool,
    "top_logprobs": Annotated[int, Meta(ge=0, le=20)], "reasoning_effort": schema.Text,
    "chat_template_kwargs": None, "add_generation_prompt": bool, "continue_final_message": bool,
    "documents": None,
}
"""Types of the fields of /v1/chat/completions that count; None: checked elsewhere."""
COMPLETIONS = _BOTH | {"prompt": None, "logprobs": Annotated[int, Meta(ge=0, le=20)],
                       "echo": bool}
"""Those of /v1/completions."""
NO_DEFAULTS = frozenset({"messages", "prompt", "model", "logprobs", "top_logprobs", "max_tokens",
                         "max_completion_tokens", "temperature", "seed", "documents"})
"""Fields that `--request-defaults` does not take: a request's own, and those that have a flag."""

IGNORED = frozenset({
    "cache_salt", "metadata", "parallel_tool_calls", "prediction", "priority", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store",
    "stream_options", "user"})
"""Fields of any value that change no answer."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],), "bad_words": ([],), "best_of": (1,), "early_stopping": (False,),
    "echo": (False,), "function_call": ("none", "auto"), "functions": ([],),
    "include_stop_str_in_output": (False,), "length_penalty": (1, 1.0), "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,), "spaces_between_special_tokens": (True,),
    "stream": (False,), "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],),
    "use_beam_search": (False,), "verbosity": ("medium",)}
"""Fields that are not supported, and the values with which they change nothing."""


class BadRequest(UserError):
    """A request that is not run: what is wrong with it, and the field, in the API's words."""

    def __init__(self, message: str, *, param: str | None = None,
                 code: str = "invalid_request_error"):
        super().__init__(message)
        self.param, self.code = param, code


def checked_fields(body: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that count, each checked by its type; without those that are null.

    Raises `BadRequest` for a wrong value, and for a field that would change the answer.
    """
    found = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in known:
            found[name] = value if known[name] is None else _checked(known[name], value, name)
        elif not any(_same(value, each) for each in _NEUTRAL.get(name, ())):
            what = f"{name} {shown(value)}" if name in _NEUTRAL else f"the field {shown(name)}"
            raise BadRequest(f"{what} is not supported: leave it out", param=name[:80],
                             code="unsupported_parameter")
    return found


def _checked(kind: Any, value: object, name: str) -> Any:
    try:
        return schema.checked(kind, value, name)
    except UserError as error:
        raise BadRequest(str(error), param=name) from None


def _same(value: object, other: object) -> bool:
    """True if they are equal and alike: 0 is not False."""
    return type(value) is type(other) and value == other
