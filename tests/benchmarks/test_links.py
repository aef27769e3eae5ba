"""benchmarks/links.py: rows and cleanup."""

import csv
import os

import pytest
import torch
from helpers.error_cases import command_refused
from helpers.programs import benchmark_modules

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.storage.tiers import PAGE


@pytest.fixture
def links():
    with benchmark_modules("links") as found:
        yield found.links


@pytest.fixture
def no_odirect(tmp_path):
    """Skips where the file system of tests refuses O_DIRECT."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(PAGE))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of temporary files refuses O_DIRECT")


def test_quick_run_writes_a_row_for_each_link(links, tmp_path, no_odirect, tiny_model,
                                                          capsys):
    out, offload = tmp_path / "new" / "links.csv", tmp_path / "offload"
    links.main(["--model", str(tiny_model("opt").folder), "--offload-dir", str(offload),
                "--quick", "--out", str(out)])
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(links.COLUMNS)
    expected = ["disk->cpu", "cpu->disk"] * 2
    if torch.cuda.is_available():
        expected += ["cpu->gpu", "gpu->cpu"]
    assert [row["link"] for row in rows] == [*expected, "host memory"]
    assert all(row["host"] and row["date"] and float(row["raw_gb_per_s"]) > 0 for row in rows)
    for row in rows[:-1]:
        assert float(row["engine_gb_per_s"]) > 0 and float(row["engine_over_raw"]) > 0
    assert not list(offload.iterdir())
    assert "page cache bypassed" in capsys.readouterr().out


@pytest.mark.parametrize("flags, message", [
    ([], "--model"),
    (["--model", "{tmp}/none"], "is not a folder"),
    (["--model", "{tmp}", "--repeats", "0"], "--repeats 0"),
    (["--model", "{model}", "--file", "{tmp}/x"], "cannot read --file"),
    (["--model", "{model}", "--out", "{tmp}"], "is not a regular file"),
])
def test_bad_input_is_one_line(links, tmp_path, tiny_model, capsys, flags, message):
    places = {"tmp": tmp_path, "model": tiny_model("opt").folder}
    given = [flag.format(**places) for flag in flags]
    command_refused(lambda argv: exit_status(lambda: links.main(argv)), capsys,
                    [*given, "--quick"], message)
