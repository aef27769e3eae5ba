"""The CPU's kernels: C++ behind a plain C ABI (see cpu/), called through ctypes.

The library is built by setup.py. ``FLEXGEN_H2O_ISA`` in the environment (`SETS`) picks another
instruction set than the best that the CPU has, for tests; ``FLEXGEN_H2O_NATIVE`` another library.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from flexgen_h2o.storage.quantization import GroupLayout

SETS = ("portable", "avx2", "avx512", "avx512bf16")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    """A struct of kernels.h: *pointers, =doubles, Layout, Matrix, and integers."""
    kinds = {"*": c_void_p, "=": c_double}

    def kind(field: str):
        if field in ("layout", "matrix"):
            return _Layout if field == "layout" else _Matrix
        return kinds.get(field[0], c_int64)

    return type(name, (ctypes.Structure,), {"_fields_": [
        (field.lstrip("*="), kind(field)) for field in fields.split()]})


_Layout = _struct("Layout", "bits groups group code_bytes nbytes")
_Prefill = _struct("Prefill", """*q *k *v *out *mass *lengths *key_lengths
    dtype sequences heads kv_heads head_dim
    q_row q_head k_row k_head v_row v_head mass_head threads =decay""")
_Select = _struct("Select", """*k *v *mass *cuts *slots *kept_mass *positions *ranks layout
    dtype sequences kv_heads head_dim num_slots k_row k_head v_row v_head mass_head
    slots_kind slots_sequence slots_head slots_slot mean sinks threads""")
_Decode = _struct("Decode", """*q *k *v *out *slots *turn *mass *positions *ranks *cos *sin *taken
    layout dtype sequences heads kv_heads head_dim num_slots half_rotary
    q_row q_head k_row k_head v_row v_head
    slots_kind slots_sequence slots_head slots_slot mean sinks threads =decay""")
_Groups = _struct("Groups", "*x *records layout dtype rows length x_row record_row threads")
_Linear = _struct("Linear", """*x *weight *bias *out
    rows inputs outputs x_row weight_row out_row add threads""")
_Matrix = _struct("Matrix", "*data outputs inputs bits group")
_Product = _struct("Product", "*x *bias *out matrix dtype rows x_row out_row add threads")
_Rows = _struct("Rows", "*rows *out matrix dtype count threads")
_Quantize = _struct("Quantize", "*weight matrix dtype weight_row search threads")
_STRUCTS = (_Prefill, _Select, _Decode, _Groups, _Linear, _Product, _Rows, _Quantize)


def _file() -> Path | None:
    if chosen := os.environ.get("FLEXGEN_H2O_NATIVE"):
        return Path(chosen)
    # Not sysconfig's: a second thread that asks while the first one has it read finds nothing.
    path = Path(__file__).with_name(f"_cpu{EXTENSION_SUFFIXES[0]}")
    return path if path.exists() else None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    path = _file()
    if path is None:
        return "the C++ kernels were not built (pip install found no working compiler)"
    try:
        # PyTorch's OpenMP is loaded by now and is the one that this library finds: one pool of
        # threads, of the size that torch.set_num_threads says.
        library = ctypes.CDLL(str(path))
        sizes = library.h2o_sizes
    except (OSError, AttributeError) as error:
        return f"the C++ kernels cannot be loaded: {error}"
    sizes.restype = c_int64
    if sizes() != functools.reduce(lambda total, struct: 31 * total + ctypes.sizeof(struct),
                                   _STRUCTS, 0):
        return f"{path.name} was built from other sources: install again"
    return library


def missing() -> str | None:
    """Why the kernels cannot be used; None if they can."""
    library = _library()
    return library if isinstance(library, str) else None


def instruction_set() -> str:
    """The one of `SETS` that is used.

    Raises
    ------
    ValueError
        `FLEXGEN_H2O_ISA` names one that the kernels or the CPU do not have.
    """
    best = SETS[: _library().h2o_isa_best() + 1]
    chosen = os.environ.get("FLEXGEN_H2O_ISA", best[-1])
    if chosen not in best:
        raise ValueError(f"FLEXGEN_H2O_ISA={chosen}: this machine has {', '.join(best)}")
    return chosen


@functools.cache
def amx() -> bool:
    """Whether PyTorch multiplies matrices in tiles (AMX) here."""
    return getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


def _call(name: str, arguments: ctypes.Structure) -> None:
    arguments.threads = torch.get_num_threads()
    function = getattr(_library(), f"h2o_{name}")
    status = function(SETS.index(instruction_set()), ctypes.byref(arguments))
    if status == 1:
        raise MemoryError(f"no memory for the workspace of {name}")
    if status:
        raise NotImplementedError(f"{name}: not with {instruction_set()}")


def _rows(x: Tensor) -> Tensor:
    """x itself if its last dimension is contiguous, else a copy of which it is."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _integers(values: Sequence[int]) -> ctypes.Array:
    return (c_int64 * len(values))(*values)


