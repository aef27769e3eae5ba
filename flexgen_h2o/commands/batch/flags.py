"""The checked flags of `batch`. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from flexgen_h2o.cli.parser import (
    Parser,
    build_parser,
    check_files,
    check_flags,
    flag_fields,
    given_flags,
)
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import parse_json_object, read_text
from flexgen_h2o.metrics.figures import check_plot
from flexgen_h2o.requests.request import Defaults, check_defaults

_SHARED_GROUPS = ("model", "policy", "planning", "cache")
_SHARED = ("config", "gpu_batch_size", "num_gpu_batches", "prefill_chunk", "seed",
           "no_generation_config", "csv")
_UNSUPPORTED = ("prompt", "prompts", "chat", "num_prompts", "prompt_len", "cut_gen_len", "warm_up",
                "plan_only", "do_sample", "no_repeat_ngram_size", "min_new_tokens", "trace",
                "count_experts", "log_file", "no_log", "verbose", "debug_mode")
"""Flags of `generate` without effect here: a file of ``--config`` must not set them."""
_RUN_ONLY = ("output", "errors", "overwrite", "max_hours", "progress_file", "plot", "csv",
             "ray", "ray_address", "replicas", "data_parallel")
"""Flags without effect on a dry run."""
_REQUEST_FIELDS = ("top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos",
                   "chat_template_kwargs")
"""Flags that are fields of a request's body."""
RESUME_SETTINGS = ("model", "path", "dtype", "weight_bits", "activation_bits", "calibration",
                   "cache_bits", "attn_sparsity", "h2o", "gen_len", "temperature", "seed",
                   "chat_template", "no_generation_config", "request_defaults")
"""Settings that texts depend on: a resumed job must have the same. Batch sizes, placements and the
device may change."""


