"""One function per operation; the backend by device. `kernels.reference.attention` specifies each.

On a CPU the operations are C++ (`native`), on a GPU Triton. Where the C++ could not be built or
Triton is missing the reference runs, and the log says so once.
``FLEXGEN_H2O_KERNELS=reference`` in the environment forces it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.config.attention_form import DEFAULT_FORM, AttentionForm
from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout, IndexLayout, PageLayout
from flexgen_h2o.config.weight_layout import BlockType, MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.eviction import Cut, EvictionState
from flexgen_h2o.h2o.key_smoothing import BasisChange
from flexgen_h2o.kernels import dispatch, library, rotary, torch_ops
from flexgen_h2o.kernels.arguments import EvictionArguments, FormArguments
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.kernels.matrix import QuantizedMatrix, signed_group
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.kernels.reference import blocks as reference_blocks
from flexgen_h2o.kernels.reference import layers as reference_layers
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.kernels.reference import recall as reference_recall
from flexgen_h2o.kernels.reference import sparse as reference_sparse
from flexgen_h2o.kernels.triton import ops as triton_ops

__all__ = ["attend_chosen", "attend_recalled", "pack_slots", "unpack_slots", "choose_keys",
           "choose_values", "claim_slots", "copy_tokens", "decode_attention", "dequantize_groups",
           "fetch_tokens", "flat", "index_keys", "linear_choice",
           "linear_float32", "linear_skinny", "linear_tiled", "linear_quantized", "uses_reference",
           "prefill_attention", "quantize_groups", "quantize_matrix", "repack",
           "select_heavy_hitters", "take_slots", "unpack_rows"]

UNPACKED_OUTPUTS = 256
"""Rows of a quantized matrix that are unpacked together where PyTorch then multiplies them."""

_log = logging.getLogger(__name__)


def _forced() -> bool:
    chosen = os.environ.get("FLEXGEN_H2O_KERNELS")
    if chosen and chosen != "reference":
        raise UserError(f"FLEXGEN_H2O_KERNELS={chosen}: it is reference, or not set")
    return chosen == "reference"


def uses_reference(device: str) -> bool:
    """True if the reference has to do, on a type of device."""
    return _forced() or not _fused(device)


@functools.cache
def _fused(device: str) -> bool:
    """True if there are kernels for a type of device."""
    missing = "no kernels for this kind of device"
    if device == "cpu":
        missing = cpu_library.missing()
    elif device == "cuda":
        missing = None if importlib.util.find_spec("triton") else "Triton is not installed"
    if missing:
        _log.warning("plain PyTorch does attention and eviction on %s, slowly: %s", device,
                     missing)
    return missing is None


def _unknown(state: EvictionState | None) -> bool:
    """True if eviction goes by a policy that the kernels don't know."""
    if state is None or state.eviction.policy is None:
        return False
    _tell_unknown(state.eviction.policy.name)
    return True


@functools.cache
def _tell_unknown(name: str) -> None:
    _log.warning("the policy %r is none of the kernels' own: its decode attention and eviction run "
                 "in plain PyTorch, slower", name)


def _backend(x: Tensor):
    """The module to call: past PyTorch's dispatcher unless a call is traced, which saves 60 us a
    call."""
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return library
    return native if x.is_cpu else triton_ops if x.is_cuda else library


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *,
                      key_lengths: Sequence[int] | None = None, scores: Tensor | None = None,
                      decay: float = 1.0, form: AttentionForm = DEFAULT_FORM,
                      sinks: Tensor | None = None) -> Tensor:
    """See `reference.prefill_attention`; memory linear in the tokens."""
    if form.window is not None and form.window >= max(key_lengths or lengths, default=0):
        form = replace(form, window=None)
    whole = scores is None and key_lengths is None and torch_ops.sdpa_supports(form)
    if whole and not _forced() and (not _fused(q.device.type) or form.window is None and (
            q.is_cuda or dispatch.choice("prefill_attention", len(q), q.dtype) == "sdpa")):
        return torch_ops.sdpa_prefill_attention(q, k, v, lengths, form=form)
    if uses_reference(q.device.type):
        return reference.prefill_attention(q, k, v, lengths, key_lengths=key_lengths, scores=scores,
                                           decay=decay, form=form, sinks=sinks)
    return _backend(q).prefill_attention(q, k, v, lengths, key_lengths or lengths, scores, decay,
                                         FormArguments.of(form, sinks))


