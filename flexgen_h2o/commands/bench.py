"""Measure one configuration: ``flexgen-h2o bench --model NAME ...``.

The model is loaded once, warmed up, and generates from the same synthetic prompts several times.
The figures are shown with the roofline if this machine has been measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from flexgen_h2o.cli.entry_point import entry_point
from flexgen_h2o.cli.launch import check_counting, open_llm, synthetic_prompts, warm_up, workload
from flexgen_h2o.cli.parser import (
    Parser,
    build_parser,
    check_flags,
    check_no_effect,
    command_flags,
    parse,
)
from flexgen_h2o.cli.results import append_csv, check_results
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.engine.expert_counts import write_expert_counts
from flexgen_h2o.files.terminal import print_stdout
from flexgen_h2o.files.writing import catch_write_errors
from flexgen_h2o.metrics.report import WIDTH, align_columns, stats_table
from flexgen_h2o.metrics.run_stats import RunStats, ratio

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.planning.search import PlanCandidate

_GROUPS = ("model", "batch and lengths", "policy", "planning", "cache", "sampling")
EXCLUDED_FLAGS = ("prompt", "prompts", "chat", "chat_template_kwargs", "plan_only", "hardware",
                  "output", "trace", "log_file", "debug_mode", "pipeline_parallel",
                  "rank_timeout")
"""Flags of `generate` without effect here: a file of ``--config`` must not set them."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The checked flags; `run` holds those shared with `generate`. Raises `UserError`."""

    run: RunConfig
    repeats: int = flag("int", 3, ge=1, group="results",
                        help="number of measured repeats")

    def __post_init__(self) -> None:
        check_flags(self)


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        command_flags(BenchOptions, groups=_GROUPS, names=("config", "csv", "count_experts"),
                      without=EXCLUDED_FLAGS, warm_up={"shown": "true"}),
        command="bench",
        usage="%(prog)s [--model NAME] [--percent P P P P] [--repeats N] [--csv FILE] [flags]",
        description="Throughput and latency of one configuration on synthetic prompts, with its "
        "roofline.")


def parse_args(argv: Sequence[str] | None = None) -> BenchOptions:
    """Parse flags into checked `BenchOptions`. Raises `UserError`."""
    options, shared = parse(argv, parser(), BenchOptions)
    check_no_effect(shared, EXCLUDED_FLAGS, "bench")
    return BenchOptions(run=RunConfig.from_mapping({"warm_up": True} | shared), **options)


def run(options: BenchOptions) -> None:
    """Plan if requested, measure, write the rows and print the table."""
    config, best, implementations = options.run, None, None
    check_results({"csv": config.csv, "count_experts": config.count_experts})
    if config.percent == AUTO:
        from flexgen_h2o.cli import planner  # only now: it loads scipy

        plan = planner.plan(config, workload(config, ()), config.num_prompts)
        plan.show()
        print_stdout("")
        config, best, implementations = plan.config, plan.best, plan.implementations
    with open_llm(config, workload=workload(config, ()), implementations=implementations,
                  progress=None if config.verbose else False) as llm:
        check_counting(config.count_experts, llm)
        repeats = measure(llm, config, options.repeats, best)
        if config.count_experts is not None:
            with catch_write_errors("--count-experts", config.count_experts):
                write_expert_counts(config.count_experts, repeats[-1])
        ideal = ideal_plan_of(llm, config, repeats[0].dtype)
    print_stdout(format_repeats(repeats, ideal))


