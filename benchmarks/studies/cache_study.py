"""Flags, rates and rows of studies that compare caches of one model."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.policy import OFFLOAD_DIR
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.files.rows import CsvWriter, format_cell, report_partial_rows
from flexgen_h2o.files.writing import check_writable
from flexgen_h2o.metrics.provenance import source_commit
from flexgen_h2o.storage.links import disk_read_rate

RUN_COLUMNS = ("date", "commit", "host", "threads", "torch", "model", "dtype", "prompt_len",
               "gen_len", "batch", "cache")
"""Columns of `run_columns`, with each row's `dtype` and `cache`."""


def parser(text: str, caches: Collection[str], *, model: str, prompt_len: int, gen_len: int,
           batch: int, csv: str) -> argparse.ArgumentParser:
    """Return the parser of a study, with these defaults.

    Parameters
    ----------
    text : str
        The study's docstring, whose first line describes it.
    caches : collection of str
        Choices of ``--caches``.
    """
    flags = argparse.ArgumentParser(description=text.splitlines()[0])
    flags.add_argument("--model", default=model)
    flags.add_argument("--prompt-len", type=int, default=prompt_len)
    flags.add_argument("--gen-len", type=int, default=gen_len)
    flags.add_argument("--batch", type=int, default=batch)
    flags.add_argument("--caches", nargs="+", default=list(caches), choices=list(caches))
    flags.add_argument("--offload-dir", default=None)
    flags.add_argument("--csv", default=csv)
    return flags


def parsed(flags: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the flags of a study. Raises `UserError` for invalid numbers or an unwritable file.
    """
    args = flags.parse_args()
    for name, low in (("prompt_len", 1), ("gen_len", 2), ("batch", 1)):
        check_int(flag_name(name), getattr(args, name), ge=low)
    check_writable("--csv", args.csv)
    return args


def offload_read_rate(offload_dir: str | None) -> float:
    """Return the bytes per second of long O_DIRECT reads in a folder (default: the disk tier's)."""
    place = Path(offload_dir or OFFLOAD_DIR).expanduser()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place) as file:
        file.write(os.urandom(1 << 28))
        file.flush()
        os.fsync(file.fileno())
        return disk_read_rate(Path(file.name))


def write_rows(args: argparse.Namespace, columns: Sequence[str],
               rows: Iterable[Mapping[str, object]]) -> None:
    """Write each row at once and print it; a stopped run keeps its rows."""
    file = CsvWriter(args.csv, columns)
    with report_partial_rows(file):
        for row in rows:
            file.write({name: format_cell(row[name], digits=4) for name in columns})
            print(dict(row), flush=True)
    file.finish()


def full_first(caches: Collection[str]) -> list[str]:
    """Return the names of caches, the full one first."""
    return sorted(caches, key=lambda name: name != "full")


def run_columns(args: argparse.Namespace) -> dict[str, object]:
    """Return the columns of date, versions, machine and flags."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": source_commit(), "host": platform.node(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "model": args.model, "prompt_len": args.prompt_len,
        "gen_len": args.gen_len, "batch": args.batch}
