"""Models larger than the memory that a run may have, as users run them, beside their floors.

    python benchmarks/make_checkpoint.py --model facebook/opt-6.7b --out /tmp/opt-6.7b
    python benchmarks/scenarios.py --config configs/opt-6.7b-disk.yaml --path /tmp/opt-6.7b \\
        --memory 6GB

A scenario is a config of `flex_opt`, planned (`percent: auto`) and run by the command line in a
process of its own; with --memory within a memory cgroup, which counts the page cache too. Beside
what it took stands what the plan said, and the floor of the prefill and of a decode step: the
largest of each link's bytes over its raw rate, measured before and after, and of compute alone.
Compute alone is the same batch through two and more layers of the model in memory: their
difference gives the time of a layer. A row is added to the CSV file for each scenario.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from link_works import RawFile
from memory_group import MemoryGroup, drop_page_cache

from flexgen_h2o import breakdown
from flexgen_h2o.cli import Parser, exit_status
from flexgen_h2o.errors import UserError
from flexgen_h2o.flag_values import parse_size
from flexgen_h2o.report import GB
from flexgen_h2o.results import source_commit
from flexgen_h2o.storage.tiers import PAGE, Device

MB = 1 << 20
RAW = ((16 * MB, 2), (16 * MB, 4), (4 * MB, 4))
"""Bytes of a raw request, and threads: the best counts."""
FEW_LAYERS = (1, 4)
STEPS = 4
"""Decode steps of a run with few layers."""
COLUMNS = (
    "date", "commit", "host", "cpu", "scenario", "model", "weight_bits", "hh_ratio", "memory_gb",
    "peak_memory_gb", "prompt_len", "gen_len", "sequences", "flags", "steps_measured",
    "predicted_prefill_s", "predicted_step_s", "predicted_total_s", "prefill_s", "step_s",
    "total_s", "tokens_per_s", "predicted_over_measured", "disk_gb_per_s", "disk_gb_prefill",
    "disk_gb_step", "disk_prefill_s", "disk_step_s", "compute_prefill_s", "compute_step_s",
    "prefill_over_floor", "step_over_floor", "bound",
)


def command_line(config: Path, *more: str) -> list[str]:
    """flex_opt with a config, writing no log."""
    return [sys.executable, "-m", "flexgen_h2o.flex_opt", "--config", str(config), "--no-log",
            "--verbose", "1", *more]


def call(command: Sequence[str], group: MemoryGroup | None = None) -> str:
    """Run a command, in a group if one is given; what it printed. `UserError` if it failed."""
    done = subprocess.run(command, capture_output=True, text=True,
                          preexec_fn=None if group is None else group.enter)
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


def one_row(path: Path) -> dict[str, str]:
    """The row of a CSV file of one."""
    with open(path, newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    return row


def spans_of(trace: Path) -> list[tuple[str, str, float, float, int]]:
    """The spans of a Chrome trace, as `report.Trace.spans` has them."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [(e["name"], e["cat"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6,
             e.get("args", {}).get("bytes", 0)) for e in events if e["ph"] == "X"]


def raw_rate(path: Path) -> float:
    """Bytes per second of plain O_DIRECT reads of a file: the best of a few settings."""
    nbytes = min(path.stat().st_size // PAGE * PAGE, 1 << 30)
    buffer = Device().host_empty(max(request * threads for request, threads in RAW))
    file = RawFile(path, 0, nbytes, buffer, write=False)
    try:
        return max(rates(file.works("read", RAW), repeats=2).values())
    finally:
        file.close()


class Scenario:
    """One config with the checkpoint that it runs on.

    Parameters
    ----------
    config, path : Path
        The YAML file, and the folder of the weights.
    memory : int or None
        Bytes of the cgroup; None: no limit.
    scratch : Path
        For what the runs write.
    """

    def __init__(self, config: Path, path: Path, *, memory: int | None, scratch: Path):
        self._config, self._path, self._memory, self._scratch = config, path, memory, scratch
        self._file = max(path.glob("*.safetensors"), key=lambda each: each.stat().st_size)

    def row(self, few: Sequence[int]) -> dict[str, object]:
        """All columns but those that say where and when."""
        before = raw_rate(self._file)
        peak, result, values = self._run()
        disk = statistics.mean((before, raw_rate(self._file)))
        phases = {each.name: each for each in
                  breakdown.phases(spans_of(self._scratch / "run.json"))}
        layers = json.loads((self._path / "config.json").read_text())["num_hidden_layers"]
        alone = [self._few_layers(count, values) for count in few]
        compute = [along(few, times, layers) for times in zip(*alone, strict=True)]
        steps = int(values["cut_gen_len"] or values["gen_len"]) - 1
        blocks = -(-int(result["num_prompts"]) // (
            int(values["gpu_batch_size"]) * int(values["num_gpu_batches"])))
        took = [float(result["prefill_seconds"]) / blocks,
                phases["decode"].wall / blocks / steps]
        read = [phases[name].lanes[READ].nbytes / blocks if READ in phases[name].lanes else 0
                for name in ("prefill", "decode")]
        read[1] /= steps
        row = {
            "scenario": self._config.stem, "model": values["model"],
            "weight_bits": result["weight_bits"], "hh_ratio": result["hh_ratio"],
            "memory_gb": self._memory and self._memory / GB, "peak_memory_gb": peak / GB,
            "prompt_len": values["prompt_len"], "gen_len": values["gen_len"],
            "sequences": int(result["num_prompts"]), "flags": self._policy, "steps_measured": steps,
            "total_s": took[0] + (int(values["gen_len"]) - 1) * took[1],
            "disk_gb_per_s": disk / GB, "bound": "; ".join(each.bound() for each in phases.values()),
        }
        for name, seconds, nbytes, computed in zip(("prefill", "step"), took, read, compute,
                                                   strict=True):
            floor = max(nbytes / disk, computed)
            row |= {f"{name}_s": seconds, f"disk_gb_{name}": nbytes / GB,
                    f"disk_{name}_s": nbytes / disk, f"compute_{name}_s": computed,
                    f"{name}_over_floor": seconds / floor}
        row |= self._predicted
        row["tokens_per_s"] = row["sequences"] * row["gen_len"] / (blocks * row["total_s"])
        row["predicted_over_measured"] = row["predicted_total_s"] / row["total_s"]
        return row
