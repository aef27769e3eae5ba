"""Compiled GPU kernels, without a GPU: every variant is listed and fits."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest
from helpers.programs import ROOT, benchmark_modules
from helpers.subprocesses import environment

RESULTS = ROOT / "benchmarks" / "results" / "gpu_static.csv"
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def bench():
    with benchmark_modules("studies.gpu_compiler") as found:
        yield found


@pytest.fixture(scope="module")
def rows():
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check(path, *options) -> subprocess.CompletedProcess:
    """In a process of its own: this one's kernels are the interpreter's."""
    return subprocess.run(
        [sys.executable, "benchmarks/studies/gpu_static.py", "--check", "--csv", str(path),
         *options], cwd=ROOT, env=environment(), capture_output=True, text=True)


@pytest.mark.full
def test_every_variant_is_listed_and_some_compile_as_listed():
    done = check(RESULTS, "--sample", "9")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_a_row_that_is_missing_or_wrong_is_found(rows, tmp_path):
    """Left out, spilling, beyond the card's shared memory, and with products under way."""
    changed = [dict(row) for row in rows]
    changed[1]["spill_stores"], changed[2]["shared"] = "8", "300000"
    changed[3]["left_under_way"] = "3"
    path = tmp_path / "gpu_static.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(changed[1:])
    done = check(path, "--sample", "0")
    assert done.returncode == 1
    lines = sorted(done.stdout.splitlines())
    assert [line.startswith("missing:") for line in lines].count(True) == 1
    assert sum("spills 8 + 0 bytes" in line for line in lines) == 1
    assert sum("takes 300000 of " in line for line in lines) == 1
    assert sum("may write registers" in line for line in lines) == 1 and len(lines) == 4


def test_all_that_the_engine_uses_is_compiled_for_every_card(rows, bench):
    for architecture, card in bench.gpu_compiler.CARDS.items():
        mine = [row for row in rows if row["architecture"] == f"sm_{architecture}"]
        assert {row["card"] for row in mine} == {card.name}
        units = {"_forward", "_sum_columns", "_narrow", "_wide"}  # they need matrix units
        assert {row["kernel"] for row in mine} == {
            "_read", "read_codes", "_score_part", "_finish", "_choose", "_gather", "_quantize",
            "_dequantize", "_skinny", "_add_parts", "_unpack", "_multiply_floats",
            "_unpack_floats", "_index", "_round_queries", "_logits", "_weigh", "_claim", "_copy",
            *(units if architecture >= 80 else ())}
        assert not [row for row in mine if row["kernel"] in units and row["dtype"] == "float32"]
        decodes = {(row["dtype"], row["size"], row["bits"])
                   for row in mine if row["kernel"] in ("_read", "read_codes")}
        assert decodes == {(dtype, size, bits) for dtype in ("float16", "bfloat16", "float32")
                           for size in ("64", "80", "96", "128", "256")
                           for bits in ("16", "8", "4")}


@pytest.mark.parametrize(("architecture", "registers", "shared", "warps", "together"), [
    (80, 32, 0, 4, 16),
    (90, 255, 0, 8, 1),
    (75, 32, 65536, 4, 1),
    (75, 32, 65537, 4, 0),
    (80, 33, 0, 32, 1),
])
def test_occupancy(bench, architecture, registers, shared, warps, together):
    """By hand: warps, registers in steps of 8 a thread, programs, shared memory."""
    card = bench.gpu_compiler.CARDS[architecture]
    assert card.together(registers, shared, warps) == together
