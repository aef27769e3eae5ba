"""The flags of `commands.batch`, checked. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from flexgen_h2o.cli import parser as flag_parser
from flexgen_h2o.cli.parser import check_files, check_own, own_fields
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.commands.batch.requests import Defaults, check_defaults
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import parse_json_object, read_text
from flexgen_h2o.metrics.figures import check_plot

_GROUPS = ("model", "policy", "planning", "cache")
_SHARED = ("config", "gpu_batch_size", "num_gpu_batches", "prefill_chunk", "seed",
           "no_generation_config", "csv")
_NOT_HERE = ("prompt", "prompts", "chat", "num_prompts", "prompt_len", "cut_gen_len", "warm_up",
             "plan_only", "do_sample", "no_repeat_ngram_size", "min_new_tokens", "trace",
             "count_experts", "log_file", "no_log", "verbose", "debug_mode")
"""Flags of `generate` that would do nothing here: a file of ``--config`` must not give them."""
_FILES = ("input", "output", "errors", "chat_template", "progress_file", "plot")
_IDLE = ("output", "errors", "overwrite", "max_hours", "progress_file", "plot", "csv",
         "ray", "ray_address", "replicas", "data_parallel")
"""Flags that say nothing of a dry run."""
DECIDING = ("model", "path", "dtype", "weight_bits", "activation_bits", "calibration",
            "cache_bits", "attn_sparsity", "h2o", "gen_len", "temperature", "seed", "chat_template",
            "no_generation_config", "request_defaults")
_FIELDS = ("top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos", "chat_template_kwargs")
"""Flags that are fields of `request_defaults`."""
"""Settings that texts depend on. Batches, placements and the device may change in between."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The flags, checked. `run` holds those that `flex_opt` has too.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    run: RunConfig
    input: str | None = flag(
        "path", None, short="-i", group="input", shown="none", metavar="FILE.jsonl",
        help="requests, one a line: as OpenAI's Batch API has them, or with a `prompt` or "
        "`messages` and an optional `id`",
    )
    chat_template: str | None = flag(
        "path", None, group="input", shown="the tokenizer's", metavar="FILE",
        help="the jinja template of chats",
    )
    served_model_name: tuple[str, ...] | None = flag(
        "words", None, group="input", shown="--model and the last part of it", metavar="NAME",
        help="more names by which requests may call the model",
    )
    strict: bool = flag(
        "bool", False, group="input",
        help="check every line first, and run nothing if one of them cannot run",
    )
    dry_run: bool = flag(
        "bool", False, group="input",
        help="check every line, count tokens and predict hours; run nothing",
    )
    window: int = flag(
        "int", 2048, low=1, group="batch and lengths",
        help="sequences that are in memory at a time, sorted by length into blocks",
    )
    temperature: float = flag(
        "float", 1.0, low=0, high=2, group="sampling",
        help="temperature of requests that name none; 0 takes the likeliest token",
    )
    top_k: int | None = flag(
        "int", None, low=0, group="sampling", shown="0, off",
        help="sample from the K likeliest tokens, for requests that name no top_k",
    )
    top_p: float | None = flag(
        "float", None, low=0, high=1, group="sampling", shown=1.0,
        help="sample from the likeliest tokens that hold this probability, for requests that name "
        "no top_p",
    )
    min_p: float | None = flag(
        "float", None, low=0, high=1, group="sampling", shown="off",
        help="sample from tokens with this share of the likeliest one's probability, for requests "
        "that name no min_p",
    )
    repetition_penalty: float | None = flag(
        "float", None, above=0, group="sampling", shown="1.0, off",
        help="divide the logits of tokens of the text so far, for requests that name none",
    )
    ignore_eos: bool = flag(
        "bool", False, group="sampling",
        help="generate past end tokens, for requests that do not say",
    )
    chat_template_kwargs: str | None = flag(
        "text", None, group="input", shown="none", metavar="JSON",
        help="arguments of the chat template, under those that a request gives",
    )
    request_defaults: str | None = flag(
        "text", None, group="sampling", shown="none", metavar="JSON",
        help="more fields of a request's body, for requests that do not give them, such as "
        '\'{"stop_token_ids": [2]}\'',
    )
    output: str | None = flag(
        "path", None, short="-o", group="results", shown="none", metavar="FILE.jsonl",
        help="a line for each request, as it ends; what it answers already is not run again",
    )
    errors: str | None = flag(
        "path", None, group="results", shown="--output", metavar="FILE.jsonl",
        help="the lines of requests that failed",
    )
    overwrite: bool = flag("bool", False, group="results", help="begin anew")
    max_hours: float | None = flag(
        "float", None, above=0, group="results", shown="no limit",
        help="end after the block in which so much time is over; the same command goes on",
    )
    progress_file: str | None = flag(
        "path", None, group="results", shown="none", metavar="FILE.json",
        help="keep how far the job is, for other programs",
    )
    plot: str | None = flag(
        "path", None, group="results", shown="none", metavar="FILE.png",
        help="draw tokens/s and memory over the job (or .svg, .pdf)",
    )

    data_parallel: bool = flag(
        "bool", False, group="several processes",
        help="share the job with the other processes that a launcher such as torchrun has started",
    )
    ray: bool = flag(
        "bool", False, group="several processes",
        help="run replicas of the model on Ray Data",
    )
    ray_address: str | None = flag(
        "text", None, group="several processes", shown="this machine alone", metavar="HOST:PORT",
        help="the Ray cluster; auto: the one that this machine is part of",
    )
    replicas: int = flag(
        "int", 1, low=1, group="several processes", help="copies of the model, with --ray",
    )

    def __post_init__(self) -> None:
        check_own(self)
        if self.input is None:
            raise UserError("give --input, a .jsonl file of requests")
        if self.output is None and not self.dry_run:
            raise UserError("give --output, the file for results, or --dry-run")
        if self.plot is not None:
            check_plot("--plot", self.plot)
        _ = self.template, self.request_fields  # what cannot be read must show now
        beside = [("output", f"{self.output}.config.yaml")] if self.output else []
        check_files(self, _FILES, beside + [
            (name, path) for name in ("csv", "expert_counts") if (path := getattr(self.run, name))])
        self._check_processes()

    def _check_processes(self) -> None:
        """Raise `UserError` for flags that several processes contradict."""
        mode = "--ray" if self.ray else "--data-parallel"
        if self.ray and self.data_parallel:
            raise UserError("--ray and --data-parallel both share the job: give one of them")
        if not self.ray:
            for name, given in (("ray_address", self.ray_address), ("replicas",
                                                                    self.replicas != 1)):
                if given:
                    raise UserError(f"{flag_name(name)} has no effect without --ray")
        if not self.ray and not self.data_parallel:
            return
        for name, given in (("csv", self.run.csv), ("plot", self.plot)):
            if given:
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
        """The text of `chat_template`, which goes where these go. Raises `UserError` if it cannot
        be read."""
        return self.chat_template and read_text("--chat-template", self.chat_template,
                                                if_empty="holds no template")

    @cached_property
    def request_fields(self) -> dict[str, Any]:
        """The fields of a body for requests that do not give them. Raises `UserError`."""
        given: dict[str, Any] = {name: value for name in _FIELDS
                                 if (value := getattr(self, name)) not in (None, False)}
        if "chat_template_kwargs" in given:
            given["chat_template_kwargs"] = parse_json_object("--chat-template-kwargs",
                                                        given["chat_template_kwargs"])
        more = {} if self.request_defaults is None else parse_json_object("--request-defaults",
                                                                    self.request_defaults)
        for name in given.keys() & more.keys():
            raise UserError(f"{flag_name(name)} and --request-defaults both give {name}: leave one "
                            "out")
        return check_defaults("--request-defaults", given | more)

    def defaults(self) -> Defaults:
        """The values for a request that does not say."""
        names = self.run.model, Path(self.run.model).name, *(self.served_model_name or ())
        return Defaults({*names}, self.run.gen_len,
                        self.temperature, self.run.seed, self.request_fields)

    def settings(self, run: RunConfig) -> dict[str, object]:
        """The settings to keep beside the results, as plain YAML values: `DECIDING`, and some of
        `run`, which is as it was planned."""
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
            # Through JSON, as YAML reads tuples as lists.
            "request_defaults": json.loads(json.dumps(self.request_fields)),
            "chat_template": _digest(self.template), "calibration": _digest(calibration),
        }


