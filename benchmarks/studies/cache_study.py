"""Flags, rates and rows of studies that set several caches of one model beside each other."""

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
from flexgen_h2o.files.rows import RowsFile, cell, keeping
from flexgen_h2o.files.writing import check_writable
from flexgen_h2o.metrics.provenance import source_commit
from flexgen_h2o.storage.links import disk_read_rate

RUN_COLUMNS = ("date", "commit", "host", "threads", "torch", "model", "dtype", "prompt_len",
               "gen_len", "batch", "cache")
"""Columns of `run_columns`, with each row's `dtype` and `cache`."""


def parser(text: str, caches: Collection[str], *, model: str, prompt_len: int, gen_len: int,
           batch: int, csv: str) -> argparse.ArgumentParser:
    """The flags of a study: what is run, by these defaults, and where rows are written.

    Parameters
    ----------
    text : str
        The study's docstring, whose first line describes it.
    caches : collection of str
        Names that ``--caches`` takes.
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
    """The values of a study's flags.

    Raises `UserError` for numbers of which no figures would come, and for rows that could not be
    written.
    """
    args = flags.parse_args()
    for name, low in (("prompt_len", 1), ("gen_len", 2), ("batch", 1)):
        check_int(flag_name(name), getattr(args, name), low=low)
    check_writable("--csv", args.csv)
    return args


def offload_read_rate(offload_dir: str | None) -> float:
    """Bytes per second of long O_DIRECT reads in a folder; None: the one of the disk tier."""
    place = Path(offload_dir or OFFLOAD_DIR).expanduser()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place) as file:
        file.write(os.urandom(1 << 28))
        file.flush()
        os.fsync(file.fileno())
        return disk_read_rate(Path(file.name))


def write_rows(args: argparse.Namespace, columns: Sequence[str],
               rows: Iterable[Mapping[str, object]]) -> None:
    """Write the rows as they come, and print them; those of a run that is stopped stay."""
    file = RowsFile(args.csv, columns)
    with keeping(file):
        for row in rows:
            file.write({name: cell(row[name], digits=4) for name in columns})
            print(dict(row), flush=True)
    file.finish()


def full_first(caches: Collection[str]) -> list[str]:
    """The names of caches, with that of the full one, which others are compared with, in front."""
    return sorted(caches, key=lambda name: name != "full")


def run_columns(args: argparse.Namespace) -> dict[str, object]:
    """When, with what and on which machine the flags' runs were done."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": source_commit(), "host": platform.node(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "model": args.model, "prompt_len": args.prompt_len,
        "gen_len": args.gen_len, "batch": args.batch}
