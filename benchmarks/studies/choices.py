"""Accuracy on multiple-choice items by cache: this engine's policies, recall, kvpress.

    pip install kvpress==0.5.5    # in a separate environment: needs transformers < 5.3
    python benchmarks/studies/choices.py --input-path xsum_0shot.jsonl --presses SnapKV TOVA

Items and scoring are those of lm_eval_budgets.py. Each cache is cut once after the article, and
keeps all later tokens, as in kvpress. The column `which` has the choice for each item. Existing
rows of the same items are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from lm_eval_budgets import OPTIONS, items
from policy_study import (
    ALL_PRESSES,
    INPUT,
    GrowingTable,
    Rival,
    attention_of,
    cache_bytes,
    chosen,
    digest,
    kept,
    kvpress,
    make_press,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import read_summary_tasks
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.models.sources import checkpoint_folder

FULL, DTYPE = "full", "float32"
CACHES = ("sum", "mean", "caote", "recall")
KEY = ("model", "items", "words", INPUT, "system", "cache", "budget_percent")
COLUMNS = (*ORIGIN, "model", "dtype", "items", "words", INPUT, "system", "cache",
           "budget_percent", "prompt_tokens", "right", "right_by_length", "as_full",
           "kv_cache_bytes_per_sequence", "seconds", "which")


TOGETHER = 8
"""Items of a batch."""


@dataclass(frozen=True)
class ChoiceItem:
    """An article, candidate summaries and the right one, as tokens; `lengths` in characters."""

    prompt: list[int]
    choices: list[list[int]]
    lengths: list[int]
    gold: int

    def right(self, scores: Sequence[float]) -> bool:
        """Return whether the likeliest choice is the right one."""
        return max(range(len(scores)), key=scores.__getitem__) == self.gold

    def right_by_length(self, scores: Sequence[float]) -> bool:
        """Return the same for scores per character, as in acc_norm."""
        return self.right([score / length for score, length in zip(scores, self.lengths,
                                                                   strict=True)])


def make_items(items: Iterable[Mapping], tokenizer) -> list[ChoiceItem]:
    """Tokenize items of `lm_eval_budgets.items` as the harness does."""
    made_items = []
    for item in items:
        context = f"Article: {item['article']}\nSummary:"
        prompt = tokenizer(context)["input_ids"]
        texts = [f"{context} {choice}" for choice in item["choices"]]
        made_items.append(ChoiceItem(prompt, [tokenizer(text)["input_ids"][len(prompt):]
                                              for text in texts],
                                     [len(choice) for choice in item["choices"]], item["gold"]))
    return made_items


def choice_scores(items: Sequence[ChoiceItem], folder: str, h2o: H2OConfig | None
           ) -> tuple[list[list[float]], int]:
    """Score each item's choices with this engine. Returns log-probabilities and cache bytes.

    A batch has all choices of some items, so that an evicting cache reads each article once.
    """
    num_choices = len(items[0].choices)
    batch = num_choices * min(TOGETHER, len(items))
    with LLM(folder, h2o=h2o, dtype="float32", progress=False,
             policy=Policy(gpu_batch_size=batch)) as llm:
        scores = llm.score([(item.prompt, choice) for item in items for choice in item.choices])
        nbytes = llm.stats.kv_cache_bytes // batch
    sums = [sum(score.log_probs) for score in scores]
    return [sums[at : at + num_choices] for at in range(0, len(sums), num_choices)], nbytes


def pressed_scores(items: Sequence[ChoiceItem], model, rival: Rival, percent: float
                   ) -> tuple[list[list[float]], int]:
    """Score each item's choices with kvpress on transformers.

    The bytes are those of the largest cache after the cut.
    """
    attention_of(model, rival)
    scores, max_bytes = [], 0
    for item in items:
        length = len(item.prompt)
        cache = DynamicCache()
        with make_press(rival, "cut", kept(percent, length), length)(model):
            first = model(torch.tensor([item.prompt]), past_key_values=cache,
                          logits_to_keep=1).logits
            max_bytes = max(max_bytes, cache_bytes(cache))
            scores.append([])
            for choice in item.choices:
                continuation = torch.tensor([choice])
                logits = [first]
                if len(choice) > 1:
                    positions = torch.arange(length, length + len(choice) - 1)[None]
                    logits.append(model(continuation[:, :-1], past_key_values=copy.deepcopy(cache),
                                        position_ids=positions).logits)
                scores[-1].append(float(chosen(torch.cat(logits, 1), continuation).sum()))
    return scores, max_bytes


def config_of(cache: str, percent: float) -> H2OConfig | None:
    """Return the cache that keeps, or attends to, `percent` of a prompt."""
    share = percent / 200
    if cache == FULL:
        return None
    if cache == "recall":
        return H2OConfig(heavy_ratio=share, recall=True)
    return H2OConfig(heavy_ratio=share, score=cache, evict_generated=False)


class ChoiceRows:
    """Rows of the results of items by cache."""

    def __init__(self, args: argparse.Namespace, choice_items: Sequence[ChoiceItem]):
        self.args, self.items = args, choice_items
        self.folder = str(checkpoint_folder(args.model))
        self.table = GrowingTable(args.csv, COLUMNS, KEY, {
            "model": args.model, "dtype": DTYPE, "items": len(choice_items), "words": args.words,
            INPUT: digest(choice_items)})

    def add(self, system: str, cache: str, percent: float) -> None:
        """Add the row of a cache unless it exists; the full cache's must be first."""
        key = {"system": system, "cache": cache, "budget_percent": f"{percent:g}"}
        if self.table.find(**key) is not None:
            return
        began = time.perf_counter()
        if system == "kvpress":
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
            log_probs, nbytes = pressed_scores(self.items, model, ALL_PRESSES[cache], percent)
        else:
            log_probs, nbytes = choice_scores(self.items, self.folder, config_of(cache, percent))
        seconds = time.perf_counter() - began
        pairs = list(zip(self.items, log_probs, strict=True))
        which = "".join(str(max(range(len(item_scores)), key=item_scores.__getitem__))
                        for item_scores in log_probs)
        full = which if cache == FULL else self.table.find(
            system="flexgen_h2o", cache=FULL, budget_percent="100")["which"]
        row = {"prompt_tokens": sum(len(item.prompt) for item in self.items),
               "right": sum(item.right(scores) for item, scores in pairs),
               "right_by_length": sum(item.right_by_length(scores) for item, scores in pairs),
               "as_full": sum(answer == other for answer, other in zip(which, full, strict=True)),
               "kv_cache_bytes_per_sequence": nbytes, "seconds": seconds, "which": which}
        self.table.add(**origin(), **key, **row)
        print(f"{cache} {percent:g} %: {row['right']} of {len(self.items)} right, "
              f"{row['right_by_length']} by length, {row['as_full']} as the full cache, "
              f"{seconds:.0f} s", flush=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="of the LLaMA architecture")
    parser.add_argument("--input-path", required=True, help="articles with `summary_gt`")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--words", type=int, default=100, help="of each article")
    parser.add_argument("--budgets", type=float, nargs="+", default=[20], help="percent of a text")
    parser.add_argument("--caches", nargs="*", choices=CACHES, default=list(CACHES),
                        help="beside the full one")
    parser.add_argument("--presses", nargs="*", choices=ALL_PRESSES, default=[])
    parser.add_argument("--csv", default="benchmarks/results/choices.csv")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Measure all rows that the file lacks."""
    if args.presses and kvpress is None:
        raise UserError("--presses needs kvpress: pip install kvpress==0.5.5")
    if args.items < OPTIONS:
        raise UserError(f"--items must be {OPTIONS} or more: the wrong summaries are other items'")
    articles = read_summary_tasks(args.input_path, max_tasks=args.items)
    if len(articles) < args.items:
        raise UserError(f"--input-path has {len(articles)} articles: lower --items {args.items}")
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint_folder(args.model)))
    rows = ChoiceRows(args, make_items(
        items(articles, words=args.words, rng=random.Random(0)), tokenizer))
    rows.add("flexgen_h2o", FULL, 100)
    for percent in args.budgets:
        for cache in args.caches:
            rows.add("flexgen_h2o", cache, percent)
        for press in args.presses:
            rows.add("kvpress", press, percent)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(parse_args())))
