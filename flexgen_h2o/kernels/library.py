"""The operations as PyTorch's custom ops: C++ on the CPU, Triton on a GPU, shapes alone under meta.

What `native` and the Triton modules offer has the names and arguments of the functions here; `ops`
has the same in the engine's words. `cuts` has three integers a prompt (`Cut`). PyTorch's schemas
know no structs: an op that takes one has a twin whose arguments are flat. There a layout is the
bits of keys and of values: 16 for plain vectors, else 8 or 4.
"""

# No `from __future__ import annotations` here: PyTorch reads the schemas off the annotations.

from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout
from flexgen_h2o.kernels.arguments import (
    DEFAULT_ARGUMENTS,
    EvictionArguments,
    FormArguments,
)
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.triton import ops as triton_ops

NAMESPACE = "flexgen_h2o"


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int],
                      key_lengths: Sequence[int], scores: Tensor | None, decay: float,
                      form: FormArguments = DEFAULT_ARGUMENTS) -> Tensor:
    """See `reference.prefill_attention`."""
    return flat_prefill_attention(q, k, v, lengths, key_lengths, scores, decay, *form[:4])


@torch.library.custom_op(f"{NAMESPACE}::prefill_attention", mutates_args=("scores",),
                         device_types="cpu")
def flat_prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int],
                           key_lengths: Sequence[int], scores: Tensor | None, decay: float,
                           scale: float, softcap: float, window: int, sink_logits: Tensor | None
                           ) -> Tensor:
    """`prefill_attention` as a custom op."""
    return native.prefill_attention(q, k, v, lengths, key_lengths, scores, decay,
                                    FormArguments(scale, softcap, window, sink_logits))


@flat_prefill_attention.register_kernel("cuda")
def _(q, k, v, lengths, key_lengths, scores, decay, *form):
    return triton_ops.prefill_attention(
        q, k, v, lengths, key_lengths, scores, decay, FormArguments(*form))


@flat_prefill_attention.register_fake
def _(q, k, v, lengths, key_lengths, scores, decay, *form):
    return q.new_empty(q.shape)


def select_heavy_hitters(k: Tensor, v: Tensor, scores: Tensor | None, *, cuts: Sequence[int],
                         slots: Tensor, layout: CacheLayout | None,
                         eviction: EvictionArguments) -> None:
    """See `reference.select_heavy_hitters`."""
    kept, positions, ranks, _, _, mean, _, sinks, *_ = eviction
    flat_select_heavy_hitters(k, v, scores, cuts, slots, *_bits(layout), kept, positions,
                              ranks, mean, sinks)


@torch.library.custom_op(f"{NAMESPACE}::select_heavy_hitters",
                         mutates_args=("slots", "kept", "positions", "ranks"), device_types="cpu")
def flat_select_heavy_hitters(k: Tensor, v: Tensor, scores: Tensor | None, cuts: Sequence[int],
                              slots: Tensor, key_bits: int, value_bits: int, kept: Tensor,
                              positions: Tensor, ranks: Tensor | None, mean: bool, sinks: int
                              ) -> None:
    """`select_heavy_hitters` as a custom op."""
    native.select_heavy_hitters(
        k, v, scores, cuts=cuts, slots=slots,
        layout=CacheLayout.of(k.shape[-1], key_bits, value_bits),
        eviction=EvictionArguments(kept, positions, ranks, mean=mean, sinks=sinks))


@flat_select_heavy_hitters.register_kernel("cuda")
def _(k, v, scores, cuts, slots, key_bits, value_bits, kept, positions, ranks, mean, sinks):
    triton_ops.select_heavy_hitters(
        k, v, scores, cuts=cuts, slots=slots,
        layout=CacheLayout.of(k.shape[-1], key_bits, value_bits),
        eviction=EvictionArguments(kept, positions, ranks, mean=mean, sinks=sinks))


@flat_select_heavy_hitters.register_fake
def _(k, v, scores, cuts, slots, key_bits, value_bits, kept, positions, ranks, mean, sinks):
    return None


def decode_attention(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, metadata: Tensor,
                     layout: CacheLayout | None, eviction: EvictionArguments,
                     form: FormArguments = DEFAULT_ARGUMENTS) -> tuple[Tensor, Tensor]:
    """See `reference.decode_attention`."""
    scale, softcap, _, sink_logits, offsets = form
    return flat_decode_attention(q, k, v, slots, metadata, *_bits(layout), *eviction, scale,
                                 softcap, sink_logits, offsets)


@torch.library.custom_op(f"{NAMESPACE}::decode_attention",
                         mutates_args=("slots", "scores", "positions", "ranks"), device_types="cpu")
def flat_decode_attention(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, metadata: Tensor,
                          key_bits: int, value_bits: int, scores: Tensor | None,
                          positions: Tensor | None, ranks: Tensor | None, cos: Tensor | None,
                          sin: Tensor | None, mean: bool, decay: float, sinks: int, window: int,
                          factor: Tensor | None, shift: Tensor | None, scale: float,
                          softcap: float, sink_logits: Tensor | None, offsets: Tensor | None
                          ) -> tuple[Tensor, Tensor]:
    """`decode_attention` as a custom op."""
    return native.decode_attention(
        q, k, v, slots=slots, metadata=metadata,
        layout=CacheLayout.of(q.shape[-1], key_bits, value_bits),
        eviction=EvictionArguments(scores, positions, ranks, cos, sin, mean, decay, sinks, window,
                                   factor, shift),
        form=FormArguments(scale, softcap, 0, sink_logits, offsets))


