"""Flags of commands that answer requests of OpenAI's API, `batch` and `serve`. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flexgen_h2o.cli.parser import changed_flag, command_flags
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import parse_json_object, read_text
from flexgen_h2o.requests.request import Defaults, check_defaults

_SHARED_GROUPS = ("model", "policy", "planning", "cache")
_SHARED = ("config", "gpu_batch_size", "num_gpu_batches", "prefill_chunk", "gen_len", "seed",
           "no_generation_config")
UNSUPPORTED = ("prompt", "prompts", "chat", "num_prompts", "prompt_len", "cut_gen_len", "warm_up",
               "plan_only", "do_sample", "no_repeat_ngram_size", "min_new_tokens", "trace",
               "count_experts", "log_file", "no_log", "verbose", "debug_mode")
"""Flags of `generate` without effect here: a file of ``--config`` must not set them."""
_REQUEST_FIELDS = ("top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos",
                   "chat_template_kwargs")
"""Flags that are fields of a request's body."""


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
    temperature: float = changed_flag(
        "temperature", default=1.0, shown=1.0, ge=0, le=2,
        help="temperature of requests without one; 0 is greedy",
    )
    top_k: int | None = changed_flag(
        "top_k", ge=0, shown="0, off",
        help="sample from the K most likely tokens, for requests without top_k",
    )
    top_p: float | None = changed_flag(
        "top_p", ge=0, le=1, shown=1.0,
        help="sample from the most likely tokens with this total probability, for requests without "
        "top_p",
    )
    min_p: float | None = changed_flag(
        "min_p", ge=0, le=1, shown="off",
        help="drop tokens below this fraction of the top probability, for requests without min_p",
    )
    repetition_penalty: float | None = changed_flag(
        "repetition_penalty", gt=0, shown="1.0, off",
        help="penalty on tokens already seen, for requests without repetition_penalty",
    )
    ignore_eos: bool = changed_flag(
        "ignore_eos", help="generate past end tokens, for requests without ignore_eos",
    )
    chat_template_kwargs: str | None = changed_flag(
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
        return check_defaults(values | defaults)

    def defaults(self) -> Defaults:
        """Return the default values of requests."""
        names = self.run.model, Path(self.run.model).name, *(self.served_model_name or ())
        return Defaults({*names}, self.run.gen_len,
                        self.temperature, self.run.seed, self.request_fields)


def request_flags(options: type, *, extra: Collection[str] = (), without: Collection[str] = (),
                  **changes: Mapping[str, object]) -> list[Field]:
    """Return the fields of all flags of a command: its options, and the flags of `generate`.

    `options`: a subclass of `RequestOptions`. `extra` and `without`: flags of `generate` that the
    command has beside the shared ones, or lacks. `**changes`: rules of `generate`'s flags that
    differ here.
    """
    specs = command_flags(
        options, groups=_SHARED_GROUPS, names={*_SHARED, *extra}, without={*UNSUPPORTED, *without},
        gen_len={"help": "maximum number of new tokens of requests without max_tokens"},
        seed={"help": "seed of random weights; with its id, the seed of a request without one"},
        **changes)
    inherited = RequestOptions.__dataclass_fields__  # after the command's own
    return sorted(specs, key=lambda spec: spec.name in inherited)
