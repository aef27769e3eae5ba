"""Compare plans for a model in limited memory with measured runs.

    python benchmarks/studies/plan_limited.py --memory-limit 2GB

The runs have OPT-1.3B's shape and 128 + 512 tokens in 2 GB: a limit of 2.5 GB without the memory of
Python and PyTorch. They are the full cache, H2O with 20 % of the text, and H2O with 4-bit weights
and cache, at a small and at a large batch size. Each is planned (`--percent auto`) after a new
calibration, as other work changes the machine's rates. The planned placement then runs for a few
tokens in a separate process after a warm-up, and is compared with the cost model's prediction for
these tokens.
With the full cache they are in the middle of the text, where a step takes about the mean time. The
median step counts.

"full-in-memory" is not the plan's choice: the whole cache in memory, with as much of the weights as
fits beside it.
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
from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.cli.launch import open_llm, synthetic_prompts, workload
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag_name, parse_size
from flexgen_h2o.config.policy import format_percent
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import InsufficientMemory
from flexgen_h2o.kernels.implementations import AutotuneTable
from flexgen_h2o.metrics.provenance import cpu_model, source_commit

sys.path.insert(0, str(Path(__file__).parents[1]))
from csv_files import write_csv

SHARE = 0.2
"""Share of prompt and generated tokens that H2O keeps: half heavy hitters, half recent tokens."""

WARM_UP = 16
"""Tokens of a warm-up prompt."""

COLUMNS = ("commit", "cpu", "model", "memory_limit", "system", "batch", "policy", "plan_tokens_s",
           "plan_prefill_s", "plan_step_s", "bound_decode", "run_prompt_len", "run_gen_len",
           "predicted_prefill_s", "prefill_s", "prefill_predicted_over_measured",
           "predicted_step_s", "step_s", "step_predicted_over_measured")


@dataclass(frozen=True)
class LimitedRun:
    """A system at a batch size. `in_memory` keeps the whole cache in memory."""

    system: str
    batch: int
    h2o: bool = False
    bits: int = 16
    in_memory: bool = False


RUNS = (LimitedRun("full", 4), LimitedRun("full-in-memory", 4, in_memory=True),
        LimitedRun("h2o", 4, h2o=True), LimitedRun("full", 32),
        LimitedRun("full-in-memory", 32, in_memory=True), LimitedRun("h2o", 128, h2o=True),
        LimitedRun("h2o-4bit", 128, h2o=True, bits=4))


def configured(args: argparse.Namespace, run: LimitedRun) -> RunConfig:
    """Return the configuration of the whole run, to be planned."""
    limit = parse_size("--memory-limit", args.memory_limit)
    budget = {"num_heavy_hitter_tokens": _half(args), "num_window_length": 2 * _half(args)}
    return RunConfig(model=args.model, path=args.path, prompt_len=args.prompt_len,
                     gen_len=args.gen_len, num_prompts=run.batch, percent="auto",
                     memory_limit=limit, weight_bits=run.bits, cache_bits=run.bits,
                     offload_dir=args.offload_dir, **(budget if run.h2o else {}))


def _half(args: argparse.Namespace) -> int:
    return int(SHARE * (args.prompt_len + args.gen_len) / 2)


def row(args: argparse.Namespace, run: LimitedRun, *, recalibrate: bool) -> dict[str, object]:
    """Plan a run, and measure a short run of the planned placement unless ``--plan-only``."""
    plan = planned(replace(configured(args, run), recalibrate=recalibrate), run)
    best, policy = plan.best, plan.config.policy()
    columns: dict[str, object] = {
        "commit": source_commit(), "cpu": cpu_model(), "model": args.model,
        "memory_limit": args.memory_limit, "system": run.system, "batch": run.batch,
        "policy": f"--percent {format_percent(policy)} --gpu-batch-size {policy.gpu_batch_size} "
                  f"--num-gpu-batches {policy.num_gpu_batches}",
        "plan_tokens_s": best.tokens_per_second, "plan_prefill_s": best.prefill_seconds,
        "plan_step_s": best.decode_seconds / (args.gen_len - 1),
        "bound_decode": best.estimate.step.binding}
    if args.plan_only:
        return columns
    prompt = args.run_prompt_len or args.prompt_len + (0 if run.h2o else args.gen_len // 2)
    # A longer prompt has a larger workspace, which would not fit.
    short = replace(plan.config, prompt_len=prompt, gen_len=args.tokens, memory_limit=None)
    predicted = planner.plan(short, workload(short, ()), run.batch).best
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        prefill, step = process.submit(measured, short, plan.implementations).result()
    blocks = math.ceil(run.batch / (policy.gpu_batch_size * policy.num_gpu_batches))
    predicted_step = predicted.decode_seconds / blocks / (args.tokens - 1)  # steps are of one block
    return columns | {
        "run_prompt_len": prompt, "run_gen_len": args.tokens,
        "predicted_prefill_s": predicted.prefill_seconds, "prefill_s": prefill,
        "prefill_predicted_over_measured": predicted.prefill_seconds / prefill,
        "predicted_step_s": predicted_step, "step_s": step,
        "step_predicted_over_measured": predicted_step / step}


def planned(config: RunConfig, run: LimitedRun) -> planner.Plan:
    """Return the plan of a run."""
    plan = planner.plan(config, workload(config, ()), run.batch)
    if not run.in_memory:
        return plan
    for share in range(100, -1, -1):
        tried = replace(config, percent=(share, 0, 100, 0, 100, 0), gpu_batch_size=run.batch,
                        num_gpu_batches=1, recalibrate=False)
        with suppress(InsufficientMemory):
            return planner.plan(tried, workload(tried, ()), run.batch)
    raise InsufficientMemory(f"the cache of {run.batch} sequences does not fit into --memory-limit")


def measured(config: RunConfig, implementations: AutotuneTable) -> tuple[float, float]:
    """Return the seconds of the prefill and of the median step, after a warm-up."""
    with open_llm(config, workload=workload(config, ()), implementations=implementations,
                  progress=False) as llm:
        prompts = synthetic_prompts(config, llm.vocab_size)
        llm.generate([prompt[:WARM_UP] for prompt in prompts], max_new_tokens=2, eos_token_id=-1)
        llm.generate(prompts, max_new_tokens=config.gen_len, eos_token_id=-1)
        return llm.stats.prefill_seconds, statistics.median(llm.stats.step_seconds)


def rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a row for each selected run."""
    selected = [run for run in RUNS
                if args.systems is None or f"{run.system}-{run.batch}" in args.systems]
    for run in selected:
        try:
            yield row(args, run, recalibrate=run is selected[0])
        except InsufficientMemory as error:  # measure the others
            print(f"{run.system:14} {run.batch:4}  left out: {error}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="facebook/opt-1.3b")
    parser.add_argument("--path", default="_DUMMY_", help="folder of weights (_DUMMY_: random)")
    parser.add_argument("--memory-limit", default="2GB")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=17, help="generated tokens of a measured run")
    parser.add_argument("--run-prompt-len", type=int,
                        help="prompt length of a measured run, if the default takes too long")
    parser.add_argument("--offload-dir", default="~/.cache/flexgen_h2o/offload")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM-BATCH",
                        choices=[f"{run.system}-{run.batch}" for run in RUNS],
                        help="only these rows")
    parser.add_argument("--plan-only", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan_limited.csv"))
    args = parser.parse_args(argv)
    for name, low in (("prompt_len", 1), ("gen_len", 2), ("tokens", 2)):
        check_int(flag_name(name), getattr(args, name), ge=low)
    table = []
    for entry in rows(args):
        table.append(entry)
        print(f"{entry['system']:14} {entry['batch']:4}  {entry['policy']}\n"
              f"    planned {entry['plan_tokens_s']:.4g} tokens/s, prefill "
              f"{entry['plan_prefill_s']:.3g} s, step {entry['plan_step_s']:.3g} s", flush=True)
        if not args.plan_only:
            print("    " + "; ".join(
                f"{phase} of the short run {entry[f'predicted_{phase}_s']:.3g} s predicted, "
                f"{entry[f'{phase}_s']:.3g} s measured" for phase in ("prefill", "step")),
                flush=True)
        write_csv(args.out, COLUMNS, table)  # keep rows if a later run is stopped


if __name__ == "__main__":
    sys.exit(exit_status(main))
