"""The checked flags of `batch`. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flexgen_h2o.cli.parser import (
    Parser,
    build_parser,
    check_files,
    check_flags,
    check_no_effect,
    parse,
    refuse,
)
from flexgen_h2o.cli.request_flags import UNSUPPORTED, RequestOptions, request_flags
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import read_text
from flexgen_h2o.metrics.figures import check_plot

_NOT_IN_DRY_RUN = ("output", "errors", "overwrite", "max_hours", "progress_file", "plot", "csv",
                   "ray", "ray_address", "replicas", "data_parallel")
"""Flags without effect on a dry run."""
RESUME_SETTINGS = ("model", "path", "dtype", "weight_bits", "activation_bits", "calibration",
                   "batch_invariant", "cache_bits", "attn_sparsity", "h2o", "gen_len",
                   "temperature", "seed", "chat_template", "no_generation_config",
                   "request_defaults")
"""Settings that texts depend on: a resumed job must have the same. Batch sizes, placements and the
device may change."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(RequestOptions):
    """The checked flags of `batch`.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    input: str | None = flag(
        "path", None, short="-i", group="input", shown="none", metavar="FILE.jsonl",
        help="requests, one per line: in the format of OpenAI's Batch API, or with `prompt` or "
        "`messages` and an optional `id`",
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

    def settings(self, run: RunConfig) -> dict[str, object]:
        """Return the settings to store beside the results, as plain YAML values.

        They are `RESUME_SETTINGS` and others for reference. `run` is the planned configuration.
        """
        h2o, cache = run.h2o(), run.cache()
        calibration = run.calibration and read_text("--calibration", run.calibration,
                                                    if_empty="is empty: give a text")
        return {
            **{name: getattr(run, name) for name in
               ("model", "path", "dtype", "activation_bits", "batch_invariant", "attn_sparsity",
                "gen_len", "seed", "no_generation_config", "device", "offload_dir",
                "prefill_chunk")},
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


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        request_flags(BatchOptions, extra=("csv",), hardware={
            "help": "predict for the machine in this file (with --dry-run)"}),
        command="batch",
        usage="%(prog)s [-i FILE.jsonl] [-o FILE.jsonl] [--model NAME] [--percent P ...] [flags]",
        description="Run a file of requests, in the format of OpenAI's Batch API, through a model. "
        "A stopped job resumes.")


def parse_args(argv: Sequence[str] | None = None) -> BatchOptions:
    """Parse flags into checked `BatchOptions`. Raises `UserError`."""
    options, shared = parse(argv, parser(), BatchOptions)
    check_no_effect(shared, UNSUPPORTED, "batch")
    dry_run = options.get("dry_run", False) is True
    if dry_run:
        given = [name for name, value in (shared | options).items() if value]
        refuse(given, _NOT_IN_DRY_RUN, "has no effect with --dry-run, which runs nothing")
    elif "hardware" in shared:
        raise UserError("--hardware describes another machine: add --dry-run")
    if isinstance(options.get("input"), str) and not options["input"].endswith(".jsonl"):
        raise UserError(f"--input must name a .jsonl file, got {options['input']!r}")
    # With `prompts`, the run is not synthetic.
    shared |= {"prompts": options.get("input"), "plan_only": dry_run}
    return BatchOptions(run=RunConfig.from_mapping(shared), **options)
