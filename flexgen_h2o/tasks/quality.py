"""Quality by cache budget: ``python -m flexgen_h2o.tasks.quality --input-path FILE.jsonl ...``.

On the same articles, each cache gives the perplexity of the second half after the first (teacher-
forced, so that its figures are of the same tokens) and the share of greedy tokens that are those
of the full cache; so do quantized weights. All that can be refused is refused before torch is
loaded.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from tqdm import tqdm

from flexgen_h2o.cli import Parser, exit_status, writing
from flexgen_h2o.config import check_choice, check_int, check_number
from flexgen_h2o.errors import UserError
from flexgen_h2o.flag_values import flag_name
from flexgen_h2o.run_config import RunConfig
from flexgen_h2o.tasks.budgets import measures
from flexgen_h2o.tasks.budgets import plot as quality_plot
from flexgen_h2o.tasks.budgets.configurations import GROUPS, Configuration, configurations
from flexgen_h2o.tasks.shared.articles import choose, halves, read_articles
from flexgen_h2o.tasks.shared.figures import check_plot
from flexgen_h2o.tasks.shared.files import RowsFile, check_writable, keeping, origin

_FILES = ("input_path", "from_csv", "csv", "plot")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One value for each flag, checked. Lengths are tokens, budgets percent of the prompt.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    model: str = "smollm2-135m"
    path: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    input_path: str | None = None
    articles: int = 30
    min_tokens: int = 500
    max_tokens: int = 768
    gpu_batch_size: int = 30
    gen_len: int = 64
    budgets: tuple[float, ...] = (5, 10, 20, 40, 60)
    only: tuple[str, ...] = GROUPS
    csv: str | None = None
    plot: str | None = None
    from_csv: str | None = None

    def __post_init__(self) -> None:
        for name in ("budgets", "only"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in _FILES:
            path = getattr(self, name)
            if path is not None and not path.strip():
                raise UserError(f"{flag_name(name)} must name a file, got {path!r}")
            object.__setattr__(self, name, path and os.path.expanduser(path))
        if (self.input_path is None) == (self.from_csv is None):
            raise UserError("give --input-path, a .jsonl file of articles, or --from-csv")
        self.run_config()
        check_int("--articles", self.articles, low=1)
        for name in ("min_tokens", "max_tokens"):  # a half has a token at least
            check_int(flag_name(name), getattr(self, name), low=2)
        for budget in self.budgets:
            check_number("each of --budgets", budget, above=0, high=100)
        for group in self.only:
            check_choice("each of --only", group, GROUPS)
        self._check_files()

    def run_config(self) -> RunConfig:
        """The flags that `flex_opt` has too, checked as it checks them."""
        names = ("model", "path", "device", "dtype", "gpu_batch_size", "gen_len")
        return RunConfig(**{name: getattr(self, name) for name in names})

    def _check_files(self) -> None:
        if self.plot is not None:
            check_plot("--plot", self.plot)
        seen: dict[str, str] = {}
        for name in _FILES:
            path = getattr(self, name)
            if path is not None:
                other = seen.setdefault(os.path.realpath(path), name)
                if other != name:
                    raise UserError(f"{flag_name(other)} and {flag_name(name)} name the same file")


_FLAGS: dict[str, tuple[dict, str]] = {
    "model": ({"metavar": "NAME"}, "model name, Hugging Face repo id or local folder"),
    "path": ({}, "folder or .gguf file of the weights, if not by name"),
    "device": ({"metavar": "auto|cpu|cuda[:n]"}, "the device that computes"),
    "dtype": ({}, "number format; float32 shows what eviction does and no rounding"),
    "input_path": ({"metavar": "FILE.jsonl"}, "articles: text under the key `article`"),
    "articles": ({"type": int, "metavar": "N"}, "measure on the first so many long enough"),
    "min_tokens": ({"type": int, "metavar": "N"}, "shorter articles are passed over"),
    "max_tokens": ({"type": int, "metavar": "N"}, "articles are cut to this"),
    "gpu_batch_size": ({"type": int, "metavar": "N"}, "sequences computed together"),
    "gen_len": ({"type": int, "metavar": "N"}, "greedy tokens to compare after each first half"),
    "budgets": ({"type": float, "nargs": "+", "metavar": "P"},
                "KV cache budgets, percent of the prompt; variants are measured at 5 and 20"),
    "only": ({"nargs": "+", "metavar": "GROUP"},
             f"measure these, and full: {', '.join(GROUPS)}"),
    "csv": ({"metavar": "FILE"}, "write a row for each cache, anew; FILE.partial until all are in"),
    "plot": ({"metavar": "FILE.png"}, "draw both figures against the budget (or .svg, .pdf)"),
    "from_csv": ({"metavar": "FILE"}, "run nothing: table, and --plot, of a file that --csv wrote"),
}


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Flags as checked `Options`. Raises `UserError`."""
    parser = Parser(prog="python -m flexgen_h2o.tasks.quality", allow_abbrev=False,
                     argument_default=argparse.SUPPRESS,
                     description="Perplexity and greedy tokens by the budget of the KV cache.")
    for spec in fields(Options):
        options, text = _FLAGS[spec.name]
        default = (" ".join(map(str, spec.default)) if isinstance(spec.default, tuple)
                   else "none" if spec.default is None else spec.default)
        parser.add_argument(flag_name(spec.name), dest=spec.name, **options,
                            help=f"{text} (default: {default})".replace("%", "%%"))
    given = vars(parser.parse_args(argv))
    extra = sorted(given.keys() - {"from_csv", "plot"})
    if "from_csv" in given and extra:
        raise UserError(f"{flag_name(extra[0])} has no effect with --from-csv: leave it out")
    return Options(**given)


