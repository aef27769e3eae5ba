"""The CSV file of a comparison: a row for each cell."""

from __future__ import annotations

from row_table import RowTable

from flexgen_h2o.tasks.shared.files import ORIGIN

KEY = ("host", "threads", "scenario", "model", "dtype", "prompts", "prompt_len", "gen_len",
       "cut_gen_len", "memory_gb", "device_memory_gb", "system", "options", "at", "batch")
"""What a cell is: the same values are not measured again."""
COLUMNS = (
    *ORIGIN, "cpu", "device", "threads", "scenario", "model", "dtype", "prompts", "prompt_len",
    "gen_len", "cut_gen_len", "memory_gb", "device_memory_gb", "page_cache", "system", "options",
    "settings", "documented", "versions", "at", "batch", "repeats", "status", "reason",
    "steps_from", "prefill_s", "decode_step_s", "total_s", "tokens_per_s", "projected", "load_s",
    "peak_rss_gb", "peak_memory_gb", "peak_device_gb", "gb_read", "equal_tokens",
    "equal_tokens_with", "prefill_floor_s", "decode_step_floor_s", "total_over_floor",
    "disk_gb_per_s", "memory_gb_per_s", "link_gb_per_s", "gemm_tflop_per_s",
)
EQUAL, SEARCH, BEST = "equal", "search", "best"
"""Values of `at`: all at the same batch; a step of the search; each at its own best batch."""
OK, REFUSED, MEMORY, TIME, FAILED = "ok", "refused", "out of memory", "timed out", "failed"
LOADING = "out of memory in loading"
"""Values of `status`. Rows of all but the first have a reason, and no figures. Those that are
`REFUSED`, or end in `LOADING`, do so at any batch."""


class Table(RowTable):
    """The rows of the file `path`, which a comparison goes on with. Errors as of `RowTable`."""

    def __init__(self, path: str):
        super().__init__(path, COLUMNS, KEY)
