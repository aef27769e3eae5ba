"""Figure of quality: perplexity against cache bytes in memory and bytes read for a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plotting import Row, beside, distinct, entitle, measured_where, positive

from flexgen_h2o.config.cache_layout import GroupLayout, IndexLayout
from flexgen_h2o.config.limits import GROUP_SIZE, INDEX_TILE
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.figures import COLOURS, log_scale, new_figure

NEEDED = ("date", "commit", "host", "model", "dtype", "articles", "prompt_tokens_mean", "policy",
          "variant", "budget_percent", "cache_bits", "cached_tokens_mean",
          "kv_cache_bytes_per_sequence", "perplexity_over_full")
FULL = "full", ""
MODES = {
    FULL: ("full cache", "black", "D", "none"),
    ("window", ""): ("window", "vermillion", "s", "--"),
    ("sink-window", ""): ("window and 4 first tokens", "green", "^", "-."),
    ("h2o", ""): ("h2o", "blue", "o", "-"),
    ("h2o", "mean"): ("h2o, mean", "blue", "v", "--"),
    ("h2o", "decay"): ("h2o, decay", "blue", "x", ":"),
    ("h2o", "caote"): ("h2o, caote", "purple", "P", "--"),
    ("h2o", "of the text"): ("h2o, of the text so far", "blue", "<", "-."),
    ("h2o", "8-bit"): ("h2o, cache of 8 bits", "black", "X", "none"),
    ("h2o", "4-bit"): ("h2o, cache of 4 bits", "black", "*", "none"),
    ("sparse-values", ""): ("sparse values", "orange", "p", "--"),
    ("recall", ""): ("recall", "sky", "o", "-"),
    ("recall", "of the text"): ("recall, of the text so far", "sky", "<", "-."),
    ("recall", "2-bit index"): ("recall, index of 2 bits", "sky", "d", "none"),
}
"""Policy and variant of drawn rows: label, colour, marker, line."""
_HALF, _WIDE = 2, {"float32": 4}
_GOOD = 1.005
"""Smallest factor on the logarithmic axis; the full cache is drawn there."""


@dataclass(frozen=True)
class QualityPoint:
    """A cache in percent of the full one's bytes, 16 bits a number: bytes in memory, and bytes read
    for a token (keys, values, index). `over` is the perplexity over the full cache's."""

    held: float
    read: float
    over: float


def points(rows: Sequence[Row]) -> dict[tuple[str, str], list[QualityPoint]]:
    """Return the points of each mode of `MODES`, by budget.

    Raises `UserError` for rows of several models or lengths, or without the full cache.
    """
    for name in ("model", "dtype", "articles", "prompt_tokens_mean"):
        if len(distinct(rows, name)) > 1:
            raise UserError(f"--csv has rows of several values of {name}: add --only {name}=VALUE")
    full = next((row for row in rows if (row["policy"], row["variant"]) == FULL), None)
    if full is None:
        raise UserError("--csv has no row of the full cache, which the others are shares of")
    points_by_policy: dict[tuple[str, str], dict[float, QualityPoint]] = {}
    for row in rows:
        mode = row["policy"], row["variant"]
        if mode in MODES:
            points_by_policy.setdefault(mode, {}).setdefault(positive(row, "budget_percent"),
                                                             _point(row, full))
    return {mode: [policy_points[budget] for budget in sorted(policy_points)]
            for mode, policy_points in sorted(points_by_policy.items(),
                                              key=lambda item: list(MODES).index(item[0]))}


def _point(row: Row, full: Row) -> QualityPoint:
    cached, read = _shares(row, full)
    return QualityPoint(100 * cached, 100 * read, positive(row, "perplexity_over_full"))


def _shares(row: Row, full: Row) -> tuple[float, float]:
    """Return the shares of the full cache's bytes: in memory at the end, read for a token."""
    bits = int(positive(row, "cache_bits"))
    kept_bytes, tokens = (positive(row, name) / positive(full, name)
                          for name in ("kv_cache_bytes_per_sequence", "cached_tokens_mean"))
    if bits < 16:
        # Caches of 16 bits had the run's dtype; packed ones have their size.
        kept_bytes *= _WIDE.get(row["dtype"], _HALF) / _HALF
        return kept_bytes, tokens * GroupLayout(GROUP_SIZE, bits).nbytes / (_HALF * GROUP_SIZE)
    budget = positive(row, "budget_percent") / 100
    if row["policy"] == "sparse-values":
        return kept_bytes, (1 + budget) / 2
    if row["policy"] != "recall":
        return kept_bytes, tokens
    index = IndexLayout(GROUP_SIZE, 2 if row["variant"] == "2-bit index" else 4)
    part = index.tile_bytes / INDEX_TILE / (2 * GROUP_SIZE * _HALF)
    if row["variant"] != "of the text":
        budget *= positive(row, "prompt_tokens_mean") / positive(full, "cached_tokens_mean")
    return kept_bytes + part, part + budget


def draw(rows: Sequence[Row]):
    """Return the figure. Raises `UserError` as `points` does."""
    by_policy = points(rows)
    figure = new_figure(16, 6.8)
    panels = figure.subplots(1, 2, sharey=True)
    over = [max(point.over, _GOOD) - 1 for policy_points in by_policy.values()
            for point in policy_points]
    for axes, name, label in zip(panels, ("held", "read"),
                                 ("bytes in memory, % of the full cache's",
                                  "bytes that a token reads, % of the full cache's"), strict=True):
        for mode, policy_points in by_policy.items():
            called, colour, marker, line = MODES[mode]
            axes.plot([getattr(point, name) for point in policy_points],
                      [100 * (max(point.over, _GOOD) - 1) for point in policy_points], label=called,
                      color=COLOURS[colour], marker=marker, linestyle=line)
        axes.set(xlabel=label, xlim=(0, None))
        axes.grid(color="0.9")
    panels[0].set_ylabel("perplexity over the full cache's, % more")
    log_scale(panels[0], [100 * ratio for ratio in over])
    beside(figure, *panels[0].get_legend_handles_labels())
    first = rows[0]
    notes = ["In numbers of 16 bits but where fewer are named; keys, values and index, without "
             "weights and scores. The full cache, which loses nothing, is at the bottom."]
    if any(mode[0] == "recall" for mode in by_policy):
        notes.append("Recall holds everything and an index: what it saves is reading.")
    entitle(figure, "Quality against the bytes of the cache\n"
            f"{first['model']}, {float(first['articles']):.0f} articles, prompts of "
            f"{float(first['prompt_tokens_mean']):.0f} tokens", notes, where=measured_where(rows))
    return figure
