"""What attention looks like: ``python -m flexgen_h2o.tasks.analyze --input-path FILE ...``.

The observations of the H2O paper (arXiv 2306.14048) on any model: a CSV file and a plot of each,
and a short summary. All that can be refused is refused before torch is loaded.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from tqdm import tqdm

from flexgen_h2o.cli import Parser, exit_status, writing
from flexgen_h2o.config import check_choice, check_int, check_number
from flexgen_h2o.errors import UserError
from flexgen_h2o.flag_values import flag_name
from flexgen_h2o.run_config import RunConfig
from flexgen_h2o.tasks.analysis import plots as analysis_plots
from flexgen_h2o.tasks.analysis.columns import EVICTED, NAMES, PARTS, RUN
from flexgen_h2o.tasks.analysis.table import summary
from flexgen_h2o.tasks.shared.articles import Pair, choose, halves, read_articles
from flexgen_h2o.tasks.shared.figures import check_plot
from flexgen_h2o.tasks.shared.files import RowsFile, check_folder, keeping, origin
from flexgen_h2o.tasks.shared.statistics import against
from flexgen_h2o.text_files import read_text

_ARTICLES, _ARTICLE_TOKENS = 20, 500  # by default
_FEWEST = 4  # tokens: a first half of two, and a query in the second


@dataclass(frozen=True, kw_only=True)
class Options:
    """One value for each flag, checked. Lengths are tokens, budgets percent.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    input_path: str | None = None
    output_dir: str | None = None
    model_name: str = "smollm2-135m"
    path: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    articles: int | None = None
    min_tokens: int | None = None
    max_tokens: int = 512
    budgets: tuple[float, ...] = (5, 10, 20, 40, 60)
    evict: tuple[float, ...] = (1, 5, 20)
    only: tuple[str, ...] = NAMES

    def __post_init__(self) -> None:
        for name in ("input_path", "output_dir"):
            path = getattr(self, name)
            if path is None or not path.strip():
                raise UserError(f"give {flag_name(name)}: {_FLAGS[name][1]}")
            object.__setattr__(self, name, os.path.expanduser(path))
        self.run_config()
        if self.articles is not None:
            check_int("--articles", self.articles, low=1)
            if not self.has_articles:
                raise UserError("--articles has no effect on a plain text: leave it out, or give "
                                "a .jsonl file as --input-path")
        check_int("--max-tokens", self.max_tokens, low=_FEWEST)
        if self.min_tokens is not None:
            check_int("--min-tokens", self.min_tokens, low=_FEWEST)
        for name in ("budgets", "evict"):
            for percent in getattr(self, name):
                check_number(f"each of {flag_name(name)}", percent, above=0, high=100)
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        for name in self.only:
            check_choice("each of --only", name, NAMES)
        check_plot("--output-dir", "sparsity.png")
        if os.path.realpath(self.input_path) in map(os.path.realpath, self.outputs()):
            raise UserError(f"--input-path {self.input_path} would be overwritten: choose another "
                            "--output-dir")

    def outputs(self) -> list[str]:
        """The files that are written."""
        return [os.path.join(self.output_dir, f"{name}.{suffix}")
                for name in self.only for suffix in ("csv", "png")]

    @property
    def has_articles(self) -> bool:
        """Whether the input is a file of articles, and not one plain text."""
        return self.input_path.lower().endswith(".jsonl")

    @property
    def shortest(self) -> int:
        """Texts of fewer tokens are passed over."""
        if self.min_tokens is not None:
            return self.min_tokens
        usual = _ARTICLE_TOKENS if self.has_articles else _FEWEST
        return min(usual, self.max_tokens)

    def run_config(self) -> RunConfig:
        """The flags that `flex_opt` has too, checked as it checks them."""
        return RunConfig(model=self.model_name, path=self.path, device=self.device,
                         dtype=self.dtype)

    def texts(self) -> list[str]:
        """The texts of the input. Raises `UserError`."""
        if self.has_articles:
            return read_articles(self.input_path)
        return [read_text("--input-path", self.input_path, if_empty="holds no text")]


