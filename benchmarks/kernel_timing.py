"""Timing of CPU kernels: rows and their file, PyTorch baselines, and recall."""

from __future__ import annotations

import datetime
import functools
import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from csv_files import write_csv
from device_rates import best_gemm_rate, memory_reader

from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import EvictionArguments
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.reference import recall as reference_recall
from flexgen_h2o.metrics.provenance import cpu_model, source_commit
from flexgen_h2o.storage.device import Device, typed

DTYPE = torch.bfloat16
COPIED_BYTES = 1 << 30
"""Bytes of all copies of an input, more than caches hold."""
MAX_SECONDS = 6.0
"""Seconds after which a contestant is done, once it has had `MIN_CALLS` calls."""
MIN_CALLS = 3
CALLS_PER_TURN = 8
"""Successive calls of a contestant: in a run, calls of layers follow each other, too."""
PROBE_BYTES = 1 << 30
"""Bytes read in each turn to measure the memory rate."""
LONG_CALL_SECONDS = 0.1
"""Seconds of a call after which a turn ends, as preceding calls no longer matter."""
COLUMNS = (
    "date", "commit", "host", "cpu", "threads", "torch", "isa", "dtype", "repeats",
    "operation", "shape", "contestant", "ms", "fastest_ms", "roofline_ms", "share_of_roofline",
    "limit", "gb_per_s",
    "over_sdpa", "over_default", "speedup_over_plain", "speedup_over_16_bits", "extra_mb", "error",
    "expected_error",
)
RATIOS = ("over_sdpa", "over_default", "speedup_over_plain", "speedup_over_16_bits")
OURS, OURS_8, OURS_4, SCORELESS = "ours", "ours, 8 bits", "ours, 4 bits", "ours, no scores"
OURS_12, OURS_MXFP4 = "ours, 12 bits", "ours, MXFP4"
OURS_8_8, OURS_4_8 = (f"{name}, activations 8" for name in (OURS_8, OURS_4))
SDPA, PLAIN, INDEXED = "torch SDPA", "plain PyTorch", "plain, indexed"
RANGE = "ours, no search"
INVARIANT = {OURS: "ours, batch-invariant", OURS_4: "ours, 4 bits, batch-invariant"}
"""Batch-invariant contestants, by the name of what they are compared with."""


class TimedRows:
    """Times cases and collects rows, which are written to `path` after each case."""

    def __init__(self, repeats: int, path: Path | None = None):
        self.repeats, self.path, self.rows = repeats, path, []

    def measure(self, operation: str, shape: str, functions: dict[str, Callable],
                inputs: dict[str, Iterator[dict]], *, nbytes: dict[str, int] | None = None,
                flops: float = 0) -> None:
        """Add a row for each function, called with successive inputs, and its roofline.

        The roofline is by FLOPs if given, else by bytes.
        """
        product_rate = functools.partial(best_gemm_rate, 2048, DTYPE)
        rates = [product_rate()] if flops else []
        read, seconds = memory_reader(PROBE_BYTES), {name: [] for name in functions}
        for repeat in range(self.repeats + 1):  # the first is a warm-up
            took = _seconds(read)  # also wakes the threads
            if not flops and repeat:
                rates.append(PROBE_BYTES / took)
            for name, function in functions.items():
                if len(seconds[name]) >= MIN_CALLS and sum(seconds[name]) > MAX_SECONDS:
                    continue
                for arguments in itertools.islice(inputs[name], CALLS_PER_TURN):
                    took = _seconds(function, **arguments)
                    if repeat:
                        seconds[name].append(took)
                    if took > LONG_CALL_SECONDS:
                        break
        rate = max(*rates, product_rate()) if flops else statistics.median(rates)
        limit = f"{rate / 1e12:.2f} TFLOP/s" if flops else f"{rate / 1e9:.1f} GB/s"
        middle = {name: statistics.median(times) for name, times in seconds.items()}
        sixteen = middle.get(OURS, middle.get(PLAIN))
        for name, took in middle.items():
            roofline = (flops or nbytes[name]) / rate
            self.rows.append({
                "operation": operation, "shape": shape, "contestant": name, "ms": took * 1e3,
                "fastest_ms": min(seconds[name]) * 1e3, "roofline_ms": roofline * 1e3,
                "share_of_roofline": roofline / took, "limit": limit,
                "gb_per_s": nbytes[name] / took / 1e9 if nbytes else "",
                "over_sdpa": took / middle[SDPA] if SDPA in middle else "",
                "over_default": next((took / middle[default] for default, invariant
                                      in INVARIANT.items() if name == invariant), ""),
                "speedup_over_plain": middle[PLAIN] / took if PLAIN in middle else "",
                "speedup_over_16_bits": sixteen / took if name in (
                    OURS_12, OURS_8, OURS_4, OURS_MXFP4, OURS_8_8, OURS_4_8) else "",
                "extra_mb": "", "error": "", "expected_error": ""})
            row = self.rows[-1]
            print(f"{operation:10}  {shape:33}  {name:15} {row['ms']:9.2f} ms, roofline "
                  f"{row['roofline_ms']:7.2f} ({row['share_of_roofline']:.2f} of {limit})"
                  + "".join(
                      f", {key} {row[key]:.2f}" for key in RATIOS if row[key] != ""),
                  flush=True)
        if self.path is not None:
            self.write(self.path)

    def write(self, path: Path) -> None:
        common = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": source_commit(), "host": platform.node(), "cpu": cpu_model(),
            "threads": torch.get_num_threads(), "torch": torch.__version__,
            "isa": cpu_library.instruction_set(), "dtype": str(DTYPE).removeprefix("torch."),
            "repeats": self.repeats}
        write_csv(path, COLUMNS, (common | row for row in self.rows))


