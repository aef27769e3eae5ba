"""Run the engine over a grid of flags, into one CSV file.

    python benchmarks/sweep.py --config configs/sweep_batch.yaml --out sweep_batch.csv

A config has `base`, the flags of every run, named as in `flex_opt --config`; `grid`, whose product
is run, the last key fastest; and `repeats`. A key of the grid is a flag with a list of values, or a
label whose names stand for several flags each. Each run is a separate process; all cells are run
once, then again. A cell that does not fit, times out or fails is a row with a reason and without
figures, and is not repeated. Each row is written when it is measured, and the same command
resumes a stopped sweep.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from csv_files import ResumableCsv
from msgspec import Meta
from processes import OK, Outcome, run_engine
from tqdm import tqdm

from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.cli.launch import read_prompts
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.results import CSV_COLUMNS
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag_name, load_yaml
from flexgen_h2o.config.validation import Count, StrictStruct, check_int, validate
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import format_flag_value, report_partial_rows
from flexgen_h2o.metrics.provenance import origin
from flexgen_h2o.metrics.report import align_columns
from flexgen_h2o.metrics.trace import GB

Run = Callable[[RunConfig], Outcome]
FIGURES = ("total_tokens_per_second", "decode_tokens_per_second", "prefill_seconds",
           "decode_seconds", "peak_process_bytes")
"""Columns whose medians are shown at the end."""
PLACE = ("sweep", "flags", "repeat")
"""Columns that identify a run."""
ENDING = ("status", "reason")
NOT_SWEPT = ("config", "plan_only", "hardware", "output", "csv", "trace", "log_file", "no_log",
             "verbose", "debug_mode")
"""Flags of files and printing, which a sweep sets itself, and of runs that compute nothing."""


@dataclass(frozen=True)
class Cell:
    """A point of the grid."""

    sweep: str  # the sweep's name
    axes: Mapping[str, str]  # each key of the grid and its value, as in the CSV file
    given: Mapping[str, object]  # the flags of the config, with checked values
    config: RunConfig  # all flags

    @property
    def label(self) -> str:
        """The grid values in short."""
        return _label(self.axes)

    @property
    def flags(self) -> str:
        """The given values as command-line arguments."""
        words: list[str] = []
        for name, value in self.given.items():
            several = value if isinstance(value, tuple) else () if value is None else (value,)
            texts = [str(each).lower() if isinstance(each, bool) else str(each)
                     for each in several]
            if name == "prompt":
                words += [word for text in texts for word in (flag_name(name), text)]
            elif texts:
                words += [flag_name(name), *texts]
        return shlex.join(words)

    def place(self, repeat: int) -> dict[str, object]:
        """Return the columns `PLACE` of a run."""
        return {"sweep": self.sweep, "flags": self.flags, "repeat": repeat}


@dataclass(frozen=True)
class Sweep:
    """A config: its file name without suffix, the cells in order, and the runs of each cell."""

    name: str
    cells: tuple[Cell, ...]
    repeats: int

    @property
    def axes(self) -> tuple[str, ...]:
        """The keys of the grid."""
        return tuple(self.cells[0].axes)


class _SweepFile(StrictStruct):
    grid: Annotated[dict[str, Any], Meta(min_length=1)]
    base: dict[str, Any] = {}
    repeats: Count = 1


def load(path: Path, *, models: Path) -> Sweep:
    """Read and check a file.

    Raises `UserError` if the file cannot be read, a key is unknown, a value is invalid, or the
    flags of a cell contradict each other.

    `models`: folder that is searched for the model.
    """
    file = validate(_SweepFile, load_yaml(path), str(path))
    base = file.base
    try:
        _check_swept("base", base)
        axes = {name: _axis(name, spec) for name, spec in file.grid.items()}
        _check_apart(base, axes)
        cells = tuple(_cell(path.stem, base, dict(zip(axes, point, strict=True)),
                            models=models)
                      for point in itertools.product(*axes.values()))
        _check_different(cells)
        for prompts in {cell.config.prompts for cell in cells} - {None}:
            read_prompts(prompts)
        return Sweep(path.stem, cells, file.repeats)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


@dataclass(frozen=True)
class _Value:
    """A value of an axis: a group of flags, with or without a name."""

    shown: str
    flags: Mapping[str, object]
    named: bool


def _axis(name: str, spec: object) -> list[_Value]:
    """Return the values of a grid key: a list for a flag, names with flags for a label."""
    is_flag = name in {spec.name for spec in fields(RunConfig)}
    if not spec or not isinstance(spec, (list, dict)):
        raise UserError(f"grid: {name} takes a list of values" if is_flag else
                        f"grid: {name} takes a list if it is a flag, or names with flags each")
    if isinstance(spec, list):
        _check_swept("grid", {name: spec})
        return [_Value(str(value), {name: value}, named=False) for value in spec]
    if is_flag or name in (*CSV_COLUMNS, *PLACE, *ENDING):
        raise UserError(f"grid: {name} is {'a flag' if is_flag else 'a column'} and can't be the "
                        "label of names")
    for key, flags in spec.items():
        if not isinstance(key, str) or not isinstance(flags, dict):
            raise UserError(f"grid: {name}: {key!r} must be a text (in quotes if need be) that "
                            "stands for flags, as in {hh_ratio: 0.1}")
        _check_swept(f"grid: {name}: {key}", flags)
    return [_Value(key, flags, named=True) for key, flags in spec.items()]


def _check_swept(where: str, flags: Mapping[str, object]) -> None:
    for name in flags:
        if name in NOT_SWEPT:
            raise UserError(f"{where}: {name} has no place in a sweep, which writes one row a run")


def _check_apart(base: Mapping[str, object], axes: Mapping[str, list[_Value]]) -> None:
    """Refuse a flag that two grid keys set, or that the base sets without effect."""
    owners: dict[str, str] = {}
    for axis, values in axes.items():
        for name in dict.fromkeys(name for value in values for name in value.flags):
            if owners.setdefault(name, axis) != axis:
                raise UserError(f"grid: {owners[name]} and {axis} both set {name}")
            if name in base and all(name in value.flags for value in values):
                raise UserError(f"base: all of the grid's {axis} set {name}: leave it out here")


def _cell(sweep: str, base: Mapping[str, object], point: Mapping[str, _Value], *, models: Path
          ) -> Cell:
    """Return a point of the grid: the flags of its values override the flags of the base."""
    flags = dict(base)
    for value in point.values():
        flags |= value.flags
    try:
        config = RunConfig.from_mapping(flags)
        values = {name: getattr(config, name) for name in flags}
        if config.path is None and (models / config.model).is_dir():
            config = RunConfig.from_mapping(flags | {"path": str(models / config.model)})
    except UserError as error:
        shown = _label({axis: value.shown for axis, value in point.items()})
        raise UserError(f"cell {shown}: {error}") from None
    axes = {axis: value.shown if value.named else str(format_flag_value(values[axis]))
            for axis, value in point.items()}
    return Cell(sweep, axes, values, config)


def _check_different(cells: tuple[Cell, ...]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.flags, cell)
        if other is not cell:
            raise UserError(f"cells {other.label} and {cell.label} are the same")


def _label(axes: Mapping[str, str]) -> str:
    return " ".join(f"{axis}={value}" for axis, value in axes.items())


def columns(sweeps: Sequence[Sweep]) -> tuple[str, ...]:
    """Return the columns of the CSV file: the run, grid keys without a result column, results."""
    axes = dict.fromkeys(axis for sweep in sweeps for axis in sweep.axes)
    return (*PLACE, *(axis for axis in axes if axis not in CSV_COLUMNS), *CSV_COLUMNS, *ENDING)


def row_of(cell: Cell, repeat: int, outcome: Outcome) -> dict[str, object]:
    """Return the row of a run. A failed run has its given flags and no figures."""
    row: dict[str, object] = dict.fromkeys(CSV_COLUMNS)
    if outcome.status == OK:
        row |= outcome.row
    else:
        row |= origin() | {name: format_flag_value(value) for name, value in cell.given.items()
                           if name in CSV_COLUMNS}
    row |= {axis: text for axis, text in cell.axes.items() if axis not in CSV_COLUMNS}
    return row | cell.place(repeat) | {"status": outcome.status, "reason": outcome.reason}


def runs_of(cell: Cell, repeats: int, table: ResumableCsv) -> list[dict[str, str] | None]:
    """Return a cell's rows by repeat; None where one is missing."""
    return [table.find(cell.place(repeat)) for repeat in range(1, repeats + 1)]


