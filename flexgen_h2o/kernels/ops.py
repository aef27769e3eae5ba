"""The operations of the engine: one function each, which calls the kernel of its tensors' device.

`kernels.reference` specifies every operation in plain PyTorch; docstrings here name the function
and state what a backend adds. `BACKENDS` has the kernels: C++ on a CPU, Triton on a GPU. The
reference runs where a device has no kernels: the C++ was not built, Triton is not installed, or
``FLEXGEN_H2O_KERNELS=reference`` is set in the environment.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout, IndexLayout
from flexgen_h2o.config.layers import DEFAULT_VARIANT, AttentionVariant
from flexgen_h2o.config.weight_layout import GGMLType, MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.eviction import Cut, EvictionState
from flexgen_h2o.h2o.key_smoothing import BasisChange
from flexgen_h2o.kernels import dispatch, torch_ops
from flexgen_h2o.kernels.arguments import EvictionArguments, QuantizedMatrix, VariantArguments
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.kernels.reference import blocks as reference_blocks
from flexgen_h2o.kernels.reference import layers as reference_layers
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.kernels.reference import recall as reference_recall
from flexgen_h2o.kernels.reference import sparse as reference_sparse

UNPACKED_OUTPUTS = 256
"""Rows of a quantized matrix that are dequantized together where PyTorch then multiplies them."""

_log = logging.getLogger(__name__)


class _Triton:
    """A module of kernels.triton, imported when one of its functions is first called.

    Triton launches on the current device, so each call selects the device of its first GPU tensor.
    """

    def __init__(self, name: str):
        self._name = f"flexgen_h2o.kernels.triton.{name}"

    def __getattr__(self, function: str) -> Callable:
        def launch(*args, **options):
            tensor = next(x for x in args if getattr(x, "is_cuda", False))
            with torch.cuda.device_of(tensor):
                return getattr(importlib.import_module(self._name), function)(*args, **options)

        setattr(self, function, launch)
        return launch


_groups, _matrix, _recall, _hot_set = map(_Triton, ("groups", "matrix", "recall", "hot_set"))
BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {
        "prefill_attention": native, "select_heavy_hitters": native, "decode_attention": native,
        "quantize_groups": native, "dequantize_groups": native,
        "quantize_matrix": native, "repack": native, "unpack_rows": native,
        "linear_quantized": native, "rotate": native, "gated_delta_net": native,
        "index_keys": native_recall, "select_keys": native_recall,
        "recall_attention": native_recall, "assign_slots": native_recall,
        "fetch_tokens": native_recall},
    "cuda": {
        "prefill_attention": _Triton("prefill"), "select_heavy_hitters": _Triton("select"),
        "decode_attention": _Triton("decode"),
        "quantize_groups": _groups, "dequantize_groups": _groups,
        "unpack_rows": _matrix, "linear_quantized": _matrix,
        "index_keys": _recall, "select_keys": _recall, "recall_attention": _recall,
        "claim_slots": _hot_set, "copy_tokens": _hot_set},
}
"""The module with the kernel of each operation, by device type. Operations that are missing run as
the reference."""


def _kernel(operation: str, x: Tensor) -> Callable | None:
    """Return the kernel of an operation for x's device; None if the reference runs."""
    device = x.device.type
    if uses_reference(device):
        return None
    module = BACKENDS[device].get(operation)
    return module and getattr(module, operation)


def _dispatched(reference_operation: Callable, argument: int = 0) -> Callable[..., Any]:
    """Return an operation: the kernel for the device of an argument, or the reference."""
    name = reference_operation.__name__
    parameter = [*inspect.signature(reference_operation).parameters][argument]

    @functools.wraps(reference_operation)
    def operation(*args: Any, **options: Any) -> Any:
        x = args[argument] if argument < len(args) else options[parameter]
        return (_kernel(name, x) or reference_operation)(*args, **options)

    return operation


