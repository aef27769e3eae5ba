"""Accuracy by cache budget with lm-evaluation-harness: a small version of H2O's Figure 4.

    python benchmarks/studies/lm_eval_budgets.py --input-path xsum_0shot.jsonl

The paper's tasks are downloads; this one is made of articles alone. Each item is the beginning of
an article and four summaries, its own and three others; the likeliest is the answer, so chance is
25 %. Few-shot examples are of other articles. The task is a .jsonl file and a YAML file, and runs
through the harness's `simple_evaluate`.

With evict_prompt (as in arXiv 2306.14048) eviction also acts inside the prompt, after every
`--prompt-chunk` tokens; without it, the prompt is cut once at its end. Recall evicts nothing:
answers attend to as many tokens of the prompt as the budget has.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.config.validation import check_int, check_number
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import Article, read_summary_tasks, strip_prompt
from flexgen_h2o.files.rows import CsvWriter, report_partial_rows
from flexgen_h2o.files.writing import check_writable
from flexgen_h2o.metrics.provenance import ORIGIN, origin

TASK, OPTIONS = "xsum_choice", 4
FULL, RECALL = "full", "recall"
POLICIES = (FULL, "h2o", "window", RECALL)
COLUMNS = (*ORIGIN, "model", "dtype", "policy", "budget_percent", "shots", "evict_prompt",
           "prompt_chunk", "items", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "seconds",
           "gpu_batch_size", "kv_cache_bytes")
YAML = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {test}
    fewshot: {fewshot}
output_type: multiple_choice
test_split: test
fewshot_split: fewshot
fewshot_config:
  sampler: first_n
doc_to_text: "Article: {{{{article}}}}\\nSummary:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def items(articles: Sequence[Article], *, words: int, rng: random.Random
          ) -> Iterator[dict[str, object]]:
    """Yield an item for each article: its first `words` words, shuffled summaries, the right index.

    Wrong summaries are from other articles. Raises `UserError` if there are too few.
    """
    summaries = list(dict.fromkeys(article.reference for article in articles))
    if len(summaries) < OPTIONS:
        raise UserError(f"--input-path: {len(articles)} articles have {len(summaries)} summaries "
                        f"that differ, and {OPTIONS} are needed: raise --items, or take others")
    for article in articles:
        others = [summary for summary in summaries if summary != article.reference]
        choices = rng.sample(others, OPTIONS - 1)
        gold = rng.randrange(OPTIONS)
        choices.insert(gold, article.reference)
        text = " ".join(strip_prompt(article.prompt).split()[:words])
        yield {"article": text, "choices": choices, "gold": gold}


def write_task(args: argparse.Namespace, folder: Path) -> None:
    """Write the task for the harness: two .jsonl files and a YAML file in `folder`."""
    shots = max(args.shots)
    spare = max(shots, OPTIONS) if shots else 0  # examples have wrong summaries of examples
    articles = read_summary_tasks(args.input_path, max_tasks=args.items + spare)
    if len(articles) < args.items + spare:
        raise UserError(f"--input-path has {len(articles)} articles and {args.items + spare} are "
                        "needed: lower --items or --shots")
    rng = random.Random(args.seed)
    parts = {"test": (articles[: args.items], args.words),
             "fewshot": (articles[args.items :] or articles[:OPTIONS], args.shot_words)}
    for name, (rows_of_part, words) in parts.items():
        lines = (json.dumps(item, ensure_ascii=False) + "\n"
                 for item in items(rows_of_part, words=words, rng=rng))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    paths = {name: json.dumps(str(folder / f"{name}.jsonl")) for name in parts}
    (folder / f"{TASK}.yaml").write_text(YAML.format(task=TASK, **paths), encoding="utf-8")


def model_arguments(args: argparse.Namespace, policy: str, budget: float, evict_prompt: bool
                    ) -> dict[str, object]:
    """Return the ``--model_args`` of a cache that keeps `budget` percent of each prompt."""
    arguments: dict[str, object] = {"pretrained": args.model, "dtype": args.dtype,
                                    "batch_size": args.batch_size}
    if policy == FULL:
        return arguments
    if policy == RECALL:
        return arguments | {"recall": True, "hh_ratio": budget / 200, "recent_ratio": budget / 200}
    if evict_prompt:
        arguments |= {"evict_prompt": True, "prompt_chunk": args.prompt_chunk}
    if policy == "window":
        return arguments | {"eviction": "window", "recent_ratio": budget / 100}
    return arguments | {"hh_ratio": budget / 200, "recent_ratio": budget / 200}


def runs(args: argparse.Namespace) -> Iterator[tuple[int, bool, str, float]]:
    """Yield (shots, evict_prompt, policy, budget) of each row.

    The full cache has one row for each number of shots, recall one for each budget.
    """
    for shots in args.shots:
        if FULL in args.policies:
            yield shots, False, FULL, 100
        budgets = [budget for budget in args.budgets if budget < 100]
        for evict_prompt in args.evict_prompt:
            for policy in args.policies:
                if policy not in (FULL, RECALL):
                    yield from ((shots, evict_prompt == "true", policy, budget)
                                for budget in budgets)
        if RECALL in args.policies:
            yield from ((shots, False, RECALL, budget) for budget in budgets)


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Run the harness on the task with every cache; each row is written at once."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from flexgen_h2o.integrations.lm_eval.model import FlexGenLM

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    file = CsvWriter(args.csv, COLUMNS)
    with report_partial_rows(file):
        for shots, evict_prompt, policy, budget in runs(args):
            lm = FlexGenLM(**model_arguments(args, policy, budget, evict_prompt))
            try:
                began = time.perf_counter()
                results = lm_eval.simple_evaluate(lm, tasks=[TASK], num_fewshot=shots,
                                                  task_manager=tasks, limit=args.limit,
                                                  log_samples=False)
                seconds = time.perf_counter() - began
                info = lm.get_model_info()
            finally:
                lm.close()
            result = results["results"][TASK]
            row = {
                **origin(), "model": args.model, "dtype": info["model_dtype"], "policy": policy,
                "budget_percent": budget, "shots": shots, "evict_prompt": evict_prompt,
                "prompt_chunk": args.prompt_chunk if evict_prompt else None,
                "items": results["n-samples"][TASK]["effective"],
                **{name: result[f"{name},none"]
                   for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")},
                "seconds": seconds, "gpu_batch_size": lm.llm.policy.gpu_batch_size,
                "kv_cache_bytes": info["kv_cache_bytes"]}
            file.write(row)
            print(f"{shots} shots, {policy} {budget:g} %, evict_prompt {evict_prompt}: accuracy "
                  f"{row['acc']:.3f}, {seconds:.0f} s", flush=True)
        file.finish()


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--input-path", required=True,
                        help="articles with `article` and `summary_gt`")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--words", type=int, default=100, help="of each article")
    parser.add_argument("--shot-words", type=int, default=50, help="of each example's article")
    parser.add_argument("--budgets", type=float, nargs="+", default=[4, 10, 20, 60],
                        help="percent of the prompt, below 100")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--shots", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--evict-prompt", nargs="+", choices=("true", "false"), default=["true"])
    parser.add_argument("--prompt-chunk", type=int, default=32)
    parser.add_argument("--batch-size", default="64")
    parser.add_argument("--limit", type=int, help="measure only the first LIMIT items")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", default="benchmarks/results/lm_eval_budgets.csv")
    return parser.parse_args(argv)


def check_numbers(args: argparse.Namespace) -> None:
    """Raise `UserError` for invalid numbers."""
    check_int("--items", args.items, ge=OPTIONS)  # wrong summaries are from other items
    if args.limit is not None:
        check_int("--limit", args.limit, ge=2)  # one has no standard error
    for name in ("words", "shot_words"):
        check_int(f"--{name.replace('_', '-')}", getattr(args, name), ge=1)
    for shots in args.shots:
        check_int("--shots", shots, ge=0)
    for budget in args.budgets:
        check_number("--budgets", budget, gt=0)


def run(args: argparse.Namespace) -> None:
    """Measure all rows."""
    check_numbers(args)
    check_writable("--csv", args.csv)
    with tempfile.TemporaryDirectory() as folder:
        # The harness reads files through `datasets`, which keeps copies, and asks a hub if it may.
        os.environ |= {"HF_DATASETS_CACHE": f"{folder}/cache", "HF_DATASETS_OFFLINE": "1",
                       "HF_HUB_OFFLINE": "1"}
        write_task(args, Path(folder))
        measure(args, Path(folder))


if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(parse_args())))
