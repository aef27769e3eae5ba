"""Figures as text: the statistics of a run, and the time breakdown of its trace. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from flexgen_h2o.metrics.run_stats import RunStats, ratio
from flexgen_h2o.metrics.trace import (
    COMPUTE,
    GB,
    PHASES,
    WAITING,
    Interval,
    difference,
    intersection,
    seconds,
    union,
)

WIDTH = 80
"""Columns of a terminal, which printed tables fit."""
_UNITS = (("GB", GB), ("MB", 1e6), ("KB", 1e3))


def format_bytes(*nbytes: int) -> list[str]:
    """Format sizes in GB, MB, KB or bytes, with enough digits that different sizes differ."""
    for digits in range(1, 10):  # nine are bytes in any unit
        texts = [_size(count, digits) for count in nbytes]
        if len(set(texts)) == len(set(nbytes)):
            break
    return texts


def _size(nbytes: int, digits: int) -> str:
    for unit, scale in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes} bytes"


def align_columns(lines: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Format rows of cells as columns: the first one left-aligned, the others right-aligned.

    Columns past `width` follow in further tables, each with the first column.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    tables: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        columns = [0, *tables[-1], column]
        if width is not None and tables[-1] and (
                sum(widths[index] + 2 for index in columns) - 2 > width):
            tables.append([])
        tables[-1].append(column)
    return "\n\n".join("\n".join(
        "  ".join([line[0].ljust(widths[0]),
                   *(line[index].rjust(widths[index]) for index in table)])
        for line in lines) for table in tables)


def fit_rows(text: str, indent: int) -> str:
    """Wrap rows of a name and a text, which begins at column `indent`, to `WIDTH`.

    Lines of flags end in a backslash, so that they can be pasted into a shell.
    """
    lines = []
    for row in text.split("\n"):
        parts = [row[indent:]]
        if len(row) > WIDTH:
            parts = textwrap.wrap(row[indent:], WIDTH - indent - 2, break_long_words=False,
                                  break_on_hyphens=False)
        end = " \\" if row.startswith(("policy ", "or ")) else ""
        lines.append(row[:indent] + f"{end}\n{'':{indent}}".join(parts))
    return "\n".join(lines)


def stats_table(stats: RunStats) -> str:
    """Format the statistics of a run as aligned columns; projected figures are marked."""
    mark = " (projected)" if stats.projected else ""
    cut = " (measured)" if stats.projected else ""
    rows = [
        ("model", f"{stats.model}, {stats.num_parameters / 1e6:,.1f} M parameters", ""),
        ("computed in", f"{stats.dtype} on {stats.device}", ""),
        ("weights", _weights_text(stats), ""),
        ("batch", f"{stats.gpu_batch_size} sequences x {stats.num_gpu_batches} in a block", ""),
        ("prompts", f"{stats.num_prompts}, of {stats.prompt_tokens} tokens", ""),
        ("generated", f"{stats.generated_tokens} tokens", mark),
        ("load", f"{stats.load_seconds:.2f} s", ""),
        ("prefill", f"{stats.prefill_seconds:.3f} s",
         _figure(stats.prefill_tokens_per_second, "tokens/s")),
        ("decode", f"{stats.decode_seconds:.3f} s",
         _figure(stats.decode_tokens_per_second, "tokens/s") + mark),
        *_idle(stats),
        *_prediction(stats),
        ("total throughput", _figure(stats.total_tokens_per_second, "tokens/s"),
         "generated / (prefill + decode)" + mark),
        ("latency per token", f"p50 {_figure(stats.latency_p50_seconds, 's')}",
         f"p95 {_figure(stats.latency_p95_seconds, 's')}{cut}"),
        ("peak memory", f"process {stats.peak_process_bytes / GB:.2f} GB",
         f"device {stats.peak_device_bytes / GB:.2f} GB" if stats.peak_device_bytes else ""),
        ("KV cache", f"{stats.kv_cache_bytes / GB:.3f} GB", _cache_text(stats)),
    ]
    if stats.acceptance_rate is not None:
        rows.append(("speculation", f"{100 * stats.acceptance_rate:.1f} % accepted",
                     f"{stats.tokens_per_step:.2f} tokens per step" + cut))
    if stats.expert_touches:
        hits = stats.expert_hit_rate
        rows.append(("experts", f"{stats.expert_bytes / GB:.3f} GB", "none had to be loaded"
                     if hits is None else f"{100 * hits:.1f} % hits" + cut))
    if stats.recall_hit_rate is not None:
        rows.append(("selective fetch", f"{100 * stats.recall_hit_rate:.1f} % in memory",
                     f"waited {stats.recall_wait_seconds:.3f} s for the others" + cut))
    for link, (nbytes, busy) in stats.links.items():
        rate = _figure(ratio(nbytes / GB, busy), "GB/s")
        rows.append((link, f"{nbytes / GB:.3f} GB", rate + cut))
    if stats.sent_bytes:
        rows.append(("sent to next rank", f"{stats.sent_bytes / GB:.6f} GB", "hidden states" + cut))
    width = max(len(row[1]) for row in rows[6:])  # the rows above have no third column to align
    return "\n".join(f"{a:<18} {b:<{width}}  {c.strip()}".rstrip() for a, b, c in rows)


def _idle(stats: RunStats) -> list[tuple[str, str, str]]:
    """Return the row of decode slots computed for sequences that had ended, if there were any."""
    if not stats.idle_share:
        return []
    return [("idle slots", f"{100 * stats.idle_share:.1f} %", "of decode: sequences had ended")]


def _prediction(stats: RunStats) -> list[tuple[str, str, str]]:
    """Return the row of the planned times and their ratio to the measured ones, if planned."""
    prefill, decode = stats.predicted_prefill_seconds, stats.predicted_decode_seconds
    if prefill is None or decode is None:
        return []
    measured = stats.prefill_seconds + stats.decode_seconds
    share = ratio(prefill + decode, measured)
    return [("predicted", f"{prefill:.3f} + {decode:.3f} s",
             "" if share is None else f"{share:.2f} of prefill and decode")]


def _weights_text(stats: RunStats) -> str:
    quantized = f", matrices in {stats.weight_bits} bits" if stats.weight_bits != 16 else ""
    if isinstance(stats.weight_bits, str):
        quantized = ", matrices as the GGUF file quantizes them"
    return f"{stats.weight_bytes / GB:.3f} GB{quantized}"


def _cache_text(stats: RunStats) -> str:
    """Return bytes per token, and the ratio to the full cache if it differs."""
    used, full = stats.kv_cache_bytes, stats.full_kv_cache_bytes
    size = f"{full / GB:.3f}" if full < GB else f"{full / GB:.3g}"
    beside = f", {used / full:.3f} of full {size} GB" if full not in (0, used) else ""
    return f"{stats.kv_bytes_per_token} bytes/token{beside}"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


Spans = Sequence[tuple[str, str, float, float, int]]
"""Spans of a trace: (name, track, start, end, bytes)."""


@dataclass(frozen=True)
class TrackTime:
    """Time of a track in a phase."""

    busy: float  # seconds in the union of its spans
    alone: float  # seconds in which no other track was busy: its time that nothing hides
    nbytes: float  # bytes moved; a transfer partly in the phase counts by its share of the time


@dataclass(frozen=True)
class PhaseTime:
    """Time of one phase, over all blocks."""

    name: str
    wall: float  # seconds of the phase
    idle: float  # seconds in which no track was busy
    tracks: dict[str, TrackTime]

    def bound(self) -> str:
        """Return the bottleneck of the phase, a track or ``idle``, with its share."""
        busy = {track: time.busy for track, time in self.tracks.items()} | {"idle": self.idle}
        name = max(busy, key=busy.__getitem__)
        return f"{self.name} {name} ({_share(busy[name], self.wall)})"


def phases(spans: Spans) -> list[PhaseTime]:
    """Return the phases of a trace in their order; time outside of all phases is ignored.

    Compute is not busy while it waits for a transfer.
    """
    tracks = list(dict.fromkeys(track for _, track, *_ in spans if track not in (PHASES, WAITING)))
    names = dict.fromkeys(name for name, track, *_ in spans if track == PHASES)
    busy = {track: union((s[2], s[3]) for s in spans if s[1] == track) for track in tracks}
    if COMPUTE in busy:
        waiting = union((s[2], s[3]) for s in spans if s[1] == WAITING)
        busy[COMPUTE] = difference(busy[COMPUTE], waiting)
    return [_phase(name, spans, busy) for name in names]


def _phase(name: str, spans: Spans, busy: dict[str, list[Interval]]) -> PhaseTime:
    windows = union((s[2], s[3]) for s in spans if s[:2] == (name, PHASES))
    in_phase = {track: intersection(intervals, windows) for track, intervals in busy.items()}
    moved = dict.fromkeys(in_phase, 0.0)
    for _, track, start, end, nbytes in spans:
        if track in moved and end > start:
            moved[track] += nbytes * seconds(intersection([(start, end)], windows)) / (end - start)
    times = {}
    for track, intervals in in_phase.items():
        others = union(i for other, track_intervals in in_phase.items() if other != track
                       for i in track_intervals)
        times[track] = TrackTime(seconds(intervals), seconds(difference(intervals, others)),
                                 moved[track])
    any_busy = union(i for track_intervals in in_phase.values() for i in track_intervals)
    return PhaseTime(name, seconds(windows), seconds(difference(windows, any_busy)),
                     {track: time for track, time in times.items() if time.busy})


def breakdown_table(spans: Spans) -> str:
    """Format the phases and tracks of a trace as a table with the bottleneck of each phase."""
    rows = [phase for phase in phases(spans) if phase.wall > 0]
    if not rows:
        return "breakdown: nothing was computed"
    lines = []
    for phase in rows:
        lines.append(_line(f"{phase.name}, s", f"{phase.wall:.3f}", "of it", "alone, s", "GB",
                           "GB/s"))
        for track, time in phase.tracks.items():
            moved, rate = time.nbytes / GB, ratio(time.nbytes / GB, time.busy)
            figures = (f"{moved:.3f}", f"{rate:.4g}") if moved else ()
            lines.append(_line(f"  {track}", f"{time.busy:.3f}", _share(time.busy, phase.wall),
                               f"{time.alone:.3f}", *figures))
        lines.append(_line("  idle", f"{phase.idle:.3f}", _share(phase.idle, phase.wall)))
    return "\n".join([*lines, "bound by: " + ", ".join(phase.bound() for phase in rows)])


def _line(name: str, *figures: str) -> str:
    return f"{name:<18}" + "".join(f"{figure:>10}" for figure in figures)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"