def _digest(text: str | None) -> str | None:
    """Return a short hash of a text; of None or an empty one, itself."""
    return text and hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class BatchHelps:
    """The flags that ``--help`` describes in other words than that of `generate`."""

    gen_len: int = flag(
        "int", RunConfig.gen_len, group="batch and lengths",
        help="most tokens to generate for a request that names no max_tokens",
    )
    hardware: str | None = flag(
        "path", None, metavar="FILE.yaml", shown="this machine", group="planning",
        help="predict for the machine in this file (with --dry-run)",
    )
    seed: int = flag(
        "int", RunConfig.seed, group="sampling",
        help="with its id, the seed of a request that names none; seed of random weights",
    )


def parser() -> flag_parser.Parser:
    """The parser of the flags."""
    specs = {spec.name: spec for spec in fields(RunConfig)
             if (spec.metadata["group"] in _GROUPS or spec.name in _SHARED)
             and spec.name not in _NOT_HERE}
    specs |= {spec.name: spec for spec in (*fields(BatchHelps), *own_fields(BatchOptions))}
    return flag_parser.build_parser(
        specs.values(), command="batch",
        usage="%(prog)s [-i FILE.jsonl] [-o FILE.jsonl] [--model NAME] [--percent P ...] [flags]",
        description="Run a file of requests, as OpenAI's Batch API has them, through a model; a "
        "job that was stopped goes on where it was.")


def parse_args(argv: Sequence[str] | None = None) -> BatchOptions:
    """Flags as checked `BatchOptions`. Raises `UserError`."""
    given = flag_parser.given_flags(parser(), argv)
    dry = given.get("dry_run", False) is True
    for name in given:
        if name in _NOT_HERE and given[name] != getattr(RunConfig, name):
            raise UserError(f"{flag_name(name)} has no effect on batch: take it out of the file of "
                            "--config")
        if dry and name in _IDLE and given[name]:
            raise UserError(f"{flag_name(name)} has no effect with --dry-run, which runs nothing")
    if "hardware" in given and not dry:
        raise UserError("--hardware describes another machine: add --dry-run")
    own = {spec.name: given.pop(spec.name) for spec in own_fields(BatchOptions)
           if spec.name in given}
    if isinstance(own.get("input"), str) and not own["input"].endswith(".jsonl"):
        raise UserError(f"--input must name a .jsonl file, got {own['input']!r}")
    # The prompts are the input's, so that nothing goes by those that are synthetic.
    shared = given | {"prompts": own.get("input"), "plan_only": dry}
    return BatchOptions(run=RunConfig.from_mapping(shared), **own)
