"""Fields of the C ABI's structs (see abi.py), by the tensors and settings that they stand for."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flexgen_h2o.config.formats import CacheLayout, GroupLayout
from flexgen_h2o.kernels.arguments import FormArguments
from flexgen_h2o.kernels.cpu_library import STRUCTS


def unit_stride(x: Tensor) -> Tensor:
    """x itself if its last dimension is contiguous, else a copy of which it is."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def integers(values: Sequence[int]) -> ctypes.Array:
    """An array of int64; who passes its address on keeps it."""
    return (ctypes.c_int64 * len(values))(*values)


def record_layout(layout: GroupLayout | None, width: int):
    """The struct of records; without a layout, of plain vectors that are `width` wide."""
    if layout is None:
        return STRUCTS["Layout"](16, 0, 0, 0, width)
    return STRUCTS["Layout"](layout.bits, layout.groups, layout.group, layout.code_bytes,
                             layout.nbytes)


def address(x: Tensor | None) -> int | None:
    """The address of a tensor's first element, which the caller keeps; null for none."""
    return None if x is None else x.data_ptr()


def strides(k: Tensor, v: Tensor) -> dict[str, int]:
    """Strides of keys and values [rows, heads, head_dim], as the structs name them."""
    return {"k_row": k.stride(0), "k_head": k.stride(1), "v_row": v.stride(0),
            "v_head": v.stride(1)}


def form_struct(form: FormArguments) -> ctypes.Structure:
    """The struct of a form; the caller keeps the sinks and offsets."""
    return STRUCTS["Form"](address(form.sink_logits), address(form.offsets), form.scale,
                           form.softcap, form.window)


def slot_fields(slots: Tensor, layout: CacheLayout | None) -> dict[str, Any]:
    """Layouts and strides of slots of `CacheLayout`, whose last stride is 1."""
    kind, sequence, head, slot, _ = slots.stride()
    keys = values = record_layout(layout and layout.keys, slots.shape[-1])
    if layout is not None and layout.mixed:  # the value is behind the key
        kind, values = layout.keys.nbytes, record_layout(layout.values, slots.shape[-1])
    return {"key_layout": keys, "value_layout": values,
            "slots_kind": kind, "slots_sequence": sequence, "slots_head": head,
            "slots_slot": slot}
