"""Measure the resident memory of a process that imports the package and runs a tiny model.

    python benchmarks/studies/resident.py

Rows of stages have the anonymous memory and the mapped file pages, which processes share, of a new
process by `/proc/self/status`. An earlier process has brought the libraries into the page cache.
Further rows have the modules with the longest import times (`python -X importtime`), cumulative.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import write_csv
from flexgen_h2o.metrics.provenance import cpu_model, source_commit
from flexgen_h2o.models import family
from flexgen_h2o.models.dummy import DummyCheckpoint
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.models.safetensors_io import write_safetensors

MB = 10**6
COLUMNS = ("commit", "cpu", "python", "torch", "kind", "name", "resident_mb", "anonymous_mb",
           "file_mb", "modules", "seconds")
TINY = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "torch_dtype": "bfloat16"}
STAGES = """
import json, sys

def note(stage):
    sizes = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("R"))
    found = [int(sizes[key].split()[0]) << 10 for key in ("RssAnon", "RssFile")]
    print(json.dumps([stage, *found, len(sys.modules)]), flush=True)

note("python")
import flexgen_h2o
note("import flexgen_h2o")
from flexgen_h2o import LLM
note("from flexgen_h2o import LLM")
with LLM(sys.argv[1], device="cpu", progress=False) as llm:
    note("an LLM of a tiny model")
    llm.generate([[5, 6, 7]], max_new_tokens=8, eos_token_id=-1)
    note("after its first tokens")
"""


def write_tiny(folder: Path) -> None:
    """Write a tiny LLaMA with seeded random weights."""
    (folder / "config.json").write_text(json.dumps(TINY))
    config = from_transformers(TINY, "tiny")
    weights = family(config).weights(config)
    shapes = {spec.name: spec.shape for group in weights.groups() for spec in group.values()}
    dummy = DummyCheckpoint(shapes, torch.bfloat16, seed=0)

    def whole(name: str) -> Iterator[torch.Tensor]:
        tensor = torch.empty(shapes[name], dtype=torch.bfloat16)
        dummy.read(name, tensor)
        yield tensor

    write_safetensors(folder / "model.safetensors",
                      {name: (torch.bfloat16, shape) for name, shape in shapes.items()}, whole)


def ran(flags: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the stages in a separate process."""
    done = subprocess.run([sys.executable, *flags, "-c", STAGES, str(folder)],
                          capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the tiny model failed: {done.stderr[-400:]}")
    return done


def rows(top: int) -> Iterator[dict[str, object]]:
    """Yield a row for each stage and for each of the longest imports."""
    common = {"commit": source_commit(), "cpu": cpu_model(),
              "python": sys.version.split()[0], "torch": torch.__version__}
    with tempfile.TemporaryDirectory(prefix="resident-") as name:
        folder = Path(name)
        write_tiny(folder)
        ran([], folder)
        stages = [json.loads(line) for line in ran([], folder).stdout.splitlines()]
        imports = ran(["-X", "importtime"], folder).stderr
    for stage, anonymous, mapped, modules in stages:
        yield common | {"kind": "stage", "name": stage, "modules": modules,
                        "resident_mb": (anonymous + mapped) / MB, "anonymous_mb": anonymous / MB,
                        "file_mb": mapped / MB}
    imported = re.findall(r"^import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)$", imports, re.MULTILINE)
    for microseconds, module in sorted(imported, key=lambda pair: -int(pair[0]))[:top]:
        yield common | {"kind": "import", "name": module, "seconds": int(microseconds) / 1e6}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--top", type=int, default=25, help="imports to show")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/resident.csv"))
    args = parser.parse_args(argv)
    table = list(rows(args.top))
    write_csv(args.out, COLUMNS, table)
    for row in table:
        figure = (f"{row['resident_mb']:7.1f} MB" if row["kind"] == "stage"
                  else f"{row['seconds']:7.3f} s ")
        print(f"{figure}  {row['name']}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
