"""Bad flags of benchmarks are refused in one line, before an engine is loaded."""

from __future__ import annotations

import sys

import pytest
from helpers.programs import BENCHMARKS, program

from flexgen_h2o.cli.command import exit_status

INPUT = ["--input-path", "a.jsonl"]


@pytest.mark.parametrize(("name", "flags", "words"), [
    ("plots", ["quality", "--csv", "no.csv", "--out", "a.png"], "cannot read --csv no.csv"),
    ("plots", ["quality", "--csv", "no.csv", "--out", "a.txt"], "--out must name"),
    ("studies/quality", [*INPUT, "--budgets", "101"], "--budgets must be at most 100"),
    ("studies/quality", [*INPUT, "--csv", "./a.jsonl"], "name the same file"),
    ("studies/recall_replay", ["--gen-len", "1"], "--gen-len must be at least 2"),
    ("studies/stream_quality", [*INPUT, "--policies", "h3o"], "--policies must be one of"),
    ("studies/stream_quality", [*INPUT, "--num-window-length", "4"], "leaves no recent tokens"),
])
def test_bad_flags_are_refused(refuses_flags, monkeypatch, name, flags, words):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main = program(f"benchmarks/{name}.py").main

    def run(argv):
        monkeypatch.setattr(sys, "argv", [name, *argv])
        return exit_status(main)

    refuses_flags(run, flags, words)
