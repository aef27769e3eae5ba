"""Summarize articles and compute ROUGE: ``flexgen-h2o summarize --input-path FILE.jsonl ...``.

Decoding is greedy, so that scores repeat. ``--sweep`` compares caches, as the table of ROUGE-2 by
KV budget in H2O (arXiv 2306.14048) does. Flags have the H2O repository's names where it has them.
Invalid flags and files are refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexgen_h2o.cli.entry_point import entry_point
from flexgen_h2o.cli.launch import open_llm
from flexgen_h2o.cli.parser import (
    WITHOUT_PLAN,
    Parser,
    build_parser,
    check_files,
    check_flags,
    check_from_csv,
    check_outputs_writable,
    check_placed,
    command_flags,
    parse,
    refuse,
)
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import csv_flag, flag, from_csv_flag, plot_flag
from flexgen_h2o.commands.summarize import table
from flexgen_h2o.commands.summarize.table import (
    Rouge,
    Row,
    Score,
    SummaryCache,
    check_rouge,
    check_rows,
    summarize,
)
from flexgen_h2o.config.h2o import EVICTIONS
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import Article, read_summary_tasks
from flexgen_h2o.files.rows import ResumableJsonl, collect_rows, report_partial
from flexgen_h2o.files.terminal import ProgressBar, print_stdout
from flexgen_h2o.files.writing import catch_write_errors, check_writable
from flexgen_h2o.metrics.figures import check_plot

__all__ = ["main", "parse_args", "parser", "run"]

POLICIES = tuple(name for name in EVICTIONS if name != "full")
WINDOW = 256
"""Default budget in tokens. Half of them are heavy hitters, as in the H2O repository."""

_SIZES = ("num_window_length", "num_heavy_hitter_tokens")
_EVICTION_SWITCHES = ("evict_while_prefilling", "enable_position_rolling")
_FULL_CACHE: dict[str, Any] = {"eviction": "full", **dict.fromkeys(_SIZES),
                               **dict.fromkeys(_EVICTION_SWITCHES, False)}
_SHARED = ("path", "device", "dtype", "gpu_batch_size", "num_gpu_batches", "percent", "offload_dir",
           "prefill_chunk", "cache_bits", "eviction", *_SIZES, *_EVICTION_SWITCHES)
_DEFAULTS = {"model": "smollm2-135m"}
_TEXT_SETTINGS = ("model", "path", "dtype", "gen_len", "chat_template", "policy", "heavy_tokens",
                  "recent_tokens", "sink_tokens", "prompt_chunk", "positions", "cache_bits")
"""Settings that summaries depend on: a resumed run must have the same."""


@dataclass(frozen=True, kw_only=True)
class SummarizeOptions:
    """The checked flags; `run` holds those shared with `generate`. Lengths are in tokens.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    run: RunConfig
    input_path: str | None = flag(
        "path", None, shown="none", metavar="FILE.jsonl",
        help="articles, a JSON object per line: the prompt in `article`, the reference in "
        "`summary_gt`, and optionally `stop` and `max_tokens`",
    )
    output_path: str | None = flag(
        "path", None, shown="none", metavar="FILE.jsonl",
        help="write a line per article; the same command resumes after the last line. A sweep "
        "writes a file per cache, such as FILE.h2o-128.jsonl",
    )
    sample_num: int | None = flag(
        "int", None, ge=1, shown="all", help="use only the first N articles",
    )
    gen_len: int | None = flag(
        "int", None, ge=1, shown="`max_tokens` of the line, or 64",
        help="maximum number of new tokens",
    )
    chat_template: bool = flag(
        "bool", False,
        help="send each prompt as a user message in the model's chat template",
    )
    enable_h2o_generation: bool = flag(
        "bool", False,
        help="evict tokens from the cache as --eviction says; otherwise the cache keeps all tokens",
    )
    sweep: tuple[str, ...] = flag(
        "words", (), shown="none", metavar="N|full",
        help="summarize with each of these budgets, for each of --policies",
    )
    policies: tuple[str, ...] | None = flag(
        "words", None, choices=POLICIES, shown="h2o window", metavar="POLICY",
        help=f"eviction policies of --sweep: {', '.join(POLICIES)}",
    )
    csv: str | None = csv_flag("cache and one for lead-1")
    plot: str | None = plot_flag("ROUGE-2 and ROUGE-L by budget")
    from_csv: str | None = from_csv_flag()

    def __post_init__(self) -> None:
        check_flags(self)
        outputs: list[tuple[str, str]] = []
        if self.from_csv is None:
            self._check_run()
            outputs = [("output_path", path) for line_file in self.outputs().values()
                       for path in (line_file, f"{line_file}.config.yaml")]
        if self.plot is not None and self.from_csv is None and not self.sweep:
            raise UserError("--plot draws several budgets: add --sweep, or --from-csv")
        if self.plot is not None:
            check_plot("--plot", self.plot)
        check_files(self, ("input_path", "from_csv", "csv", "plot"), outputs)

    def _check_run(self) -> None:
        if self.input_path is None or self.output_path is None:
            raise UserError("give --input-path, a .jsonl file of articles, and --output-path, "
                            "or --from-csv")
        check_placed(self.run)
        if self.policies and not self.sweep:
            raise UserError("--policies has no effect without --sweep: give --eviction")
        if self.policies and {*self.sweep} == {"full"}:
            raise UserError("--policies has no effect on the full cache: add a budget to --sweep")
        for size in self.sweep:
            if size != "full" and not (size.isdecimal() and size.isascii() and int(size) > 0):
                raise UserError("each of --sweep must be a number of tokens or full, got "
                                f"{size!r}")
        self.configs()  # RunConfig checks each
        check_rouge()

    def configs(self) -> dict[str, RunConfig]:
        """Return the run configuration of each cache, by the cache's name, in order."""
        configs = [self.run]
        if self.sweep:
            budgets = sorted({int(size) for size in self.sweep if size != "full"})
            configs = [replace(self.run, eviction=policy, num_window_length=budget)
                       for policy in dict.fromkeys(self.policies or ("h2o", "window"))
                       for budget in budgets]
            configs += [replace(self.run, **_FULL_CACHE)] if "full" in self.sweep else []
        return {_cache_name(config): config for config in configs}

    def outputs(self) -> dict[str, str]:
        """Return the output file of each of `configs`; in a sweep it contains the cache's name."""
        assert self.output_path is not None
        path = Path(self.output_path)
        return {name: str(path.with_name(f"{path.stem}.{name}{path.suffix}")) if self.sweep
                else self.output_path for name in self.configs()}