_FLAGS: dict[str, tuple[dict, str]] = {
    "input_path": ({"metavar": "FILE"},
                   "a .jsonl file of articles, text under the key `article`, or one plain text"),
    "output_dir": ({"metavar": "DIR"}, "a folder for the .csv and .png files, made if need be"),
    "model_name": ({"metavar": "NAME"}, "model name, Hugging Face repo id or local folder"),
    "path": ({}, "folder or .gguf file of the weights, if not by name"),
    "device": ({"metavar": "auto|cpu|cuda[:n]"}, "the device that computes"),
    "dtype": ({}, "number format of the model; the statistics are in float32"),
    "articles": ({"type": int, "metavar": "N"},
                 f"look at the first so many long enough; {_ARTICLES} of a .jsonl file"),
    "min_tokens": ({"type": int, "metavar": "N"},
                   "shorter articles are passed over, a shorter text is refused; "
                   f"{_ARTICLE_TOKENS}, at most --max-tokens, and {_FEWEST} for a plain text"),
    "max_tokens": ({"type": int, "metavar": "N"}, "texts are cut to this"),
    "budgets": ({"type": float, "nargs": "+", "metavar": "P"},
                "percent of the tokens that are heavy hitters (local), and cache budgets in "
                "percent of the first half (misses)"),
    "evict": ({"type": float, "nargs": "+", "metavar": "P"},
              "percent of the first half's keys that the second half does not see (evicted)"),
    "only": ({"nargs": "+", "metavar": "NAME"}, f"find these alone, of {', '.join(NAMES)}"),
}
_USED_BY = {"budgets": ("local", "misses"), "evict": ("evicted",)}


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Flags as checked `Options`; each may be spelled with underscores. Raises `UserError`."""
    parser = Parser(prog="python -m flexgen_h2o.tasks.analyze", allow_abbrev=False,
                    argument_default=argparse.SUPPRESS,
                    description="What attention looks like: the observations behind H2O.")
    for spec in fields(Options):
        options, text = _FLAGS[spec.name]
        names = [flag_name(spec.name)]
        names += ["--model"] if spec.name == "model_name" else []
        names += [f"--{spec.name}"] if "_" in spec.name else []
        default = (" ".join(map(str, spec.default)) if isinstance(spec.default, tuple)
                   else spec.default)
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(*names, dest=spec.name, **options,
                            help=f"{text}{shown}".replace("%", "%%"))
    given = vars(parser.parse_args(argv))
    options = Options(**given)
    for name, parts in _USED_BY.items():
        if name in given and not set(parts) & set(options.only):
            raise UserError(f"{flag_name(name)} has no effect without {' or '.join(parts)} in "
                            "--only: leave it out")
    return options


def run(options: Options) -> None:
    """Look at the texts, write the files, print the summary."""
    check_folder("--output-dir", options.output_dir, options.outputs())
    texts = options.texts()
    print(summary(analyze(options, texts)), flush=True)


def analyze(options: Options, texts: Sequence[str]) -> dict[str, list[dict[str, object]]]:
    """The rows of each part; each part's files are written when it is done."""
    from flexgen_h2o.llm import LLM  # only now: it loads torch, and bad flags answer at once
    from flexgen_h2o.tasks.analysis.evicted import KINDS
    from flexgen_h2o.tasks.analysis.survey import Survey

    config = options.run_config()
    parts = [part for part in PARTS if part in options.only]
    cases = [(kind, percent) for percent in options.evict for kind in KINDS]
    cases = cases if "evicted" in options.only else []
    with LLM(config.model, path=config.path, device=config.device, dtype=config.dtype,
             progress=False) as llm:
        pairs = _pairs(llm, texts, options)
        survey = Survey(parts, [head + tail[:-1] for head, tail in pairs],
                        [len(head) for head, _ in pairs], options.budgets)
        steps = llm.model_config.num_layers * len(pairs) * (1 + len(cases))
        with tqdm(total=steps, unit="layer", disable=None) as bar:
            log_probs = llm.probe(pairs, _counting(survey.attend, bar))
            run = _run_columns(llm, pairs)
            found = {part: _save(options, part, [{**run, **row} for row in survey.rows(part)])
                     for part in parts}
            if cases:
                found["evicted"] = _without_keys(options, llm, pairs, cases=cases,
                                                 full=log_probs, run=run, bar=bar)
    return found


