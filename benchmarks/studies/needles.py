"""Retrieval of numbers from long texts by cache: full, H2O's policies, recall, kvpress.

    python benchmarks/studies/needles.py --input-path xsum_0shot.jsonl --tokens 1000 --texts 8

A text consists of articles and hides six numbers, each of which is a task. The question follows the
prompt (`later`), after most of the cache was evicted, or is at the prompt's end. A task is solved
if greedy decoding writes the number. Existing rows of the same tasks are not measured again.
--presses needs kvpress 0.5.5 in a separate environment, as it requires transformers < 5.3.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.config.validation import check_int, check_number
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import report_partial_rows
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.models.sources import checkpoint_folder
from flexgen_h2o.outputs import Scored

sys.path.insert(0, str(Path(__file__).parents[1]))
from articles import read_articles
from csv_files import ResumableCsv

try:
    import kvpress
except ImportError:
    kvpress = None

INPUT = "input_digest"
"""Column with 16 hex digits that identify the tasks."""
PRESSES = ("ObservedAttention", "SnapKV", "KeyDiff", "TOVA", "ExpectedAttention")
"""Methods of kvpress."""
SNAP_WINDOW = 32
"""Observation window of SnapKV."""
FULL, DTYPE = "full", "float32"
CACHES = ("window", "sum", "mean", "caote", "recall")
KEY = ("model", "prompt_tokens", "tasks", INPUT, "asked", "system", "cache", "budget_percent")
COLUMNS = (*ORIGIN, "model", "dtype", "prompt_tokens", "tasks", INPUT, "asked", "system",
           "cache", "budget_percent", "kept_tokens", "solved", "solved_by_full", "solved_of_these",
           "answer_nats", "kv_cache_bytes_per_sequence", "seconds", "which")


QUESTIONS = (
    " The secret number of the city of Oslo is",
    " The password of Professor Lindqvist's computer is",
    " The phone extension of the harbour office is",
    " The serial number of the old red tractor is",
    " Goalkeeper Almeida's locker has the code",
    " The number of visitors to the glass museum was",
)
"""A number follows each in the text."""
ASKED = ("later", "in the prompt")
"""Position of the question: after the prompt, which was cut without it, or at its end."""


@dataclass(frozen=True)
class NeedleTask:
    """A text with hidden numbers, a question for one of them, and this number, as tokens."""

    text: list[int]
    question: list[int]
    answer: list[int]

    def parts(self, question: str) -> tuple[list[int], list[int]]:
        """Return the prompt and its continuation, which ends with the answer."""
        if question == "later":
            return self.text, self.question + self.answer
        return self.text + self.question, self.answer


def make_tasks(hay: Sequence[int], tokenizer, *, tokens: int, texts: int) -> list[NeedleTask]:
    """Make a task for each of `QUESTIONS` in each of `texts` texts of `tokens` tokens.

    Needles are at even depths, in a random order for each text.

    Raises `UserError` if there are too few articles.

    `hay`: tokens of articles, each of which is used at most once.
    """
    draw, used = random.Random(0), 0
    tasks: list[NeedleTask] = []

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for _ in range(texts):
        questions = draw.sample(QUESTIONS, len(QUESTIONS))
        numbers = draw.sample(range(10000, 100000), len(QUESTIONS))
        hidden = [encode(f"{question} {number}.")
                  for question, number in zip(questions, numbers, strict=True)]
        room = tokens - sum(map(len, hidden))
        if room < len(QUESTIONS) or used + room > len(hay):
            raise UserError(f"{texts} texts of {tokens} tokens need articles of {texts * room} "
                            f"tokens, and there are {len(hay)}; a text holds "
                            f"{len(QUESTIONS)} needles")
        places = [int(room * (index + 0.5) / len(QUESTIONS)) for index in range(len(QUESTIONS))]
        text: list[int] = []
        for start, end, needle in zip([0, *places], [*places, room], [*hidden, []], strict=True):
            text += [*hay[used + start : used + end], *needle]
        used += room
        tasks += [NeedleTask(text, encode(question), encode(f" {number}"))
                  for question, number in zip(questions, numbers, strict=True)]
    return tasks


def answers(tasks: Sequence[NeedleTask], folder: str, h2o: H2OConfig | None, question: str
            ) -> tuple[list[Scored], int]:
    """Score the answers with this engine. Returns scores and cache bytes of a sequence.

    The questions of a text are a batch, which reads the text once.
    """
    with LLM(folder, h2o=h2o, dtype="float32", progress=False,
             policy=Policy(gpu_batch_size=len(QUESTIONS))) as llm:
        scores = llm.score([task.parts(question) for task in tasks])
        nbytes = llm.stats.kv_cache_bytes // len(QUESTIONS)
    return [Scored(score.log_probs[-len(task.answer) :], score.likeliest[-len(task.answer) :])
            for task, score in zip(tasks, scores, strict=True)], nbytes


def pressed_answers(tasks: Sequence[NeedleTask], model, press: str, percent: float,
                    question: str) -> tuple[list[Scored], int]:
    """Score the answers with kvpress on transformers, which evicts only from prompts."""
    # ObservedAttention needs attention weights.
    model.set_attn_implementation("eager" if press == "ObservedAttention" else "sdpa")
    scores, max_bytes = [], 0
    for task in tasks:
        prompt, continuation = task.parts(question)
        keep, cache = kept_tokens(percent, len(prompt)), DynamicCache()
        window = SNAP_WINDOW if keep > SNAP_WINDOW else keep // 2
        options = {"window_size": window} if press == "SnapKV" else {}
        ratio = 1 - (keep + 0.5) / len(prompt)
        with getattr(kvpress, f"{press}Press")(compression_ratio=ratio, **options)(model):
            first = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits
            max_bytes = max(max_bytes, sum(x.nbytes for layer in cache.layers
                                           for x in (layer.keys, layer.values)))
            positions = torch.arange(len(prompt), len(prompt) + len(continuation) - 1)
            logits = model(torch.tensor([continuation[:-1]]), past_key_values=cache,
                           position_ids=positions[None]).logits
        log_probs = torch.cat((first, logits), 1)[0, -len(task.answer) :].log_softmax(-1)
        answer = torch.tensor(task.answer)
        scores.append(Scored(log_probs.gather(-1, answer[:, None])[:, 0].tolist(),
                             (log_probs.argmax(-1) == answer).tolist()))
    return scores, max_bytes


def kept_tokens(percent: float, prompt: int) -> int:
    """Return the number of kept tokens of a prompt, half of them heavy hitters."""
    return 2 * max(1, int(percent / 200 * prompt + 1e-9))


def config_of(cache: str, percent: float) -> H2OConfig | None:
    """Return the cache that keeps, or attends to, `percent` of a prompt."""
    share = percent / 100
    if cache == FULL:
        return None
    if cache == "window":
        return H2OConfig(heavy_tokens=0, recent_ratio=share)
    if cache == "recall":
        return H2OConfig(heavy_ratio=share / 2, recall=True)
    return H2OConfig(heavy_ratio=share / 2, score=cache)


class NeedleRows:
    """Rows of the results of tasks by cache."""

    def __init__(self, args: argparse.Namespace, tasks: Sequence[NeedleTask]):
        self.args, self.tasks = args, tasks
        self.folder = str(checkpoint_folder(args.model))
        self.table = ResumableCsv(args.csv, COLUMNS, KEY, flag="--csv")
        self._common = {"model": args.model, "dtype": DTYPE, "prompt_tokens": args.tokens,
                        "tasks": len(tasks),
                        INPUT: hashlib.sha256(repr(tasks).encode()).hexdigest()[:16]}

    def add(self, system: str, cache: str, percent: float, question: str) -> None:
        """Add the row of a cache unless it exists; the full cache's must be first."""
        key = self._common | {"system": system, "cache": cache,
                              "budget_percent": f"{percent:g}", "asked": question}
        if self.table.find(key) is not None:
            return
        began = time.perf_counter()
        if system == "kvpress":
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
            scores, nbytes = pressed_answers(self.tasks, model, cache, percent,
                                             question)
        else:
            scores, nbytes = answers(self.tasks, self.folder, config_of(cache, percent),
                                     question)
        seconds = time.perf_counter() - began
        solved = [score.greedy for score in scores]
        full = solved if cache == FULL else self._of_full()
        row = {"kept_tokens": self.args.tokens if cache == FULL
               else kept_tokens(percent, self.args.tokens), "solved": sum(solved),
               "solved_by_full": sum(full),
               "solved_of_these": sum(a and b for a, b in zip(solved, full, strict=True)),
               "answer_nats": -fmean(chain.from_iterable(score.log_probs for score in scores)),
               "kv_cache_bytes_per_sequence": nbytes, "seconds": seconds,
               "which": "".join("ny"[score] for score in solved)}
        self.table.add({**origin(), **key, **row})
        print(f"{self.args.tokens} tokens, {cache} {percent:g} %, asked {question or 'anywhere'}: "
              f"{row['solved']} of {len(solved)}, of the full cache's {row['solved_by_full']} "
              f"{row['solved_of_these']}, {seconds:.0f} s", flush=True)

    def _of_full(self) -> list[bool]:
        row = self.table.find(self._common | {"system": "flexgen_h2o", "cache": FULL,
                                              "budget_percent": "100", "asked": ""})
        return [letter == "y" for letter in row["which"]]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="of the LLaMA architecture")
    parser.add_argument("--input-path", required=True, help="articles, as `quality` reads them")
    parser.add_argument("--tokens", type=int, default=1000, help="of a text with needles")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--asked", nargs="+", choices=ASKED, default=list(ASKED))
    parser.add_argument("--budgets", type=float, nargs="+", default=[20], help="percent of a text")
    parser.add_argument("--caches", nargs="*", choices=CACHES, default=list(CACHES),
                        help="beside the full one")
    parser.add_argument("--presses", nargs="*", choices=PRESSES, default=[])
    parser.add_argument("--csv", default="benchmarks/results/needles.csv")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Measure all rows that the file lacks."""
    if args.presses and kvpress is None:
        raise UserError("--presses needs kvpress: pip install kvpress==0.5.5")
    check_int("--texts", args.texts, ge=1)
    for budget in args.budgets:
        check_number("--budgets", budget, gt=0, le=100)
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint_folder(args.model)))
    hay = list(chain.from_iterable(tokenizer(text)["input_ids"]
                                   for text in read_articles(args.input_path)))
    rows = NeedleRows(args, make_tasks(hay, tokenizer, tokens=args.tokens, texts=args.texts))
    with report_partial_rows(rows.table.file):
        rows.add("flexgen_h2o", FULL, 100, "")
        for question in args.asked:
            for percent in args.budgets:
                for cache in args.caches:
                    rows.add("flexgen_h2o", cache, percent, question)
                for press in args.presses:
                    rows.add("kvpress", press, percent, question)
        rows.table.finish()


if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(parse_args())))
