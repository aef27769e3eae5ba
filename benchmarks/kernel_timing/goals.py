"""Goals of the kernels on a CPU, as ratios in one run, beside what a run has reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernel_timing.rows import OURS, OURS_4


@dataclass(frozen=True)
class Goal:
    """A column of a row, and what it is to be: at least, or at most, on a CPU without AMX and on
    one with it."""

    operation: str
    shape: str
    contestant: str
    column: str
    plain: float
    amx: float
    most: bool = False


FOUR_BITS = {1: (4.0, 3.2), 4: (2.5, 3.0), 16: (1.7, 2.5), 32: (1.0, 1.5), 64: (1.0, 1.2),
             256: (1.0, 0.95), 1024: (1.0, 0.95)}
"""By rows: how many times PyTorch's speed with 16 bits."""
GOALS = (
    *(Goal("linear", f"{rows} x ", OURS_4, "speedup_over_plain", *goals)
      for rows, goals in FOUR_BITS.items()),
    *(Goal("linear", f"{rows} x ", OURS, "share_of_roofline", 0.85, 0.85)
      for rows in (1, 2, 4, 8, 16)),
    *(Goal("prefill", shape, OURS, "over_sdpa", 0.3, 1.5, most=True)
      for shape in ("batch 4", "batch 1")),
    Goal("decode", "batch 16, 32 KV heads, 205 slots", OURS, "share_of_roofline", 0.8, 0.8),
    Goal("recall", "batch 4, 8 KV heads, 8192 slots", "recall 20%, 4 bits", "speedup_over_plain",
         2.5, 2.5),
)


def goal_lines(rows: Sequence[dict], isa: str) -> Iterator[str]:
    """A line for each goal of which a run has a row.

    Parameters
    ----------
    rows : sequence of dict
        As `rows.TimedRows` collects them.
    isa : str
        The instruction set of the run.
    """
    for goal in GOALS:
        for row in rows:
            if (row["operation"], row["contestant"]) != (goal.operation, goal.contestant) or (
                    not row["shape"].startswith(goal.shape)):
                continue
            wanted = goal.amx if isa.startswith("amx") else goal.plain
            found = row[goal.column]
            reached = found <= wanted if goal.most else found >= wanted
            sign, said = "<=" if goal.most else ">=", "reached" if reached else "not reached"
            yield (f"goal  {goal.operation:8} {row['shape']:33} {goal.contestant:13} "
                   f"{goal.column:18} {found:.2f} {sign} {wanted:g}: {said}")
