"""Numbers to be found in longer texts, by cache: the full one, H2O's policies, recall, kvpress.

    python benchmarks/studies/needles.py --input-path xsum_0shot.jsonl --tokens 1000 --texts 8

A text is made of articles and hides six numbers, each of which is a task. The question comes after
the prompt (`later`), when an evicting cache has forgotten most of it, or at the prompt's end. A
task is solved if greedy decoding writes the number. Rows that the file has already, of the same
tasks, are not made again. Presses of kvpress need kvpress 0.5.5, in an environment of its own: it
wants transformers < 5.3.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import chain
from statistics import fmean

import torch
from growing_table import INPUT, GrowingTable, digest
from policy_study import beside, needles
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexgen_h2o import H2OConfig
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.config.validation import check_int, check_number
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import read_articles
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.models.sources import checkpoint_folder

FULL, DTYPE = "full", "float32"
CACHES = ("window", "sum", "mean", "caote", "recall")
PRESSES = {one.name: one for one in [*beside.PRESSES, *beside.ADAPTIVE]}
KEY = ("model", "prompt_tokens", "tasks", INPUT, "asked", "system", "cache", "budget_percent")
COLUMNS = (*ORIGIN, "model", "dtype", "prompt_tokens", "tasks", INPUT, "asked", "system",
           "cache", "budget_percent", "kept_tokens", "solved", "solved_by_full", "solved_of_these",
           "answer_nats", "kv_cache_bytes_per_sequence", "seconds", "which")


def config_of(cache: str, percent: float) -> H2OConfig | None:
    """The cache of a name that keeps, or attends to, `percent` of a prompt."""
    share = percent / 100
    if cache == FULL:
        return None
    if cache == "window":
        return H2OConfig(heavy_tokens=0, recent_ratio=share)
    if cache == "recall":
        return H2OConfig(heavy_ratio=share / 2, recall=True)
    return H2OConfig(heavy_ratio=share / 2, score=cache)


class NeedleRows:
    """Tasks, what solves them, and the file of what came of it."""

    def __init__(self, args: argparse.Namespace, tasks: Sequence[needles.NeedleTask]):
        self.args, self.tasks = args, tasks
        self.folder = str(checkpoint_folder(args.model))
        self.table = GrowingTable(args.csv, COLUMNS, KEY, {
            "model": args.model, "dtype": DTYPE, "prompt_tokens": args.tokens,
            "tasks": len(tasks), INPUT: digest(tasks)})

    def add(self, system: str, cache: str, percent: float, asked: str) -> None:
        """The row of a cache, after that of the full one: unless the file has it."""
        key = {"system": system, "cache": cache, "budget_percent": f"{percent:g}", "asked": asked}
        if self.table.find(**key) is not None:
            return
        began = time.perf_counter()
        if system == "kvpress":
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
            found, nbytes = needles.pressed_answers(self.tasks, model, PRESSES[cache], percent,
                                                    asked)
        else:
            found, nbytes = needles.answers(self.tasks, self.folder, config_of(cache, percent),
                                            asked)
        seconds = time.perf_counter() - began
        solved = [one.greedy for one in found]
        full = solved if cache == FULL else self._of_full()
        row = {"kept_tokens": self.args.tokens if cache == FULL
               else needles.kept(percent, self.args.tokens), "solved": sum(solved),
               "solved_by_full": sum(full),
               "solved_of_these": sum(a and b for a, b in zip(solved, full, strict=True)),
               "answer_nats": -fmean(chain.from_iterable(one.log_probs for one in found)),
               "kv_cache_bytes_per_sequence": nbytes, "seconds": seconds,
               "which": "".join("ny"[one] for one in solved)}
        self.table.add(**origin(), **key, **row)
        print(f"{self.args.tokens} tokens, {cache} {percent:g} %, asked {asked or 'anywhere'}: "
              f"{row['solved']} of {len(solved)}, of the full cache's {row['solved_by_full']} "
              f"{row['solved_of_these']}, {seconds:.0f} s", flush=True)

    def _of_full(self) -> list[bool]:
        row = self.table.find(system="flexgen_h2o", cache=FULL, budget_percent="100", asked="")
        return [one == "y" for one in row["which"]]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="of the LLaMA architecture")
    parser.add_argument("--input-path", required=True, help="articles, as `quality` reads them")
    parser.add_argument("--tokens", type=int, default=1000, help="of a text with its needles")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--asked", nargs="+", choices=needles.ASKED, default=list(needles.ASKED))
    parser.add_argument("--budgets", type=float, nargs="+", default=[20], help="percent of a text")
    parser.add_argument("--caches", nargs="*", choices=CACHES, default=list(CACHES),
                        help="beside the full one")
    parser.add_argument("--presses", nargs="*", choices=PRESSES, default=[])
    parser.add_argument("--csv", default="benchmarks/results/needles.csv")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """All rows that the file lacks."""
    if args.presses and beside.kvpress is None:
        raise UserError("--presses needs kvpress: pip install kvpress==0.5.5")
    check_int("--texts", args.texts, low=1)
    for budget in args.budgets:
        check_number("--budgets", budget, above=0, high=100)
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint_folder(args.model)))
    hay = list(chain.from_iterable(tokenizer(text)["input_ids"]
                                   for text in read_articles(args.input_path)))
    rows = NeedleRows(args, needles.make(hay, tokenizer, tokens=args.tokens, texts=args.texts))
    rows.add("flexgen_h2o", FULL, 100, "")
    for asked in args.asked:
        for percent in args.budgets:
            for cache in args.caches:
                rows.add("flexgen_h2o", cache, percent, asked)
            for press in args.presses:
                rows.add("kvpress", press, percent, asked)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(parse_args())))
