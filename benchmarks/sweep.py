"""Runs of the engine over a grid of any flags, into one CSV file.

    python benchmarks/sweep.py --config configs/sweep_batch.yaml --out sweep_batch.csv

A config has `base`, the flags of every run, named as `flex_opt --config` takes them; `grid`, whose
product is run, the last key fastest; and `repeats`. A key of the grid is a flag with a list of
values, or a label whose names stand for several flags each. Every run is a process of its own; all
cells are run once, then again. A cell that does not fit, takes too long or fails is a row with its
reason and no figures, and is not repeated. Rows are on disk as they come, and the same command goes
on where it was stopped.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from shared.engine_run import OK, Outcome, run_engine
from sweeping.grid import ENDING, PLACE, Cell, Sweep, load
from tqdm import tqdm

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.results import CSV_COLUMNS
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import RowTable, csv_cell, keeping
from flexgen_h2o.metrics.provenance import origin
from flexgen_h2o.metrics.report import align_columns
from flexgen_h2o.metrics.trace import GB

Run = Callable[[RunConfig], Outcome]
FIGURES = ("total_tokens_per_second", "decode_tokens_per_second", "prefill_seconds",
           "decode_seconds", "peak_process_bytes")
"""Columns whose medians are shown at the end."""


def columns(sweeps: Sequence[Sweep]) -> tuple[str, ...]:
    """Columns of the CSV file: which run it is, what of the grid results have no column for, the
    rest."""
    axes = dict.fromkeys(axis for sweep in sweeps for axis in sweep.axes)
    return (*PLACE, *(axis for axis in axes if axis not in CSV_COLUMNS), *CSV_COLUMNS, *ENDING)


def row_of(cell: Cell, repeat: int, outcome: Outcome) -> dict[str, object]:
    """A run's row but for other sweeps' keys. One that failed has what was asked for, no figures.
    """
    row: dict[str, object] = dict.fromkeys(CSV_COLUMNS)
    if outcome.status == OK:
        row |= outcome.row
    else:
        row |= origin() | {name: csv_cell(value) for name, value in cell.given.items()
                           if name in CSV_COLUMNS}
    row |= {axis: text for axis, text in cell.axes.items() if axis not in CSV_COLUMNS}
    return row | cell.place(repeat) | {"status": outcome.status, "reason": outcome.reason}


def runs_of(cell: Cell, repeats: int, table: RowTable) -> list[dict[str, str] | None]:
    """The rows that a table has of a cell, None where it lacks one."""
    return [table.find(cell.place(repeat)) for repeat in range(1, repeats + 1)]


def to_run(sweeps: Sequence[Sweep], table: RowTable, *, retry_failed: bool
           ) -> list[tuple[Cell, int]]:
    """Cells, and which of their repeats: what the table lacks, of cells that have not failed."""
    found = []
    for sweep in sweeps:
        for repeat in range(1, sweep.repeats + 1):
            for cell in sweep.cells:
                rows = runs_of(cell, sweep.repeats, table)
                mine = rows[repeat - 1]
                failed = any(row is not None and row["status"] != OK for row in rows)
                if (mine is None or mine["status"] != OK) and (retry_failed or not failed):
                    found.append((cell, repeat))
    return found


def measure(todo: Sequence[tuple[Cell, int]], table: RowTable, run: Run) -> None:
    """Run what is to be run, and add a row for each."""
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


def summary(sweep: Sweep, table: RowTable) -> str:
    """Medians of each cell as aligned text, or why there are none."""
    lines = [(*sweep.axes, "runs", "tokens/s", "decode tokens/s", "prefill s", "decode s",
              "peak GB")]
    for cell in sweep.cells:
        rows = [row for row in runs_of(cell, sweep.repeats, table) if row is not None]
        good = [row for row in rows if row["status"] == OK]
        lines.append((*cell.axes.values(), str(len(good)), *(
            figures(good) if good else (rows[-1]["status"], "", "", "", ""))))
    return f"{sweep.name}\n{align_columns(lines)}"


def figures(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Medians of the columns `FIGURES`; a projected one says so."""
    texts = []
    for name in FIGURES:
        values = [float(row[name]) for row in rows if row[name]]
        unit = GB if name.endswith("bytes") else 1
        texts.append(f"{statistics.median(values) / unit:.4g}" if values else "")
    if any(row["projected"] == "true" for row in rows):
        texts[0] += " (projected)"
    return texts


def read_sweeps(paths: Sequence[Path], models: Path) -> list[Sweep]:
    """The sweeps of several files. Raises `UserError`, also for two of one name."""
    sweeps = [load(path, models=models) for path in paths]
    names = [sweep.name for sweep in sweeps]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--config: two files are called {name}: rename one")
    return sweeps


def check_rows(out: str, table: RowTable, sweeps: Sequence[Sweep]) -> None:
    """Refuse a file with rows of runs that are not of these sweeps, before it is added to."""
    known = {(sweep.name, cell.flags) for sweep in sweeps for cell in sweep.cells}
    for row in table.rows():
        if (row["sweep"], row["flags"]) not in known:
            raise UserError(f"--out {out} has a run that is not of this config ({row['sweep']}: "
                            f"{row['flags']}): choose another")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config", type=Path, nargs="+", required=True, help="of the sweep, YAML")
    parser.add_argument("--out", required=True,
                        help="CSV file, which is gone on with where it is there")
    parser.add_argument("--models", type=Path, default=Path("."),
                        help="folder that holds models' folders; other names are fetched")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds of one run")
    parser.add_argument("--retry-failed", action="store_true",
                        help="run again what did not fit, took too long or failed")
    args = parser.parse_args(argv)
    check_int("--timeout", args.timeout, low=1)
    sweeps = read_sweeps(args.config, args.models)
    out = os.path.expanduser(args.out)
    table = RowTable(out, columns(sweeps), PLACE)
    check_rows(out, table, sweeps)
    todo = to_run(sweeps, table, retry_failed=args.retry_failed)
    with keeping(table.file):
        measure(todo, table, partial(run_engine, timeout=args.timeout))
    table.finish()
    print("\n\n".join(summary(sweep, table) for sweep in sweeps))
    rows = table.rows()
    if all(row["status"] != OK for row in rows):
        raise UserError(f"no run came to figures, the first by this: {rows[0]['reason']} (rows: "
                        f"{out})")


if __name__ == "__main__":
    sys.exit(exit_status(main))