def _cache(config: RunConfig) -> SummaryCache:
    return SummaryCache(config.eviction, config.h2o(), config.resolved_cache_bits)


def _cache_name(config: RunConfig) -> str:
    budget = _cache(config).budget
    return config.eviction if budget is None else f"{config.eviction}-{budget}"


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        command_flags(
            SummarizeOptions, names=_SHARED, model={"shown": _DEFAULTS["model"]},
            eviction={"shown": f"{POLICIES[0]} with --enable-h2o-generation"},
            num_window_length={"shown": f"{WINDOW}, or twice --num-heavy-hitter-tokens"},
            **WITHOUT_PLAN),
        command="summarize", show_all=True,
        description="Summaries and their ROUGE with the full or an evicting KV cache.")


def parse_args(argv: Sequence[str] | None = None) -> SummarizeOptions:
    """Parse flags into checked `SummarizeOptions`. Raises `UserError`."""
    options, shared = parse(argv, parser(), SummarizeOptions)
    check_from_csv([*options, *shared])
    return SummarizeOptions(run=RunConfig.from_mapping(_DEFAULTS | _cache_flags(options, shared)),
                            **options)


def _cache_flags(options: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Return the shared flags with the defaults of the cache; for a sweep, of an evicting one."""
    h2o, sweep = options.get("enable_h2o_generation"), options.get("sweep", ())
    if sweep:
        refuse([*shared, *options], ("eviction", *_SIZES, "enable_h2o_generation"),
               "has no effect with --sweep, which sets the caches: leave it out")
    elif h2o and shared.get("eviction") == "full":
        raise UserError("--enable-h2o-generation evicts: leave --eviction full out")
    if not h2o and {*sweep} <= {"full"}:
        add = "a budget to --sweep" if sweep else "--enable-h2o-generation"
        evicting = [name for name in shared if shared[name] not in (False, "full")]
        refuse(evicting, _FULL_CACHE, f"has no effect on the full cache: add {add}")
        return _FULL_CACHE | shared
    return shared if shared.keys() & {*_SIZES} else {"num_window_length": WINDOW} | shared


def run(options: SummarizeOptions) -> None:
    """Summarize and score, or read measured rows; write the files and print the table."""
    check_outputs_writable(options, "csv", "plot")
    rows = (collect_rows(options.csv, table.COLUMNS, measure(options))
            if options.from_csv is None else table.read_rows(options.from_csv))
    print_stdout(table.text(rows))
    if options.plot is not None:
        with catch_write_errors("--plot", options.plot):
            table.draw(rows, options.plot)


def measure(options: SummarizeOptions) -> list[Row]:
    """Return a row for each cache. Summaries resume where an earlier run stopped."""
    assert options.input_path is not None
    articles = read_summary_tasks(options.input_path, max_tasks=options.sample_num,
                                  max_tokens=options.gen_len)
    configs, files, rows = options.configs(), {}, {}
    for name, path in options.outputs().items():
        check_writable("--output-path", path)
        files[name] = ResumableJsonl("--output-path", path,
                                     _settings(options, _cache(configs[name])), _TEXT_SETTINGS)
        rows[name] = files[name].read()
        check_rows(path, rows[name], articles)
    score = Rouge()
    done = sum(min(len(lines), len(articles)) for lines in rows.values())
    with ProgressBar(total=len(files) * len(articles), initial=done, unit="article",
                     disable=None) as bar:
        for name, config in configs.items():
            bar.set_description(name)
            if len(rows[name]) < len(articles):
                rows[name] += _missing_rows(options, config, articles, files[name], score=score,
                                            bar=bar)
    return table.all_rows({_cache(config): rows[name] for name, config in configs.items()},
                          articles, model=options.run.model, chat=options.chat_template,
                          score=score)


def _missing_rows(options: SummarizeOptions, config: RunConfig, articles: Sequence[Article],
                  file: ResumableJsonl, *, score: Score, bar: ProgressBar) -> list[Row]:
    """Summarize the articles that the file lacks, add them to it, and return their rows."""
    missing: list[Row] = []
    with (report_partial(lambda: f"{file.count} of {len(articles)} lines are in {file.path}; run "
                         "the same command to resume" if file.count else ""),
          open_llm(config, progress=False) as llm):
        for rows in summarize(llm, articles, begin=file.count, chat=options.chat_template,
                              score=score):
            with catch_write_errors("--output-path", file.path):
                file.add(rows)
            missing += rows
            bar.update(len(rows))
    return missing


def _settings(options: SummarizeOptions, cache: SummaryCache) -> dict[str, object]:
    """Return the settings to store beside the lines of a cache, as plain YAML values."""
    run = options.run
    return {
        "model": run.model, "path": run.path, "dtype": run.dtype, "gen_len": options.gen_len,
        "chat_template": options.chat_template, **cache.columns(),
        "input_path": options.input_path, "device": run.device,
        "batch_size": run.resolved_gpu_batch_size, "num_gpu_batches": run.resolved_num_gpu_batches,
        "percent": list(run.percent), "offload_dir": run.offload_dir,
        "prefill_chunk": run.prefill_chunk,
    }


main = entry_point(parse_args, run)
