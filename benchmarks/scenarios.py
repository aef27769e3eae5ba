"""Run models larger than memory as users do, and compare with the plan and the roofline.

    python benchmarks/make_checkpoint.py --model facebook/opt-6.7b --out /tmp/opt-6.7b
    python benchmarks/scenarios.py --config configs/opt6.7b_disk.yaml --path /tmp/opt-6.7b \\
        --memory 6GB

A scenario is a config of `flex_opt`, planned (`percent: auto`) and run by the command line in a
separate process; with --memory in a memory cgroup, which counts the page cache, too. A row has the
measured times, the planned ones, and the roofline of the prefill and of a decode step: the larger
of disk bytes over the raw rate, measured before and after, and of compute alone. Compute alone is
measured on the same batch through 2 and through 6 layers in memory; the difference gives the time
of a layer. Each run appends a row to the CSV file.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from links import RawFile
from processes import MemoryGroup, drop_page_cache

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.values import parse_size
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import append_row, check_header
from flexgen_h2o.files.writing import catch_write_errors, check_writable
from flexgen_h2o.metrics import report
from flexgen_h2o.metrics.provenance import cpu_model, source_commit
from flexgen_h2o.metrics.trace import GB, Trace
from flexgen_h2o.storage.disk import READ
from flexgen_h2o.storage.tiers import PAGE, Device

MB = 1 << 20
RAW = ((16 * MB, 2), (16 * MB, 4), (4 * MB, 4))
"""Request sizes in bytes and threads of raw reads; the best setting counts."""
RAW_RUNS, RAW_BYTES = 3, 1 << 30
"""Runs of each setting, and bytes of a run."""
FEW_LAYERS = (2, 6)
STEPS, REPEATS = 8, 3
"""Decode steps of a run with few layers, and repeats, whose median counts."""
PARTS = ("prefill", "step")
COLUMNS = (
    "date", "commit", "host", "cpu", "scenario", "model", "weight_bits", "hh_ratio", "memory_gb",
    "peak_memory_gb", "prompt_len", "gen_len", "sequences", "policy", "steps_measured",
    "prefill_s", "step_s", "total_s", "tokens_per_s", "predicted_prefill_s", "predicted_step_s",
    "predicted_total_s", "predicted_over_measured", "disk_gb_per_s", "prefill_disk_gb",
    "step_disk_gb", "prefill_disk_s", "step_disk_s", "prefill_compute_s", "step_compute_s",
    "prefill_over_roofline", "step_over_roofline", "bound",
)


def call(command: Sequence[str], group: MemoryGroup | None = None) -> None:
    """Run a command, in a memory group if given. Raises `UserError` if it fails."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True,
                          preexec_fn=None if group is None else group.enter)
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()[-400:]}")