def select_heavy_hitters(k: Tensor, v: Tensor, scores: Tensor | None, *, cuts: Sequence[Cut],
                         slots: Tensor, state: EvictionState,
                         layout: CacheLayout | None = None) -> None:
    """See `reference.select_heavy_hitters`; no sort."""
    if uses_reference(k.device.type) or _unknown(state):
        reference.select_heavy_hitters(k, v, scores, cuts=cuts, slots=slots, state=state,
                                       layout=layout)
        return
    _backend(k).select_heavy_hitters(k, v, scores, cuts=list(chain.from_iterable(cuts)),
                                     slots=slots, layout=layout,
                                     eviction=EvictionArguments.of(state))


def decode_attention(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, metadata: Tensor,
                     layout: CacheLayout | None = None, state: EvictionState | None = None,
                     form: AttentionForm = DEFAULT_FORM, sinks: Tensor | None = None,
                     offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.decode_attention`; each cached byte is read once per group of query heads."""
    restores = state is not None and state.ranks is not None and state.smoothing is not None
    if uses_reference(q.device.type) or _unknown(state) or q.is_cuda and restores:
        return reference.decode_attention(q, k, v, slots=slots, metadata=metadata, layout=layout,
                                          state=state, form=form, sinks=sinks, offsets=offsets)
    return _backend(q).decode_attention(q, k, v, slots=slots, metadata=metadata,
                                        layout=layout, eviction=EvictionArguments.of(state),
                                        form=FormArguments.of(form, sinks, offsets))


def choose_values(q: Tensor, k: Tensor, *, keys: Tensor, metadata: Tensor, sparsity: float,
                  layout: CacheLayout | None = None, form: AttentionForm = DEFAULT_FORM,
                  sinks: Tensor | None = None, offsets: Tensor | None = None
                  ) -> tuple[Tensor, Tensor]:
    """See `reference_sparse.choose_values`; plain PyTorch on every device."""
    return reference_sparse.choose_values(q, k, keys=keys, metadata=metadata, sparsity=sparsity,
                                          layout=layout, form=form, sinks=sinks, offsets=offsets)


def attend_chosen(k: Tensor, v: Tensor, *, slots: Tensor, values: Tensor, weights: Tensor,
                  metadata: Tensor, layout: CacheLayout | None = None) -> tuple[Tensor, Tensor]:
    """See `reference_sparse.attend_chosen`; plain PyTorch on every device."""
    return reference_sparse.attend_chosen(k, v, slots=slots, values=values, weights=weights,
                                          metadata=metadata, layout=layout)


def uses_native(x: Tensor) -> bool:
    """True if the C++ of what has no custom op is called: where nothing is traced, on a CPU."""
    return x.is_cpu and not uses_reference("cpu") and _backend(x) is native


def _recall(x: Tensor, name: str):
    """The function `name` of recall's kernels for x's device; None where the reference runs."""
    if uses_native(x):
        return getattr(native_recall, name)
    if x.is_cuda and not uses_reference("cuda"):
        return triton_ops.triton_function("recall", name)
    return None


def index_keys(keys: Tensor, index: Tensor, spans: Tensor, *, layout: IndexLayout,
               records: GroupLayout | None = None) -> None:
    """See `reference_recall.index_keys`. Beside an index on a GPU keys may be in page-locked host
    memory."""
    kernel = _recall(index, "index_keys")
    if kernel is None:
        reference_recall.index_keys(keys, index, spans, layout=layout, records=records)
        return
    kernel(keys, index, spans, layout=layout, records=records)


def choose_keys(q: Tensor, k: Tensor, *, index: Tensor, metadata: Tensor, layout: IndexLayout,
                most: int, log_weights: Tensor | None = None, form: AttentionForm = DEFAULT_FORM,
                sinks: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    """See `reference_recall.choose_keys`; no sort, and codes are never written out as floats."""
    some = {"index": index, "metadata": metadata, "layout": layout, "most": most,
            "log_weights": log_weights}
    kernel = _recall(q, "choose_keys")
    if kernel is None:
        return reference_recall.choose_keys(q, k, **some, form=form, sinks=sinks, offsets=offsets)
    return kernel(q, k, **some, form=FormArguments.of(form, sinks, offsets))


def attend_recalled(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, chosen: Tensor,
                    metadata: Tensor, layout: CacheLayout | None = None,
                    form: AttentionForm = DEFAULT_FORM, sinks: Tensor | None = None,
                    offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference_recall.attend_recalled`; slots that are not chosen are not read. Beside
    queries on a GPU slots may be in page-locked host memory."""
    some = {"slots": slots, "chosen": chosen, "metadata": metadata, "layout": layout}
    kernel = _recall(q, "attend_recalled")
    if kernel is None:
        return reference_recall.attend_recalled(q, k, v, **some, form=form, sinks=sinks,
                                                offsets=offsets)
    return kernel(q, k, v, **some, form=FormArguments.of(form, sinks, offsets))


def take_slots(chosen: Tensor, firsts: Tensor, *, slot_of: Tensor, token_of: Tensor,
               log_weights: Tensor, newest: int) -> tuple[Tensor, Tensor, int]:
    """See `reference_recall.take_slots`; on a CPU alone."""
    take = native_recall if uses_native(chosen) else reference_recall
    return take.take_slots(chosen, firsts, slot_of=slot_of, token_of=token_of,
                           log_weights=log_weights, newest=newest)


def claim_slots(chosen: Tensor, *, slot_of: Tensor, token_of: Tensor, log_weights: Tensor
                ) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference_recall.claim_slots`; for a GPU."""
    claim = (triton_ops.triton_function("hot_set", "claim_slots") if chosen.is_cuda
             else reference_recall.claim_slots)
    return claim(chosen, slot_of=slot_of, token_of=token_of, log_weights=log_weights)


def copy_tokens(source: Tensor, target: Tensor, moves: Tensor, counts: Tensor) -> None:
    """See `reference_recall.copy_tokens`; for a GPU, and either side may be in page-locked host
    memory."""
    copy = (triton_ops.triton_function("hot_set", "copy_tokens") if moves.is_cuda
            else reference_recall.copy_tokens)
    copy(source, target, moves, counts)


def fetch_tokens(missing: Tensor, slots: Tensor, *, file: int, direct: bool, offset: int,
                 layout: PageLayout, landing: Tensor) -> tuple[int, int]:
    """See `reference_recall.fetch_tokens`; on a CPU alone."""
    fetch = native_recall if uses_native(missing) else reference_recall
    return fetch.fetch_tokens(missing, slots, file=file, direct=direct, offset=offset,
                              layout=layout, landing=landing)


def rotate_(x: Tensor, rope: tuple[Tensor, Tensor] | None, change: BasisChange | None = None,
            offsets: Tensor | None = None) -> None:
    """Rotate heads x [rows, heads, head_dim] in place, then change their basis.

    `rope` are cosines and sines of `table_dtype` as of `rotary.apply_rope_`, None for no rotation;
    see `reference_layer.rotate`.
    """
    if rope is None and change is None:
        return
    if uses_native(x):
        native.rotate(x, *(rope or (None, None)), change, offsets)
    elif change is None:
        rotary.apply_rope_(x, *rope)
    else:
        reference_layers.rotate(x, *(rope or (None, None)), change, offsets)


def table_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of cosines and sines by which `rotate_` turns x of `dtype` on a device."""
    return torch.float32 if device.type == "cpu" else dtype


def quantize_groups(x: Tensor, layout: GroupLayout) -> Tensor:
    """See `reference.quantize_groups`."""
    if uses_reference(x.device.type):
        return reference.quantize_groups(x, layout)
    x = x.float() if x.dtype == torch.float64 else x
    return _backend(x).quantize_groups(x, layout.bits)


def dequantize_groups(records: Tensor, layout: GroupLayout) -> Tensor:
    """See `reference.dequantize_groups`."""
    if uses_reference(records.device.type):
        return reference.dequantize_groups(records, layout)
    return _backend(records).dequantize_groups(records, layout.bits, layout.length)


def pack_slots(vectors: Tensor, layout: CacheLayout | None) -> Tensor:
    """See `reference.pack_slots`."""
    return reference.pack_slots(vectors, layout, quantize=quantize_groups)


def unpack_slots(records: Tensor, layout: CacheLayout | None) -> Tensor:
    """See `reference.unpack_slots`."""
    return reference.unpack_slots(records, layout, dequantize=dequantize_groups)


def linear_choice(x: Tensor, weight: Tensor) -> str:
    """The implementation of a product of x [rows, inputs] and weight [outputs, inputs]: the one
    that `dispatch` prefers, and "pytorch" where the kernels cannot do it."""
    if (x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype or not x.is_cpu
            or not x.stride(1) == weight.stride(1) == 1 or uses_reference("cpu")):
        return "pytorch"
    return dispatch.choice("linear", len(x), x.dtype)


def linear_skinny(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *,
                  add: bool = False) -> None:
    """See `reference.linear_skinny`; of few rows of bfloat16, out's rows contiguous."""
    _backend(x).linear_skinny(x, weight, bias, out, add)


def linear_tiled(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *,
                 add: bool = False) -> None:
    """See `reference.linear_skinny`; of any rows of bfloat16 in AMX tiles, out's rows contiguous.

    Sums are float32 and rounded once, with bias and all; no bit depends on the number of threads.
    """
    _backend(x).linear_tiled(x, weight, bias, out, add)


def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *,
                   add: bool = False) -> None:
    """See `reference.linear_skinny`; of any rows and dtype, sums in float32, out's rows contiguous.

    Weights come to float32 by strips that stay in cache; no bit depends on the number of threads.
    """
    _backend(x).linear_float32(x, weight, bias, out, add)


