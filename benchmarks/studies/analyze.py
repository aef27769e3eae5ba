"""Analyze attention: ``python benchmarks/studies/analyze.py --input-path FILE ...``.

The observations of the H2O paper (arXiv 2306.14048) on any model: a CSV file of each, a plot of the
lost attention, and a short summary. Bad flags are refused before torch is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import attention_report
from attention_report import EVICTED, NAMES, PARTS, RUN, summary

from flexgen_h2o.cli import parser as task_flags
from flexgen_h2o.cli.command import entry_point
from flexgen_h2o.cli.launch import open_llm
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import Pair, read_articles, select_articles, split_halves
from flexgen_h2o.files.readers import read_text
from flexgen_h2o.files.rows import CsvWriter, report_partial_rows
from flexgen_h2o.files.terminal import ProgressBar, print_stdout
from flexgen_h2o.files.writing import catch_write_errors, check_folder
from flexgen_h2o.metrics.figures import check_plot
from flexgen_h2o.metrics.provenance import origin
from flexgen_h2o.metrics.statistics import compare_to_full

_SHARED = ("path", "device", "dtype")
_DEFAULTS = {"model": "smollm2-135m", "dtype": "float32"}
_ARTICLES, _ARTICLE_TOKENS = 20, 500  # by default
_MIN_TOKENS = 4  # tokens: a first half of two, and a query in the second
_USED_BY = {"budgets": ("local", "misses"), "evict": ("evicted",)}


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions:
    """The checked flags; `run` holds those shared with `flex_opt`. Lengths are in tokens.

    Raises
    ------
    UserError
        A value is out of range, or flags contradict each other.
    """

    run: RunConfig
    input_path: str | None = flag(
        "path", None, shown="none", metavar="FILE",
        help="a .jsonl file of articles, text under the key `article`, or one plain text",
    )
    output_dir: str | None = flag(
        "path", None, shown="none", metavar="DIR",
        help="folder for the .csv files and misses.png; created if it does not exist",
    )
    articles: int | None = flag(
        "int", None, ge=1, shown=f"{_ARTICLES} of a .jsonl file",
        help="number of articles: the first ones that are long enough",
    )
    min_tokens: int | None = flag(
        "int", None, ge=_MIN_TOKENS,
        shown=f"{_ARTICLE_TOKENS}, at most --max-tokens, and {_MIN_TOKENS} for a plain text",
        help="shorter articles are skipped, a shorter text is refused",
    )
    max_tokens: int = flag("int", 512, ge=_MIN_TOKENS, help="texts are cut to this")
    budgets: tuple[float, ...] = flag(
        "numbers", (5, 10, 20, 40, 60), gt=0, le=100, metavar="P",
        help="percent of the tokens that are heavy hitters (local), and cache budgets in percent "
        "of the first half (misses)",
    )
    evict: tuple[float, ...] = flag(
        "numbers", (1, 5, 20), gt=0, le=100, metavar="P",
        help="percent of the first half's keys that the second half does not see (evicted)",
    )
    only: tuple[str, ...] = flag(
        "words", NAMES, choices=NAMES, metavar="NAME",
        help=f"measure only these, of {', '.join(NAMES)}",
    )

    def __post_init__(self) -> None:
        task_flags.check_flags(self)
        for spec in task_flags.flag_fields(AnalyzeOptions):
            if spec.name in ("input_path", "output_dir") and getattr(self, spec.name) is None:
                raise UserError(f"give {flag_name(spec.name)}: {spec.metadata['help']}")
        if self.articles is not None and not self.has_articles:
            raise UserError("--articles has no effect on a plain text: leave it out, or give "
                            "a .jsonl file as --input-path")
        for name in ("budgets", "evict"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        check_plot("--output-dir", "misses.png")
        if os.path.realpath(self.input_path) in map(os.path.realpath, self.outputs()):
            raise UserError(f"--input-path {self.input_path} would be overwritten: choose another "
                            "--output-dir")

    def outputs(self) -> list[str]:
        """Return the files to write."""
        names = [f"{name}.csv" for name in self.only]
        names += ["misses.png"] if "misses" in self.only else []
        return [os.path.join(self.output_dir, name) for name in names]

    @property
    def has_articles(self) -> bool:
        """True if the input is a file of articles, and not one plain text."""
        return self.input_path.lower().endswith(".jsonl")

    @property
    def shortest(self) -> int:
        """Minimum tokens of a text."""
        if self.min_tokens is not None:
            return self.min_tokens
        usual = _ARTICLE_TOKENS if self.has_articles else _MIN_TOKENS
        return min(usual, self.max_tokens)

    def texts(self) -> list[str]:
        """Return the texts of the input. Raises `UserError`."""
        if self.has_articles:
            return read_articles(self.input_path)
        return [read_text("--input-path", self.input_path, if_empty="holds no text")]


def parser() -> Parser:
    """Return the parser of the flags."""
    return task_flags.command_parser(
        AnalyzeOptions, _SHARED, prog="python benchmarks/studies/analyze.py",
        defaults=_DEFAULTS,
        helps={"dtype": "number format of the model; the statistics are in float32"},
        description="Statistics of attention: the observations behind H2O.")


def parse_args(argv: Sequence[str] | None = None) -> AnalyzeOptions:
    """Parse flags into checked `AnalyzeOptions`. Raises `UserError`."""
    analyze_flags, shared = task_flags.parse(argv, parser(), AnalyzeOptions)
    options = AnalyzeOptions(run=RunConfig(**_DEFAULTS | shared), **analyze_flags)
    for name, parts in _USED_BY.items():
        if name in analyze_flags and not set(parts) & set(options.only):
            raise UserError(f"{flag_name(name)} has no effect without {' or '.join(parts)} in "
                            "--only: leave it out")
    return options


def run(options: AnalyzeOptions) -> None:
    """Measure the texts, write the files, print the summary."""
    check_folder("--output-dir", options.output_dir, options.outputs())
    texts = options.texts()
    print_stdout(summary(analyze(options, texts)))


def analyze(options: AnalyzeOptions, texts: Sequence[str]) -> dict[str, list[dict[str, object]]]:
    """Return the rows of each part; each part's files are written when it is done."""
    # Only now: they load torch, and bad flags answer at once.
    from attention_survey import KINDS, Survey

    parts = [part for part in PARTS if part in options.only]
    cases = [(kind, percent) for percent in options.evict for kind in KINDS]
    cases = cases if "evicted" in options.only else []
    with open_llm(options.run, progress=False) as llm:
        pairs = _pairs(llm, texts, options)
        survey = Survey(parts, [head + tail[:-1] for head, tail in pairs],
                        [len(head) for head, _ in pairs], options.budgets)
        steps = llm.model_config.num_layers * len(pairs) * (1 + len(cases))
        with ProgressBar(total=steps, unit="layer", disable=None) as bar:
            log_probs = llm.probe(pairs, _counting(survey.attend, bar))
            run = _run_columns(llm, pairs)
            files = {part: _save(options, part, [{**run, **row} for row in survey.rows(part)])
                     for part in parts}
            if cases:
                files["evicted"] = _without_keys(options, llm, pairs, cases=cases,
                                                 full=log_probs, run=run, bar=bar)
    return files


