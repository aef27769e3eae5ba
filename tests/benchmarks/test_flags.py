"""Flags of benchmarks that could give no figures are refused before a run."""

from __future__ import annotations

import sys

import pytest
from helpers.programs import program

from flexgen_h2o.cli.command import exit_status


@pytest.mark.parametrize(("name", "flags", "words"), [
    ("recall_replay.py", ["--gen-len", "1"], "--gen-len must be at least 2, got 1"),
    ("machines.py", ["--repeats", "0"], "--repeats must be at least 1, got 0"),
])
def test_flags_are_refused(monkeypatch, capsys, name, flags, words):
    monkeypatch.setattr(sys, "argv", [name, *flags])
    module = program(f"benchmarks/studies/{name}")
    assert exit_status(module.main) == 2 and words in capsys.readouterr().err
