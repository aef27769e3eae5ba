"""Flags of commands that answer requests of OpenAI's API, `batch` and `serve`. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from flexgen_h2o.cli.parser import flag_fields
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import parse_json_object, read_text
from flexgen_h2o.requests.request import Defaults, check_defaults

_SHARED_GROUPS = ("model", "policy", "planning", "cache")
_SHARED = ("config", "gpu_batch_size", "num_gpu_batches", "prefill_chunk", "seed",
           "no_generation_config")
UNSUPPORTED = ("prompt", "prompts", "chat", "num_prompts", "prompt_len", "cut_gen_len", "warm_up",
               "plan_only", "do_sample", "no_repeat_ngram_size", "min_new_tokens", "trace",
               "count_experts", "log_file", "no_log", "verbose", "debug_mode")
"""Flags of `generate` without effect here: a file of ``--config`` must not set them."""
_REQUEST_FIELDS = ("top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos",
                   "chat_template_kwargs")
"""Flags that are fields of a request's body."""


def generate_flag(name: str, *, help: str, **rules: object) -> Any:
    """Return the field of a flag of `generate` with another help, and other rules where given."""
    spec = RunConfig.__dataclass_fields__[name]
    default = rules.pop("default", spec.default)
    return field(default=default, metadata={**spec.metadata, "help": help, **rules})


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The flags that both commands have; `run` holds those shared with `generate`."""

    run: RunConfig
    chat_template: str | None = flag(
        "path", None, group="input", shown="the tokenizer's", metavar="FILE",
        help="file with the Jinja chat template",
    )
    served_model_name: tuple[str, ...] | None = flag(
        "words", None, group="input", shown="--model and the last part of it", metavar="NAME",
        help="more model names that requests may use",
    )
    temperature: float = generate_flag(
        "temperature", default=1.0, shown=1.0, ge=0, le=2,
        help="temperature of requests without one; 0 is greedy",
    )
    top_k: int | None = generate_flag(
        "top_k", ge=0, shown="0, off",
        help="sample from the K most likely tokens, for requests without top_k",
    )
    top_p: float | None = generate_flag(
        "top_p", ge=0, le=1, shown=1.0,
        help="sample from the most likely tokens with this total probability, for requests without "
        "top_p",
    )
    min_p: float | None = generate_flag(
        "min_p", ge=0, le=1, shown="off",
        help="drop tokens below this fraction of the top probability, for requests without min_p",
    )
    repetition_penalty: float | None = generate_flag(
        "repetition_penalty", gt=0, shown="1.0, off",
        help="penalty on tokens already seen, for requests without repetition_penalty",
    )
    ignore_eos: bool = generate_flag(
        "ignore_eos", help="generate past end tokens, for requests without ignore_eos",
    )
    chat_template_kwargs: str | None = generate_flag(
        "chat_template_kwargs",
        help="arguments of the chat template; a request can override them",
    )
    request_defaults: str | None = flag(
        "text", None, group="sampling", shown="none", metavar="JSON",
        help="more default fields of a request's body, such as "
        '\'{"stop_token_ids": [2]}\'',
    )

    @cached_property
    def template(self) -> str | None:
        """The text of `chat_template`, which Ray's replicas need. Raises `UserError`."""
        return self.chat_template and read_text("--chat-template", self.chat_template,
                                                if_empty="holds no template")

    @cached_property
    def request_fields(self) -> dict[str, Any]:
        """Default fields of a request's body. Raises `UserError`."""
        values: dict[str, Any] = {name: value for name in _REQUEST_FIELDS
                                  if (value := getattr(self, name)) not in (None, False)}
        if "chat_template_kwargs" in values:
            values["chat_template_kwargs"] = parse_json_object(
                "--chat-template-kwargs", values["chat_template_kwargs"])
        defaults = {} if self.request_defaults is None else parse_json_object(
            "--request-defaults", self.request_defaults)
        for name in values.keys() & defaults.keys():
            raise UserError(f"{flag_name(name)} and --request-defaults both give {name}: leave one "
                            "out")
        return check_defaults("--request-defaults", values | defaults)

    def defaults(self) -> Defaults:
        """Return the default values of requests."""
        names = self.run.model, Path(self.run.model).name, *(self.served_model_name or ())
        return Defaults({*names}, self.run.gen_len,
                        self.temperature, self.run.seed, self.request_fields)


@dataclass(frozen=True)
class _SharedFlags:
    """Flags of `run` whose help differs from `generate`'s."""

    gen_len: int = generate_flag(
        "gen_len", help="maximum number of new tokens of requests without max_tokens",
    )
    seed: int = generate_flag(
        "seed",
        help="seed of random weights; with its id, the seed of a request without one",
    )


def request_flags(options: type, *, more: Collection[str] = (), without: Collection[str] = ()
                  ) -> list[Field]:
    """Return the fields of all flags of a command: its options, and the flags of `generate`.

    Parameters
    ----------
    options : type
        A subclass of `RequestOptions`. Its own flags come before those that it inherits.
    more, without : collection of str
        Flags of `generate` that the command has beside the shared ones, or has not.
    """
    specs = {spec.name: spec for spec in fields(RunConfig)
             if (spec.metadata["group"] in _SHARED_GROUPS or spec.name in {*_SHARED, *more})
             and spec.name not in {*UNSUPPORTED, *without}}
    specs |= {spec.name: spec for spec in fields(_SharedFlags)}
    inherited = RequestOptions.__dataclass_fields__
    specs |= {spec.name: spec for spec in sorted(flag_fields(options),
                                                 key=lambda spec: spec.name in inherited)}
    return [*specs.values()]


def check_supported(values: Mapping[str, Any], command: str, names: Collection[str] = UNSUPPORTED
                    ) -> None:
    """Raise `UserError` for values of a file of ``--config`` without effect on a command."""
    for name, value in values.items():
        if name in names and value != getattr(RunConfig, name):
            raise UserError(f"{flag_name(name)} has no effect on {command}: take it out of the "
                            "file of --config")