def measure(llm: LLM, config: RunConfig, count: int, best: PlanCandidate | None) -> list[RunStats]:
    """Measure `count` repeats; each row is appended to ``--csv`` as soon as it is known.

    `best` is the plan, if there is one: its prediction is stored with the figures.
    """
    prompts = synthetic_prompts(config, llm.vocab_size)
    if config.warm_up:
        warm_up(llm, prompts, config)
    runs: list[RunStats] = []
    for _ in range(count):
        llm.generate(prompts, cut_gen_len=config.cut_gen_len, **asdict(config.sampling()))
        stats = llm.stats
        assert stats is not None  # generate has set it
        if best is not None:
            stats = replace(stats, predicted_prefill_seconds=best.prefill_seconds,
                            predicted_decode_seconds=best.decode_seconds)
        runs.append(stats)
        if config.csv is not None:
            with catch_write_errors("--csv", config.csv):
                append_csv(config.csv, stats, config)
                config.save(f"{config.csv}.config.yaml")
    return runs


def ideal_plan_of(llm: LLM, config: RunConfig, dtype: str) -> PlanCandidate | str:
    """Return the roofline of the run on this machine, or why it is not known."""
    from flexgen_h2o.planning import calibrate
    from flexgen_h2o.planning.planned_run import PlannedRun
    from flexgen_h2o.planning.roofline import ideal_plan
    from flexgen_h2o.storage.device import open_device

    device = open_device(config.device)
    hardware = calibrate.measured_hardware(device, config.offload_dir, dtype)
    if isinstance(hardware, str):
        return hardware
    run = PlannedRun(
        llm.model_config, llm.policy, workload(config, ()),
        calibrate.measured_dtype(device).itemsize, device.is_gpu,
        False, config.cache(), llm.weight_options)
    return ideal_plan(hardware, run, config.num_prompts)


_COLUMNS: dict[str, Callable[[RunStats], float | None]] = {
    "prefill s": lambda stats: stats.prefill_seconds,
    "prefill tokens/s": lambda stats: stats.prefill_tokens_per_second,
    "decode s": lambda stats: stats.decode_seconds,
    "decode tokens/s": lambda stats: stats.decode_tokens_per_second,
    "tokens/s": lambda stats: stats.total_tokens_per_second,
    "p50 s": lambda stats: stats.latency_p50_seconds,
    "p95 s": lambda stats: stats.latency_p95_seconds,
}
"""Columns of the table; latencies are of a decode step."""


def format_repeats(repeats: Sequence[RunStats], ideal: PlanCandidate | str) -> str:
    """Format the median repeat's figures, a line per repeat, their medians and the roofline."""
    ranked = sorted(repeats, key=lambda stats: stats.prefill_seconds + stats.decode_seconds)
    middle = ranked[(len(ranked) - 1) // 2]
    rows = {str(number): [column(stats) for column in _COLUMNS.values()]
            for number, stats in enumerate(repeats, 1)}
    rows["median"] = [None if None in column else median(column)
                      for column in zip(*rows.values(), strict=True)]
    if not isinstance(ideal, str):
        rows["roofline"] = bound = _roofline_row(ideal, middle)
        # Times are above the roofline, rates below it.
        rows["over roofline"] = [
            value and limit and (value / limit if name.endswith(" s") else limit / value)
            for name, value, limit in zip(_COLUMNS, rows["median"], bound, strict=True)]
    mark = " (projected)" if middle.projected else ""
    lines = [[f"repeat{mark}", *_COLUMNS],
             *([name, *("-" if cell is None else f"{cell:.4g}" for cell in row)]
               for name, row in rows.items())]
    note = f"\nroofline: {ideal}" if isinstance(ideal, str) else ""
    return f"{stats_table(middle)}\n\n{align_columns(lines, WIDTH)}{note}"


def _roofline_row(ideal: PlanCandidate, stats: RunStats) -> list[float | None]:
    """Return the roofline's row of the table."""
    step = ideal.estimate.step.seconds if ideal.estimate.steps else None
    return [ideal.prefill_seconds, ratio(stats.prompt_tokens, ideal.prefill_seconds),
            ideal.decode_seconds or None,
            ratio(stats.generated_tokens - stats.num_prompts, ideal.decode_seconds),
            ratio(stats.generated_tokens, ideal.seconds), step, step]


main = entry_point(parse_args, run)