def _generate_flag(name: str, *, help: str, **rules: object) -> Any:
    """Return the field of a flag of `generate` with another help, and other rules where given."""
    spec = RunConfig.__dataclass_fields__[name]
    default = rules.pop("default", spec.default)
    return field(default=default, metadata={**spec.metadata, "help": help, **rules})


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The checked flags; `run` holds those shared with `generate`.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    run: RunConfig
    input: str | None = flag(
        "path", None, short="-i", group="input", shown="none", metavar="FILE.jsonl",
        help="requests, one per line: in the format of OpenAI's Batch API, or with `prompt` or "
        "`messages` and an optional `id`",
    )
    chat_template: str | None = flag(
        "path", None, group="input", shown="the tokenizer's", metavar="FILE",
        help="file with the Jinja chat template",
    )
    served_model_name: tuple[str, ...] | None = flag(
        "words", None, group="input", shown="--model and the last part of it", metavar="NAME",
        help="more model names that requests may use",
    )
    strict: bool = flag(
        "bool", False, group="input",
        help="check every line first; run nothing if one of them cannot run",
    )
    dry_run: bool = flag(
        "bool", False, group="input",
        help="check every line, count tokens and predict the time; run nothing",
    )
    window: int = flag(
        "int", 2048, ge=1, group="batch and lengths",
        help="sequences in memory at a time; they are sorted by length into blocks",
    )
    temperature: float = _generate_flag(
        "temperature", default=1.0, shown=1.0, ge=0, le=2,
        help="temperature of requests without one; 0 is greedy",
    )
    top_k: int | None = _generate_flag(
        "top_k", ge=0, shown="0, off",
        help="sample from the K most likely tokens, for requests without top_k",
    )
    top_p: float | None = _generate_flag(
        "top_p", ge=0, le=1, shown=1.0,
        help="sample from the most likely tokens with this total probability, for requests without "
        "top_p",
    )
    min_p: float | None = _generate_flag(
        "min_p", ge=0, le=1, shown="off",
        help="drop tokens below this fraction of the top probability, for requests without min_p",
    )
    repetition_penalty: float | None = _generate_flag(
        "repetition_penalty", gt=0, shown="1.0, off",
        help="penalty on tokens already seen, for requests without repetition_penalty",
    )
    ignore_eos: bool = _generate_flag(
        "ignore_eos", help="generate past end tokens, for requests without ignore_eos",
    )
    chat_template_kwargs: str | None = _generate_flag(
        "chat_template_kwargs",
        help="arguments of the chat template; those of a request override them",
    )
    request_defaults: str | None = flag(
        "text", None, group="sampling", shown="none", metavar="JSON",
        help="more default fields of a request's body, such as "
        '\'{"stop_token_ids": [2]}\'',
    )
    output: str | None = flag(
        "path", None, short="-o", group="results", shown="none", metavar="FILE.jsonl",
        help="write a line per request; requests that already have an answer are skipped",
    )
    errors: str | None = flag(
        "path", None, group="results", shown="--output", metavar="FILE.jsonl",
        help="write the lines of failed requests to this file",
    )
    overwrite: bool = flag("bool", False, group="results", help="delete existing results")
    max_hours: float | None = flag(
        "float", None, gt=0, group="results", shown="no limit",
        help="stop after the block in which this time ends; the same command resumes",
    )
    progress_file: str | None = flag(
        "path", None, group="results", shown="none", metavar="FILE.json",
        help="write the progress of the job to this file, for other programs",
    )
    plot: str | None = flag(
        "path", None, group="results", shown="none", metavar="FILE.png",
        help="draw tokens/s and memory over time; also .svg and .pdf",
    )
    data_parallel: bool = flag(
        "bool", False, group="several processes",
        help="share the job with the other processes that torchrun or another launcher has started",
    )
    ray: bool = flag(
        "bool", False, group="several processes",
        help="run replicas of the model on Ray Data",
    )
    ray_address: str | None = flag(
        "text", None, group="several processes", shown="this machine only", metavar="HOST:PORT",
        help="address of the Ray cluster, or auto for the cluster of this machine",
    )
    replicas: int = flag(
        "int", 1, ge=1, group="several processes", help="copies of the model (with --ray)",
    )

    def __post_init__(self) -> None:
        check_flags(self)
        if self.input is None:
            raise UserError("give --input, a .jsonl file of requests")
        if self.output is None and not self.dry_run:
            raise UserError("give --output, the file for results, or --dry-run")
        if self.plot is not None:
            check_plot("--plot", self.plot)
        _ = self.template, self.request_fields  # read the files now, to report errors early
        settings = [("output", f"{self.output}.config.yaml")] if self.output else []
        files = "input", "output", "errors", "chat_template", "progress_file", "plot"
        check_files(self, files, settings + [
            (name, path) for name in ("csv", "expert_counts") if (path := getattr(self.run, name))])
        self._check_processes()

    def _check_processes(self) -> None:
        """Raise `UserError` for flags that contradict ``--ray`` or ``--data-parallel``."""
        mode = "--ray" if self.ray else "--data-parallel"
        if self.ray and self.data_parallel:
            raise UserError("--ray and --data-parallel both share the job: give one of them")
        if not self.ray:
            for name, value in (("ray_address", self.ray_address), ("replicas",
                                                                    self.replicas != 1)):
                if value:
                    raise UserError(f"{flag_name(name)} has no effect without --ray")
        if not self.ray and not self.data_parallel:
            return
        for name, value in (("csv", self.run.csv), ("plot", self.plot)):
            if value:
                raise UserError(f"{flag_name(name)} shows one process: leave it out with {mode}")
        if self.ray_address is not None and "://" in self.ray_address:
            raise UserError(f"--ray-address {self.ray_address} is a client's, and the input is "
                            "read where the command runs: run it on a machine of the cluster, with "
                            "--ray-address auto")
        if self.run.percent == AUTO:
            raise UserError("--percent auto plans for one process with this machine to itself: "
                            f"give numbers with {mode}")
        if ":" in self.run.device:
            raise UserError(f"--device {self.run.device} is one GPU of this machine: give cuda "
                            f"with {mode}, which chooses one for each replica")

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

    def settings(self, run: RunConfig) -> dict[str, object]:
        """Return the settings to store beside the results, as plain YAML values.

        They are `RESUME_SETTINGS` and others for reference. `run` is the planned configuration.
        """
        h2o, cache = run.h2o(), run.cache()
        calibration = run.calibration and read_text("--calibration", run.calibration,
                                                    if_empty="is empty: give a text")
        return {
            **{name: getattr(run, name) for name in
               ("model", "path", "dtype", "activation_bits", "attn_sparsity", "gen_len", "seed",
                "no_generation_config", "device", "offload_dir", "prefill_chunk")},
            "weight_bits": run.resolved_weight_bits,
            "cache_bits": (cache.bits if cache.key_bits == cache.value_bits
                           else [cache.key_bits, cache.value_bits]),
            "gpu_batch_size": run.resolved_gpu_batch_size,
            "num_gpu_batches": run.resolved_num_gpu_batches, "percent": list(run.percent),
            "expert_percent": run.expert_percent and list(run.expert_percent),
            "expert_slots": run.expert_slots, "expert_counts": run.expert_counts,
            "h2o": h2o and {name: list(value) if isinstance(value, tuple) else value
                            for name, value in asdict(h2o).items()},
            "temperature": self.temperature, "input": self.input,
            # Through JSON, because YAML returns tuples as lists.
            "request_defaults": json.loads(json.dumps(self.request_fields)),
            "chat_template": _digest(self.template), "calibration": _digest(calibration),
        }


