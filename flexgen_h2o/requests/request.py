"""Requests in the format of OpenAI's API: a line, or a body, as a checked request.

A line is in the format of OpenAI's Batch API (``custom_id, method, url, body``), or it is plain:
the fields of a body with an optional ``id``. A plain line with `prompt` is a completion, one with
`messages` is a chat.

A field that is not supported is refused, unless its value has no effect on the answer. A null
field counts as missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flexgen_h2o.config import validation
from flexgen_h2o.config.sampling import SamplingParams, StructuredOutputs, mix_seed
from flexgen_h2o.config.validation import check_keys
from flexgen_h2o.errors import UserError, check_text, short_repr
from flexgen_h2o.files.chat_template import check_template_arguments

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


MAX_CHOICES = 2048
"""Maximum number of choices of a request, over all of its prompts."""
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_ENVELOPE = ("custom_id", "method", "url", "body")
_ROLES = ("system", "developer", "user", "assistant")
_MESSAGE_FIELDS = ("role", "content", "name", "reasoning", "reasoning_content")
_TEMPLATE_FIELDS = ("reasoning_effort", "documents", "add_generation_prompt",
                    "continue_final_message")
"""Fields of a chat that are passed to the chat template."""
_MIN_TEMPERATURE = 1e-30
"""A lower temperature counts as 0, because logits divided by it overflow float32."""


@dataclass(frozen=True)
class Defaults:
    """Values of fields that a request does not give."""

    models: Collection[str]  # names of the model
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0  # combined with a request's id
    fields: Mapping[str, Any] = field(default_factory=dict)  # more fields of a body


@dataclass(frozen=True)
class JobRequest:
    """A checked request."""

    custom_id: str
    chat: bool  # whether the request is a chat, with `messages`, or a completion, with `prompts`
    messages: tuple[Mapping[str, str], ...]
    prompts: tuple[str | list[int], ...]  # each is text or a list of token ids
    n: int  # choices of each prompt
    params: SamplingParams
    """With the request's seed, from which `choice_params` derives the seeds of the choices."""
    return_token_ids: bool = False  # add token ids of prompts and choices to the response
    clamp_new_tokens: bool = False
    """The request gives no length, and may end at the model's last position."""
    add_special_tokens: bool = True  # add the tokenizer's special tokens to texts
    echo: bool = False  # the answer begins with the prompt
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def choice_params(self, choice: int) -> SamplingParams:
        """Return the sampling parameters of one choice, counted over all prompts."""
        return replace(self.params, seed=mix_seed(self.params.seed, choice))

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return tuple(self.params.stop_strings or ())


def read_object(line: bytes) -> dict[str, Any]:
    """Parse the JSON object of a line. Raises `BadRequest` if the line is something else."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise BadRequest(f"the line is not JSON ({reason}): fix it", code="invalid_json_line"
                         ) from None
    if not isinstance(value, dict):
        raise BadRequest(f"the line is not a JSON object, but {short_repr(value)}",
                         code="invalid_json_line")
    return value


def request_id(record: Mapping[str, Any], number: int) -> str:
    """Return the id of a request: its `custom_id`, the `id` of a plain one, or ``line-NUMBER``.

    Raises `BadRequest` for an id that is not text, and for a line of the API without one.
    """
    plain = not any(key in record for key in _ENVELOPE)
    name = "id" if plain else "custom_id"
    value = record.get(name)
    if plain and value is None:
        return f"line-{number}"
    if plain and type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} must be a text that no other line has, got "
                         f"{short_repr(value)}" if value is not None else f"the line has no {name}",
                         param=name, code="missing_required_parameter")
    return value


def read_request(line: bytes, number: int, defaults: Defaults) -> JobRequest:
    """Return the request of line `number` of a file. Raises `BadRequest`."""
    record = read_object(line)
    custom_id = request_id(record, number)
    return parse_request(*_split_envelope(record), custom_id, defaults)


def parse_request(url: str, body: Mapping[str, Any], custom_id: str, defaults: Defaults
                  ) -> JobRequest:
    """Return the request of a body that is sent to `url`, one of `URLS`. Raises `BadRequest`."""
    fields = check_fields(body, URLS[url])
    chat = URLS[url] is CHAT
    arguments = _template_arguments(fields, defaults)
    fields = {name: value for name, value in defaults.fields.items() if name in URLS[url]} | fields
    model = fields.get("model")
    if model is not None and model not in defaults.models:
        raise BadRequest(f"there is no model {short_repr(model)} here: use "
                         f"{min(defaults.models, key=len)}",
                         param="model", code="mismatched_model")
    messages = _messages(fields.get("messages")) if chat else ()
    prompts = () if chat else _prompts(fields.get("prompt"))
    n = fields.get("n", 1)
    if n * len(prompts) > MAX_CHOICES:
        raise BadRequest(f"{len(prompts)} prompts and n {n} are more than {MAX_CHOICES} choices: "
                         "make several requests of it", param="n")
    if fields.get("echo") and fields.get("logprobs") is not None:
        raise BadRequest("echo with logprobs is not supported, as prompts have none: leave one "
                         "out", param="echo", code="unsupported_parameter")
    return JobRequest(custom_id, chat, messages, prompts, n,
                      _params(fields, custom_id, defaults, chat=chat),
                      clamp_new_tokens=not {"max_tokens", "max_completion_tokens"} & fields.keys(),
                      add_special_tokens=fields.get("add_special_tokens", not chat),
                      echo=fields.get("echo", False), template_arguments=arguments,
                      return_token_ids=fields.get("return_token_ids", False))


def check_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check the default fields of bodies, from ``--request-defaults``. Raises `UserError`."""
    known = {key: kind for key, kind in (CHAT | COMPLETIONS).items() if key not in NO_DEFAULTS}
    check_keys(values, known, "--request-defaults")
    try:
        fields = check_fields(values, known)
        _template_arguments(fields, Defaults((), 1))
        _params(fields, "", Defaults((), 2**30), chat=False)
    except BadRequest as error:
        raise UserError(f"--request-defaults: {error}") from None
    return fields


