"""The fields of a request's body in OpenAI's API, and their checks. No torch.

A field that is not supported is refused, unless its value has no effect on the answer. A null
field counts as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from msgspec import Meta

from flexgen_h2o.config import validation
from flexgen_h2o.errors import UserError, short_repr

_Penalty = Annotated[float, Meta(ge=-2, le=2)]

_Tokens = Annotated[int, Meta(ge=1, le=2**30)]
_COMMON: dict[str, Any] = {
    "model": validation.Text, "max_tokens": _Tokens,
    "temperature": Annotated[float, Meta(ge=0, le=2)], "top_p": validation.Share, "stop": None,
    "seed": Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)],
    "n": Annotated[int, Meta(ge=1, le=128)], "presence_penalty": _Penalty,
    "frequency_penalty": _Penalty,
    # vLLM's
    "top_k": Annotated[int, Meta(ge=-1, le=2**30)], "min_p": validation.Share,
    "repetition_penalty": Annotated[float, Meta(gt=0)],
    "min_tokens": Annotated[int, Meta(ge=0, le=2**30)], "ignore_eos": bool,
    "stop_token_ids": tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], "logit_bias": None,
    "add_special_tokens": bool, "skip_special_tokens": bool, "return_token_ids": bool,
    "response_format": None, "structured_outputs": None,
}
CHAT = _COMMON | {
    "messages": None, "max_completion_tokens": _Tokens, "logprobs": bool,
    "top_logprobs": Annotated[int, Meta(ge=0, le=20)], "reasoning_effort": validation.Text,
    "chat_template_kwargs": None, "add_generation_prompt": bool, "continue_final_message": bool,
    "documents": None,
}
"""Types of the supported fields of /v1/chat/completions; None: checked elsewhere."""
COMPLETIONS = _COMMON | {"prompt": None, "logprobs": Annotated[int, Meta(ge=0, le=20)],
                         "echo": bool}
"""Types of the supported fields of /v1/completions."""
URLS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS}
"""Supported endpoints and their fields."""
NO_DEFAULTS = frozenset({"messages", "prompt", "model", "logprobs", "top_logprobs", "max_tokens",
                         "max_completion_tokens", "temperature", "seed", "documents"})
"""Fields that ``--request-defaults`` refuses: they differ by request, or have a flag."""

IGNORED = frozenset({
    "cache_salt", "metadata", "parallel_tool_calls", "prediction", "priority", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store",
    "stream_options", "user"})
"""Fields whose value never affects the answer."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],), "bad_words": ([],), "best_of": (1,), "early_stopping": (False,),
    "echo": (False,), "function_call": ("none", "auto"), "functions": ([],),
    "include_stop_str_in_output": (False,), "length_penalty": (1, 1.0), "modalities": (["text"],),
    "return_tokens_as_token_ids": (False,), "spaces_between_special_tokens": (True,),
    "stream": (False,), "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],),
    "use_beam_search": (False,), "verbosity": ("medium",)}
"""Unsupported fields, and their values without effect."""


class BadRequest(UserError):
    """Error of a request that cannot run, with the API's `param` and `code`."""

    def __init__(self, message: str, *, param: str | None = None,
                 code: str = "invalid_request_error"):
        super().__init__(message)
        self.param, self.code = param, code


@contextmanager
def refuse_field(param: str | None) -> Iterator[None]:
    """Turn a `UserError` into a `BadRequest` about the field `param`."""
    try:
        yield
    except BadRequest:
        raise
    except UserError as error:
        raise BadRequest(str(error), param=param) from None


def check_fields(body: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Check the fields of a body, and return the supported ones that are not null.

    Raises `BadRequest` for a wrong value, and for an unsupported field with an effect.
    """
    fields = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in known:
            with refuse_field(name):
                kind = known[name]
                fields[name] = value if kind is None else validation.validate(kind, value, name)
        elif not any(_same(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            description = (f"{name} {short_repr(value)}" if name in _NEUTRAL
                           else f"the field {short_repr(name)}")
            raise BadRequest(f"{description} is not supported: leave it out", param=name[:80],
                             code="unsupported_parameter")
    return fields


def _same(value: object, other: object) -> bool:
    """Return whether two values are equal and of one type: 0 is not False."""
    return type(value) is type(other) and value == other
