"""What a run did: bytes over links, and the figures made of times and tokens. No torch.

Text and JSON are made here; the CSV file of many runs is in `results`, the time line in `trace`.
Throughput is generated tokens / (prefill + decode) seconds. GB is 1e9 bytes.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import json
import os
import resource
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from flexgen_h2o.errors import UserError

LINKS = ("disk->cpu", "cpu->disk", "cpu->gpu", "gpu->cpu")
GB = 1e9

_UNITS = (("GB", GB), ("MB", 1e6), ("KB", 1e3))

RATES = ("prefill_tokens_per_second", "decode_tokens_per_second", "total_tokens_per_second",
          "latency_p50_seconds", "latency_p95_seconds")


class LinkStats:
    """Bytes moved and seconds busy on each link, added from any thread.

    Busy time is the union of the intervals: two transfers at once count once, so that bytes over
    seconds is what the link carried. Intervals are merged as they come; the oldest are closed into
    a sum, as a long run has millions.
    """

    _MOST_OPEN = 1024

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next run starts at zero."""
        with self._lock:
            self._bytes = dict.fromkeys(LINKS, 0)
            self._closed = dict.fromkeys(LINKS, 0.0)
            self._open: dict[str, list[tuple[float, float]]] = {link: [] for link in LINKS}

    def add(self, link: str, nbytes: int, start: float, end: float) -> None:
        """Count a transfer of `nbytes` that took from `start` to `end` (perf_counter seconds)."""
        with self._lock:
            self._bytes[link] += nbytes
            intervals = self._open[link]
            first = bisect.bisect_left(intervals, start, key=lambda span: span[1])
            last = bisect.bisect_right(intervals, end, key=lambda span: span[0])
            if first < last:
                start, end = min(start, intervals[first][0]), max(end, intervals[last - 1][1])
            intervals[first:last] = [(start, end)]
            if len(intervals) > self._MOST_OPEN:
                half = self._MOST_OPEN // 2
                self._closed[link] += sum(b - a for a, b in intervals[:half])
                del intervals[:half]

    def totals(self) -> dict[str, tuple[int, float]]:
        """Link to (bytes, busy seconds), for the links that carried anything."""
        with self._lock:
            return {
                link: (nbytes, self._closed[link] + sum(b - a for a, b in self._open[link]))
                for link, nbytes in self._bytes.items() if nbytes
            }


@dataclass(kw_only=True)
class RunStats:
    """The figures of one call of generate, warm-up excluded.

    Sizes are bytes, times seconds. `prompt_tokens` and `generated_tokens` count real tokens (no
    pads, nothing past EOS) of all prompts. `step_seconds` holds each decode step of each block:
    the time that a sequence waits for one token. `kv_cache_bytes` is the cache of the largest
    block at rest, `full_kv_cache_bytes` what it would be with nothing evicted or compressed, and
    `kv_bytes_per_token` a cached token at rest, all layers together. `weight_bytes` are all weights
    at rest, their matrices in `weight_bits` (16: as `dtype` says). `links` is
    `LinkStats.totals`. `projected` says that decode was extrapolated. `predicted_prefill_seconds`
    and `predicted_decode_seconds` are what a plan said, if one was made. A rate is None where its
    time was not measured.
    """

    model: str
    num_parameters: int
    dtype: str
    device: str
    num_prompts: int
    prompt_tokens: int
    generated_tokens: int
    gpu_batch_size: int
    num_gpu_batches: int
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    peak_device_bytes: int = 0
    peak_process_bytes: int = 0
    kv_cache_bytes: int = 0
    full_kv_cache_bytes: int = 0
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0
    weight_bits: int = 16
    links: dict[str, tuple[int, float]] = field(default_factory=dict)
    projected: bool = False
    predicted_prefill_seconds: float | None = None
    predicted_decode_seconds: float | None = None

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens / prefill seconds."""
        return over(self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Generated tokens but each prompt's first (prefill makes it) / decode seconds."""
        return over(self.generated_tokens - self.num_prompts, self.decode_seconds)

    @property
    def total_tokens_per_second(self) -> float | None:
        """Generated tokens / (prefill + decode) seconds."""
        return over(self.generated_tokens, self.prefill_seconds + self.decode_seconds)

    @property
    def latency_p50_seconds(self) -> float | None:
        """Median seconds of a decode step."""
        return percentile(self.step_seconds, 50)

    @property
    def latency_p95_seconds(self) -> float | None:
        """95th percentile of the seconds of a decode step."""
        return percentile(self.step_seconds, 95)

    def project(self, *, cut: int, gen_len: int) -> RunStats:
        """What `gen_len` tokens would have taken, from a run that was cut at `cut` tokens each.

        Decode seconds become the mean measured step times ``gen_len - 1`` for every block, and
        the tokens after the first grow alike. Steps, links and peaks stay as measured. Raises
        `UserError` when there is decode time to project and no step was measured.
        """
        if gen_len > 1 and (cut < 2 or not self.step_seconds):
            raise UserError("no decode step was measured to project from: cut at 2 tokens or more")
        growth = (gen_len - 1) / (cut - 1) if gen_len > 1 else 1.0
        mean = sum(self.step_seconds) / max(len(self.step_seconds), 1)
        decoded = self.generated_tokens - self.num_prompts
        return replace(
            self,
            decode_seconds=mean * len(self.step_seconds) * growth,
            generated_tokens=self.num_prompts + round(decoded * growth),
            projected=True,
        )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile by linear interpolation, as numpy's default; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def over(amount: float, seconds: float) -> float | None:
    """A rate; None where no time was measured."""
    return amount / seconds if seconds > 0 else None


