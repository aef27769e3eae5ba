"""The CPU kernels of recall: checks of arguments and calls of the C++ library, as in `native`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout, IndexLayout, PageLayout
from flexgen_h2o.kernels.arguments import (
    DEFAULT_ARGUMENTS,
    DTYPES,
    VariantArguments,
    check,
    check_attention,
    check_contiguous,
    check_last_dim_contiguous,
    check_slots,
    check_tensors,
    check_variant,
)
from flexgen_h2o.kernels.cpu.library import CapturedCalls, call
from flexgen_h2o.kernels.cpu.native import (
    address,
    group_struct,
    slot_fields,
    strides,
    unit_stride,
    variant_struct,
)

READERS = 32
"""Threads that read a file where io_submit(2) does not apply (cpu/fetch_tokens.cpp)."""


def _index_fields(name: str, index: Tensor, layout: IndexLayout, heads: Sequence[int]
                  ) -> dict[str, Any]:
    """Return struct fields of an index [sequences, kv_heads, tiles, tile_bytes]."""
    check_tensors(name, torch.uint8, index=(index, (*heads, index.shape[2], layout.tile_bytes)))
    check(index.stride()[2:] == (layout.tile_bytes, 1), name, "tiles of an index must lie together")
    return {"head_dim": layout.length, "bits": layout.bits, "groups": layout.groups,
            "num_tiles": index.shape[2], "index_sequence": index.stride(0),
            "index_head": index.stride(1)}


def index_keys(keys: Tensor, index: Tensor, spans: Tensor, *, layout: IndexLayout,
               key_layout: GroupLayout | None, capture: CapturedCalls | None = None) -> None:
    """Run `reference.recall.index_keys`."""
    name = "index_keys"
    width = layout.length if key_layout is None else key_layout.nbytes
    check(keys.dim() == 4 and keys.is_cpu and keys.shape[3] == width and (
        keys.dtype == torch.uint8 if key_layout is not None else keys.dtype in DTYPES), name,
        f"keys must be [sequences, kv_heads, n, {width}] on the CPU, got {keys.dtype} "
        f"{list(keys.shape)}")
    sequences = len(keys)
    check_tensors(name, torch.int32, spans=(spans, (3, sequences)))
    check_contiguous(name, spans=spans)
    check_last_dim_contiguous(name, keys=keys)
    sequence, head, slot, _ = keys.stride()
    call(name, "IndexKeys", capture=capture, tensors=(keys, index, spans),
         keys=keys.data_ptr(), index=index.data_ptr(), spans=spans.data_ptr(),
         key_layout=group_struct(key_layout, keys.shape[-1]),
         dtype=DTYPES.get(keys.dtype, 0), sequences=sequences, kv_heads=keys.shape[1],
         num_keys=keys.shape[2], keys_sequence=sequence, keys_head=head, keys_slot=slot,
         **_index_fields(name, index, layout, keys.shape[:2]))


def select_keys(q: Tensor, k: Tensor, *, index: Tensor, metadata: Tensor, layout: IndexLayout,
                top_k: int, log_weights: Tensor | None = None,
                variant: VariantArguments = DEFAULT_ARGUMENTS, out: Tensor | None = None,
                capture: CapturedCalls | None = None) -> Tensor:
    """Run `reference.recall.select_keys`.

    `out` is int32 [sequences, kv_heads, top_k], contiguous; it is allocated if None.
    """
    name = "select_keys"
    dtype, sequences = check_attention(name, q, k, k), len(q)
    check(len(k) == sequences and q.shape[2] == layout.length, name,
         f"{len(k)} new keys for {sequences} queries, or not of {layout.length} elements")
    check_tensors(name, torch.int32, metadata=(metadata, (2, sequences)))
    check_contiguous(name, metadata=metadata)
    check_variant(name, variant, q.shape[1], sequences)
    tokens = 0
    if log_weights is not None:
        tokens = log_weights.shape[-1]
        check_tensors(name, torch.int32, log_weights=(log_weights, (sequences, k.shape[1], tokens)))
        check_contiguous(name, log_weights=log_weights)
    shape = (sequences, k.shape[1], top_k)
    selected = metadata.new_empty(shape) if out is None else out
    check_tensors(name, torch.int32, out=(selected, shape))
    check_contiguous(name, out=selected)
    if capture is not None:
        check_last_dim_contiguous(name, q=q, k=k)
    q, k = map(unit_stride, (q, k))
    call(name, "SelectKeys", capture=capture,
         tensors=(q, k, index, metadata, selected, log_weights, variant.sink_logits,
                  variant.offsets),
         q=q.data_ptr(), k=k.data_ptr(), index=index.data_ptr(), metadata=metadata.data_ptr(),
         selected=selected.data_ptr(), log_weights=address(log_weights), dtype=DTYPES[dtype],
         sequences=sequences, heads=q.shape[1], kv_heads=k.shape[1], top_k=top_k, tokens=tokens,
         q_row=q.stride(0), q_head=q.stride(1),
         k_row=k.stride(0), k_head=k.stride(1), variant=variant_struct(variant),
         **_index_fields(name, index, layout, (sequences, k.shape[1])))
    return selected


def recall_attention(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, selected: Tensor,
                     metadata: Tensor, layout: CacheLayout | None,
                     variant: VariantArguments = DEFAULT_ARGUMENTS,
                     out: Tensor | None = None, capture: CapturedCalls | None = None
                    ) -> tuple[Tensor, Tensor]:
    """Run `reference.recall.recall_attention`.

    `out` is [sequences, heads, head_dim], contiguous; it is allocated if None.
    """
    name = "recall_attention"
    dtype, sequences = check_attention(name, q, k, v), len(q)
    check(len(k) == sequences, name, f"{len(k)} new keys for {sequences} queries")
    check_slots(name, slots, sequences, k, layout)
    check_tensors(name, torch.int32, metadata=(metadata, (2, sequences)),
                  selected=(selected, (sequences, k.shape[1], selected.shape[-1])))
    check_variant(name, variant, q.shape[1], sequences)
    out = q.new_empty(q.shape) if out is None else out
    check_tensors(name, dtype, out=(out, q.shape))
    check_contiguous(name, metadata=metadata, selected=selected, out=out)
    if capture is not None:
        check_last_dim_contiguous(name, q=q, k=k, v=v)
    q, k, v = map(unit_stride, (q, k, v))
    written_slots = q.new_empty(k.shape[:2], dtype=torch.int64)
    call(name, "RecallAttention", capture=capture,
         tensors=(q, k, v, out, slots, selected, metadata, written_slots, variant.sink_logits,
                  variant.offsets),
         q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(),
         slots=slots.data_ptr(), selected=selected.data_ptr(), metadata=metadata.data_ptr(),
         written_slots=written_slots.data_ptr(), dtype=DTYPES[dtype], sequences=sequences,
         heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2], num_slots=slots.shape[3],
         top_k=selected.shape[-1],
         q_row=q.stride(0), q_head=q.stride(1), **strides(k, v), **slot_fields(slots, layout),
         variant=variant_struct(variant))
    return out, written_slots


def assign_slots(selected: Tensor, first_recent: Tensor, *, slot_of: Tensor, token_of: Tensor,
                 log_weights: Tensor, newest: int) -> tuple[Tensor, Tensor, int]:
    """Run `reference.recall.assign_slots`."""
    name = "assign_slots"
    sequences, kv_heads, top_k = selected.shape
    heads, (_, tokens), (_, num_slots) = sequences * kv_heads, slot_of.shape, token_of.shape
    tensors = {"selected": (selected, (sequences, kv_heads, top_k)),
               "first_recent": (first_recent, (sequences,)),
               "slot_of": (slot_of, (heads, tokens)), "token_of": (token_of, (heads, num_slots)),
               "log_weights": (log_weights, (heads, tokens))}
    check_tensors(name, torch.int32, **tensors)
    check_contiguous(name, **{key: tensor for key, (tensor, _) in tensors.items()})
    check(newest > 0, name, f"{newest} newest tokens")
    slots = torch.empty_like(selected)
    missing = selected.new_empty((3, heads * top_k), dtype=torch.int64)
    counts = selected.new_empty(2, dtype=torch.int64)
    addresses: dict[str, Any] = {key: tensor.data_ptr() for key, (tensor, _) in tensors.items()}
    call(name, "AssignSlots", slots=slots.data_ptr(), missing=missing.data_ptr(),
         counts=counts.data_ptr(), **addresses,
         sequences=sequences, kv_heads=kv_heads, top_k=top_k, tokens=tokens, num_slots=num_slots,
         newest=newest)
    count, hits = counts.tolist()
    return slots, missing[:, :count], hits


def fetch_tokens(missing: Tensor, slots: Tensor, *, file: int, direct: bool, offset: int,
                 layout: PageLayout, read_buffer: Tensor) -> tuple[int, int]:
    """Run `reference.recall.fetch_tokens`, with concurrent reads."""
    name = "fetch_tokens"
    count, num_slots = missing.shape[1], slots.shape[-3]
    check_tensors(name, torch.int64, missing=(missing, (3, count)))
    check_tensors(name, torch.uint8, read_buffer=(read_buffer, (len(read_buffer),)))
    check_contiguous(name, slots=slots, read_buffer=read_buffer)
    check(len(read_buffer) >= layout.page_bytes, name, "no capacity for a page")
    check(missing.stride(1) == 1 and slots.nbytes == slots.shape[:-2].numel() * layout.token_bytes,
         name, f"missing tokens must lie together, and slots have {layout.token_bytes} bytes")
    counts = missing.new_empty(2)
    call(name, "FetchTokens", missing=missing.data_ptr(), slots=slots.data_ptr(),
         read_buffer=read_buffer.data_ptr(), counts=counts.data_ptr(), file=file, direct=direct,
         offset=offset, missing_row=missing.stride(0), count=count,
         heads=slots.shape[:-3].numel(), head_pages=layout.head_pages,
         page_tokens=layout.page_tokens,
         token_bytes=layout.token_bytes, page_bytes=layout.page_bytes, num_slots=num_slots,
         read_buffer_bytes=len(read_buffer), gap=layout.gap, max_read_pages=layout.max_read_pages,
         threads=READERS)
    done, nbytes = counts.tolist()
    return done, nbytes