def _seconds(function: Callable, **arguments: object) -> float:
    began = time.perf_counter()
    function(**arguments)
    return time.perf_counter() - began


def copies(block: torch.Tensor, quick: bool) -> list[torch.Tensor]:
    """Return copies in `engine_memory`, `COPIED_BYTES` bytes in all."""
    count = 2 if quick else max(2, math.ceil(COPIED_BYTES / block.nbytes))
    return [engine_memory(block) for _ in range(count)]


def engine_memory(block: torch.Tensor) -> torch.Tensor:
    """Return a copy in huge pages, as the engine allocates weights and caches."""
    return typed(Device().empty(block.nbytes), 0, block.shape, block.dtype).copy_(block)


def error(x: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the 2-norm."""
    return ((x.double() - expected.double()).norm() / expected.double().norm()).item()


def check(name: str, *errors: float, same: bool = True, bound: float = 1e-2) -> None:
    """Print the largest error. RuntimeError if it exceeds the bound or `same` is false."""
    print(f"check  {name:50} error {max(errors):.2g}", flush=True)
    if not (same and max(errors) <= bound):
        raise RuntimeError(f"{name}: wrong by {max(errors):.2g} (at most {bound:g}), {same=}")


def plain_decode(q, k, v, *, slots, metadata, layout, state):
    """Decode step with scores and eviction in plain PyTorch."""
    _, tokens, recent, _ = metadata
    n, keys, values = slots.shape[3], *slots
    query = q.unflatten(1, (k.shape[1], -1))  # queries of a group are rows of one matmul
    logits = torch.cat([query @ keys.mT, query @ k[..., None]], -1) * q.shape[-1] ** -0.5
    probabilities = logits.float().softmax(-1)
    weights = probabilities.to(q.dtype)
    out = weights[..., :n] @ values + weights[..., n:] * v[:, :, None]
    received = probabilities.sum(2)
    state.scores.add_(received[..., :n])
    safe = state.positions >= (tokens - recent)[:, None, None]
    victims = state.scores.masked_fill(safe, torch.inf).argmin(-1)
    at = victims[..., None]
    state.scores.scatter_(-1, at, received[..., n:])
    state.positions.scatter_(-1, at, (tokens - 1)[:, None, None].expand(at.shape))
    for cached, new in ((keys, k), (values, v)):
        cached.scatter_(2, at[..., None].expand(-1, -1, 1, q.shape[-1]), new[:, :, None])
    return out.flatten(1, 2), victims


def sdpa_decode(q, k, v, *, slots, metadata, layout, state):
    """Run PyTorch's fused attention over the same slots, without scores, eviction and writes.

    Queries of a group are rows of one head, eight times as fast as `enable_gqa` on a CPU.
    """
    return F.scaled_dot_product_attention(q.unflatten(1, (k.shape[1], -1)), *slots)


def plain_prefill(q, k, v, lengths, *, scores):
    """Prefill with scores in plain PyTorch, float32, in blocks of queries."""
    batch = len(lengths)
    query, keys, values = (x.unflatten(0, (batch, -1)).transpose(1, 2).float() for x in (q, k, v))
    total, length, block = scores.unflatten(1, (batch, -1)).transpose(0, 1), keys.shape[2], 256
    out = torch.empty_like(query)
    for start in range(0, length, block):
        end = min(start + block, length)
        logits = query[:, :, start:end] @ keys[:, :, :end].mT * q.shape[-1] ** -0.5
        future = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
        probabilities = logits.masked_fill_(future, -torch.inf).softmax(-1)
        total[..., :end] += probabilities.sum(2)
        out[:, :, start:end] = probabilities @ values[:, :, :end]
    return out.to(q.dtype).transpose(1, 2).flatten(0, 1)


def sdpa_prefill(q, k, v, lengths, *, scores=None):
    """Run PyTorch's fused causal attention on the same packed rows, without scores."""
    q, k, v = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)


