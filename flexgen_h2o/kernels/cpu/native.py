"""The CPU kernels: Python functions that check arguments and call the C++ library.

C++ gets pointers, so everything is checked here: a call with inconsistent arguments raises
ValueError and writes nothing. Only values of tensors (slots, ranks, rows) are checked in C++.
Structs and their fields are declared in `kernels.abi`.

Functions with a `capture` argument add the call to it instead of making it; inputs must then be
contiguous in their last dimension, since a copy would not see later values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout
from flexgen_h2o.config.layers import RecurrentConfig
from flexgen_h2o.config.limits import SKINNY_ROWS
from flexgen_h2o.config.weight_layout import GGMLType
from flexgen_h2o.h2o.key_smoothing import BasisChange
from flexgen_h2o.kernels import abi, dispatch
from flexgen_h2o.kernels.arguments import (
    DEFAULT_ARGUMENTS,
    DTYPES,
    EvictionArguments,
    QuantizedMatrix,
    VariantArguments,
    check,
    check_attention,
    check_contiguous,
    check_floats,
    check_last_dim_contiguous,
    check_linear,
    check_slots,
    check_state,
    check_tensors,
    check_variant,
)
from flexgen_h2o.kernels.cpu.library import STRUCTS, CapturedCalls, call, has_tiles

GROUP_SCALED_ROWS = 64
"""Rows of a batch-invariant quantized matmul that are multiplied together with tiles."""


def unit_stride(x: Tensor) -> Tensor:
    """Return x if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def integers(values: Sequence[int]) -> ctypes.Array:
    """Return a C array of int64. The caller keeps it alive while its address is used."""
    return (ctypes.c_int64 * len(values))(*values)


def group_struct(layout: GroupLayout | None, width: int) -> ctypes.Structure:
    """Return the struct of quantized groups; without a layout, of plain vectors [width]."""
    if layout is None:
        return STRUCTS["GroupLayout"](16, 0, 0, 0, width)
    return STRUCTS["GroupLayout"](layout.bits, layout.groups, layout.group, layout.code_bytes,
                             layout.nbytes)


def address(x: Tensor | None) -> int | None:
    """Return the address of a tensor's first element, or None. The caller keeps the tensor."""
    return None if x is None else x.data_ptr()


def strides(k: Tensor, v: Tensor) -> dict[str, Any]:
    """Return the strides of keys and values [rows, heads, head_dim], by their names in structs."""
    return {"k_row": k.stride(0), "k_head": k.stride(1), "v_row": v.stride(0),
            "v_head": v.stride(1)}


def variant_struct(variant: VariantArguments) -> ctypes.Structure:
    """Return the struct of a variant. The caller keeps the sinks and offsets."""
    return STRUCTS["AttentionVariant"](
        address(variant.sink_logits), address(variant.offsets), variant.scale, variant.softcap,
        variant.window)


def slot_fields(slots: Tensor, layout: CacheLayout | None) -> dict[str, Any]:
    """Return the layouts and strides of cache slots, whose last dimension is contiguous."""
    kind, sequence, head, slot, _ = slots.stride()
    keys = values = group_struct(None if layout is None else layout.keys, slots.shape[-1])
    if layout is not None and layout.mixed:  # each slot has the key, then the value
        kind, values = layout.keys.nbytes, group_struct(layout.values, slots.shape[-1])
    return {"key_layout": keys, "value_layout": values,
            "slots_kind": kind, "slots_sequence": sequence, "slots_head": head,
            "slots_slot": slot}


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int],
                      key_lengths: Sequence[int], scores: Tensor | None, decay: float,
                      variant: VariantArguments = DEFAULT_ARGUMENTS) -> Tensor:
    """Run `reference.attention.prefill_attention`."""
    name = "prefill_attention"
    dtype = check_attention(name, q, k, v)
    check(len(lengths) == len(key_lengths) and sum(lengths) == len(q)
          and sum(key_lengths) == len(k)
          and all(0 <= rows <= keys for rows, keys in zip(lengths, key_lengths, strict=True)),
          name, f"lengths {list(lengths)} and {list(key_lengths)} do not make up {len(q)} rows and "
          f"{len(k)} keys")
    check_tensors(name, torch.float32, scores=(scores, (k.shape[1], len(k))))
    check_last_dim_contiguous(name, scores=scores)
    check_variant(name, variant, q.shape[1])
    q, k, v = map(unit_stride, (q, k, v))
    out = q.new_empty(q.shape)
    rows, key_rows = integers(lengths), integers(key_lengths)
    call(name, "PrefillAttention",
         q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(),
         scores=address(scores),
         lengths=ctypes.addressof(rows), key_lengths=ctypes.addressof(key_rows),
         dtype=DTYPES[dtype], sequences=len(lengths), heads=q.shape[1], kv_heads=k.shape[1],
         head_dim=q.shape[2], q_row=q.stride(0), q_head=q.stride(1), **strides(k, v),
         scores_head=0 if scores is None else scores.stride(0), decay=decay,
         variant=variant_struct(variant))
    return out


