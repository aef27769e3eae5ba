"""A decode step's attention by recall, beside the same over the full cache."""

from __future__ import annotations

import itertools

import torch
from kernel_timing.rows import DTYPE, TimedRows, check, copies, engine_memory, error

from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import EvictionArguments
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.reference import recall as reference_recall

HEADS, DIM = 32, 128
CASES = [(4, 8, 8192), (4, 8, 2048)]
"""Sequences, KV heads, cached tokens; of LLaMA-3-8B's attention."""
FULL = "full cache"
CONTESTANTS = {f"recall {share:.0%}, {bits} bits": (share, bits)
               for share, bits in ((0.2, 4), (0.2, 2), (0.1, 4), (0.05, 4))}


def told(step: dict, share: float) -> dict[str, torch.Tensor]:
    """The metadata of a step in which a token attends to a share of what is cached, and the span of
    the key before it."""
    before, sequences = int(step["metadata"][0, 0]), len(step["q"])
    return {"metadata": torch.tensor([[before], [int(share * before)]], dtype=torch.int32
                                     ).repeat(1, sequences),
            "spans": torch.tensor([[before - 1], [before - 1], [1]], dtype=torch.int32
                                  ).repeat(1, sequences)}


def wanted(step: dict, *, share: float, bits: int) -> torch.Tensor:
    """All that a step does, by the reference: it indexes the last step's key, chooses, attends,
    caches."""
    q, k, v, slots, index = (*(step[name] for name in ("q", "k", "v", "slots")),
                             step["indexes"][bits])
    layout, tokens = IndexLayout(DIM, bits), told(step, share)
    metadata = tokens["metadata"]
    reference_recall.index_keys(slots[0], index, tokens["spans"], layout=layout)
    chosen = reference_recall.choose_keys(q, k, index=index, metadata=metadata, layout=layout,
                                          most=int(metadata[1].max()))
    return reference_recall.attend_recalled(q, k, v, slots=slots, chosen=chosen,
                                            metadata=metadata)[0]


def bound_recall(step: dict, *, share: float, bits: int) -> tuple[CapturedCalls, torch.Tensor]:
    """The same as a run has it, with checked arguments and structs made once for a layer; and the
    output that the program writes."""
    program = CapturedCalls()
    q, k, v, slots, index = (*(step[name] for name in ("q", "k", "v", "slots")),
                             step["indexes"][bits])
    layout, tokens = IndexLayout(DIM, bits), told(step, share)
    metadata = tokens["metadata"]
    native_recall.index_keys(slots[0], index, tokens["spans"], layout=layout, records=None,
                             capture=program)
    chosen = native_recall.choose_keys(q, k, index=index, metadata=metadata, layout=layout,
                                       most=int(metadata[1].max()), capture=program)
    return program, native_recall.attend_recalled(q, k, v, slots=slots, chosen=chosen, layout=None,
                                                  metadata=metadata, capture=program)[0]


def bound_full(step: dict) -> CapturedCalls:
    """Attention over everything, which is not scored."""
    program = CapturedCalls()
    native.decode_attention(
        *(step[name] for name in ("q", "k", "v")), slots=step["slots"], layout=None,
        metadata=step["metadata"], eviction=EvictionArguments(), capture=program)
    return program


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
    small = step_of(torch.randn(2, 2, 8, 300, DIM, dtype=DTYPE))
    for name, (share, bits) in CONTESTANTS.items():
        right = wanted(small, share=share, bits=bits)
        program, found = bound_recall(small, share=share, bits=bits)
        found.fill_(torch.nan)
        program.replay()
        check(f"recall: {name}", error(found, right))
    for sequences, kv_heads, n in CASES:
        n = n // 16 if quick else n
        block = torch.randn(2, sequences, kv_heads, n, DIM, dtype=DTYPE)
        steps = [step_of(slots) for slots in copies(block, quick)]
        programs = itertools.cycle([
            {FULL: bound_full(step)} | {name: bound_recall(step, share=share, bits=bits)[0]
                                        for name, (share, bits) in CONTESTANTS.items()}
            for step in steps])
        # They share one round through the steps: none finds them in a cache.
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
