"""A decode step's attention by recall, beside the same over the full cache."""

from __future__ import annotations

import functools
import itertools

import torch
from kernel_timing.rows import DTYPE, TimedRows, check, copies, engine_memory, error

from flexgen_h2o.config.index_layout import IndexLayout
from flexgen_h2o.kernels import ops, reference_recall

HEADS, DIM = 32, 128
CASES = [(4, 8, 8192), (4, 8, 2048)]
"""Sequences, KV heads, cached tokens; of LLaMA-3-8B's attention."""
FULL = "full cache"
CONTESTANTS = {f"recall {share:.0%}, {bits} bits": (share, bits)
               for share, bits in ((0.2, 4), (0.2, 2), (0.1, 4), (0.05, 4))}


def full_step(q, k, v, slots, metadata, **others) -> torch.Tensor:
    """Attention over everything, which is not scored."""
    return ops.decode_attention(q, k, v, slots=slots, metadata=metadata)[0]


def recall_step(q, k, v, slots, metadata, indexes, *, share: float, bits: int, choosing=ops
                ) -> torch.Tensor:
    """All that a step does: it indexes the last step's key, chooses, attends, caches."""
    cached = int(metadata[0, 0])
    count, layout = int(share * cached), IndexLayout(DIM, bits)
    told = torch.tensor([[cached] * len(q), [count] * len(q)], dtype=torch.int32)
    spans = torch.tensor([[cached - 1] * len(q)] * 2 + [[1] * len(q)], dtype=torch.int32)
    choosing.index_keys(slots[0], indexes[bits], spans, layout=layout)
    chosen = choosing.choose_keys(q, k, index=indexes[bits], metadata=told, layout=layout,
                                  most=count)
    return choosing.attend_recalled(q, k, v, slots=slots, chosen=chosen, metadata=told)[0]


def step_of(slots: torch.Tensor) -> dict:
    """Arguments of a step over slots of which all but the last are full."""
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
    """Rows of each case: the full cache and each of `CONTESTANTS`."""
    functions = {FULL: full_step} | {
        name: functools.partial(recall_step, share=share, bits=bits)
        for name, (share, bits) in CONTESTANTS.items()}
    small = step_of(torch.randn(2, 2, 8, 300, DIM, dtype=DTYPE))
    for name, (share, bits) in CONTESTANTS.items():
        found, wanted = (recall_step(**small, share=share, bits=bits, choosing=choosing)
                         for choosing in (ops, reference_recall))
        check(f"recall: {name}", error(found, wanted))
    for sequences, kv_heads, n in CASES:
        n = n // 16 if quick else n
        block = torch.randn(2, sequences, kv_heads, n, DIM, dtype=DTYPE)
        steps = itertools.cycle([step_of(slots) for slots in copies(block, quick)])
        token = sequences * kv_heads * 2 * DIM * block.itemsize
        nbytes = {name: n * sequences * kv_heads * IndexLayout(DIM, bits).tile_bytes // 16
                  + int(share * n) * token for name, (share, bits) in CONTESTANTS.items()}
        rows.measure("recall", f"batch {sequences}, {kv_heads} KV heads, {n} slots", functions,
                     dict.fromkeys(functions, steps), nbytes={FULL: block.nbytes} | nbytes)
        full, *others = rows.rows[-len(functions) :]
        for row in others:
            row["speedup_over_plain"] = full["ms"] / row["ms"]
            print(f"recall      {row['shape']:33}  {row['contestant']:22} "
                  f"{row['speedup_over_plain']:.2f} times as fast as over the full cache")
