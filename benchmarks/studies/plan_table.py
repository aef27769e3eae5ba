"""Plan the runs of the H2O paper on its machines, and compare with its measurements.

    python benchmarks/studies/plan_table.py

The runs are the throughput table of H2O (arXiv 2306.14048, Table 3: a 16 GB T4 with weights and
cache mostly in host memory) and its latency on an A100. Each is planned on the machine's file in
configs/hardware/. Nothing is run: planned figures are this engine's cost model on rates from data
sheets and FlexGen's published constants, the paper's are measurements of another engine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flexgen_h2o.cli import planner
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.launch import workload
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.files.rows import write_csv
from flexgen_h2o.metrics.provenance import source_commit

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"
LENGTHS = ((512, 32), (512, 512), (512, 1024))
MODELS = ("facebook/opt-6.7b", "facebook/opt-30b")
SYSTEMS = {
    "FlexGen": ({}, (20.2, 8.1, 16.8, 8.5, 16.9, 7.1)),
    "H2O 20 %": ({"hh_ratio": 0.1}, (35.1, 12.7, 51.7, 18.8, 52.1, 13.8)),
    "H2O 20 %, 4-bit weights": ({"hh_ratio": 0.1, "weight_bits": 4},
                                (50.5, None, 72.5, None, 62.3, None)),
}
"""Flags, and the paper's tokens per second for each of LENGTHS and MODELS."""
LATENCY = {"FlexGen": ({}, 99.5), "H2O 20 %": ({"hh_ratio": 0.1}, 53.5)}
"""Flags, and seconds for 24 sequences of 2048 + 2048 tokens with OPT-6.7B on the A100."""
COLUMNS = ("commit", "machine", "model", "prompt_len", "gen_len", "system", "quantity", "paper",
           "planned", "planned_over_paper", "bound_prefill", "bound_decode", "policy")


def rows() -> Iterator[dict[str, object]]:
    """Yield a row for each of the paper's figures."""
    for system, (flags, figures) in SYSTEMS.items():
        runs = ((lengths, model) for lengths in LENGTHS for model in MODELS)
        for (lengths, model), paper in zip(runs, figures, strict=True):
            yield row("t4", model, lengths, system, paper, **flags)
    for system, (flags, paper) in LATENCY.items():
        yield row("a100", MODELS[0], (2048, 2048), system, paper, gpu_batch_size=24,
                  num_gpu_batches=1, hh_long_seq=True, **flags)


def row(machine: str, model: str, lengths: Sequence[int], system: str, paper: float | None,
        **flags: object) -> dict[str, object]:
    """Plan one run."""
    config = RunConfig(model=model, path="_DUMMY_", prompt_len=lengths[0], gen_len=lengths[1],
                       percent="auto", plan_only=True, hardware=str(HARDWARE / f"{machine}.yaml"),
                       **flags)
    plan = planner.plan(config, workload(config, ()), None)
    best = plan.best
    latency = machine == "a100"
    planned = best.seconds if latency else best.tokens_per_second
    policy = next(line for line in plan.text.splitlines() if line.startswith("policy"))
    return {"commit": source_commit(), "machine": machine, "model": model,
            "prompt_len": lengths[0], "gen_len": lengths[1], "system": system,
            "quantity": "seconds" if latency else "tokens/s", "paper": paper, "planned": planned,
            "planned_over_paper": paper and planned / paper,
            "bound_prefill": best.estimate.prefill.binding,
            "bound_decode": best.estimate.step.binding,
            "policy": policy.removeprefix("policy").strip()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan_table.csv"))
    args = parser.parse_args(argv)
    table = []
    for row in rows():
        table.append(row)
        print(f"{row['machine']:5} {row['model']:18} {row['prompt_len']}+"
              f"{row['gen_len']:<5} {row['system']:24} paper {row['paper'] or '-':>5}  "
              f"planned {row['planned']:6.1f} {row['quantity']}", flush=True)
    write_csv(args.out, COLUMNS, table)


if __name__ == "__main__":
    sys.exit(exit_status(main))
