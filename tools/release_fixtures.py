"""Write the fixtures of this release: small files of each kind that later releases must read.

    python tools/release_fixtures.py

writes tests/fixtures/releases/VERSION/, which is committed with the release and never changed after
it. tests/test_releases.py reads the folders of all releases.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import fuzz_cases, planning_cases  # noqa: E402
from helpers.servers import flags, request, serving  # noqa: E402

from flexgen_h2o import LLM, Placement, Policy  # noqa: E402
from flexgen_h2o.cli import commands  # noqa: E402
from flexgen_h2o.config.layers import ExpertChoices  # noqa: E402
from flexgen_h2o.config.version import VERSION  # noqa: E402
from flexgen_h2o.engine.expert_counts import save_counts  # noqa: E402
from flexgen_h2o.planning.hardware import save_hardware  # noqa: E402
from flexgen_h2o.serving.store import Batch, Counts, Store, new_id  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures" / "releases"
ARCHIVED = ("model", "cache", "data")
"""Folders that are kept in folders.tar.xz: they are binary, and mostly zeros."""
JOB = ["batch", "-i", "requests.jsonl", "-o", "results.jsonl", "--csv", "rows.csv", "--model",
       "model", "--dtype", "float32", "--device", "cpu", "--offload-dir", "offload"]
"""A job, whose results.jsonl is cut in half."""
PROMPT = [5, 3, 9, 7]


def write_job() -> None:
    """Answer a file of requests, and drop half of the answers, as a kill would."""
    Path("requests.jsonl").write_text("".join(json.dumps(
        {"id": f"r{number}", "prompt": f"w{3 + number} w5", "max_tokens": 4,
         "temperature": number % 2}) + "\n" for number in range(6)))
    if commands.main(JOB):
        sys.exit("the job has failed")
    lines = Path("results.jsonl").read_bytes().splitlines(keepends=True)
    Path("results.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])


def write_copies() -> None:
    """Fill the cache: a copy in another dtype, and quantized weights."""
    for options in ({"policy": Policy(weights=Placement(0, 0, 100))}, {"weight_bits": 4},
                    {"weight_bits": 12}):
        with LLM("model", dtype="float32", offload_dir="offload", **options) as llm:
            llm.generate([PROMPT], max_new_tokens=2)


def write_data() -> None:
    """Write a server's folder with a finished batch, and one that is left."""
    lines = [request(f"r{number}", prompt=f"w{3 + number}", max_tokens=3) for number in range(4)]
    with serving([*flags("model", "data"), "--max-model-len", "32"]) as served:
        done = served.batch(lines, metadata={"kept": "yes"})
        served.wait(done.id)
    store = Store("data")
    batch = Batch(id=new_id("batch_"), endpoint="/v1/completions", model="tiny",
                  input_file_id=done.input_file_id, completion_window="9999d", created_at=1,
                  expires_at=2**40, output_file_id=new_id("file-"), error_file_id=new_id("file-"),
                  request_counts=Counts())
    store.add_batch(batch)
    store.close()
    os.unlink("data/lock")


def main() -> None:
    """Write the folder of this release."""
    platform.node = lambda: "host"
    with tempfile.TemporaryDirectory() as name:
        os.environ["FLEXGEN_H2O_CACHE"] = f"{name}/cache"
        os.chdir(name)
        fuzz_cases.make_model(Path("model"), torch.bfloat16)
        write_job()
        write_copies()
        write_data()
        save_hardware(planning_cases.CPU, "hardware.yaml")
        save_counts(Path("experts.json"), ExpertChoices(((600, 20, 0, 80), ()), 2))
        with tarfile.open("folders.tar.xz", "w:xz") as archive:
            for folder in ARCHIVED:
                archive.add(folder)
                shutil.rmtree(folder)
        target = FIXTURES / VERSION
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(name, target, ignore=shutil.ignore_patterns("offload", "*.log*"))
        os.chdir("/")
    for path in sorted(target.iterdir()):
        print(f"{path.stat().st_size:8} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
