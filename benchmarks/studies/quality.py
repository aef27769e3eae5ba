"""Quality by cache budget: ``python benchmarks/studies/quality.py --input-path FILE.jsonl ...``.

For each cache and for quantized weights, measure two figures on the same articles: the perplexity
of the second half after the first (teacher-forced, so that all caches score the same tokens), and
the fraction of greedy tokens that equal those of the full cache. Bad flags are refused before torch
is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import quality_study
from quality_study import GROUPS, USUAL, Configuration, configurations

from flexgen_h2o.cli import launch, measurements
from flexgen_h2o.cli.command import entry_point
from flexgen_h2o.cli.parser import (
    Parser,
    build_parser,
    check_files,
    check_flags,
    check_outputs_writable,
    command_flags,
    parse,
)
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.errors import UserError
from flexgen_h2o.files import terminal
from flexgen_h2o.metrics.provenance import origin

sys.path.insert(0, str(Path(__file__).parents[1]))
from articles import articles_flag, read_articles, select_articles, split_halves

_SHARED = ("path", "device", "dtype", "gpu_batch_size", "gen_len")
_DEFAULTS = {"model": "smollm2-135m", "dtype": "float32", "gpu_batch_size": 30, "gen_len": 64}
_HELPS = {"dtype": "number format; float32 shows what eviction does and no rounding",
          "gen_len": "greedy tokens to compare after each first half"}


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """The checked flags; `run` holds those shared with `generate`. Lengths are in tokens."""

    run: RunConfig
    input_path: str | None = articles_flag()
    articles: int = flag("int", 30, ge=1,
                         help="number of articles: the first ones that are long enough")
    # Each half has at least one token.
    min_tokens: int = flag("int", 500, ge=2, help="shorter articles are skipped")
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

    def __post_init__(self) -> None:
        check_flags(self)
        if self.input_path is None:
            raise UserError("give --input-path, a .jsonl file of articles")
        groups = {configuration.group for configuration in configurations(self.budgets, self.only)}
        for group in self.only if self.only != GROUPS else ():
            if group not in groups:
                raise UserError(f"--only {group} measures nothing at these --budgets: add {USUAL}")
        check_files(self, ("input_path", "csv"))


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        command_flags(QualityOptions, names=_SHARED,
                      **{name: {"shown": value} | ({"help": _HELPS[name]} if name in _HELPS else {})
                         for name, value in _DEFAULTS.items()}),
        prog="python benchmarks/studies/quality.py", show_all=True,
        description="Perplexity and greedy tokens by the budget of the KV cache.")


def parse_args(argv: Sequence[str] | None = None) -> QualityOptions:
    """Parse flags into checked `QualityOptions`. Raises `UserError`."""
    options, shared = parse(argv, parser(), QualityOptions)
    return QualityOptions(run=RunConfig(**_DEFAULTS | shared), **options)


def run(options: QualityOptions) -> None:
    """Measure every cache, write the rows and print the table."""
    check_outputs_writable(options, "csv")
    rows = measure_all(options, read_articles(options.input_path))
    terminal.print_stdout(quality_study.table(rows))


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


if __name__ == "__main__":
    sys.exit(main())
