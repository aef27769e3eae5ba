"""benchmarks/links.py: rows and cleanup."""

from __future__ import annotations

import os

import pytest
import torch
from helpers.programs import benchmark_modules
from helpers.read_back import read_csv

from flexgen_h2o.storage.tiers import PAGE


@pytest.fixture
def odirect(tmp_path):
    """Skip where the file system of tests refuses O_DIRECT."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(PAGE))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of temporary files refuses O_DIRECT")


def test_quick_run_writes_a_row_for_each_link(odirect, tmp_path, tiny_model):
    out, offload = tmp_path / "new" / "links.csv", tmp_path / "offload"
    with benchmark_modules("links") as modules:
        modules.links.main(["--model", str(tiny_model("opt").folder), "--offload-dir",
                            str(offload), "--quick", "--out", str(out)])
        rows = read_csv(out)
        assert tuple(rows[0]) == tuple(modules.links.COLUMNS)
    links = ["disk->cpu", "cpu->disk"] * 2
    links += ["cpu->gpu", "gpu->cpu"] if torch.cuda.is_available() else []
    assert [row["link"] for row in rows] == [*links, "host memory"]
    assert all(float(row["raw_gb_per_s"]) > 0 for row in rows)
    assert all(float(row["engine_over_raw"]) > 0 for row in rows[:-1])
    assert not list(offload.iterdir())
