"""Fields of the C ABI's structs (see abi.py), by the tensors and settings that they stand for."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from flexgen_h2o.config.formats import GroupLayout
from flexgen_h2o.kernels.arguments import FormArguments
from flexgen_h2o.kernels.cpu_library import STRUCTS


def unit_stride(x: Tensor) -> Tensor:
    """x itself if its last dimension is contiguous, else a copy of which it is."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def integers(values: Sequence[int]) -> ctypes.Array:
    """An array of int64; who passes its address on keeps it."""
    return (ctypes.c_int64 * len(values))(*values)


def record_layout(length: int, bits: int, width: int):
    """The struct of records of vectors of `length` elements, `width` wide in memory."""
    if bits == 16:
        return STRUCTS["Layout"](16, 0, 0, 0, width)
    layout = GroupLayout(length, bits)
    return STRUCTS["Layout"](bits, layout.groups, layout.group, layout.code_bytes, layout.nbytes)


def address(x: Tensor | None) -> int | None:
    """The address of a tensor's first element, which the caller keeps; null for none."""
    return None if x is None else x.data_ptr()


def strides(k: Tensor, v: Tensor) -> dict[str, int]:
    """Strides of keys and values [rows, heads, head_dim], as the structs name them."""
    return {"k_row": k.stride(0), "k_head": k.stride(1), "v_row": v.stride(0),
            "v_head": v.stride(1)}


def form_struct(form: FormArguments) -> ctypes.Structure:
    """The struct of a form; the caller keeps the sinks."""
    return STRUCTS["Form"](address(form.sink_logits), form.scale, form.softcap, form.window)


def slot_strides(slots: Tensor) -> dict[str, int]:
    """Strides of slots [keys and values, sequences, kv_heads, slots, width], whose last is 1."""
    kind, sequence, head, slot, _ = slots.stride()
    return {"slots_kind": kind, "slots_sequence": sequence, "slots_head": head,
            "slots_slot": slot}