def _digest(text: str | None) -> str | None:
    """Return a short hash of a text; None and the empty text are returned unchanged."""
    return text and hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _SharedFlags:
    """Flags of `run` whose help differs from `generate`'s."""

    gen_len: int = _generate_flag(
        "gen_len", help="maximum number of new tokens of requests without max_tokens",
    )
    hardware: str | None = _generate_flag(
        "hardware", shown="this machine", metavar="FILE.yaml",
        help="predict for the machine in this file (with --dry-run)",
    )
    seed: int = _generate_flag(
        "seed",
        help="seed of random weights; with its id, the seed of a request without one",
    )


def parser() -> Parser:
    """Return the parser of the flags."""
    specs = {spec.name: spec for spec in fields(RunConfig)
             if (spec.metadata["group"] in _SHARED_GROUPS or spec.name in _SHARED)
             and spec.name not in _UNSUPPORTED}
    specs |= {spec.name: spec for spec in (*fields(_SharedFlags), *flag_fields(BatchOptions))}
    return build_parser(
        specs.values(), command="batch",
        usage="%(prog)s [-i FILE.jsonl] [-o FILE.jsonl] [--model NAME] [--percent P ...] [flags]",
        description="Run a file of requests, in the format of OpenAI's Batch API, through a model. "
        "A stopped job resumes.")


def parse_args(argv: Sequence[str] | None = None) -> BatchOptions:
    """Parse flags into checked `BatchOptions`. Raises `UserError`."""
    values = given_flags(parser(), argv)
    dry_run = values.get("dry_run", False) is True
    for name in values:
        if name in _UNSUPPORTED and values[name] != getattr(RunConfig, name):
            raise UserError(f"{flag_name(name)} has no effect on batch: take it out of the file of "
                            "--config")
        if dry_run and name in _RUN_ONLY and values[name]:
            raise UserError(f"{flag_name(name)} has no effect with --dry-run, which runs nothing")
    if "hardware" in values and not dry_run:
        raise UserError("--hardware describes another machine: add --dry-run")
    options = {spec.name: values.pop(spec.name) for spec in flag_fields(BatchOptions)
               if spec.name in values}
    if isinstance(options.get("input"), str) and not options["input"].endswith(".jsonl"):
        raise UserError(f"--input must name a .jsonl file, got {options['input']!r}")
    # With `prompts`, the run is not synthetic.
    shared = values | {"prompts": options.get("input"), "plan_only": dry_run}
    return BatchOptions(run=RunConfig.from_mapping(shared), **options)