def _layout(length: int, bits: int, width: int) -> _Layout:
    if bits == 16:
        return _Layout(16, 0, 0, 0, width)
    layout = GroupLayout(length, bits)
    return _Layout(bits, layout.groups, layout.group, layout.code_bytes, layout.nbytes)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int],
                      key_lengths: Sequence[int], mass: Tensor | None, decay: float) -> Tensor:
    """See `library.prefill_attention`."""
    q, k, v = map(_rows, (q, k, v))
    out = q.new_empty(q.shape)
    lengths, key_lengths = _integers(lengths), _integers(key_lengths)
    _call("prefill_attention", _Prefill(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(), mass=_address(mass),
        lengths=ctypes.addressof(lengths), key_lengths=ctypes.addressof(key_lengths),
        dtype=_DTYPES[q.dtype], sequences=len(lengths), heads=q.shape[1], kv_heads=k.shape[1],
        head_dim=q.shape[2], q_row=q.stride(0), q_head=q.stride(1), k_row=k.stride(0),
        k_head=k.stride(1), v_row=v.stride(0), v_head=v.stride(1),
        mass_head=0 if mass is None else mass.stride(0), decay=decay))
    return out


def select_heavy_hitters(k: Tensor, v: Tensor, mass: Tensor | None, cuts: Sequence[int],
                         slots: Tensor, kept_mass: Tensor, positions: Tensor,
                         ranks: Tensor | None, bits: int, mean: bool, sinks: int) -> None:
    """See `library.select_heavy_hitters`."""
    k, v = map(_rows, (k, v))
    cuts = _integers(cuts)
    _call("select_heavy_hitters", _Select(
        k=k.data_ptr(), v=v.data_ptr(), mass=_address(mass), cuts=ctypes.addressof(cuts),
        slots=slots.data_ptr(), kept_mass=kept_mass.data_ptr(), positions=positions.data_ptr(),
        ranks=_address(ranks), layout=_layout(k.shape[2], bits, slots.shape[-1]),
        dtype=_DTYPES[k.dtype], sequences=slots.shape[1], kv_heads=k.shape[1],
        head_dim=k.shape[2], num_slots=slots.shape[3], k_row=k.stride(0), k_head=k.stride(1),
        v_row=v.stride(0), v_head=v.stride(1), mass_head=0 if mass is None else mass.stride(0),
        **_slot_strides(slots), mean=mean, sinks=sinks))


def _slot_strides(slots: Tensor) -> dict[str, int]:
    names = ("slots_kind", "slots_sequence", "slots_head", "slots_slot")
    return dict(zip(names, slots.stride()[:4], strict=True))


def decode_attention(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, turn: Tensor,
                     mass: Tensor | None, positions: Tensor | None, ranks: Tensor | None,
                     cos: Tensor | None, sin: Tensor | None, bits: int, mean: bool, decay: float,
                     sinks: int) -> tuple[Tensor, Tensor]:
    """See `library.decode_attention`."""
    q, k, v = map(_rows, (q, k, v))
    out = q.new_empty(q.shape)
    taken = q.new_empty(k.shape[:2], dtype=torch.int64)
    _call("decode_attention", _Decode(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(),
        slots=slots.data_ptr(), turn=turn.data_ptr(), mass=_address(mass),
        positions=_address(positions), ranks=_address(ranks), cos=_address(cos),
        sin=_address(sin), taken=taken.data_ptr(),
        layout=_layout(q.shape[2], bits, slots.shape[-1]), dtype=_DTYPES[q.dtype],
        sequences=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2],
        num_slots=slots.shape[3], half_rotary=0 if cos is None else cos.shape[1],
        q_row=q.stride(0), q_head=q.stride(1), k_row=k.stride(0), k_head=k.stride(1),
        v_row=v.stride(0), v_head=v.stride(1), **_slot_strides(slots), mean=mean, sinks=sinks,
        decay=decay))
    return out, taken


