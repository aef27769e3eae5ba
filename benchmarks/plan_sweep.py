"""Run the planner's policy and every policy of a grid, to compare them.

    python benchmarks/make_checkpoint.py --model facebook/opt-125m --out /tmp/opt-125m
    python benchmarks/plan_sweep.py --model /tmp/opt-125m --memory-limit 700MB

All run the same prompts under a memory limit: `--percent auto`, and each placement and batch shape
of the grid that fits. They take turns `--repeats` times, each run in a separate process. Figures
are medians of prefill and decode together, with the planner's prediction. "Best" is the best of the
grid.

Until all is measured, rows are in the file with the suffix .partial. A policy whose run fails is
not run again and keeps the row of its earlier runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import OK, TOO_LARGE, Outcome, run_engine

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser, parse_args
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import write_csv
from flexgen_h2o.files.writing import check_folder
from flexgen_h2o.metrics.provenance import source_commit

BATCHES = ((4, 1), (8, 4), (16, 2), (32, 1), (64, 1))
WEIGHTS = (100, 50, 0)
CACHE = (100, 0)
"""Percent in memory; the rest is on disk."""
AUTO = ("--percent", "auto")
COLUMNS = ("commit", "model", "memory_limit", "prompts", "prompt_len", "gen_len", "policy",
           "seconds", "predicted_s", "predicted_over_measured", "best_over_this", "repeats")


def grid() -> list[tuple[str, ...]]:
    """Return the flags of each policy."""
    return [("--percent", f"{weights}", "0", f"{cache}", "0", "100", "0",
             "--gpu-batch-size", f"{size}", "--num-gpu-batches", f"{count}")
            for (size, count), weights, cache in itertools.product(BATCHES, WEIGHTS, CACHE)]


def outcome(args: argparse.Namespace, policy: Sequence[str]) -> Outcome:
    """Run a policy."""
    return run_engine(parse_args([
        "--model", str(args.model), "--memory-limit", args.memory_limit, "--num-prompts",
        str(args.num_prompts), "--prompt-len", str(args.prompt_len), "--gen-len",
        str(args.gen_len), *policy]))


def seconds(row: Mapping[str, str], prefix: str = "") -> float:
    """Return the seconds of prefill and decode in a result row."""
    return sum(float(row[f"{prefix}{phase}_seconds"]) for phase in ("prefill", "decode"))


def sweep(args: argparse.Namespace, partial: Path) -> tuple[list[dict[str, object]], list[str]]:
    """Return a row for the plan and for each fitting policy, and a line for each failed run.

    After every run the rows are also written to `partial`.
    """
    runs: dict[tuple[str, ...], list[Mapping[str, str]]] = {AUTO: []}
    runs |= {policy: [] for policy in grid()}
    todo, failures = list(runs), []
    for repeat in range(args.repeats):
        for policy in list(todo):
            ended, flags = outcome(args, policy), " ".join(policy)
            if ended.status == OK:
                runs[policy].append(ended.row)
                print(f"{repeat} {seconds(ended.row):8.2f} s  {flags}", flush=True)
                write_csv(partial, COLUMNS, rows_of(args, runs))
                continue
            todo.remove(policy)
            if ended.status != TOO_LARGE:
                failures.append(f"{flags} failed: {ended.reason}")
                print(failures[-1], file=sys.stderr, flush=True)
    return rows_of(args, runs), failures


def rows_of(args: argparse.Namespace,
            runs_of: Mapping[tuple[str, ...], Sequence[Mapping[str, str]]]
            ) -> list[dict[str, object]]:
    """Return a row for each policy that has run: the plan's, then the fastest first."""
    took = {policy: statistics.median(map(seconds, runs)) for policy, runs in runs_of.items()
            if runs}
    best = min((time for policy, time in took.items() if policy != AUTO), default=None)
    table = []
    for policy in sorted(took, key=lambda policy: (policy != AUTO, took[policy])):
        last = runs_of[policy][-1]
        predicted = seconds(last, "predicted_") if policy == AUTO else None
        flags = " ".join(policy)
        if policy == AUTO:
            flags += f" ({shown(last)})"
        table.append({
            "commit": source_commit(), "model": args.model.name, "memory_limit": args.memory_limit,
            "prompts": args.num_prompts, "prompt_len": args.prompt_len, "gen_len": args.gen_len,
            "policy": flags, "seconds": took[policy], "predicted_s": predicted,
            "predicted_over_measured": predicted and predicted / took[policy],
            "best_over_this": best and best / took[policy], "repeats": len(runs_of[policy])})
    return table


def shown(row: Mapping[str, str]) -> str:
    """Return the choices of a plan."""
    shares = (row[f"{kind}_{tier}"] for kind in ("weights", "cache", "activations")
              for tier in ("gpu", "cpu"))
    return f"{' '.join(shares)}, batches {row['gpu_batch_size']} x {row['num_gpu_batches']}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--memory-limit", default="700MB")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan_sweep.csv"))
    args = parser.parse_args(argv)
    check_int("--repeats", args.repeats, ge=1)
    check_folder("--out", str(args.out.parent), [str(args.out)])
    partial = Path(f"{args.out}.partial")
    table, failures = sweep(args, partial)
    if table:
        os.replace(partial, args.out)
    for row in table:
        best = "" if row["best_over_this"] is None else f"{row['best_over_this']:.3f}"
        print(f"{row['seconds']:8.2f} s  {best:>5}  {row['policy']}")
    if failures:
        rows = f" (rows of the others: {args.out})" if table else ""
        raise UserError(f"{len(failures)} failed, the first by this: {failures[0]}{rows}")
    if all(row["best_over_this"] is None for row in table):
        raise UserError(f"no policy of the grid fits --memory-limit {args.memory_limit}: raise it")


if __name__ == "__main__":
    sys.exit(exit_status(main))