def select_heavy_hitters(k: Tensor, v: Tensor, scores: Tensor | None, *, cuts: Sequence[int],
                         slots: Tensor, layout: CacheLayout | None,
                         eviction: EvictionArguments) -> None:
    """Run `reference.attention.select_heavy_hitters`.

    `cuts` has three integers per prompt: the fields of `Cut`.
    """
    name = "select_heavy_hitters"
    dtype = check_attention(name, k, k, v)
    sequences, sinks = len(cuts) // 3, eviction.sinks
    check_slots(name, slots, sequences, k, layout)
    state = tuple(slots.shape[1:4])
    check(len(cuts) == 3 * sequences and sum(cuts[::3]) == len(k) and min((*cuts, sinks)) >= 0
          and all(min(length, heavy + recent + sinks) <= state[2]
                  for length, heavy, recent in zip(*(cuts[i::3] for i in range(3)), strict=True)),
          name, f"cuts {list(cuts)} and {sinks} sinks do not fit {len(k)} tokens and {state[2]} "
          "slots")
    check_tensors(name, torch.float32, scores=(scores, (k.shape[1], len(k))))
    check_state(name, eviction, state)
    check(eviction.scores is not None, name, "there is no state to write")
    check_last_dim_contiguous(name, scores=scores)
    k, v = map(unit_stride, (k, v))
    cut_fields = integers(cuts)
    call(name, "SelectHeavyHitters",
         k=k.data_ptr(), v=v.data_ptr(), scores=address(scores), cuts=ctypes.addressof(cut_fields),
         slots=slots.data_ptr(), kept_scores=address(eviction.scores),
         positions=address(eviction.positions), ranks=address(eviction.ranks),
         dtype=DTYPES[dtype], sequences=sequences, kv_heads=k.shape[1], head_dim=k.shape[2],
         num_slots=state[2],
         **strides(k, v), scores_head=0 if scores is None else scores.stride(0),
         **slot_fields(slots, layout), mean=eviction.mean, sinks=sinks)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, metadata: Tensor,
                     layout: CacheLayout | None, eviction: EvictionArguments,
                     variant: VariantArguments = DEFAULT_ARGUMENTS, out: Tensor | None = None,
                     capture: CapturedCalls | None = None) -> tuple[Tensor, Tensor]:
    """Run `reference.attention.decode_attention`.

    `out` is [sequences, heads, head_dim], contiguous; it is allocated if None.
    """
    name = "decode_attention"
    dtype, sequences = check_attention(name, q, k, v), len(q)
    check(len(k) == sequences, name, f"{len(k)} new keys for {sequences} queries")
    check_slots(name, slots, sequences, k, layout)
    state, cos, sin = tuple(slots.shape[1:4]), eviction.cos, eviction.sin
    check_tensors(name, torch.int32, metadata=(metadata, (4, sequences)))
    check_state(name, eviction, state)
    check_variant(name, variant, q.shape[1], sequences)
    check(not eviction.window or eviction.positions is not None, name,
         "a window needs the positions of what is cached")
    rope: tuple[int, ...] = (0, 0)
    if eviction.ranks is not None:
        check(eviction.scores is not None and cos is not None and cos.dim() == 2
              and 2 * cos.shape[1] <= q.shape[2], name,
              "ranks need scores, and cos and sin [positions, at most head_dim / 2]")
        rope = tuple(cos.shape)
        check_tensors(name, torch.float32, cos=(cos, rope), sin=(sin, rope))
    factor, shift, constants = eviction.factor, eviction.shift, tuple(k.shape[1:])
    check((factor is None) == (shift is None) and (factor is None or rope[0] > 0), name,
         "factor and shift of smoothed keys go together, and need ranks")
    check_tensors(name, torch.float32, factor=(factor, constants), shift=(shift, constants))
    out = q.new_empty(q.shape) if out is None else out
    check_tensors(name, dtype, out=(out, q.shape))
    check_contiguous(name, metadata=metadata, cos=cos, sin=sin, factor=factor, shift=shift, out=out)
    if capture is not None:
        check_last_dim_contiguous(name, q=q, k=k, v=v)
    q, k, v = map(unit_stride, (q, k, v))
    written_slots = q.new_empty(k.shape[:2], dtype=torch.int64)
    call(name, "DecodeAttention", capture=capture,
         tensors=(q, k, v, out, slots, metadata, *eviction[:5], factor, shift, written_slots,
                  variant.sink_logits, variant.offsets),
         q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(),
         slots=slots.data_ptr(), metadata=metadata.data_ptr(), scores=address(eviction.scores),
         positions=address(eviction.positions), ranks=address(eviction.ranks),
         cos=address(cos), sin=address(sin), factor=address(factor), shift=address(shift),
         written_slots=written_slots.data_ptr(), dtype=DTYPES[dtype],
         sequences=sequences, heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2],
         num_slots=state[2], rope_rows=rope[0], half_rotary=rope[1],
         q_row=q.stride(0), q_head=q.stride(1), **strides(k, v), **slot_fields(slots, layout),
         mean=eviction.mean, sinks=eviction.sinks, window=eviction.window,
         decay=eviction.decay, variant=variant_struct(variant))
    return out, written_slots