def _pairs(llm, texts: Sequence[str], options: AnalyzeOptions) -> list[Pair]:
    """Return the token ids of the halves of each text."""
    if llm.tokenizer is None:
        raise UserError(f"{options.run.model} has no tokenizer here, and articles are text")

    def encode(text: str) -> list[int]:
        return list(llm.tokenizer(text, verbose=False)["input_ids"])

    if options.has_articles:
        return split_halves(select_articles(texts, encode, articles=options.articles or _ARTICLES,
                             min_tokens=options.shortest, max_tokens=options.max_tokens))
    (ids,) = map(encode, texts)
    if len(ids) < options.shortest:
        raise UserError(f"--input-path {options.input_path} has {len(ids)} tokens, and "
                        f"{options.shortest} are needed at least: see --min-tokens")
    return split_halves([ids[: options.max_tokens]])


def _counting(attend: Callable, bar: ProgressBar) -> Callable:
    """Return `attend` with a step of the bar for each call."""
    def attend_and_count(*arguments):
        out = attend(*arguments)
        bar.update()
        return out

    return attend_and_count


def _run_columns(llm, pairs: Sequence[Pair]) -> dict[str, object]:
    return {**origin(), "device": llm.stats.device, "model": llm.stats.model,
            "dtype": llm.stats.dtype, "articles": len(pairs),
            "tokens_mean": fmean(len(head) + len(tail) for head, tail in pairs)}


def _without_keys(options: AnalyzeOptions, llm, pairs: Sequence[Pair], *, cases: Sequence[tuple],
                  full: Sequence[Sequence[float]], run: dict, bar: ProgressBar) -> list[dict]:
    """Return the perplexities of the second halves without some keys of the first."""
    from attention_stats import share_of
    from attention_survey import Without

    contexts = [len(head) for head, _ in pairs]
    file, rows = _file(options, "evicted"), []
    with report_partial_rows(file):
        for kind, percent in [("none", 0.0), *cases]:
            counts = [share_of(percent, context) if percent else 0 for context in contexts]
            log_probs = full
            if percent:
                attend = Without(kind, contexts, counts)
                log_probs = llm.probe(pairs, _counting(attend, bar))
            rows.append({**run, "evicted": kind, "evicted_percent": percent,
                         "evicted_tokens_mean": fmean(counts),
                         "scored_tokens": sum(map(len, full)), **compare_to_full(log_probs, full)})
            with catch_write_errors("--output-dir", options.output_dir):
                file.write(rows[-1])
    return _finish(options, "evicted", file, rows)


def _file(options: AnalyzeOptions, name: str) -> CsvWriter:
    with catch_write_errors("--output-dir", options.output_dir):
        os.makedirs(options.output_dir, exist_ok=True)
    path = os.path.join(options.output_dir, f"{name}.csv")
    return CsvWriter(path, (*RUN, *PARTS.get(name, EVICTED)))


def _save(options: AnalyzeOptions, part: str, rows: list[dict]) -> list[dict]:
    """Write the file of a part, and the plot of `misses`."""
    file = _file(options, part)
    with catch_write_errors("--output-dir", options.output_dir):
        for row in rows:
            file.write(row)
    return _finish(options, part, file, rows)


def _finish(options: AnalyzeOptions, name: str, file: CsvWriter, rows: list[dict]) -> list[dict]:
    with catch_write_errors("--output-dir", options.output_dir):
        file.finish()
        if name == "misses":
            attention_report.draw_misses(rows, os.path.join(options.output_dir, "misses.png"))
    return rows


main = entry_point(parse_args, run)


if __name__ == "__main__":
    sys.exit(main())
