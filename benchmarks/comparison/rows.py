"""The CSV file of a comparison: a row for each cell, there for the next run to go on with."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.tasks.shared.files import ORIGIN, RowsFile, cell, check_writable

KEY = ("host", "threads", "scenario", "model", "dtype", "prompts", "prompt_len", "gen_len",
       "cut_gen_len", "memory_gb", "system", "options", "at", "batch")
"""What a cell is: the same values are not measured again."""
COLUMNS = (
    *ORIGIN, "cpu", "threads", "scenario", "model", "dtype", "prompts", "prompt_len", "gen_len",
    "cut_gen_len", "memory_gb", "page_cache", "system", "options", "settings", "documented",
    "versions", "at", "batch", "repeats", "status", "reason", "prefill_s", "decode_step_s",
    "total_s", "tokens_per_s", "projected", "load_s", "peak_rss_gb", "peak_memory_gb", "gb_read",
    "equal_tokens", "equal_tokens_with", "prefill_floor_s", "decode_step_floor_s",
    "total_over_floor", "disk_gb_per_s", "memory_gb_per_s", "gemm_tflop_per_s",
)
EQUAL, SEARCH, BEST = "equal", "search", "best"
"""Values of `at`: all at the same batch; a step of the search; each at its own best batch."""
OK, REFUSED, MEMORY, TIME, FAILED = "ok", "refused", "out of memory", "timed out", "failed"
"""Values of `status`. Rows of all but the first have a reason, and no figures."""


def key_of(row: Mapping[str, object]) -> tuple[str, ...]:
    """What tells the cells of a file apart, as the file has it."""
    return tuple(str(cell(row[name])) for name in KEY)


class Table:
    """The rows of a file and those that come; each is on disk when `add` returns.

    The file is `path`.partial until `finish`, as of any `RowsFile`.

    Parameters
    ----------
    path : str

    Raises
    ------
    UserError
        It cannot be written, or holds other rows than these.
    """

    def __init__(self, path: str):
        check_writable("--out", path)
        self.file = RowsFile(path, COLUMNS)
        partial = self.file.partial
        if os.path.exists(path) and partial.exists():
            raise UserError(f"both {path} and {partial} are there: remove the older one")
        found = _whole_rows(partial if partial.exists() else Path(path))
        self._path, self._rows = path, {key_of(row): row for row in found}
        if partial.exists():
            self.file.count = len(found)

    def find(self, row: Mapping[str, object]) -> dict[str, str] | None:
        """The row of the same cell, as text; None if it is still to be measured."""
        return self._rows.get(key_of(row))

    def add(self, row: dict[str, object]) -> None:
        """A cell that was measured. OSError if it cannot be written."""
        if os.path.exists(self._path):  # whole, and now to grow
            os.replace(self._path, self.file.partial)
            self.file.count = len(self._rows)
        self.file.write(row)
        self._rows[key_of(row)] = {name: str(cell(row[name])) for name in COLUMNS}

    def rows(self) -> list[dict[str, str]]:
        """All of them, as text, in the order of the file."""
        return list(self._rows.values())

    def finish(self) -> None:
        """Give the file its name."""
        if self.file.count:
            self.file.finish()


def _whole_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file; a last one without its end, as a killed run leaves it, is cut off."""
    try:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].decode("utf-8").splitlines()
        rows = list(csv.DictReader(lines, strict=True))
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot go on with --out {path}: {error}") from None
    if not whole:
        return []
    if tuple(rows[0] if rows else lines[0].split(",")) != COLUMNS or any(
            None in row or None in row.values() for row in rows):
        raise UserError(f"--out {path} has other columns than compare.py writes: choose another")
    if whole < len(content):
        os.truncate(path, whole)
    return rows