def quantize_groups(x: Tensor, layout: GroupLayout) -> Tensor:
    """Run `reference.attention.quantize_groups`."""
    name = "quantize_groups"
    dtype = check_floats(name, x, x.dim())
    check_tensors(name, dtype, x=(x, (*x.shape[:-1], layout.length)))
    rows = unit_stride(x.reshape(-1, layout.length))
    packed = x.new_empty((*x.shape[:-1], layout.nbytes), dtype=torch.uint8)
    _groups(name, rows, packed.view(-1, layout.nbytes), layout)
    return packed


def dequantize_groups(packed: Tensor, layout: GroupLayout) -> Tensor:
    """Run `reference.attention.dequantize_groups`."""
    name = "dequantize_groups"
    check_tensors(name, torch.uint8, packed=(packed, (*packed.shape[:-1], layout.nbytes)))
    out = packed.new_empty((*packed.shape[:-1], layout.length), dtype=torch.float32)
    _groups(name, out.view(-1, layout.length), unit_stride(packed.reshape(-1, layout.nbytes)),
            layout)
    return out


def _groups(name: str, x: Tensor, packed: Tensor, layout: GroupLayout) -> None:
    call(name, "QuantizeGroups", x=x.data_ptr(), packed=packed.data_ptr(),
         layout=group_struct(layout, layout.nbytes), dtype=DTYPES[x.dtype],
         rows=len(x), length=layout.length, x_row=x.stride(0), packed_row=packed.stride(0))


def linear_skinny(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
                  add: bool = False, *, capture: CapturedCalls | None = None) -> None:
    """Run `reference.attention.linear_skinny` for rows of bfloat16, of which it is for few.

    It reads the weight once for each `SKINNY_ROWS` rows.
    """
    name = "linear_skinny"
    check(x.dtype == torch.bfloat16 and len(x) == len(out), name,
          f"takes equal rows of bfloat16, got {x.dtype} {list(x.shape)} and {list(out.shape)}")
    for rows, part in zip(x.split(SKINNY_ROWS), out.split(SKINNY_ROWS), strict=True):
        _linear(name, rows, weight, bias, part, add, capture)