def select_by_gather(k, v, scores, *, cuts, slots, state):
    """Select the kept tokens of prompts by topk, sort and gather."""
    index = _select(scores, cuts, state)
    rows = index[..., None].expand(-1, -1, -1, k.shape[-1])
    for cached, x in zip(slots, (k, v), strict=True):
        torch.gather(x.unflatten(0, (len(cuts), -1)).transpose(1, 2), 2, rows, out=cached)


def select_by_index(k, v, scores, *, cuts, slots, state):
    """Select the kept tokens; keys and values by an index of rows, which copies faster."""
    index = _select(scores, cuts, state)
    sequence, head = torch.arange(len(cuts))[:, None, None], torch.arange(k.shape[1])[:, None]
    for cached, x in zip(slots, (k, v), strict=True):
        cached.copy_(x.unflatten(0, (len(cuts), -1))[sequence, index, head])


def _select(scores, cuts, state):
    """Write the eviction state and return the indices of kept tokens."""
    cut = cuts[0]
    by_text = scores.unflatten(1, (len(cuts), -1)).transpose(0, 1)
    heavy = by_text[..., :-cut.recent].topk(cut.heavy, sorted=False).indices.sort().values
    recent = torch.arange(cut.length - cut.recent, cut.length).expand(*heavy.shape[:2], -1)
    index = torch.cat([heavy, recent], -1)
    torch.gather(by_text, 2, index, out=state.scores)
    state.positions.copy_(index)
    return index


HEADS, DIM = 32, 128
CASES = [(4, 8, 8192), (4, 8, 2048)]
"""Sequences, KV heads and cached tokens, in LLaMA-3-8B's attention shape."""
FULL = "full cache"
CONTESTANTS = {f"recall {share:.0%}, {bits} bits": (share, bits)
               for share, bits in ((0.2, 4), (0.2, 2), (0.1, 4), (0.05, 4))}


def step_metadata(step: dict, share: float) -> dict[str, torch.Tensor]:
    """Return metadata of a step that attends to a share of the cache, and the last key's span."""
    before, sequences = int(step["metadata"][0, 0]), len(step["q"])
    return {"metadata": torch.tensor([[before], [int(share * before)]], dtype=torch.int32
                                     ).repeat(1, sequences),
            "spans": torch.tensor([[before - 1], [before - 1], [1]], dtype=torch.int32
                                  ).repeat(1, sequences)}


def reference_step(step: dict, *, share: float, bits: int) -> torch.Tensor:
    """Run a step by the reference: index the last key, select keys, attend, cache."""
    q, k, v, slots, index = (*(step[name] for name in ("q", "k", "v", "slots")),
                             step["indexes"][bits])
    layout, tokens = IndexLayout(DIM, bits), step_metadata(step, share)
    metadata = tokens["metadata"]
    reference_recall.index_keys(slots[0], index, tokens["spans"], layout=layout)
    selected = reference_recall.select_keys(q, k, index=index, metadata=metadata, layout=layout,
                                            top_k=int(metadata[1].max()))
    return reference_recall.recall_attention(q, k, v, slots=slots, selected=selected,
                                             metadata=metadata)[0]


