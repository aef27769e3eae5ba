"""The CSV file of a comparison: a row for each cell."""

from __future__ import annotations

from collections.abc import Mapping

from flexgen_h2o.files.rows import RowTable, cell
from flexgen_h2o.metrics.provenance import ORIGIN

_OF_A_BATCH = ("prompt_len", "cut_gen_len", "at", "batch")
KEY = ("host", "threads", "scenario", "model", "dtype", "prompts", "prompt_len", "gen_len",
       "cut_gen_len", "memory_gb", "device_memory_gb", "system", "options", "at", "batch")
"""Columns that identify a cell: the same values are not measured again. But for `_OF_A_BATCH` they
are those of a system in a scenario.
"""
COLUMNS = (
    *ORIGIN, "cpu", "device", "threads", "scenario", "model", "dtype", "prompts", "prompt_len",
    "gen_len", "cut_gen_len", "memory_gb", "device_memory_gb", "page_cache", "system", "options",
    "settings", "documented", "versions", "at", "batch", "repeats", "status", "reason",
    "steps_from", "prefill_s", "decode_step_s", "total_s", "tokens_per_s", "projected", "load_s",
    "peak_rss_gb", "peak_memory_gb", "peak_device_gb", "gb_read", "equal_tokens",
    "equal_tokens_with", "prefill_roofline_s", "decode_step_roofline_s", "total_over_roofline",
    "disk_gb_per_s", "memory_gb_per_s", "link_gb_per_s", "gemm_tflop_per_s",
)
EQUAL, SEARCH, BEST = "equal", "search", "best"
"""Values of `at`: all at the same batch; a step of the search; each at its own best batch."""
OK, REFUSED, MEMORY, TIME, FAILED = "ok", "refused", "out of memory", "timed out", "failed"
"""Values of `status`. Rows of all but the first have a reason, and no figures."""
LOADING = " in loading"
"""Follows `MEMORY` and `TIME` where that ended loading, as it would at any batch."""


class Table(RowTable):
    """The rows of the file `path`, which a comparison goes on with. Errors as of `RowTable`."""

    def __init__(self, path: str):
        super().__init__(path, COLUMNS, KEY)

    def never(self, row: Mapping[str, object]) -> dict[str, str] | None:
        """The row that says why the system of this one runs at no batch at all; None if none does.
        """
        alike = [name for name in KEY if name not in _OF_A_BATCH]
        return next((each for each in self.rows() if runs_never(each["status"])
                     and all(each[name] == str(cell(row[name])) for name in alike)), None)


def runs_never(status: str) -> bool:
    """True if a system of that `status` would have it at any batch."""
    return status == REFUSED or status.endswith(LOADING)
