"""Quality by cache budget: ``python benchmarks/studies/quality.py --input-path FILE.jsonl ...``.

On the same articles, each cache gives the perplexity of the second half after the first (teacher-
forced, so that its figures are of the same tokens) and the share of greedy tokens that are those
of the full cache; so do quantized weights. All that can be refused is refused before torch is
loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quality_study import measures
from quality_study import plot as quality_plot
from quality_study.configurations import GROUPS, USUAL, Configuration, configurations

from flexgen_h2o.cli import launch, measurements
from flexgen_h2o.cli import parser as task_flags
from flexgen_h2o.cli.command import entry_point
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.errors import UserError
from flexgen_h2o.files import terminal
from flexgen_h2o.files.articles import choose, halves, read_articles
from flexgen_h2o.metrics.provenance import origin

_SHARED = ("path", "device", "dtype", "gpu_batch_size", "gen_len")
_DEFAULTS = {"model": "smollm2-135m", "dtype": "float32", "gpu_batch_size": 30, "gen_len": 64}
_HELPS = {"dtype": "number format; float32 shows what eviction does and no rounding",
          "gen_len": "greedy tokens to compare after each first half"}


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """The flags, checked. `run` holds those that `flex_opt` has too; lengths are tokens.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    run: RunConfig
    input_path: str | None = measurements.articles_flag()
    articles: int = flag("int", 30, low=1, help="measure on the first so many long enough")
    # A half has a token at least.
    min_tokens: int = flag("int", 500, low=2, help="shorter articles are passed over")
    max_tokens: int = flag("int", 768, low=2, help="articles are cut to this")
    budgets: tuple[float, ...] = flag(
        "numbers", (5, 10, 20, 40, 60), above=0, high=100, metavar="P",
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
        task_flags.check_own(self)
        measurements.check_source(self)
        found = {one.group for one in configurations(self.budgets, self.only)}
        for group in self.only if self.only != GROUPS else ():
            if group not in found:
                raise UserError(f"--only {group} measures nothing at these --budgets: add {USUAL}")
        measurements.check_outputs(self)


def parser() -> Parser:
    """The parser of the flags."""
    return task_flags.command_parser(
        QualityOptions, _SHARED, prog="python benchmarks/studies/quality.py",
        defaults=_DEFAULTS,
        helps=_HELPS, description="Perplexity and greedy tokens by the budget of the KV cache.")


def parse_args(argv: Sequence[str] | None = None) -> QualityOptions:
    """Flags as checked `QualityOptions`. Raises `UserError`."""
    own, shared = task_flags.parse(argv, parser(), QualityOptions)
    task_flags.check_from_csv([*own, *shared])
    return QualityOptions(run=RunConfig(**_DEFAULTS | shared), **own)


def run(options: QualityOptions) -> None:
    """Measure, or read what was measured; write the files and print the table."""
    measurements.report(
        options, read=measures.read_rows,
        measure=lambda: measure_all(options, read_articles(options.input_path)),
        show=lambda rows: terminal.show(measures.table(rows)), draw=quality_plot.draw)


def measure_all(options: QualityOptions, texts: Sequence[str]) -> list[dict[str, object]]:
    """Measure every cache on the articles; rows go to ``--csv`` as they come."""
    todo = configurations(options.budgets, options.only)
    with terminal.ProgressBar(total=2 * len(todo), unit="part", disable=None) as bar:
        open_llm = _opener(options, bar.set_description)
        rows = measures.compare(todo, open_llm, lambda llm: _pairs(llm, texts, options),
                                gen_len=options.run.gen_len, on_part=bar.update)
        return measurements.collected(options.csv, measures.COLUMNS,
                                  ({**origin(), **row} for row in rows))


def _opener(options: QualityOptions, show: Callable[[str], None]) -> Callable[[Configuration],
                                                                              object]:
    """A function that loads the model with the cache of a configuration."""
    def open_llm(one: Configuration):
        show(one.name)
        return launch.open_llm(options.run, progress=False, **one.arguments())

    return open_llm


def _pairs(llm, texts: Sequence[str], options: QualityOptions):
    """Token ids of the halves of each article."""
    if llm.tokenizer is None:
        raise UserError(f"{options.run.model} has no tokenizer here, and articles are text")
    chosen = choose(texts, lambda text: llm.tokenizer(text, verbose=False)["input_ids"],
                    articles=options.articles, min_tokens=options.min_tokens,
                    max_tokens=options.max_tokens)
    return halves(chosen)


main = entry_point(parse_args, run)


if __name__ == "__main__":
    sys.exit(main())