def captured_recall(step: dict, *, share: float, bits: int) -> tuple[CapturedCalls, torch.Tensor]:
    """Return the captured calls of a step, as in a run, and their output tensor."""
    program = CapturedCalls()
    q, k, v, slots, index = (*(step[name] for name in ("q", "k", "v", "slots")),
                             step["indexes"][bits])
    layout, tokens = IndexLayout(DIM, bits), step_metadata(step, share)
    metadata = tokens["metadata"]
    native_recall.index_keys(slots[0], index, tokens["spans"], layout=layout, key_layout=None,
                             capture=program)
    selected = native_recall.select_keys(q, k, index=index, metadata=metadata, layout=layout,
                                         top_k=int(metadata[1].max()), capture=program)
    return program, native_recall.recall_attention(q, k, v, slots=slots, selected=selected,
                                                   layout=None,
                                                   metadata=metadata, capture=program)[0]


def captured_full(step: dict) -> CapturedCalls:
    """Return the captured attention over the full cache, without scores."""
    program = CapturedCalls()
    native.decode_attention(
        *(step[name] for name in ("q", "k", "v")), slots=step["slots"], layout=None,
        metadata=step["metadata"], eviction=EvictionArguments(), capture=program)
    return program


def step_of(slots: torch.Tensor) -> dict:
    """Return the arguments of a step over slots of which the last is empty."""
    _, sequences, kv_heads, n, _ = slots.shape
    indexes = {}
    for bits in (4, 2):
        layout = IndexLayout(DIM, bits)
        indexes[bits] = engine_memory(torch.zeros(
            sequences, kv_heads, layout.tiles(n), layout.tile_bytes, dtype=torch.uint8))
        spans = torch.tensor([[0] * sequences] * 2 + [[n - 1] * sequences], dtype=torch.int32)
        ops.index_keys(slots[0], indexes[bits], spans, layout=layout)
    q, k, v = (torch.randn(sequences, heads, DIM, dtype=DTYPE)
               for heads in (HEADS, kv_heads, kv_heads))
    metadata = torch.tensor([n - 1, n, 0, 0], dtype=torch.int32)[:, None].repeat(1, sequences)
    return {"q": q, "k": k, "v": v, "slots": slots, "metadata": metadata, "indexes": indexes}


def recall(rows: TimedRows, quick: bool) -> None:
    """Time each case with the full cache and each of `CONTESTANTS`."""
    small = step_of(torch.randn(2, 2, 8, 300, DIM, dtype=DTYPE))
    for name, (share, bits) in CONTESTANTS.items():
        right = reference_step(small, share=share, bits=bits)
        program, output = captured_recall(small, share=share, bits=bits)
        output.fill_(torch.nan)
        program.replay()
        check(f"recall: {name}", error(output, right))
    for sequences, kv_heads, n in CASES:
        n = n // 16 if quick else n
        block = torch.randn(2, sequences, kv_heads, n, DIM, dtype=DTYPE)
        steps = [step_of(slots) for slots in copies(block, quick)]
        programs = itertools.cycle([
            {FULL: captured_full(step)} | {name: captured_recall(step, share=share, bits=bits)[0]
                                           for name, (share, bits) in CONTESTANTS.items()}
            for step in steps])
        # They share one iterator over the steps, so that no input is in a cache.
        inputs = {name: map(lambda each, name=name: {"self": each[name]}, programs)
                  for name in (FULL, *CONTESTANTS)}
        token = sequences * kv_heads * 2 * DIM * block.itemsize
        nbytes = {name: n * sequences * kv_heads * IndexLayout(DIM, bits).tile_bytes // 16
                  + int(share * n) * token for name, (share, bits) in CONTESTANTS.items()}
        rows.measure("recall", f"batch {sequences}, {kv_heads} KV heads, {n} slots",
                     dict.fromkeys(inputs, CapturedCalls.replay), inputs,
                     nbytes={FULL: block.nbytes} | nbytes)
        full, *others = rows.rows[-len(inputs) :]
        for row in others:
            row["speedup_over_plain"] = full["ms"] / row["ms"]
            print(f"recall      {row['shape']:33}  {row['contestant']:22} "
                  f"{row['speedup_over_plain']:.2f} times as fast as over the full cache")