def quantize_matrix(weight: Tensor, layout: MatrixLayout, *, search: bool = False,
                    importance: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See `reference_matrix.quantize_matrix`; the weight is on the host, and so is `out`. For MXFP4
    that is what computes it."""
    out = torch.empty(layout.nbytes, dtype=torch.uint8) if out is None else out
    if uses_reference("cpu") or layout.mxfp4:
        return out.copy_(reference_matrix.quantize_matrix(weight, layout, search=search,
                                                          importance=importance))
    weight = weight.float() if weight.dtype == torch.float64 else weight
    _backend(weight).quantize_matrix(weight, out, layout.bits, signed_group(layout), search,
                                     importance)
    return out


def repack(blocks: np.ndarray, kind: BlockType, layout: MatrixLayout, out: Tensor,
           order: Tensor | None = None) -> bool:
    """Write a matrix of GGUF blocks into `out`: see `reference_blocks.repack`.

    Parameters
    ----------
    blocks : uint8 array [rows, bytes]
        Contiguous; it may be mapped from a file.
    kind : BlockType
    layout : MatrixLayout
        One that `kind.fits`.
    out : uint8 Tensor [layout.nbytes]
        On the host.
    order : int64 Tensor [outputs], optional
        The row of `blocks` that is row i of the matrix; None: all of them in order.

    Returns
    -------
    bool
        False where a scale or a zero point is not finite in float16; `out` is then undefined.
    """
    if not uses_reference("cpu") and layout == kind.layout(layout.outputs, layout.inputs):
        return native.repack(blocks, order, kind, *flat(QuantizedMatrix(out, layout)))
    chosen = slice(None) if order is None else order.numpy()
    found = reference_blocks.repack(torch.from_numpy(np.array(blocks[chosen])), kind, layout)
    if found is not None:
        out.copy_(found)
    return found is not None


def unpack_rows(matrix: QuantizedMatrix, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference_matrix.unpack_rows`."""
    if uses_reference(matrix.data.device.type):
        return reference_matrix.unpack_rows(matrix.data, matrix.layout, rows, dtype)
    return _backend(matrix.data).unpack_rows(*flat(matrix), rows, dtype)


def linear_quantized(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor, *,
                     add: bool = False) -> None:
    """See `reference_matrix.linear_quantized`.

    Where `dispatch` gives "codes", the quantized bytes alone are read, what is computed for a row
    does not depend on the rows beside it but for the order of its sums, and no bit depends on the
    number of threads; with AMX more than 64 rows of bfloat16 meet weights that were rounded to it,
    each by 2^-8 at most. Where it gives "unpacked" (bfloat16, if it was measured to be faster), all
    weights are rounded so and the product is PyTorch's, which promises neither. A matrix that
    rounds activations goes by codes, too.
    """
    if uses_reference(x.device.type):
        reference_matrix.linear_quantized(x, matrix, bias, out, add=add)
        return
    if quantized_choice(x, matrix) == "unpacked":
        _unpacked_product(x, matrix, bias, out, add=add)
        return
    _backend(x).linear_quantized(x, *flat(matrix), bias, out, add, matrix.activation_bits)


def quantized_choice(x: Tensor, matrix: QuantizedMatrix) -> str:
    """Name of the implementation of `linear_quantized` that is used: "codes" or "unpacked"."""
    if not x.is_cpu or matrix.activation_bits != 16:
        return "codes"
    bits = 8 if matrix.layout.bits == 6 else matrix.layout.bits  # 6 bits have not been timed apart
    return dispatch.choice("linear_quantized", len(x), x.dtype, bits)


def _unpacked_product(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor, *,
                      add: bool) -> None:
    """`linear_quantized` by PyTorch's own products, in slices of outputs that stay in cache."""
    # With AMX oneDNN takes what stands behind a row into its sums, times 0: NaN if it is NaN.
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


def flat(matrix: QuantizedMatrix) -> tuple[Tensor, int, int, int, int]:
    """Return a matrix as arguments of `native` and `library`: data, outputs, inputs, bits, and the
    group (see `signed_group`)."""
    layout = matrix.layout
    return matrix.data, layout.outputs, layout.inputs, layout.bits, signed_group(layout)