def linear_tiled(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
                 add: bool = False, *, capture: CapturedCalls | None = None) -> None:
    """Run `reference.attention.linear_skinny` for any rows of bfloat16, with AMX tiles.

    Sums are float32 and rounded once, after bias and residual. No bit depends on the number of
    threads.
    """
    name = "linear_tiled"
    check(x.dtype == torch.bfloat16 and has_tiles(), name,
         f"takes bfloat16 where there is AMX, got {x.dtype}")
    _linear(name, x, weight, bias, out, add, capture)


def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
                   add: bool = False, *, capture: CapturedCalls | None = None) -> None:
    """Run `reference.attention.linear_skinny` for any rows, with float32 arithmetic.

    Weights are converted to float32 in blocks that stay in cache. No bit depends on the number of
    threads, or of rows.
    """
    _linear("linear_float32", x, weight, bias, out, add, capture)


def _linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool,
            capture: CapturedCalls | None) -> None:
    outputs = len(weight)
    dtype = check_linear(name, x, outputs, bias, out)
    check_tensors(name, dtype, weight=(weight, (outputs, x.shape[1])))
    check_last_dim_contiguous(name, x=x, weight=weight)
    call(name, "Linear", capture=capture, tensors=(x, weight, bias, out),
         x=x.data_ptr(), weight=weight.data_ptr(), bias=address(bias), out=out.data_ptr(),
         dtype=DTYPES[dtype], rows=len(x), inputs=x.shape[1], outputs=outputs, x_row=x.stride(0),
         weight_row=weight.stride(0), out_row=out.stride(0), add=add)


def plain_matrix(weight: Tensor) -> ctypes.Structure:
    """Return the struct of a contiguous 16-bit weight [outputs, inputs]."""
    return STRUCTS["Matrix"](weight.data_ptr(), *weight.shape, 16, 0, 16)


def matrix_struct(name: str, matrix: QuantizedMatrix) -> ctypes.Structure:
    """Return the struct of a quantized weight, whose bytes are checked.

    Its group is 0 for MXFP4, and negative for compact scales.
    """
    layout, activation_bits = matrix.layout, matrix.activation_bits
    check_tensors(name, torch.uint8, data=(matrix.data, (layout.nbytes,)))
    check_contiguous(name, data=matrix.data)
    check(activation_bits == 16 or activation_bits == 8 and layout.bits != 12, name,
          f"cannot round activations to {activation_bits} bits for weights of {layout.bits}")
    group = 0 if layout.mxfp4 else -layout.group if layout.compact else layout.group
    return STRUCTS["Matrix"](matrix.data.data_ptr(), layout.outputs, layout.inputs, layout.bits,
                             group, activation_bits)


def quantize_matrix(weight: Tensor, matrix: QuantizedMatrix, *, search: bool = False,
                    importance: Tensor | None = None) -> None:
    """Run `reference.matrix.quantize_matrix`, with the result in matrix.data; not for MXFP4."""
    name = "quantize_matrix"
    dtype = check_floats(name, weight, 2)
    check(not matrix.layout.mxfp4, name, "MXFP4 is for the reference")
    check_tensors(name, dtype, weight=(weight, matrix.shape))
    check_tensors(name, torch.float32, importance=(importance, weight.shape[1:]))
    check_contiguous(name, importance=importance)
    weight = unit_stride(weight)
    call(name, "QuantizeMatrix", weight=weight.data_ptr(), importance=address(importance),
         matrix=matrix_struct(name, matrix), dtype=DTYPES[dtype], weight_row=weight.stride(0),
         search=search)


def repack(blocks: np.ndarray, kind: GGMLType, matrix: QuantizedMatrix,
           order: Tensor | None = None) -> bool:
    """Run `ops.repack`, with the result in matrix.data; its layout is the block type's own."""
    name, (outputs, inputs) = "repack", matrix.shape
    row_bytes = inputs // kind.elements * kind.nbytes
    struct = matrix_struct(name, matrix)
    check(blocks.dtype == np.uint8 and blocks.flags.c_contiguous and blocks.ndim == 2
          and (order is not None or len(blocks) == outputs) and blocks.shape[1] == row_bytes,
          name, f"takes contiguous bytes of {outputs} rows, got {blocks.shape}")
    check_tensors(name, torch.int64, order=(order, (outputs,)))
    if order is not None:
        check_contiguous(name, order=order)
        check(int(order.min()) >= 0 and int(order.max()) < len(blocks), name, "rows out of range")
    non_finite = ctypes.c_int64()
    call(name, "Repack", blocks=blocks.ctypes.data, rows=address(order), matrix=struct,
         non_finite=ctypes.addressof(non_finite), ggml_type=kind.number, row_bytes=row_bytes)
    return not non_finite.value