def uses_reference(device: str) -> bool:
    """Return True if a device type runs the reference.

    Raises UserError if ``FLEXGEN_H2O_KERNELS`` has an unknown value.
    """
    return _is_forced() or not _has_kernels(device)


def _is_forced() -> bool:
    value = os.environ.get("FLEXGEN_H2O_KERNELS")
    if value and value != "reference":
        raise UserError(f"FLEXGEN_H2O_KERNELS={value}: it must be reference or unset")
    return value == "reference"


@functools.cache
def _has_kernels(device: str) -> bool:
    """Return True if a device type has kernels; log the reason once if not."""
    missing: str | None = "no kernels for this kind of device"
    if device == "cpu":
        missing = cpu_library.missing()
    elif device == "cuda":
        missing = None if importlib.util.find_spec("triton") else "Triton is not installed"
    if missing:
        _log.warning("attention and eviction run in plain PyTorch on %s, slowly: %s", device,
                     missing)
    return missing is None


def _has_custom_policy(state: EvictionState | None) -> bool:
    """Return True if a user's policy, which the kernels do not know, selects the victims."""
    if state is None or state.eviction.policy.in_kernels:
        return False
    _log_custom_policy(state.eviction.policy.name)
    return True


def _is_latent(k: Tensor, v: Tensor) -> bool:
    """Return True if values are the last elements of the keys."""
    return v.shape[-1] < k.shape[-1]


def kernel_values(k: Tensor, v: Tensor, slots: Tensor, layout: CacheLayout | None
                  ) -> tuple[Tensor, Tensor, CacheLayout | None]:
    """Return values, slots and their layout as the kernels take them.

    Values that are part of the keys become whole keys, in the same slots. The last elements of the
    kernels' output are then the result.
    """
    if not _is_latent(k, v):
        return v, slots, layout
    layout = None if layout is None else replace(layout, values=layout.keys)
    return k, slots.expand(2, -1, -1, -1, -1), layout


@functools.cache
def _log_custom_policy(name: str) -> None:
    _log.warning("policy %r has no fused kernel: decode attention and eviction run in plain "
                 "PyTorch, slower", name)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *,
                      key_lengths: Sequence[int] | None = None, scores: Tensor | None = None,
                      decay: float = 1.0, variant: AttentionVariant = DEFAULT_VARIANT,
                      sinks: Tensor | None = None) -> Tensor:
    """Compute causal attention of prompts: `reference.attention.prefill_attention`.

    Memory is linear in the number of tokens.
    """
    if variant.window is not None and variant.window >= max(key_lengths or lengths, default=0):
        variant = replace(variant, window=None)
    if _is_latent(k, v) and not _is_forced():
        options = (lengths, key_lengths or lengths, scores, decay,
                   VariantArguments.from_variant(variant, sinks))
        if dispatch.is_batch_invariant():
            # As in `kernel_values`. PyTorch's matmuls depend on the number of rows.
            return native.prefill_attention(q, k, k, *options)[..., k.shape[-1] - v.shape[-1] :]
        return torch_ops.blockwise_prefill_attention(q, k, v, *options)
    whole = scores is None and key_lengths is None and torch_ops.sdpa_supports(variant)
    if whole and not _is_forced() and (
            not _has_kernels(q.device.type) or variant.window is None and (
            q.is_cuda or dispatch.select_implementation(
                "prefill_attention", len(q), q.dtype) == "sdpa")):
        return torch_ops.sdpa_prefill_attention(q, k, v, lengths, variant=variant)
    kernel = _kernel("prefill_attention", q)
    if kernel is None:
        return reference.prefill_attention(q, k, v, lengths, key_lengths=key_lengths, scores=scores,
                                           decay=decay, variant=variant, sinks=sinks)
    return kernel(q, k, v, lengths, key_lengths or lengths, scores, decay,
                  VariantArguments.from_variant(variant, sinks))