def quantize_groups(x: Tensor, bits: int) -> Tensor:
    """See `library.quantize_groups`."""
    layout = GroupLayout(x.shape[-1], bits)
    rows = _rows(x.reshape(-1, layout.length))
    records = x.new_empty((*x.shape[:-1], layout.nbytes), dtype=torch.uint8)
    _groups("quantize_groups", rows, records.view(-1, layout.nbytes), layout)
    return records


def dequantize_groups(records: Tensor, bits: int, length: int) -> Tensor:
    """See `library.dequantize_groups`."""
    layout = GroupLayout(length, bits)
    out = records.new_empty((*records.shape[:-1], length), dtype=torch.float32)
    _groups("dequantize_groups", out.view(-1, length),
            _rows(records.reshape(-1, layout.nbytes)), layout)
    return out


def _groups(name: str, x: Tensor, records: Tensor, layout: GroupLayout) -> None:
    _call(name, _Groups(
        x=x.data_ptr(), records=records.data_ptr(),
        layout=_layout(layout.length, layout.bits, layout.nbytes), dtype=_DTYPES[x.dtype],
        rows=len(x), length=layout.length, x_row=x.stride(0), record_row=records.stride(0)))


FEW_ROWS = 16
"""The most rows of `linear_few_rows`: the lanes of a vector."""


def multiplies_bfloat16() -> bool:
    """Whether there is `linear_few_rows` here."""
    return missing() is None and instruction_set() == "avx512bf16"


def linear_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool
                    ) -> None:
    """See `library.linear_few_rows`."""
    _call("linear_few_rows", _Linear(
        x=x.data_ptr(), weight=weight.data_ptr(), bias=_address(bias), out=out.data_ptr(),
        rows=len(x), inputs=x.shape[1], outputs=len(weight), x_row=x.stride(0),
        weight_row=weight.stride(0), out_row=out.stride(0), add=add))


def _matrix(data: Tensor, outputs: int, inputs: int, bits: int, group: int) -> _Matrix:
    return _Matrix(data.data_ptr(), outputs, inputs, bits, group)


def quantize_matrix(weight: Tensor, data: Tensor, bits: int, group: int, search: bool) -> None:
    """See `library.quantize_matrix`."""
    weight = _rows(weight)
    _call("quantize_matrix", _Quantize(
        weight=weight.data_ptr(), matrix=_matrix(data, *weight.shape, bits, group),
        dtype=_DTYPES[weight.dtype], weight_row=weight.stride(0), search=search))


def unpack_rows(data: Tensor, outputs: int, inputs: int, bits: int, group: int, rows: Tensor,
                dtype: torch.dtype) -> Tensor:
    """See `library.unpack_rows`."""
    rows = rows.contiguous()
    out = torch.empty(len(rows), inputs, dtype=dtype)
    _call("unpack_rows", _Rows(
        rows=rows.data_ptr(), out=out.data_ptr(),
        matrix=_matrix(data, outputs, inputs, bits, group), dtype=_DTYPES[dtype],
        count=len(rows)))
    return out


def linear_quantized(x: Tensor, data: Tensor, outputs: int, inputs: int, bits: int, group: int,
                     bias: Tensor | None, out: Tensor, add: bool) -> None:
    """See `library.linear_quantized`."""
    x = _rows(x)
    _call("linear_quantized", _Product(
        x=x.data_ptr(), bias=_address(bias), out=out.data_ptr(),
        matrix=_matrix(data, outputs, inputs, bits, group), dtype=_DTYPES[x.dtype], rows=len(x),
        x_row=x.stride(0), out_row=out.stride(0), add=add))