def unpack_rows(matrix: QuantizedMatrix, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Run `reference.matrix.unpack_rows`."""
    name = "unpack_rows"
    struct = matrix_struct(name, matrix)
    check(dtype in DTYPES, name, f"cannot make {dtype}")
    check_tensors(name, torch.int64, rows=(rows, (rows.numel(),)))
    rows = rows.contiguous()
    out = torch.empty(len(rows), matrix.layout.inputs, dtype=dtype)
    call(name, "UnpackRows", rows=rows.data_ptr(), out=out.data_ptr(), matrix=struct,
         dtype=DTYPES[dtype], count=len(rows))
    return out


def linear_quantized(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor,
                     add: bool = False, *, capture: CapturedCalls | None = None) -> None:
    """Run `reference.matrix.linear_quantized`; see `dispatch.batch_invariant`."""
    name, (outputs, inputs) = "linear_quantized", matrix.shape
    dtype = check_linear(name, x, outputs, bias, out)
    check(x.shape[1] == inputs, name, f"{x.shape[1]} inputs for a matrix of {inputs}")
    struct = matrix_struct(name, matrix)
    if capture is not None:
        check_last_dim_contiguous(name, x=x)
    x, invariant = unit_stride(x), dispatch.is_batch_invariant()
    # The one kernel with tiles for any number of rows keeps sums of all of them in the L2 cache.
    most = GROUP_SCALED_ROWS if invariant and has_tiles() else max(1, len(x))
    for rows, part in zip(x.split(most), out.split(most), strict=True):
        call(name, "QuantizedLinear", capture=capture, tensors=(x, matrix.data, bias, out),
             x=rows.data_ptr(), bias=address(bias), out=part.data_ptr(), matrix=struct,
             dtype=DTYPES[dtype], rows=len(rows), x_row=x.stride(0), out_row=out.stride(0),
             add=add, invariant=invariant)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor, *, eps: float,
         centered: bool, capture: CapturedCalls | None = None) -> None:
    """Run `reference.layers.norm`."""
    dtype = check_floats("norm", x, 2)
    check_tensors("norm", dtype, x=(x, x.shape), out=(out, x.shape), weight=(weight, x.shape[1:]),
           bias=(bias, x.shape[1:]))
    check_last_dim_contiguous("norm", x=x, weight=weight, bias=bias, out=out)
    call("norm", "Norm", capture=capture, tensors=(x, weight, bias, out), x=x.data_ptr(),
         weight=address(weight), bias=address(bias), out=out.data_ptr(), dtype=DTYPES[dtype],
         rows=len(x), width=x.shape[1], x_row=x.stride(0), out_row=out.stride(0),
         centered=centered, eps=eps)


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None, change: BasisChange | None = None,
           offsets: Tensor | None = None, *, capture: CapturedCalls | None = None) -> None:
    """Run `reference.layers.rotate`."""
    dtype, half = check_floats("rotate", x, 3), 0 if cos is None else cos.shape[-1]
    tables = (len(x), half)
    check_tensors("rotate", dtype, x=(x, x.shape))
    check_tensors("rotate", torch.float32, cos=(cos, tables), sin=(sin, tables))
    check(2 * half <= x.shape[2], "rotate", f"rotary tables of {half} pairs exceed "
         f"{x.shape[2]} dimensions")
    factor, shift, mean = (None, None, None) if change is None else (
        change.factor, change.shift, None if offsets is None else change.mean)
    kv_heads = x.shape[1] if factor is None else len(factor)
    check(kv_heads > 0 and x.shape[1] % kv_heads == 0, "rotate",
         f"{x.shape[1]} heads are not a multiple of {kv_heads} KV heads")
    constants = (kv_heads, x.shape[2])
    check_tensors("rotate", torch.float32, factor=(factor, constants), shift=(shift, constants),
           mean=(mean, constants), offsets=(offsets, tuple(x.shape[:2])))
    check(offsets is None or mean is not None, "rotate", "offsets take the mean of keys")
    check_last_dim_contiguous("rotate", x=x)
    check_contiguous("rotate", cos=cos, sin=sin, factor=factor, shift=shift, mean=mean,
                     offsets=offsets)
    call("rotate", "Rotate", capture=capture, tensors=(x, cos, sin, factor, shift, mean, offsets),
         x=x.data_ptr(), cos=address(cos), sin=address(sin), factor=address(factor),
         shift=address(shift), mean=address(mean), offsets=address(offsets),
         dtype=DTYPES[dtype], rows=len(x), heads=x.shape[1], kv_heads=kv_heads,
         head_dim=x.shape[2], half_rotary=half, x_row=x.stride(0), x_head=x.stride(1))


def activate(x: Tensor, function: str, factor: Tensor | None = None, *,
             capture: CapturedCalls | None = None) -> None:
    """Run `reference.layers.activate`."""
    dtype = check_floats("activate", x, 2)
    check(function in abi.ACTIVATIONS, "activate", f"there is no {function}")
    check_tensors("activate", dtype, x=(x, x.shape), factor=(factor, x.shape))
    check_last_dim_contiguous("activate", x=x, factor=factor)
    call("activate", "Activate", capture=capture, tensors=(x, factor), x=x.data_ptr(),
         factor=address(factor), dtype=DTYPES[dtype], rows=len(x), width=x.shape[1],
         function=abi.ACTIVATIONS.index(function), x_row=x.stride(0),
         factor_row=0 if factor is None else factor.stride(0))


def gated_delta_net(mixed: Tensor, beta: Tensor, step: Tensor, states: Tensor, *,
                    weights: Sequence[Tensor], sequences: Sequence[int], lengths: Sequence[int],
                    config: RecurrentConfig) -> Tensor:
    """Run `reference.layers.gated_delta_net`."""
    name, (conv, log_decay, step_bias) = "gated_delta_net", weights
    dtype, rows, heads = check_floats(name, mixed, 2), len(mixed), (config.value_heads,)
    check_tensors(name, dtype, mixed=(mixed, (rows, config.conv_size)), beta=(beta, (rows, *heads)),
                  step=(step, (rows, *heads)), conv=(conv, (config.conv_size, config.kernel)),
                  log_decay=(log_decay, heads), step_bias=(step_bias, heads))
    check_tensors(name, torch.float32, states=(states, (len(states), config.state_size)))
    check(len(sequences) == len(lengths) and sum(lengths) == rows
          and all(0 <= sequence < len(states) for sequence in sequences)
          and len({*sequences}) == len(sequences) and min(lengths, default=1) > 0, name,
          f"{list(lengths)} tokens of sequences {list(sequences)} do not make up {rows} rows of "
          f"{len(states)} states")
    check_last_dim_contiguous(name, mixed=mixed, beta=beta, step=step, states=states)
    check_contiguous(name, conv=conv, log_decay=log_decay, step_bias=step_bias)
    out = mixed.new_empty((rows, config.value_heads, config.value_dim))
    places, counts = integers(sequences), integers(lengths)
    call(name, "GatedDeltaNet", mixed=mixed.data_ptr(), beta=beta.data_ptr(), step=step.data_ptr(),
         out=out.data_ptr(), states=states.data_ptr(), conv=conv.data_ptr(),
         log_decay=log_decay.data_ptr(), step_bias=step_bias.data_ptr(),
         sequences=ctypes.addressof(places), lengths=ctypes.addressof(counts),
         dtype=DTYPES[dtype], count=len(lengths), key_heads=config.key_heads,
         value_heads=config.value_heads, key_dim=config.key_dim, value_dim=config.value_dim,
         kernel=config.kernel, mixed_row=mixed.stride(0), beta_row=beta.stride(0),
         step_row=step.stride(0), states_row=states.stride(0))
    return out