def select_heavy_hitters(k: Tensor, v: Tensor, scores: Tensor | None, *, cuts: Sequence[Cut],
                         slots: Tensor, state: EvictionState,
                         layout: CacheLayout | None = None) -> None:
    """Cut prompts to their budgets: `reference.attention.select_heavy_hitters`, without a sort."""
    kernel = _kernel("select_heavy_hitters", k)
    if kernel is None or k.is_cuda and _is_latent(k, v) or _has_custom_policy(state):
        reference.select_heavy_hitters(k, v, scores, cuts=cuts, slots=slots, state=state,
                                       layout=layout)
        return
    v, slots, layout = kernel_values(k, v, slots, layout)
    kernel(k, v, scores, cuts=list(chain.from_iterable(cuts)), slots=slots, layout=layout,
           eviction=EvictionArguments.from_state(state))


def decode_attention(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, metadata: Tensor,
                     layout: CacheLayout | None = None, state: EvictionState | None = None,
                     variant: AttentionVariant = DEFAULT_VARIANT, sinks: Tensor | None = None,
                     offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attend over the cache and cache new tokens: `reference.attention.decode_attention`.

    The kernels read each cached byte once per group of query heads.
    """
    kernel = _kernel("decode_attention", q)
    restores = state is not None and state.ranks is not None and state.smoothing is not None
    if (kernel is None or _has_custom_policy(state)
            or q.is_cuda and (restores or _is_latent(k, v))):
        return reference.decode_attention(q, k, v, slots=slots, metadata=metadata, layout=layout,
                                          state=state, variant=variant, sinks=sinks,
                                          offsets=offsets)
    values, slots, layout = kernel_values(k, v, slots, layout)
    out, written_slots = kernel(q, k, values, slots=slots, metadata=metadata, layout=layout,
                                eviction=EvictionArguments.from_state(state),
                                variant=VariantArguments.from_variant(variant, sinks, offsets))
    return out[..., k.shape[-1] - v.shape[-1] :], written_slots


select_values = reference_sparse.select_values
attend_selected = reference_sparse.attend_selected


# The hot set: on a CPU, then on a GPU, with page-locked host memory on either side of copies.
assign_slots = _dispatched(reference_recall.assign_slots)
fetch_tokens = _dispatched(reference_recall.fetch_tokens)
claim_slots = _dispatched(reference_recall.claim_slots)
copy_tokens = _dispatched(reference_recall.copy_tokens, 2)

gated_delta_net = _dispatched(reference_layers.gated_delta_net)
dequantize_groups = _dispatched(reference.dequantize_groups)


def index_keys(keys: Tensor, index: Tensor, spans: Tensor, *, layout: IndexLayout,
               key_layout: GroupLayout | None = None) -> None:
    """Quantize keys into an index: `reference.recall.index_keys`.

    With an index on a GPU, keys may be in page-locked host memory.
    """
    kernel = _kernel("index_keys", index) or reference_recall.index_keys
    kernel(keys, index, spans, layout=layout, key_layout=key_layout)


def select_keys(q: Tensor, k: Tensor, *, index: Tensor, metadata: Tensor, layout: IndexLayout,
                top_k: int, log_weights: Tensor | None = None,
                variant: AttentionVariant = DEFAULT_VARIANT,
                sinks: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    """Select the tokens that queries attend to: `reference.recall.select_keys`.

    The kernels do not sort, and do not write out dequantized keys.
    """
    options = {"index": index, "metadata": metadata, "layout": layout, "top_k": top_k,
               "log_weights": log_weights}
    kernel = _kernel("select_keys", q)
    if kernel is None:
        return reference_recall.select_keys(q, k, **options, variant=variant, sinks=sinks,
                                            offsets=offsets)
    return kernel(q, k, **options, variant=VariantArguments.from_variant(variant, sinks, offsets))


def recall_attention(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, selected: Tensor,
                     metadata: Tensor, layout: CacheLayout | None = None,
                     variant: AttentionVariant = DEFAULT_VARIANT, sinks: Tensor | None = None,
                     offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attend to selected tokens: `reference.recall.recall_attention`.

    The kernels read no other slots. With queries on a GPU, slots may be in page-locked host memory.
    """
    options = {"selected": selected, "metadata": metadata}
    kernel = _kernel("recall_attention", q)
    if kernel is None or q.is_cuda and _is_latent(k, v):
        return reference_recall.recall_attention(q, k, v, **options, slots=slots, layout=layout,
                                                 variant=variant, sinks=sinks, offsets=offsets)
    values, slots, layout = kernel_values(k, v, slots, layout)
    out, written_slots = kernel(q, k, values, **options, slots=slots, layout=layout,
                                variant=VariantArguments.from_variant(variant, sinks, offsets))
    return out[..., k.shape[-1] - v.shape[-1] :], written_slots


def rotate_(x: Tensor, rope: tuple[Tensor, Tensor] | None, change: BasisChange | None = None,
            offsets: Tensor | None = None) -> None:
    """Rotate heads in place, then change their basis: `reference.layers.rotate`.

    Parameters
    ----------
    x : Tensor [rows, heads, head_dim]
    rope : (Tensor, Tensor) or None
        Cosines and sines of `table_dtype`, as in `torch_ops.apply_rope_`. None: no rotation.
    offsets : float32 Tensor [rows, heads], optional
        Written in place.
    """
    if rope is None and change is None:
        return
    cos, sin = rope or (None, None)
    if uses_native(x):
        native.rotate(x, cos, sin, change, offsets)
    elif change is None:
        torch_ops.apply_rope_(x, cos, sin)
    else:
        reference_layers.rotate(x, cos, sin, change, offsets)


def table_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the cosines and sines that `rotate_` takes for x of `dtype`."""
    return torch.float32 if device.type == "cpu" else dtype


def uses_native(x: Tensor) -> bool:
    """Return True if the C++ kernels run for x."""
    return x.is_cpu and not uses_reference("cpu")


def quantize_groups(x: Tensor, layout: GroupLayout) -> Tensor:
    """Quantize vectors group by group: `reference.attention.quantize_groups`."""
    kernel = _kernel("quantize_groups", x)
    if kernel is None:
        return reference.quantize_groups(x, layout)
    return kernel(x.float() if x.dtype == torch.float64 else x, layout)


stack_vectors = reference.stack_vectors
split_vectors = reference.split_vectors


def pack_slots(vectors: Tensor, layout: CacheLayout | None) -> Tensor:
    """Convert keys and values to the format of cache slots: `reference.attention.pack_slots`."""
    return reference.pack_slots(vectors, layout, quantize=quantize_groups)


def unpack_slots(packed: Tensor, layout: CacheLayout | None) -> Tensor:
    """Convert cache slots to keys and values: `reference.attention.unpack_slots`."""
    return reference.unpack_slots(packed, layout, dequantize=dequantize_groups)


def linear_kernel(x: Tensor, weight: Tensor) -> Callable[..., None] | None:
    """Return the C++ matmul for x [rows, inputs] and a weight [outputs, inputs].

    None: PyTorch's matmul is to be used, because `dispatch` prefers it or C++ does not apply.
    """
    dtypes = (torch.bfloat16, torch.float16) + dispatch.is_batch_invariant() * (torch.float32,)
    if (x.dtype not in dtypes or weight.dtype != x.dtype or not x.is_cpu
            or not x.stride(1) == weight.stride(1) == 1 or uses_reference("cpu")):
        return None
    name = dispatch.select_implementation("linear", len(x), x.dtype)
    return None if name == "pytorch" else getattr(native, f"linear_{name}")


def quantize_matrix(weight: Tensor, layout: MatrixLayout, *, search: bool = False,
                    importance: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Quantize a weight in host memory: `reference.matrix.quantize_matrix`.

    The result is written to `out` if given, uint8 [layout.nbytes] in host memory. MXFP4 is always
    computed by the reference.
    """
    out = torch.empty(layout.nbytes, dtype=torch.uint8) if out is None else out
    if uses_reference("cpu") or layout.mxfp4:
        return out.copy_(reference_matrix.quantize_matrix(weight, layout, search=search,
                                                          importance=importance))
    weight = weight.float() if weight.dtype == torch.float64 else weight
    native.quantize_matrix(weight, QuantizedMatrix(out, layout), search=search,
                           importance=importance)
    return out


def repack(blocks: np.ndarray, kind: GGMLType, layout: MatrixLayout, out: Tensor,
           order: Tensor | None = None) -> bool:
    """Convert a matrix of GGUF blocks to the format of the kernels: `reference.blocks.repack`.

    Parameters
    ----------
    blocks : uint8 array [rows, bytes]
        Contiguous; it may be mapped from a file.
    layout : MatrixLayout
        One that `kind.fits`.
    out : uint8 Tensor [layout.nbytes]
        In host memory.
    order : int64 Tensor [outputs], optional
        Row i of the matrix is row order[i] of `blocks`. None: all rows in order.

    Returns
    -------
    bool
        False if a scale or a zero point is not finite in float16; `out` is then undefined.
    """
    if not uses_reference("cpu") and layout == kind.layout(layout.outputs, layout.inputs):
        return native.repack(blocks, kind, QuantizedMatrix(out, layout), order)
    rows = slice(None) if order is None else order.numpy()
    data = reference_blocks.repack(torch.from_numpy(np.array(blocks[rows])), kind, layout)
    if data is not None:
        out.copy_(data)
    return data is not None


def unpack_rows(matrix: QuantizedMatrix, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize rows of a matrix: `reference.matrix.unpack_rows`."""
    kernel = _kernel("unpack_rows", matrix.data)
    if kernel is None:
        return reference_matrix.unpack_rows(matrix.data, matrix.layout, rows, dtype)
    return kernel(matrix, rows, dtype)


def linear_quantized(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor, *,
                     add: bool = False) -> None:
    """Multiply by a quantized weight: `reference.matrix.linear_quantized`.

    `quantized_implementation` selects the implementation on a CPU:

    - "codes" reads only the quantized bytes. No bit depends on the number of threads, and a row
      depends on the other rows only in the order of its sums, and within
      `dispatch.batch_invariant` not at all. With AMX, more than 64 rows of bfloat16 are otherwise
      multiplied by weights that are rounded to bfloat16.
    - "unpacked" (bfloat16, where it was measured to be faster) rounds all weights to bfloat16 and
      uses PyTorch's matmul, which guarantees neither.
    """
    kernel = _kernel("linear_quantized", x)
    if kernel is None:
        reference_matrix.linear_quantized(x, matrix, bias, out, add=add)
    elif quantized_implementation(x, matrix) == "unpacked":
        _unpacked_matmul(x, matrix, bias, out, add=add)
    else:
        kernel(x, matrix, bias, out, add)


def quantized_implementation(x: Tensor, matrix: QuantizedMatrix) -> str:
    """Return the implementation that `linear_quantized` uses: "codes" or "unpacked"."""
    if not x.is_cpu or matrix.activation_bits != 16:
        return "codes"
    bits = 8 if matrix.layout.bits == 6 else matrix.layout.bits  # 6 bits are not timed separately
    return dispatch.select_implementation("linear_quantized", len(x), x.dtype, bits)


def _unpacked_matmul(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor, *,
                      add: bool) -> None:
    """Compute `linear_quantized` with PyTorch's matmul, in slices of outputs that stay in cache."""
    # oneDNN with AMX reads past the end of a row and multiplies the values there by 0, which
    # gives NaN for NaN. Contiguous rows have only numbers there.
    x = x.contiguous()
    every = torch.arange(len(matrix))
    for rows, part in zip(every.split(UNPACKED_OUTPUTS), out.split(UNPACKED_OUTPUTS, dim=1),
                          strict=True):
        weight = unpack_rows(matrix, rows, x.dtype)
        product = F.linear(x, weight, None if bias is None else bias[rows])
        if add:
            part.add_(product)
        else:
            part.copy_(product)