@flat_decode_attention.register_kernel("cuda")
def _(q, k, v, slots, metadata, key_bits, value_bits, *others):
    *eviction, scale, softcap, sink_logits, offsets = others
    return triton_ops.decode_attention(
        q, k, v, slots=slots, metadata=metadata,
        layout=CacheLayout.of(q.shape[-1], key_bits, value_bits),
        eviction=EvictionArguments(*eviction),
        form=FormArguments(scale, softcap, 0, sink_logits, offsets))


@flat_decode_attention.register_fake
def _(q, k, v, slots, metadata, key_bits, value_bits, *others):
    return q.new_empty(q.shape), q.new_empty(k.shape[:2], dtype=torch.int64)


def _bits(layout: CacheLayout | None) -> tuple[int, int]:
    """Bits of keys and of values."""
    return (16, 16) if layout is None else (layout.keys.bits, layout.values.bits)


@torch.library.custom_op(f"{NAMESPACE}::quantize_groups", mutates_args=(), device_types="cpu")
def quantize_groups(x: Tensor, bits: int) -> Tensor:
    """See `reference.quantize_groups`."""
    return native.quantize_groups(x, bits)


quantize_groups.register_kernel("cuda")(triton_ops.quantize_groups)


@quantize_groups.register_fake
def _(x, bits):
    nbytes = GroupLayout(x.shape[-1], bits).nbytes
    return x.new_empty((*x.shape[:-1], nbytes), dtype=torch.uint8)


@torch.library.custom_op(f"{NAMESPACE}::dequantize_groups", mutates_args=(), device_types="cpu")
def dequantize_groups(records: Tensor, bits: int, length: int) -> Tensor:
    """See `reference.dequantize_groups`."""
    return native.dequantize_groups(records, bits, length)


dequantize_groups.register_kernel("cuda")(triton_ops.dequantize_groups)


@dequantize_groups.register_fake
def _(records, bits, length):
    return records.new_empty((*records.shape[:-1], length), dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::linear_skinny", mutates_args=("out",),
                         device_types="cpu")
def linear_skinny(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool
                  ) -> None:
    """See `reference.linear_skinny`; where `ops.linear_choice` may be "skinny"."""
    native.linear_skinny(x, weight, bias, out, add)


@linear_skinny.register_fake
def _(x, weight, bias, out, add):
    return None


@torch.library.custom_op(f"{NAMESPACE}::linear_tiled", mutates_args=("out",),
                         device_types="cpu")
def linear_tiled(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool
                 ) -> None:
    """See `reference.linear_skinny`; where `ops.linear_choice` may be "tiled"."""
    native.linear_tiled(x, weight, bias, out, add)


@linear_tiled.register_fake
def _(x, weight, bias, out, add):
    return None


@torch.library.custom_op(f"{NAMESPACE}::linear_float32", mutates_args=("out",),
                         device_types="cpu")
def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool
                   ) -> None:
    """See `reference.linear_skinny`; where `ops.linear_choice` may be "float32"."""
    native.linear_float32(x, weight, bias, out, add)


@linear_float32.register_fake
def _(x, weight, bias, out, add):
    return None


@torch.library.custom_op(f"{NAMESPACE}::quantize_matrix", mutates_args=("data",),
                         device_types="cpu")
def quantize_matrix(weight: Tensor, data: Tensor, bits: int, group: int, search: bool,
                    importance: Tensor | None = None) -> None:
    """See `reference_matrix.quantize_matrix`; on the CPU alone, where weights are loaded."""
    native.quantize_matrix(weight, data, bits, group, search, importance)


@quantize_matrix.register_fake
def _(weight, data, bits, group, search, importance=None):
    return None


@torch.library.custom_op(f"{NAMESPACE}::unpack_rows", mutates_args=(), device_types="cpu")
def unpack_rows(data: Tensor, outputs: int, inputs: int, bits: int, group: int, rows: Tensor,
                dtype: torch.dtype) -> Tensor:
    """See `reference_matrix.unpack_rows`."""
    return native.unpack_rows(data, outputs, inputs, bits, group, rows, dtype)


unpack_rows.register_kernel("cuda")(triton_ops.unpack_rows)


@unpack_rows.register_fake
def _(data, outputs, inputs, bits, group, rows, dtype):
    return data.new_empty((len(rows), inputs), dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::linear_quantized", mutates_args=("out",),
                         device_types="cpu")
def linear_quantized(x: Tensor, data: Tensor, outputs: int, inputs: int, bits: int, group: int,
                     bias: Tensor | None, out: Tensor, add: bool, activation_bits: int = 16
                     ) -> None:
    """See `reference_matrix.linear_quantized`."""
    native.linear_quantized(x, data, outputs, inputs, bits, group, bias, out, add, activation_bits)


linear_quantized.register_kernel("cuda")(triton_ops.linear_quantized)


@linear_quantized.register_fake
def _(x, data, outputs, inputs, bits, group, bias, out, add, activation_bits=16):
    return None
