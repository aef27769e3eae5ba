"""Quality by cache budget: ``python benchmarks/studies/quality.py --input-path FILE.jsonl ...``.

For each cache and for quantized weights, measure two figures on the same articles: the perplexity
of the second half after the first (teacher-forced, so that all caches score the same tokens), and
the fraction of greedy tokens that equal those of the full cache. Bad flags are refused before torch
is loaded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import quality_study
from quality_study import GROUPS, RECALL, SPARSE, USUAL, Configuration, configurations

from flexgen_h2o.cli import launch, measurements
from flexgen_h2o.cli import parser as task_flags
from flexgen_h2o.cli.command import entry_point
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.errors import UserError
from flexgen_h2o.files import terminal
from flexgen_h2o.files.articles import read_articles, select_articles, split_halves
from flexgen_h2o.metrics.figures import LINES, log_scale, new_figure, save
from flexgen_h2o.metrics.provenance import origin

_SHARED = ("path", "device", "dtype", "gpu_batch_size", "gen_len")
_DEFAULTS = {"model": "smollm2-135m", "dtype": "float32", "gpu_batch_size": 30, "gen_len": 64}
_HELPS = {"dtype": "number format; float32 shows what eviction does and no rounding",
          "gen_len": "greedy tokens to compare after each first half"}


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """The checked flags; `run` holds those shared with `flex_opt`. Lengths are in tokens.

    Raises
    ------
    UserError
        A value is out of range, or flags contradict each other.
    """

    run: RunConfig
    input_path: str | None = measurements.articles_flag()
    articles: int = flag("int", 30, ge=1, help="measure on the first so many long enough")
    # Each half has at least one token.
    min_tokens: int = flag("int", 500, ge=2, help="shorter articles are passed over")
    max_tokens: int = flag("int", 768, ge=2, help="articles are cut to this")
    budgets: tuple[float, ...] = flag(
        "numbers", (5, 10, 20, 40, 60), gt=0, le=100, metavar="P",
        help="KV cache budgets, percent of the prompt; recall, sparse values and variants are "
        "measured at 5 and 20",
    )
    only: tuple[str, ...] = flag(
        "words", GROUPS, choices=GROUPS, metavar="GROUP",
        help=f"measure these, and full: {', '.join(GROUPS)}",
    )
    csv: str | None = measurements.csv_flag("cache")
    plot: str | None = measurements.plot_flag("both figures against the budget")
    from_csv: str | None = measurements.from_csv_flag()

    def __post_init__(self) -> None:
        task_flags.check_flags(self)
        measurements.check_source(self)
        groups = {configuration.group for configuration in configurations(self.budgets, self.only)}
        for group in self.only if self.only != GROUPS else ():
            if group not in groups:
                raise UserError(f"--only {group} measures nothing at these --budgets: add {USUAL}")
        measurements.check_outputs(self)


def parser() -> Parser:
    """Return the parser of the flags."""
    return task_flags.command_parser(
        QualityOptions, _SHARED, prog="python benchmarks/studies/quality.py",
        defaults=_DEFAULTS,
        helps=_HELPS, description="Perplexity and greedy tokens by the budget of the KV cache.")


def parse_args(argv: Sequence[str] | None = None) -> QualityOptions:
    """Parse flags into checked `QualityOptions`. Raises `UserError`."""
    options, shared = task_flags.parse(argv, parser(), QualityOptions)
    task_flags.check_from_csv([*options, *shared])
    return QualityOptions(run=RunConfig(**_DEFAULTS | shared), **options)


def run(options: QualityOptions) -> None:
    """Measure, or read measured rows; write the files and print the table."""
    measurements.report(
        options, read=quality_study.read_rows,
        measure=lambda: measure_all(options, read_articles(options.input_path)),
        show=lambda rows: terminal.print_stdout(quality_study.table(rows)), draw=draw)


def measure_all(options: QualityOptions, texts: Sequence[str]) -> list[dict[str, object]]:
    """Measure every cache on the articles. Rows are written to ``--csv`` one by one."""
    todo = configurations(options.budgets, options.only)
    with terminal.ProgressBar(total=2 * len(todo), unit="part", disable=None) as bar:
        open_llm = _opener(options, bar.set_description)
        rows = quality_study.compare(todo, open_llm, lambda llm: _pairs(llm, texts, options),
                                gen_len=options.run.gen_len, on_part=bar.update)
        return measurements.collected(options.csv, quality_study.COLUMNS,
                                  ({**origin(), **row} for row in rows))


def _opener(options: QualityOptions, show: Callable[[str], None]) -> Callable[[Configuration],
                                                                              object]:
    """Return a function that loads the model with the cache of a configuration."""
    def open_llm(configuration: Configuration):
        show(configuration.name)
        return launch.open_llm(options.run, progress=False, **configuration.arguments())

    return open_llm


def _pairs(llm, texts: Sequence[str], options: QualityOptions):
    """Return the token ids of the halves of each article."""
    if llm.tokenizer is None:
        raise UserError(f"{options.run.model} has no tokenizer here, and articles are text")
    selected = select_articles(texts, lambda text: llm.tokenizer(text, verbose=False)["input_ids"],
                               articles=options.articles, min_tokens=options.min_tokens,
                               max_tokens=options.max_tokens)
    return split_halves(selected)


main = entry_point(parse_args, run)


_POLICIES = ("h2o", RECALL, SPARSE, "window", "sink-window")
_MARKERS = {"8-bit": "D", "4-bit": "v", "mean": "P", "decay": "X", "caote": "d", "rolling": "*",
            "of the text": "^", "chunks of 16": "<", "chunks of 64": ">"}
_STEP = 1.6  # distance on the axis, in percent, between variants of the same budget


def draw(rows: Sequence[dict], path: str) -> None:
    """Draw rows of the quality task to a file, which is written atomically.

    `rows` are by column name, with numbers as numbers. One of them is of the plain full cache. Rows
    with quantized weights are left out. Raises OSError if the file cannot be written.
    """
    figure = new_figure(11, 4.8)
    left, right = figure.subplots(1, 2)
    full = _full(rows)
    _curves(left, rows, "perplexity", scale=1.0)
    _curves(right, rows, "greedy_equal_share", scale=100.0)
    left.axhline(full["perplexity"], color="black", linewidth=1, linestyle=":", label="full cache")
    left.set(ylabel="perplexity of the second half (log scale)",
             title="Perplexity: lower is better")
    log_scale(left, [row["perplexity"] for row in rows])
    right.axhline(100, color="black", linewidth=1, linestyle=":")
    right.set(ylabel=f"greedy tokens equal to the full cache's, % of {full['gen_len']:.0f}",
              title="Greedy tokens: higher is better", ylim=(0, 104))
    for axes in (left, right):
        axes.set(xlabel="KV cache budget, % of the prompt", xlim=(0, None))
        axes.grid(color="0.9", which="both")
        axes.set_axisbelow(True)
    figure.legend(*_legend(left), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    aside = f"; variants of h2o at {USUAL} % stand to its right" if _shown(rows) else ""
    figure.suptitle(
        f"{full['model']}, {full['dtype']}, {full['articles']:.0f} articles, prompts of "
        f"{full['prompt_tokens_mean']:.0f} tokens; bars: 95 % interval of the difference to full"
        f"{aside}", fontsize=10)
    save(figure, path)


def _full(rows: Sequence[dict]) -> dict:
    return next(row for row in rows if row["policy"] == "full" and not row["variant"])


def _curves(axes, rows: Sequence[dict], column: str, *, scale: float) -> None:
    """Draw a line for each policy, and the variants of h2o near its point at the usual budget."""
    full = _full(rows)
    for policy in _POLICIES:
        style = LINES[policy]
        points = sorted((row for row in rows if row["policy"] == policy and not row["variant"]),
                        key=lambda row: row["budget_percent"])
        if not points:
            continue
        at, values = [row["budget_percent"] for row in points], [row[column] for row in points]
        bars = None
        if column == "perplexity":
            low, high = ([full[column] * math.exp(row[f"delta_nats_{end}"]) for row in points]
                         for end in ("low", "high"))
            # The interval of a skewed sample may exclude the estimate; bars cannot be negative.
            bars = [[max(value - end, 0) for value, end in zip(values, low, strict=True)],
                    [max(end - value, 0) for value, end in zip(values, high, strict=True)]]
        axes.errorbar(at, [scale * value for value in values], yerr=bars, capsize=2, markersize=5,
                      linewidth=1.6, elinewidth=0.8, label=policy, **style)
    for place, row in enumerate(_shown(rows), 1):
        axes.plot([USUAL + place * _STEP], [scale * row[column]], linestyle="none",
                  marker=_MARKERS[row["variant"]], markersize=7, markerfacecolor="white",
                  markeredgecolor="black", label=f"h2o {USUAL} % {row['variant']}")


def _shown(rows: Sequence[dict]) -> list[dict]:
    """Return the variants at the usual budget, in the order of their markers."""
    order = list(_MARKERS)
    return sorted((row for row in rows if row["variant"] in order
                   and row["policy"] != RECALL and row["budget_percent"] == USUAL),
                  key=lambda row: order.index(row["variant"]))


def _legend(axes) -> tuple[list, list[str]]:
    """Return handles and labels by column: the lines first, then the points."""
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [name for name in (*_POLICIES, "full cache") if name in named]
    order += [name for name in named if name not in order]
    return [named[name] for name in order], order


if __name__ == "__main__":
    sys.exit(main())