def to_run(sweeps: Sequence[Sweep], table: ResumableCsv, *, retry_failed: bool
           ) -> list[tuple[Cell, int]]:
    """Return the missing (cell, repeat) pairs of cells that have not failed."""
    todo = []
    for sweep in sweeps:
        for repeat in range(1, sweep.repeats + 1):
            for cell in sweep.cells:
                rows = runs_of(cell, sweep.repeats, table)
                recorded = rows[repeat - 1]
                failed = any(row is not None and row["status"] != OK for row in rows)
                if (recorded is None or recorded["status"] != OK) and (retry_failed or not failed):
                    todo.append((cell, repeat))
    return todo


def measure(todo: Sequence[tuple[Cell, int]], table: ResumableCsv, run: Run) -> None:
    """Run the pairs, and add a row for each."""
    failed = set()
    with tqdm(total=len(todo), unit="run", disable=None) as bar:
        for cell, repeat in todo:
            if (cell.sweep, cell.flags) in failed:
                bar.total -= 1
                continue
            bar.set_description(f"{cell.label}, repeat {repeat}")
            outcome = run(cell.config)
            table.add(dict.fromkeys(table.columns) | row_of(cell, repeat, outcome))
            if outcome.status != OK:
                failed.add((cell.sweep, cell.flags))
            said = f"{outcome.status}: {outcome.reason}" if outcome.status != OK else (
                f"{outcome.row['total_tokens_per_second']} tokens/s")
            bar.write(f"{cell.label}, repeat {repeat}: {said}", file=sys.stderr)
            bar.update()


