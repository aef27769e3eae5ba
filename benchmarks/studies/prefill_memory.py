"""Measure the memory of a long prefill above the loaded weights, by cache and chunk.

    python benchmarks/studies/prefill_memory.py --lengths 4096 16384

Each row is a separate process with smollm2-135m and a raised context limit, which affects neither
memory nor time. `least_mb` is the lower bound: kept keys and values, and those of the prompt if
there are chunks, or its hidden states if not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import CsvWriter, format_cell, report_partial_rows
from flexgen_h2o.files.writing import check_writable

CACHES = (("full", None), ("full", 512), ("h2o 20 %", None), ("h2o 20 %", 512))
"""Cache names, and tokens of a chunk."""
COLUMNS = ("prompt_len", "cache", "prefill_chunk", "peak_above_weights_mb", "least_mb",
           "kv_cache_mb", "scores_matrix_mb", "prefill_seconds", "prefill_tokens_per_second")


def measure(length: int, cache: str, chunk: int | None) -> dict:
    """Measure one row in this process."""
    from flexgen_h2o import LLM, H2OConfig, Policy
    from flexgen_h2o.models import checkpoint_folder

    h2o = H2OConfig(heavy_ratio=0.1) if cache == "h2o 20 %" else None
    with tempfile.TemporaryDirectory() as folder:
        for file in Path(checkpoint_folder("smollm2-135m")).iterdir():
            if file.suffix == ".safetensors":
                (Path(folder) / file.name).symlink_to(file)
            else:
                shutil.copyfile(file, Path(folder) / file.name)
        config = json.loads((Path(folder) / "config.json").read_text())
        (Path(folder) / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": 1 << 20}))
        with LLM(folder, policy=Policy(prefill_chunk=chunk), h2o=h2o, progress=False) as llm:
            rng = random.Random(0)
            llm.generate([[rng.randrange(3, 40000) for _ in range(64)]], max_new_tokens=3)
            loaded = _status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            prompt = [rng.randrange(3, 40000) for _ in range(length)]
            llm.generate([prompt], max_new_tokens=4, eos_token_id=-1)
            shape, stats = llm.model_config, llm.stats
    itemsize = stats.kv_bytes_per_token // shape.kv_bytes_per_token(1)
    cache_bytes = stats.kv_cache_bytes
    if chunk is None:
        cache_bytes += length * shape.hidden_size * itemsize
    elif h2o is not None:
        cache_bytes += length * stats.kv_bytes_per_token
    return dict(zip(COLUMNS, (
        length, cache, chunk or "", (_status("VmHWM") - loaded) / 1e6, cache_bytes / 1e6,
        stats.kv_cache_bytes / 1e6, shape.num_heads * length**2 * 4 / 1e6, stats.prefill_seconds,
        length / stats.prefill_seconds), strict=True))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--csv", default="benchmarks/results/prefill_memory.csv")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*json.loads(args.one))))
        return
    for length in args.lengths:
        check_int("--lengths", length, ge=1)
    check_writable("--csv", args.csv)
    file = CsvWriter(args.csv, COLUMNS)
    with report_partial_rows(file):
        for length in args.lengths:
            for cache, chunk in CACHES:
                row = measured(length, cache, chunk)
                file.write({name: format_cell(value, digits=5) for name, value in row.items()})
                print({key: round(value, 1) if isinstance(value, float) else value
                       for key, value in row.items()}, flush=True)
    file.finish()


def measured(length: int, cache: str, chunk: int | None) -> dict:
    """Measure one row in a new process. Raises `UserError` on failure."""
    done = subprocess.run([sys.executable, __file__, "--one", json.dumps([length, cache, chunk])],
                          capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{length} tokens, {cache}, chunk {chunk or 'none'} failed, status "
                        f"{done.returncode}: {done.stderr[-400:].removeprefix('error: ')}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(exit_status(main))
