"""Other systems and this engine side by side, on one machine, in one go.

    python benchmarks/make_checkpoint.py --model facebook/opt-1.3b --out /tmp/models/opt-1.3b
    python benchmarks/compare.py --config configs/compare_cpu.yaml --models /tmp/models

Every run is a process of its own, with the same checkpoint, prompts, lengths, threads, allocator
and memory limit (a cgroup, which counts the page cache; that is dropped before). All systems are
measured at the same batch, and each at its own best, which is searched by doubling; after a
warm-up, in turn, medians of the repeats. Beside each stands its roofline, by rates measured before
and after, and the share of its tokens that equal the first exact system's.

A system that can't run, or not at a batch, has a row that says why. Rows are on disk as they come;
the same command goes on where it was stopped, and measures nothing twice: to have a cell measured
again, delete its row.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from comparison.cells import Cells
from comparison.config import Comparison, load
from comparison.processes import run_job
from comparison.rows import OK, SEARCH, Table
from shared.memory_group import MemoryGroup

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.config.policy import OFFLOAD_DIR
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import keeping
from flexgen_h2o.metrics.report import align_columns


def check_limits(config: Comparison) -> None:
    """Raise `UserError` for limits that cannot be set here, before anything is measured."""
    if any(scenario.device_memory is not None for scenario in config.scenarios):
        import torch  # only now: it takes seconds

        if not torch.cuda.is_available():
            raise UserError("--config limits device_memory, and there is no GPU here: choose other "
                            "--scenarios")
    for scenario in config.scenarios:
        if scenario.memory is not None:
            with MemoryGroup(scenario.memory):
                pass


def summary(rows: Sequence[dict[str, str]]) -> str:
    """The cells that count as aligned text: figures, or why there are none."""
    lines = [("scenario", "at", "batch", "system", "tokens/s", "step s", "x roofline", "equal")]
    for row in rows:
        if row["at"] == SEARCH:
            continue
        figures = [row[name] for name in ("tokens_per_s", "decode_step_s", "total_over_roofline",
                                          "equal_tokens")]
        if row["status"] != OK:
            figures = [row["status"], "", "", ""]
        elif row["projected"] == "True":
            figures[0] += " (projected)"
        lines.append((row["scenario"], row["at"], row["batch"], row["system"], *figures))
    return align_columns(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="of the comparison, YAML")
    parser.add_argument("--models", type=Path, default=Path("."),
                        help="folder that holds the models' folders")
    parser.add_argument("--out", default="benchmarks/results/compare_cpu.csv",
                        help="CSV file, which is gone on with where it is there")
    parser.add_argument("--scratch", type=Path, default=Path(OFFLOAD_DIR).expanduser(),
                        help="folder for what is offloaded to disk")
    parser.add_argument("--systems", nargs="+", default=(), help="only these of the config")
    parser.add_argument("--scenarios", nargs="+", default=(), help="only these of the config")
    args = parser.parse_args(argv)
    config = load(args.config, models=args.models, systems=args.systems,
                  scenarios=args.scenarios)
    check_limits(config)
    table = Table(os.path.expanduser(args.out))

    def do(job: dict, memory: int | None) -> dict:
        timeout = job.get("timeout") or config.timeout
        return run_job(job, threads=config.threads, timeout=timeout, memory=memory,
                       scratch=args.scratch)

    with keeping(table.file):
        Cells(config, table, do).run()
    table.finish()
    print(summary(table.rows()))


if __name__ == "__main__":
    sys.exit(exit_status(main))