def _template_arguments(body: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    """Return the arguments of the chat template: a request's override the job's."""
    fields: dict[str, Any] = {}
    for source in (defaults.fields, body):
        arguments = source.get("chat_template_kwargs", {})
        with refuse_field("chat_template_kwargs"):
            check_template_arguments("chat_template_kwargs", arguments)
        fields |= arguments | {name: source[name] for name in _TEMPLATE_FIELDS if name in source}
    if fields.get("continue_final_message") and fields.get("add_generation_prompt", True):
        raise BadRequest("continue_final_message goes with \"add_generation_prompt\": false",
                         param="continue_final_message")
    return fields


def _split_envelope(record: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the endpoint and the body of a request."""
    if not any(key in record for key in _ENVELOPE):
        url = "/v1/chat/completions" if "messages" in record else "/v1/completions"
        return url, {key: value for key, value in record.items() if key != "id"}
    method, endpoint, body = record.get("method", "POST"), record.get("url"), record.get("body")
    if method != "POST":
        raise BadRequest(f"method must be POST, got {short_repr(method)}", param="method",
                         code="invalid_method")
    if not isinstance(endpoint, str) or endpoint not in URLS:
        raise BadRequest(f"url must be {' or '.join(URLS)}, got {short_repr(endpoint)}",
                         param="url", code="invalid_url")
    if not isinstance(body, dict):
        raise BadRequest(f"body must be a JSON object, got {short_repr(body)}", param="body")
    return endpoint, body


def _params(fields: Mapping[str, Any], custom_id: str, defaults: Defaults, *, chat: bool
            ) -> SamplingParams:
    """Return the sampling parameters of checked fields."""
    lengths = {fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields}
    if len(lengths) > 1:
        raise BadRequest("max_tokens and max_completion_tokens contradict: leave one out",
                         param="max_tokens")
    min_tokens = fields.get("min_tokens", 0)
    max_tokens = lengths.pop() if lengths else max(defaults.max_tokens, min_tokens)
    if min_tokens > max_tokens:
        raise BadRequest(f"min_tokens {min_tokens} is more than max_tokens {max_tokens}",
                         param="min_tokens")
    temperature = fields.get("temperature", defaults.temperature)
    sampled = temperature >= _MIN_TEMPERATURE
    logprobs, stops = fields.get("logprobs"), _stops(fields.get("stop", []))
    biases = _logit_bias(fields.get("logit_bias", {}))
    if chat:
        if "top_logprobs" in fields and not logprobs:
            raise BadRequest("top_logprobs has no effect: add \"logprobs\": true",
                             param="top_logprobs")
        logprobs = fields.get("top_logprobs", 0) if logprobs else None
    with refuse_field(None):
        return SamplingParams(
            max_new_tokens=max_tokens, min_new_tokens=fields.get("min_tokens"),
            do_sample=sampled, temperature=temperature if sampled else 1.0,
            top_k=max(0, fields.get("top_k", 0)), top_p=fields.get("top_p", 1.0),
            min_p=fields.get("min_p"), repetition_penalty=fields.get("repetition_penalty"),
            stop_strings=stops,
            eos_token_id=-1 if fields.get("ignore_eos") else None,
            stop_token_ids=fields.get("stop_token_ids", ()),
            logit_bias=biases,
            skip_special_tokens=fields.get("skip_special_tokens", True),
            presence_penalty=fields.get("presence_penalty", 0.0),
            frequency_penalty=fields.get("frequency_penalty", 0.0), logprobs=logprobs,
            structured_outputs=_structured_outputs(fields),
            seed=(fields["seed"] % 2**63 if "seed" in fields
                  else derive_seed(defaults.seed, custom_id)))


def _structured_outputs(fields: Mapping[str, Any]) -> StructuredOutputs | None:
    """Return the form of the answer, whose grammar is checked; None if it is free."""
    names = [name for name in ("response_format", "structured_outputs") if name in fields]
    if len(names) > 1:
        raise BadRequest("response_format and structured_outputs contradict: leave one out",
                         param="response_format")
    for name in names:
        with refuse_field(name):
            outputs = (_response_format if name == "response_format" else _vllm_outputs)(
                fields[name])
            if outputs is not None:
                if fields.get("ignore_eos"):
                    raise UserError(f"{name} contradicts ignore_eos: leave one out")
                outputs.compile()
            return outputs
    return None


def _response_format(value: object) -> StructuredOutputs | None:
    """Return the form that OpenAI's `response_format` describes."""
    fields = value if isinstance(value, dict) else {}
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    schema = fields.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise UserError("response_format must be of type text, json_object, or json_schema with "
                        f"json_schema.schema, got {short_repr(value)}")
    return StructuredOutputs(json=schema["schema"])


def _vllm_outputs(value: object) -> StructuredOutputs:
    """Return the form that vLLM's `structured_outputs` describe."""
    if not isinstance(value, dict):
        raise UserError(f"structured_outputs must be a JSON object, got {short_repr(value)}")
    check_keys(value, StructuredOutputs.__dataclass_fields__, "structured_outputs")
    return StructuredOutputs(**{name: form for name, form in value.items() if form is not None})


def _logit_bias(biases: object) -> dict[int, float]:
    if not isinstance(biases, dict):
        raise BadRequest(f"logit_bias must be a JSON object, got {short_repr(biases)}",
                         param="logit_bias")
    by_token = {}
    for token, bias in biases.items():
        if not token.isdecimal() or len(token) > 10:
            raise BadRequest(f"logit_bias must have token ids as names, got {short_repr(token)}",
                             param="logit_bias")
        with refuse_field("logit_bias"):
            by_token[int(token)] = validation.validate(_Bias, bias, f"logit_bias of token {token}")
    return by_token


def _stops(stop: object) -> Sequence[str] | None:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise BadRequest(f"stop must be a text, or several, none empty, got {short_repr(stop)}",
                         param="stop")
    return stops or None


def derive_seed(seed: int, custom_id: str) -> int:
    """Return the seed of a request that gives none: a hash of the job's seed and its id."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\n{custom_id}".encode(), digest_size=8).digest(),
                          "big") >> 1


def _prompts(prompt: object) -> tuple[str | list[int], ...]:
    """Return the prompts of a completion, each of which is text or token ids."""
    prompts: Sequence[object] = [prompt]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = prompt
    if not prompts or not all(isinstance(item, str) and item or _is_token_ids(item)
                              for item in prompts):
        raise BadRequest("prompt must be text or a list of token ids, or a list of these, none "
                         f"empty, got {short_repr(prompt)}", param="prompt")
    return tuple(prompts)  # type: ignore[arg-type]


def _is_token_ids(value: object) -> bool:
    return (isinstance(value, list) and len(value) > 0
            and all(type(token) is int and 0 <= token < 2**31 for token in value))


def _messages(messages: object) -> tuple[Mapping[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages must be a list that is not empty, got {short_repr(messages)}",
                         param="messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: object, where: str) -> Mapping[str, str]:
    """Return a message whose parts are joined to one text."""
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be a JSON object, got {short_repr(message)}", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}, got {short_repr(role)}",
                         param=f"{where}.role")
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS and value not in (None, [], {}):
            raise BadRequest(f"{where} has {short_repr(name)}, which is not supported",
                             param=where, code="unsupported_parameter")
    # Templates do not know the role developer, the newer name of system.
    checked = {"role": "system" if role == "developer" else role,
               "content": _content(message.get("content"), f"{where}.content")}
    for name in ("name", "reasoning", "reasoning_content"):
        if message.get(name) is not None:
            # vLLM says reasoning, templates say reasoning_content.
            checked["name" if name == "name" else "reasoning_content"] = _text(
                message[name], f"{where}.{name}")
    return checked


def _content(content: object, where: str) -> str:
    if not isinstance(content, list):
        return _text(content, where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise BadRequest(f"{where}[{index}] must be of type text, got "
                             f"{short_repr(part if kind is None else kind)}: "
                             "only text is supported",
                             param=where, code="unsupported_parameter")
        texts.append(_text(part.get("text"), f"{where}[{index}].text"))
    return "".join(texts)


def _text(value: object, where: str) -> str:
    with refuse_field(where):
        check_text(where, value)
    assert isinstance(value, str)
    return value