def table(stats: RunStats) -> str:
    """The figures as text in aligned columns; a projected run says so on every line it touches."""
    mark = " (projected)" if stats.projected else ""
    cut = " (of the steps that were measured)" if stats.projected else ""
    rows = [
        ("model", f"{stats.model}, {stats.num_parameters / 1e6:,.1f} M parameters", ""),
        ("computed in", f"{stats.dtype} on {stats.device}", ""),
        ("weights", _of_the_weights(stats), ""),
        ("batch", f"{stats.gpu_batch_size} sequences x {stats.num_gpu_batches} in a block", ""),
        ("prompts", f"{stats.num_prompts}, of {stats.prompt_tokens} tokens", ""),
        ("generated", f"{stats.generated_tokens} tokens", mark),
        ("load", f"{stats.load_seconds:.2f} s", ""),
        ("prefill", f"{stats.prefill_seconds:.3f} s",
         _figure(stats.prefill_tokens_per_second, "tokens/s")),
        ("decode", f"{stats.decode_seconds:.3f} s",
         _figure(stats.decode_tokens_per_second, "tokens/s") + mark),
        *_prediction(stats),
        ("total throughput", _figure(stats.total_tokens_per_second, "tokens/s"),
         "generated / (prefill + decode)" + mark),
        ("latency per token", f"p50 {_figure(stats.latency_p50_seconds, 's')}",
         f"p95 {_figure(stats.latency_p95_seconds, 's')}{cut}"),
        ("peak memory", f"process {stats.peak_process_bytes / GB:.2f} GB",
         f"device {stats.peak_device_bytes / GB:.2f} GB" if stats.peak_device_bytes else ""),
        ("KV cache", f"{stats.kv_cache_bytes / GB:.3f} GB", _of_the_cache(stats)),
    ]
    for link, (nbytes, seconds) in stats.links.items():
        rate = _figure(over(nbytes / GB, seconds), "GB/s")
        rows.append((link, f"{nbytes / GB:.3f} GB", rate + cut))
    width = max(len(row[1]) for row in rows[6:])  # the rows above have no third column to align
    return "\n".join(f"{a:<18} {b:<{width}}  {c.strip()}".rstrip() for a, b, c in rows)


def _prediction(stats: RunStats) -> list[tuple[str, str, str]]:
    """What a plan said of the times above, and its share of what they came to."""
    prefill, decode = stats.predicted_prefill_seconds, stats.predicted_decode_seconds
    if prefill is None or decode is None:
        return []
    measured = stats.prefill_seconds + stats.decode_seconds
    share = over(prefill + decode, measured)
    return [("predicted", f"{prefill:.3f} + {decode:.3f} s",
             "" if share is None else f"{share:.2f} of prefill and decode")]


def _of_the_weights(stats: RunStats) -> str:
    quantized = f", matrices in {stats.weight_bits} bits" if stats.weight_bits != 16 else ""
    return f"{stats.weight_bytes / GB:.3f} GB{quantized}"


def _of_the_cache(stats: RunStats) -> str:
    """Bytes per token, and the full cache beside the one there was, where they differ."""
    used, full = stats.kv_cache_bytes, stats.full_kv_cache_bytes
    beside = f", {used / full:.3f} of the full {full / GB:.3f} GB" if full not in (0, used) else ""
    return f"{stats.kv_bytes_per_token} bytes per token{beside}"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def to_json(stats: RunStats) -> str:
    """All fields and rates as one JSON object; each link as bytes, seconds and gb_per_s."""
    values = asdict(stats) | {name: getattr(stats, name) for name in RATES}
    values["links"] = {
        link: {"bytes": nbytes, "seconds": seconds, "gb_per_s": over(nbytes / GB, seconds)}
        for link, (nbytes, seconds) in stats.links.items()
    }
    return json.dumps(values)


def peak_process_bytes() -> int:
    """Most memory that this process has had resident, in bytes."""
    # Not getrusage's ru_maxrss where there is a choice: a process inherits its parent's through
    # exec (fs/exec.c), and a benchmark would report its launcher.
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def sizes(*nbytes: int) -> list[str]:
    """Bytes as people read them, in GB or the unit that suits; no two that differ read the same.

    They have one digit after the point, or as many more as it takes to tell them apart.
    """
    for digits in range(1, 10):  # nine are bytes, whatever the unit
        texts = [_size(each, digits) for each in nbytes]
        if len(set(texts)) == len(set(nbytes)):
            break
    return texts


def _size(nbytes: int, digits: int) -> str:
    for unit, scale in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes} bytes"


@contextmanager
def open_atomic(path: str | os.PathLike) -> Iterator[io.TextIOBase]:
    """Open a text file that appears under `path` whole, or not at all. OSError if it cannot."""
    # A lone surrogate, as a prompt may hold, becomes the JSON escape that it came from.
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8",
                                            errors="backslashreplace") as file:
        yield file


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A new, empty file beside `path`, which takes its place at the end of the ``with`` statement.

    If that ends with an error the new file goes and `path` stays. OSError if it cannot be made.
    """
    target = Path(path)
    # Drawn, and not the number of the process, which two containers with one folder may share.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    temporary.touch(exist_ok=False)  # what is there already is another's, and not removed
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
