"""Plans of a model in too little memory, and how far they are from what is then measured.

    python benchmarks/studies/plan_limited.py --memory-limit 2GB

OPT-1.3B's shape with 128 + 512 tokens in what 2.5 GB leave beside Python and PyTorch: the full
cache, H2O's of 20 % of the text, and the latter with 4 bits of weights and cache, at a small batch
and at a large one. Each is planned (`--percent auto`), by rates of the machine that are measured
anew at first, as other work on it changes them. The placement that the plan finds is then run for a
few tokens, in a process of its own and after a warm-up, and stands beside what the cost model says
of these: of the full cache in the middle of its text, where a step takes what the mean one does. Of
the steps the median counts.

"full-in-memory" is what the search did not choose: the whole cache in memory, and as much of the
weights as that leaves room for.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flexgen_h2o.cli import planner
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.launch import open_llm, synthetic_prompts, workload
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag_name, parse_size
from flexgen_h2o.config.policy import percent_text
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import TooLittleMemory
from flexgen_h2o.files.rows import write_csv
from flexgen_h2o.kernels.implementations import AutotuneTable
from flexgen_h2o.metrics.provenance import cpu_model, source_commit

SHARE = 0.2
"""Of prompt and generated tokens, that H2O keeps: half of it heavy hitters, half recent tokens."""

WARM_UP = 16
"""Tokens of a prompt that warm up."""

COLUMNS = ("commit", "cpu", "model", "memory_limit", "system", "batch", "policy", "plan_tokens_s",
           "plan_prefill_s", "plan_step_s", "bound_decode", "run_prompt_len", "run_gen_len",
           "predicted_prefill_s", "prefill_s", "prefill_predicted_over_measured",
           "predicted_step_s", "step_s", "step_predicted_over_measured")


@dataclass(frozen=True)
class LimitedRun:
    """A system at a batch size."""

    system: str
    batch: int
    h2o: bool = False
    bits: int = 16
    in_memory: bool = False
    """The cache is."""


RUNS = (LimitedRun("full", 4), LimitedRun("full-in-memory", 4, in_memory=True),
        LimitedRun("h2o", 4, h2o=True), LimitedRun("full", 32),
        LimitedRun("full-in-memory", 32, in_memory=True), LimitedRun("h2o", 128, h2o=True),
        LimitedRun("h2o-4bit", 128, h2o=True, bits=4))


def configured(args: argparse.Namespace, run: LimitedRun) -> RunConfig:
    """The whole run, its placement to be planned."""
    limit = parse_size("--memory-limit", args.memory_limit)
    kept = {"num_heavy_hitter_tokens": _half(args), "num_window_length": 2 * _half(args)}
    return RunConfig(model=args.model, path=args.path, prompt_len=args.prompt_len,
                     gen_len=args.gen_len, num_prompts=run.batch, percent="auto",
                     memory_limit=limit, weight_bits=run.bits, cache_bits=run.bits,
                     offload_dir=args.offload_dir, **(kept if run.h2o else {}))


def _half(args: argparse.Namespace) -> int:
    return int(SHARE * (args.prompt_len + args.gen_len) / 2)


def row(args: argparse.Namespace, run: LimitedRun, *, recalibrate: bool) -> dict[str, object]:
    """One plan, and the short run of its placement unless only plans are wanted."""
    plan = planned(replace(configured(args, run), recalibrate=recalibrate), run)
    best, policy = plan.best, plan.config.policy()
    found: dict[str, object] = {
        "commit": source_commit(), "cpu": cpu_model(), "model": args.model,
        "memory_limit": args.memory_limit, "system": run.system, "batch": run.batch,
        "policy": f"--percent {percent_text(policy)} --gpu-batch-size {policy.gpu_batch_size} "
                  f"--num-gpu-batches {policy.num_gpu_batches}",
        "plan_tokens_s": best.tokens_per_second, "plan_prefill_s": best.prefill,
        "plan_step_s": best.decode / (args.gen_len - 1),
        "bound_decode": best.estimate.step.binding}
    if args.plan_only:
        return found
    prompt = args.run_prompt_len or args.prompt_len + (0 if run.h2o else args.gen_len // 2)
    # A longer prompt has a larger workspace, which would not fit.
    short = replace(plan.config, prompt_len=prompt, gen_len=args.tokens, memory_limit=None)
    predicted = planner.plan(short, workload(short, ()), run.batch).best
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        prefill, step = process.submit(measured, short, plan.implementations).result()
    blocks = math.ceil(run.batch / (policy.gpu_batch_size * policy.num_gpu_batches))
    predicted_step = predicted.decode / blocks / (args.tokens - 1)  # as a step is measured: of one
    return found | {
        "run_prompt_len": prompt, "run_gen_len": args.tokens,
        "predicted_prefill_s": predicted.prefill, "prefill_s": prefill,
        "prefill_predicted_over_measured": predicted.prefill / prefill,
        "predicted_step_s": predicted_step, "step_s": step,
        "step_predicted_over_measured": predicted_step / step}


def planned(config: RunConfig, run: LimitedRun) -> planner.Plan:
    """The plan of a run, whose cache is in memory if it is to be."""
    plan = planner.plan(config, workload(config, ()), run.batch)
    if not run.in_memory:
        return plan
    for share in range(100, -1, -1):
        tried = replace(config, percent=(share, 0, 100, 0, 100, 0), gpu_batch_size=run.batch,
                        num_gpu_batches=1, recalibrate=False)
        with suppress(TooLittleMemory):
            return planner.plan(tried, workload(tried, ()), run.batch)
    raise TooLittleMemory(f"the cache of {run.batch} sequences does not fit into --memory-limit")


def measured(config: RunConfig, implementations: AutotuneTable) -> tuple[float, float]:
    """Seconds of the prefill and of the median step, after a warm-up with a few tokens of each
    prompt, with the implementations that the plan goes by."""
    with open_llm(config, workload=workload(config, ()), implementations=implementations,
                  progress=False) as llm:
        prompts = synthetic_prompts(config, llm.vocab_size)
        llm.generate([prompt[:WARM_UP] for prompt in prompts], max_new_tokens=2, eos_token_id=-1)
        llm.generate(prompts, max_new_tokens=config.gen_len, eos_token_id=-1)
        return llm.stats.prefill_seconds, statistics.median(llm.stats.step_seconds)


def rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row for each of the runs that are wanted."""
    wanted = [run for run in RUNS
              if args.systems is None or f"{run.system}-{run.batch}" in args.systems]
    for run in wanted:
        try:
            yield row(args, run, recalibrate=run is wanted[0])
        except TooLittleMemory as error:  # the others are still worth measuring
            print(f"{run.system:14} {run.batch:4}  left out: {error}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="facebook/opt-1.3b")
    parser.add_argument("--path", default="_DUMMY_", help="weights; _DUMMY_: random ones")
    parser.add_argument("--memory-limit", default="2GB")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=17, help="of a run that is measured")
    parser.add_argument("--run-prompt-len", type=int,
                        help="of a run that is measured, where its prompts would take too long")
    parser.add_argument("--offload-dir", default="~/.cache/flexgen_h2o/offload")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM-BATCH",
                        choices=[f"{run.system}-{run.batch}" for run in RUNS],
                        help="a part of the rows")
    parser.add_argument("--plan-only", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan_limited.csv"))
    args = parser.parse_args(argv)
    for name, low in (("prompt_len", 1), ("gen_len", 2), ("tokens", 2)):
        check_int(flag_name(name), getattr(args, name), low=low)
    table = []
    for found in rows(args):
        table.append(found)
        print(f"{found['system']:14} {found['batch']:4}  {found['policy']}\n"
              f"    planned {found['plan_tokens_s']:.4g} tokens/s, prefill "
              f"{found['plan_prefill_s']:.3g} s, step {found['plan_step_s']:.3g} s", flush=True)
        if not args.plan_only:
            print("    " + "; ".join(
                f"{phase} of the short run {found[f'predicted_{phase}_s']:.3g} s predicted, "
                f"{found[f'{phase}_s']:.3g} s measured" for phase in ("prefill", "step")),
                flush=True)
        write_csv(args.out, COLUMNS, table)  # what there is, should a later row be stopped


if __name__ == "__main__":
    sys.exit(exit_status(main))