def raw_rate(path: Path) -> float:
    """Return the bytes per second of O_DIRECT reads of a file, the best of a few settings.

    Each read is of another part of the file, as in a run: layers below this system may have caches.
    """
    span = min(path.stat().st_size // (RAW_RUNS * len(RAW)), RAW_BYTES) // PAGE * PAGE
    buffer = Device().host_empty(max(request * threads for request, threads in RAW), touch=True)
    rates: dict[tuple[int, int], list[float]] = {setting: [] for setting in RAW}
    for number, setting in enumerate(RAW * RAW_RUNS):
        start = number * (path.stat().st_size // (RAW_RUNS * len(RAW))) // PAGE * PAGE
        file = RawFile(path, start, span, buffer, write=False)
        began = time.perf_counter()
        file.sweep(*setting)
        rates[setting].append(span / (time.perf_counter() - began))
        file.close()
    return max(map(statistics.median, rates.values()))


def extended(layer_counts: Sequence[int], seconds: Sequence[float], layers: int) -> float:
    """Extrapolate seconds to `layers` layers from two smaller counts."""
    (less, more), (short, long) = layer_counts, seconds
    if less == more:  # the model has no more
        return short
    return short + (layers - less) * (long - short) / (more - less)


def with_layers(sizes: dict, count: int) -> dict:
    """Return the config.json with only the first layers."""
    if "text_config" in sizes:
        return sizes | {"text_config": with_layers(sizes["text_config"], count)}
    kinds = sizes.get("layer_types")
    return sizes | {"num_hidden_layers": count, "layer_types": kinds and kinds[:count]}


class MemoryScenario:
    """A config of `flex_opt`, run on a folder of weights.

    Parameters
    ----------
    config, weights, scratch : Path
        The YAML file, the folder of the weights, and a temporary folder.
    memory : int or None
        Bytes of the memory cgroup; None for no limit.
    """

    def __init__(self, config: Path, weights: Path, *, scratch: Path, memory: int | None):
        self._config, self._weights, self._scratch = config, weights, scratch
        self._memory = memory
        files = sorted(weights.glob("*.safetensors"), key=lambda file: file.stat().st_size)
        if not files:
            raise UserError(f"no safetensors file in --path {weights}")
        self._file = files[-1]

    def row(self) -> dict[str, object]:
        """Return all columns except those of date and machine."""
        before = raw_rate(self._file)
        peak = self._run()
        disk = statistics.mean((before, raw_rate(self._file)))
        values, result = self._outcome(self._scratch / "run.csv")
        steps, new = int(values["cut_gen_len"] or values["gen_len"]) - 1, int(values["gen_len"])
        traced = report.phases(Trace.read_chrome(self._scratch / "run.json").spans())
        took = dict(zip(PARTS, (traced[0].wall, traced[1].wall / steps), strict=True))
        sequences = int(result["num_prompts"])
        row = {
            "scenario": self._config.stem, "model": values["model"],
            "weight_bits": result["weight_bits"], "hh_ratio": result["hh_ratio"],
            "memory_gb": self._memory and self._memory / GB, "peak_memory_gb": peak / GB,
            "prompt_len": values["prompt_len"], "gen_len": new, "sequences": sequences,
            "policy": policy_text(values), "steps_measured": steps,
            "total_s": took["prefill"] + (new - 1) * took["step"],
            "predicted_prefill_s": float(result["predicted_prefill_seconds"]),
            "predicted_step_s": float(result["predicted_decode_seconds"]) / (new - 1),
            "disk_gb_per_s": disk / GB, "bound": "; ".join(trace.bound() for trace in traced),
        }
        row["tokens_per_s"] = sequences * new / row["total_s"]
        row["predicted_total_s"] = (row["predicted_prefill_s"]
                                    + (new - 1) * row["predicted_step_s"])
        row["predicted_over_measured"] = row["predicted_total_s"] / row["total_s"]
        compute = self._compute_alone(values)
        for part, phase, count in zip(PARTS, traced, (1, steps), strict=True):
            read = phase.lanes[READ].nbytes / count if READ in phase.lanes else 0.0
            row |= {f"{part}_s": took[part], f"{part}_disk_gb": read / GB,
                    f"{part}_disk_s": read / disk, f"{part}_compute_s": compute[part],
                    f"{part}_over_roofline": took[part] / max(read / disk, compute[part])}
        return row

    def _run(self) -> int:
        """Run the scenario. Return the peak memory of its group, or of its process."""
        command = [sys.executable, "-m", "flexgen_h2o.flex_opt", "--config", str(self._config),
                   "--path", str(self._weights), "--csv", str(self._scratch / "run.csv"),
                   "--trace", str(self._scratch / "run.json"), "--no-log", "--verbose", "1"]
        if self._memory is None:
            call(command)
            return int(self._outcome(self._scratch / "run.csv")[1]["peak_process_bytes"])
        drop_page_cache()
        with MemoryGroup(self._memory) as group:
            call(command, group)
            return group.peak()

    def _outcome(self, path: Path) -> tuple[dict, dict[str, str]]:
        """Return the resolved config of a run and its result row."""
        with open(path, newline="", encoding="utf-8") as file:
            (row,) = csv.DictReader(file)
        return yaml.safe_load(Path(f"{path}.config.yaml").read_text(encoding="utf-8")), row

    def _compute_alone(self, values: dict) -> dict[str, float]:
        """Return seconds of the prefill and of a decode step with weights and cache in memory."""
        sizes = json.loads((self._weights / "config.json").read_text(encoding="utf-8"))
        layers = sizes.get("text_config", sizes)["num_hidden_layers"]
        layer_counts = tuple(min(count, layers) for count in FEW_LAYERS)
        timings = []
        for count in layer_counts * REPEATS:
            folder = self._scratch / f"{count}-layers"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(with_layers(sizes, count)))
            config, result = folder / "run.yaml", folder / "run.csv"
            config.write_text(yaml.safe_dump(values | {
                "model": str(folder), "path": "_DUMMY_", "percent": [100, 0, 100, 0, 100, 0],
                "csv": str(result), "trace": None, "gen_len": STEPS + 1, "cut_gen_len": None}))
            call([sys.executable, "-m", "flexgen_h2o.flex_opt", "--config", str(config)])
            _, row = self._outcome(result)
            timings.append((float(row["prefill_seconds"]), float(row["decode_seconds"]) / STEPS))
            shutil.rmtree(folder)
        typical = [[statistics.median(times) for times in zip(*timings[which::2], strict=True)]
                   for which in range(2)]
        return {part: extended(layer_counts, seconds, layers)
                for part, seconds in zip(PARTS, zip(*typical, strict=True), strict=True)}


def policy_text(values: dict) -> str:
    """Return the policy of a resolved config as flags."""
    percent = " ".join(f"{share:g}" for share in values["percent"])
    return (f"--percent {percent} --gpu-batch-size {values['gpu_batch_size']} "
            f"--num-gpu-batches {values['num_gpu_batches']}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of flex_opt")
    parser.add_argument("--path", type=Path, required=True, help="folder of the weights")
    parser.add_argument("--memory", type=lambda text: parse_size("--memory", text),
                        help="limit of the cgroup, such as 6GB (default: none)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scenarios.csv"))
    args = parser.parse_args(argv)
    check_writable("--out", str(args.out))
    check_header(args.out, COLUMNS, flag="--out")
    with tempfile.TemporaryDirectory() as scratch:
        scenario = MemoryScenario(args.config, args.path, scratch=Path(scratch), memory=args.memory)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        row = {"date": now, "commit": source_commit(), "host": platform.node(),
               "cpu": cpu_model(), **scenario.row()}
    with catch_write_errors("--out", str(args.out)):
        append_row(args.out, COLUMNS, row, flag="--out", digits=4)
    for name, value in row.items():
        print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