def summary(sweep: Sweep, table: ResumableCsv) -> str:
    """Return the medians of each cell, or why there are none, as an aligned table."""
    lines = [(*sweep.axes, "runs", "tokens/s", "decode tokens/s", "prefill s", "decode s",
              "peak GB")]
    for cell in sweep.cells:
        rows = [row for row in runs_of(cell, sweep.repeats, table) if row is not None]
        good = [row for row in rows if row["status"] == OK]
        lines.append((*cell.axes.values(), str(len(good)), *(
            figures(good) if good else (rows[-1]["status"], "", "", "", ""))))
    return f"{sweep.name}\n{align_columns(lines)}"


def figures(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the medians of the columns `FIGURES`; projected ones are marked."""
    texts = []
    for name in FIGURES:
        values = [float(row[name]) for row in rows if row[name]]
        unit = GB if name.endswith("bytes") else 1
        texts.append(f"{statistics.median(values) / unit:.4g}" if values else "")
    if any(row["projected"] == "true" for row in rows):
        texts[0] += " (projected)"
    return texts


def read_sweeps(paths: Sequence[Path], models: Path) -> list[Sweep]:
    """Read several configs. Raises `UserError`, also for two of the same name."""
    sweeps = [load(path, models=models) for path in paths]
    names = [sweep.name for sweep in sweeps]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--config: two files are called {name}: rename one")
    return sweeps


def check_rows(out: str, table: ResumableCsv, sweeps: Sequence[Sweep]) -> None:
    """Refuse a file with rows of runs that are not of these sweeps."""
    known = {(sweep.name, cell.flags) for sweep in sweeps for cell in sweep.cells}
    for row in table.rows():
        if (row["sweep"], row["flags"]) not in known:
            raise UserError(f"--out {out} has a run that is not of this config ({row['sweep']}: "
                            f"{row['flags']}): choose another")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config", type=Path, nargs="+", required=True,
                        default=argparse.SUPPRESS, help="YAML file")
    parser.add_argument("--out", required=True, default=argparse.SUPPRESS,
                        help="CSV file; an existing one is continued")
    parser.add_argument("--models", type=Path, default=Path("."),
                        help="folder of model folders; other models are fetched")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds of one run")
    parser.add_argument("--retry-failed", action="store_true",
                        help="run cells again that did not fit, timed out or failed")
    args = parser.parse_args(argv)
    check_int("--timeout", args.timeout, ge=1)
    sweeps = read_sweeps(args.config, args.models)
    out = os.path.expanduser(args.out)
    table = ResumableCsv(out, columns(sweeps), PLACE)
    check_rows(out, table, sweeps)
    todo = to_run(sweeps, table, retry_failed=args.retry_failed)
    with report_partial_rows(table.file):
        measure(todo, table, partial(run_engine, timeout=args.timeout))
    table.finish()
    print("\n\n".join(summary(sweep, table) for sweep in sweeps))
    rows = table.rows()
    if all(row["status"] != OK for row in rows):
        raise UserError(f"no run came to figures, the first by this: {rows[0]['reason']} (rows: "
                        f"{out})")


if __name__ == "__main__":
    sys.exit(exit_status(main))
