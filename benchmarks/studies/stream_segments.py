"""Perplexity and time by position: a long text through a stream, in segments. No torch.

An `LLM`, or an object with the same `stream`, is an argument. Every token is predicted from the
tokens that are cached before it, as if it had been generated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import read_csv
from flexgen_h2o.metrics.figures import LINES, log_scale, new_figure, save
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.storage.free_memory import resident_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))
from articles import perplexity

_ENDS = 3
"""Segments that define the initial perplexity. The same number far above it is a failure."""
# The full cache has no sizes, and a refused cache has no figures.
_SIZES = ("budget_tokens", "heavy_tokens", "recent_tokens", "sink_tokens")
_MEASURED = ("nll_mean", "perplexity", "ms_per_token_median", "ms_per_token_p95", "cached_tokens",
             "kv_cache_bytes")
COLUMNS = (*ORIGIN, "device", "model", "dtype", "policy", *_SIZES, "positions",
           "trained_positions", "position", "tokens", *_MEASURED, "process_bytes", "reason")
_TEXTS = (*ORIGIN, "device", "model", "dtype", "policy", "positions", "reason")


@dataclass(frozen=True)
class Streamed:
    """One cache to measure.

    `h2o` is None for the full cache, which has a capacity of `max_tokens` tokens. The cache has
    failed when several segments in a row have `blow_up` times the perplexity of the first ones.
    """

    policy: str
    h2o: H2OConfig | None
    max_tokens: int
    blow_up: float

    def open_stream(self, llm) -> AbstractContextManager:
        """Open the stream. It may exceed the model's positions, because this is measured."""
        if self.h2o is None:
            return llm.stream(max_tokens=self.max_tokens, past_context=True)
        return llm.stream()

    def cells(self) -> dict[str, object]:
        """Return the columns of a row that describe the cache."""
        if self.h2o is None:
            return {"policy": self.policy, **dict.fromkeys(_SIZES), "positions": "original"}
        heavy, recent, sinks = (getattr(self.h2o, f"{part}_tokens")
                                for part in ("heavy", "recent", "sink"))
        sizes = (heavy + recent + sinks, heavy, recent, sinks)
        return {"policy": self.policy, **dict(zip(_SIZES, sizes, strict=True)),
                "positions": self.h2o.positions}


def measure(llm, streamed: Streamed, tokens: Sequence[int], *, piece: int,
            on_segment: Callable[[int], None] = lambda _: None) -> Iterator[dict[str, object]]:
    """Stream the tokens, and yield a row for each segment by `COLUMNS`.

    A cache that fails stops early, and the last row has the reason. A full cache may also be
    refused because it does not fit in memory: then a row without figures has the reason. A
    `UserError` of another cache is raised.

    `piece`: tokens of a row. `on_segment`: called with the tokens of each segment when it is done.
    """
    for row in _segments(llm, streamed, tokens, piece, on_segment):
        yield {**origin(), **streamed.cells(),
               "trained_positions": llm.model_config.plain_positions, **row}


def _segments(llm, streamed: Streamed, tokens: Sequence[int], piece: int,
              on_segment: Callable[[int], None]) -> Iterator[dict[str, object]]:
    """Yield the cells of each row that change from row to row."""
    log_probs: list[list[float]] = []
    position, refused = 0, None
    try:
        with streamed.open_stream(llm) as stream:
            for start in range(0, min(len(tokens), streamed.max_tokens), piece):
                part = tokens[start : min(start + piece, streamed.max_tokens)]
                log_probs.append(stream.loglikelihood(part))
                position = start + len(part)
                reason = _failure(log_probs, streamed.blow_up)
                if not reason and streamed.max_tokens == position < len(tokens):
                    reason = f"stopped at {position} tokens, as asked"
                on_segment(len(part))
                yield {**_figures(log_probs[-1], stream), "position": position, "reason": reason}
                if reason:
                    return
    except UserError as error:
        if streamed.h2o is not None:
            raise
        refused = " ".join(str(error).split())
    if refused is not None:
        yield {**dict.fromkeys(("device", "model", "dtype"), ""), **dict.fromkeys(_MEASURED),
               "tokens": 0, "process_bytes": resident_bytes(), "position": position,
               "reason": refused}


def _failure(log_probs: Sequence[Sequence[float]], blow_up: float) -> str:
    """Return why a cache with these log-probabilities has failed; empty if it has not."""
    if len(log_probs) < 2 * _ENDS:
        return ""
    limit = blow_up * perplexity(log_probs[:_ENDS])
    last = [perplexity([text]) for text in log_probs[-_ENDS:]]
    # Infinite and NaN values are failures too.
    if any(math.isfinite(value) and value <= limit for value in last):
        return ""
    return f"perplexity over {blow_up:g} x the first {_ENDS} pieces', {_ENDS} pieces in a row"


def _figures(log_probs: Sequence[float], stream) -> dict[str, object]:
    stats: RunStats = stream.stats
    median, p95 = stats.latency_p50_seconds, stats.latency_p95_seconds
    return {
        **{name: getattr(stats, name) for name in ("device", "model", "dtype")},
        "tokens": len(log_probs), "nll_mean": -fmean(log_probs),
        "perplexity": perplexity([log_probs]),
        "ms_per_token_median": median and 1000 * median, "ms_per_token_p95": p95 and 1000 * p95,
        "cached_tokens": stream.cached_tokens, "process_bytes": resident_bytes(),
        "kv_cache_bytes": stats.kv_cache_bytes,
    }