def _pairs(llm, texts: Sequence[str], options: Options) -> list[Pair]:
    """Token ids of the halves of each text."""
    if llm.tokenizer is None:
        raise UserError(f"{options.model_name} has no tokenizer here, and articles are text")

    def encode(text: str) -> list[int]:
        return list(llm.tokenizer(text)["input_ids"])

    if options.has_articles:
        return halves(choose(texts, encode, articles=options.articles or _ARTICLES,
                             min_tokens=options.shortest, max_tokens=options.max_tokens))
    (ids,) = map(encode, texts)
    if len(ids) < options.shortest:
        raise UserError(f"--input-path {options.input_path} has {len(ids)} tokens, and "
                        f"{options.shortest} are needed at least: see --min-tokens")
    return halves([ids[: options.max_tokens]])


def _counting(attend: Callable, bar: tqdm) -> Callable:
    """`attend`, and a step of the bar for each call."""
    def attend_and_count(*arguments):
        out = attend(*arguments)
        bar.update()
        return out

    return attend_and_count


def _run_columns(llm, pairs: Sequence[Pair]) -> dict[str, object]:
    return {**origin(), "device": llm.stats.device, "model": llm.stats.model,
            "dtype": llm.stats.dtype, "articles": len(pairs),
            "tokens_mean": fmean(len(head) + len(tail) for head, tail in pairs)}


def _without_keys(options: Options, llm, pairs: Sequence[Pair], *, cases: Sequence[tuple],
                  full: Sequence[Sequence[float]], run: dict, bar: tqdm) -> list[dict]:
    """Perplexities of the second halves without some keys of the first; rows as they come."""
    from flexgen_h2o.tasks.analysis.evicted import Without
    from flexgen_h2o.tasks.analysis.stats import share_of

    contexts = [len(head) for head, _ in pairs]
    file, rows = _file(options, "evicted"), []
    with keeping(file):
        for kind, percent in [("none", 0.0), *cases]:
            counts = [share_of(percent, context) if percent else 0 for context in contexts]
            log_probs = full
            if percent:
                attend = Without(kind, contexts, counts)
                log_probs = llm.probe(pairs, _counting(attend, bar))
            rows.append({**run, "evicted": kind, "evicted_percent": percent,
                         "evicted_tokens_mean": fmean(counts),
                         "scored_tokens": sum(map(len, full)), **against(log_probs, full)})
            with writing("output_dir", options.output_dir):
                file.write(rows[-1])
    return _finish(options, "evicted", file, rows)


def _file(options: Options, name: str) -> RowsFile:
    with writing("output_dir", options.output_dir):
        os.makedirs(options.output_dir, exist_ok=True)
    path = os.path.join(options.output_dir, f"{name}.csv")
    return RowsFile(path, (*RUN, *PARTS.get(name, EVICTED)))


def _save(options: Options, part: str, rows: list[dict]) -> list[dict]:
    """Write the file of a part, and its plot."""
    file = _file(options, part)
    with writing("output_dir", options.output_dir):
        for row in rows:
            file.write(row)
    return _finish(options, part, file, rows)


def _finish(options: Options, name: str, file: RowsFile, rows: list[dict]) -> list[dict]:
    with writing("output_dir", options.output_dir):
        file.finish()
        analysis_plots.draw(name, rows, os.path.join(options.output_dir, f"{name}.png"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 2 for a user's error, 130 for Ctrl-C."""
    return exit_status(lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