def run(options: Options) -> None:
    """Measure, or read what was measured; write the files and print the table."""
    for name in ("csv", "plot"):
        if getattr(options, name) is not None:
            check_writable(flag_name(name), getattr(options, name))
    if options.from_csv is not None:
        rows = measures.read_rows(options.from_csv)
    else:
        rows = measure_all(options, read_articles(options.input_path))
    print(measures.table(rows), flush=True)
    if options.plot is not None:
        with writing("plot", options.plot):
            quality_plot.draw(rows, options.plot)


def measure_all(options: Options, texts: Sequence[str]) -> list[dict[str, object]]:
    """Measure every cache on the articles; rows go to ``--csv`` as they come."""
    todo = configurations(options.budgets, options.only)
    file = RowsFile(options.csv, measures.COLUMNS) if options.csv is not None else None
    rows: list[dict[str, object]] = []
    with keeping(file), tqdm(total=2 * len(todo), unit="part", disable=None) as bar:
        open_llm = _opener(options, bar.set_description)
        for row in measures.compare(todo, open_llm, lambda llm: _pairs(llm, texts, options),
                                    gen_len=options.gen_len, on_part=bar.update):
            rows.append({**origin(), **row})
            if file is not None:
                with writing("csv", options.csv):
                    file.write(rows[-1])
    if file is not None:
        with writing("csv", options.csv):
            file.finish()
    return rows


def _opener(options: Options, show: Callable[[str], None]) -> Callable[[Configuration], object]:
    """A function that loads the model with the cache of a configuration."""
    from flexgen_h2o.llm import LLM  # only now: it loads torch, and bad flags answer at once

    config = options.run_config()

    def open_llm(one: Configuration):
        show(one.name)
        return LLM(config.model, path=config.path, policy=config.policy(), device=config.device,
                   dtype=config.dtype, progress=False, **one.arguments())

    return open_llm


def _pairs(llm, texts: Sequence[str], options: Options):
    """Token ids of the halves of each article."""
    if llm.tokenizer is None:
        raise UserError(f"{options.model} has no tokenizer here, and articles are text")
    chosen = choose(texts, lambda text: llm.tokenizer(text)["input_ids"],
                    articles=options.articles, min_tokens=options.min_tokens,
                    max_tokens=options.max_tokens)
    return halves(chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 2 for a user's error, 130 for Ctrl-C."""
    return exit_status(lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