def read_rows(path: str) -> list[dict[str, object]]:
    """Read rows of a CSV file of an earlier run. Raises `UserError`."""
    rows = read_csv(path, (COLUMNS,), texts=_TEXTS, may_lack=(*_SIZES, *_MEASURED))
    if not rows:
        raise UserError(f"--from-csv {path} has no rows")
    return rows


def by_policy(rows: Sequence[dict]) -> dict[str, list[dict]]:
    """Group rows by policy, in their order."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["policy"], []).append(row)
    return groups


def table(rows: Sequence[dict]) -> str:
    """Return aligned lines, one per cache: its first and last segments, and the reason to end."""
    head = ("cache", "cached", "position", "perplexity first", "last", "ms/token first", "last",
            "process MB first", "last", "stopped early")
    body = []
    for policy, its in by_policy(rows).items():
        measured = [row for row in its if row["tokens"]]
        ends = (measured[:_ENDS], measured[-_ENDS:])
        cached = f"{measured[-1]['cached_tokens']:.0f}" if measured else "-"
        body.append((policy, cached, f"{its[-1]['position']:.0f}",
                     *map(_perplexity, ends),
                     *(_mean(part, "ms_per_token_median", 1) for part in ends),
                     *(_mean(part, "process_bytes", 1e-6) for part in ends), its[-1]["reason"]))
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return "\n".join("  ".join([line[0].ljust(widths[0]),
                                *map(str.rjust, line[1:-1], widths[1:-1]), line[-1]]).rstrip()
                     for line in (head, *body))


def _perplexity(rows: Sequence[dict]) -> str:
    """Return the perplexity over all tokens of the segments."""
    if not rows:
        return "-"
    nats = math.fsum(row["nll_mean"] * row["tokens"] for row in rows)
    return f"{perplexity([[-nats / sum(row['tokens'] for row in rows)]]):.4g}"


def _mean(rows: Sequence[dict], column: str, scale: float) -> str:
    values = [row[column] for row in rows if row[column] is not None]
    return f"{scale * fmean(values):.4g}" if values else "-"


# The plot of a stream: perplexity and time per token against position.


_MARKS = 12  # markers on the longest line


def draw(rows: Sequence[dict], path: str) -> None:
    """Draw rows of `segments` to a file, which is written atomically.

    A cross marks the end of a cache that stopped early. Raises OSError if the file cannot be
    written.
    """
    figure = new_figure(11, 4.8)
    left, right = figure.subplots(1, 2)
    trained, end = rows[0]["trained_positions"], max(row["position"] for row in rows)
    policies = by_policy(rows)
    mark_every = max(1, max(map(len, policies.values())) // _MARKS)
    for axes, column in ((left, "perplexity"), (right, "ms_per_token_median")):
        for policy, its in policies.items():
            _line(axes, policy, its, column=column, mark_every=mark_every)
        if trained <= end:  # further right, it would compress the lines
            axes.axvline(trained, color="0.4", linewidth=1, linestyle=(0, (6, 3)),
                         label=f"trained context, {trained:.0f} tokens")
        axes.set(xlabel="position, tokens", xlim=(0, None))
        axes.grid(color="0.9", which="both")
        axes.set_axisbelow(True)
    tokens = max(row["tokens"] for row in rows)
    left.set(ylabel=f"perplexity of {tokens:.0f} tokens (log scale)",
             title="Perplexity: lower is better")
    log_scale(left, [row["perplexity"] for row in rows if row["perplexity"] is not None])
    right.set(ylabel="ms/token, median of a piece", title="Time: lower is better",
              ylim=(0, 1.05 * right.get_ylim()[1]))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False, fontsize=9)
    # The row of a refused cache has no model.
    sample = next((row for row in rows if row["tokens"]), None)
    model = "" if sample is None else f"{sample['model']}, {sample['dtype']}, "
    figure.suptitle(f"{model}one text token by token{_budget(rows)}; x: stopped early",
                    fontsize=10)
    save(figure, path)


def _line(axes, policy: str, rows: Sequence[dict], *, column: str, mark_every: int) -> None:
    """Draw the figures of one cache, with a marker every few segments."""
    points = [(row["position"], row[column]) for row in rows
              if row[column] is not None and math.isfinite(row[column])]
    if not points:
        return
    style = LINES[policy]
    axes.plot(*zip(*points, strict=True), markersize=5, linewidth=1.6, label=policy,
              markevery=mark_every, **style)
    if rows[-1]["reason"]:
        axes.plot(*points[-1], linestyle="none", marker="x", markersize=10, markeredgewidth=2,
                  color=style["color"])


def _budget(rows: Sequence[dict]) -> str:
    """Return the size of the caches, if all caches that evict have the same size."""
    sizes = {row["budget_tokens"] for row in rows} - {None}
    return f", {sizes.pop():.0f} tokens cached" if len(sizes) == 1 else ""
