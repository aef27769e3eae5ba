"""The CPU's kernels: C++ behind a plain C ABI (see abi.py and cpu/), called through ctypes.

The library is built by setup.py. ``FLEXGEN_H2O_ISA`` in the environment (`SETS`) picks another
instruction set than the best that the CPU has; ``FLEXGEN_H2O_NATIVE`` another library. Arguments
are checked here, since pointers are not: a call that does not hold together raises ValueError and
writes nothing. What the checks leave to the C++ are values of tensors (slots, ranks, rows).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from flexgen_h2o.config.formats import GroupLayout, MatrixLayout
from flexgen_h2o.config.limits import MXFP4_GROUP, SKINNY_ROWS
from flexgen_h2o.kernels import abi
from flexgen_h2o.kernels.arguments import (
    DEFAULT_ARGUMENTS,
    DTYPES,
    EvictionArguments,
    FormArguments,
    check_form,
    check_slots,
    check_state,
    contiguous,
    expect,
    floats,
    head_shapes,
    lines,
    need,
    product_shapes,
)

EMULATED = "amx_emulated"
SETS = ("portable", "avx2", "avx512", "avx512bf16", "amx", EMULATED)
"""Instruction sets, each with what the one before it has, and last the kernels of AMX with tiles in
plain C++ (cpu/amx.h), which any CPU with AVX2 runs, slowly: to test them. A CPU with AMX whose
system does not let the process use it counts as avx512bf16."""

_STRUCTS = abi.structs()


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
        for text in (library.h2o_abi, library.h2o_build):
            text.restype = ctypes.c_char_p
        library.h2o_idle_team.restype = None
    except (OSError, AttributeError) as error:
        return f"the C++ kernels cannot be loaded: {error}"
    if library.h2o_abi() != abi.FINGERPRINT.encode():
        return f"{path.name} was built from other sources: install again"
    return library


def missing() -> str | None:
    """Why the kernels cannot be used; None if they can."""
    library = _library()
    return library if isinstance(library, str) else None


def build() -> str:
    """Tells builds of the kernels apart: a digest of sources and flags, and the compiler."""
    return _library().h2o_build().decode()


def available_sets() -> tuple[str, ...]:
    """The instruction sets of `SETS` that this machine can run."""
    best = _library().h2o_isa_best()
    return SETS[: best + 1] + ((EMULATED,) if best else ())


def instruction_set() -> str:
    """The one of `SETS` that is used.

    Raises
    ------
    ValueError
        `FLEXGEN_H2O_ISA` names one that the kernels or the CPU do not have.
    """
    chosen = os.environ.get("FLEXGEN_H2O_ISA")
    if chosen is None:
        return SETS[_library().h2o_isa_best()]
    if chosen not in (available := available_sets()):
        raise ValueError(f"FLEXGEN_H2O_ISA={chosen}: this machine has {', '.join(available)}")
    return chosen


class Steps(Protocol):
    """Takes calls that are to be made later."""

    def add(self, name: str, arguments: ctypes.Structure, tensors: Sequence[Tensor | None]) -> None:
        """Note a call of an operation; the tensors are those that its arguments point to."""


def _call(name: str, struct: str, *, steps: Steps | None = None,
          tensors: Sequence[Tensor | None] = (), **fields: object) -> None:
    """Call a function of the library; with `steps`, one of abi.OPERATIONS is noted there."""
    arguments = _STRUCTS[struct](**fields, threads=torch.get_num_threads())
    if steps is not None:
        steps.add(name, arguments, tensors)
        return
    function = getattr(_library(), f"h2o_{name}")
    _check(name, function(SETS.index(instruction_set()), ctypes.byref(arguments)))


def bound(calls: Sequence[tuple[str, ctypes.Structure]]) -> Callable[[], None]:
    """A function that makes these calls of abi.OPERATIONS in order, on the instruction set of now.

    The caller keeps what the arguments point to. What the function raises: see `_check`.
    """
    numbers = {name: number for number, name in enumerate(abi.OPERATIONS)}
    steps = (_STRUCTS["Step"] * len(calls))(*(
        (numbers[name], ctypes.addressof(arguments)) for name, arguments in calls))
    program = ctypes.byref(_STRUCTS["Program"](ctypes.addressof(steps), len(calls)))
    function, chosen = _library().h2o_program, SETS.index(instruction_set())
    held = steps, list(calls)  # the structs live as long as the function

    def run() -> None:
        status = function(chosen, program)
        if status:
            _check(f"one of {', '.join(dict(held[1]))}", status)

    return run


_SHARED = {"linear_skinny": ("x", "rows", "inputs", "x_row", "threads"),
           "linear_float32": ("x", "rows", "inputs", "x_row", "dtype", "threads"),
           "linear_quantized": ("x", "rows", "x_row", "dtype", "threads")}
"""Products that may be joined, and the fields that are alike then."""
_SHARED_MATRIX = ("inputs", "bits", "group")


def joined(first: tuple[str, ctypes.Structure], second: tuple[str, ctypes.Structure]) -> bool:
    """Have a product's call do another one too, if both have the same input; False if not.

    It goes to the end of what the first one does. The caller keeps both structs.
    """
    (name, mine), (other, more) = first, second
    if name != other or name not in _SHARED or any(
            getattr(mine, field) != getattr(more, field) for field in _SHARED[name]):
        return False
    if name == "linear_quantized" and any(
            getattr(mine.matrix, field) != getattr(more.matrix, field)
            for field in _SHARED_MATRIX):
        return False
    while mine.next:
        mine = type(mine).from_address(mine.next)
    mine.next = ctypes.addressof(more)
    return True


def _check(name: str, status: int) -> None:
    """Raise what a status other than 0 says (Status of cpu/kernels.h)."""
    if status == 1:
        raise MemoryError(f"no memory for the workspace of {name}")
    if status:
        raise ValueError(f"{name}: a tensor of indices points outside of what it indexes")


def idle_team(threads: int) -> None:
    """Give the calling thread a team of OpenMP threads that do nothing. It ends with the thread."""
    _library().h2o_idle_team(ctypes.c_int64(threads))


def _rows(x: Tensor) -> Tensor:
    """x itself if its last dimension is contiguous, else a copy of which it is."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def call(name: str, struct: str, **fields: object) -> None:
    """Call a function of the library with the fields of its struct, which the caller has checked.

    What is raised: see `_check`.
    """
    _call(name, struct, **fields)


def array_of(struct: str, count: int) -> ctypes.Array:
    """So many of a struct of abi.STRUCTS, all zero."""
    return (_STRUCTS[struct] * count)()


def plain_matrix(weight: Tensor) -> ctypes.Structure:
    """The struct of a matrix [outputs, inputs] of 16 bits, contiguous."""
    return _STRUCTS["Matrix"](weight.data_ptr(), *weight.shape, 16, 0)


def _integers(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


def _layout(length: int, bits: int, width: int):
    """The struct of records of vectors of `length` elements, `width` wide in memory."""
    if bits == 16:
        return _STRUCTS["Layout"](16, 0, 0, 0, width)
    layout = GroupLayout(length, bits)
    return _STRUCTS["Layout"](bits, layout.groups, layout.group, layout.code_bytes, layout.nbytes)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _strides(k: Tensor, v: Tensor) -> dict[str, int]:
    """Strides of keys and values [rows, heads, head_dim], as the structs name them."""
    return {"k_row": k.stride(0), "k_head": k.stride(1), "v_row": v.stride(0),
            "v_head": v.stride(1)}


def _form(form: FormArguments) -> ctypes.Structure:
    """The struct of a form; the caller keeps the sinks."""
    return _STRUCTS["Form"](_address(form.sink_logits), form.scale, form.softcap, form.window)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int],
                      key_lengths: Sequence[int], scores: Tensor | None, decay: float,
                      form: FormArguments = DEFAULT_ARGUMENTS) -> Tensor:
    """See `library.prefill_attention`."""
    name = "prefill_attention"
    dtype = head_shapes(name, q, k, v)
    need(len(lengths) == len(key_lengths) and sum(lengths) == len(q)
          and sum(key_lengths) == len(k)
          and all(0 <= rows <= keys for rows, keys in zip(lengths, key_lengths, strict=True)),
          name, f"lengths {list(lengths)} and {list(key_lengths)} do not make up {len(q)} rows and "
          f"{len(k)} keys")
    expect(name, torch.float32, scores=(scores, (k.shape[1], len(k))))
    lines(name, scores=scores)
    check_form(name, form, q.shape[1])
    q, k, v = map(_rows, (q, k, v))
    out = q.new_empty(q.shape)
    lengths, key_lengths = _integers(lengths), _integers(key_lengths)
    _call(name, "Prefill",
          q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(),
          scores=_address(scores),
          lengths=ctypes.addressof(lengths), key_lengths=ctypes.addressof(key_lengths),
          dtype=DTYPES[dtype], sequences=len(lengths), heads=q.shape[1], kv_heads=k.shape[1],
          head_dim=q.shape[2], q_row=q.stride(0), q_head=q.stride(1), **_strides(k, v),
          scores_head=0 if scores is None else scores.stride(0), decay=decay, form=_form(form))
    return out


def _slot_strides(slots: Tensor) -> dict[str, int]:
    kind, sequence, head, slot, _ = slots.stride()
    return {"slots_kind": kind, "slots_sequence": sequence, "slots_head": head,
            "slots_slot": slot}


def select_heavy_hitters(k: Tensor, v: Tensor, scores: Tensor | None, *, cuts: Sequence[int],
                         slots: Tensor, bits: int, eviction: EvictionArguments) -> None:
    """See `reference.select_heavy_hitters`; the tables of rotations are not used."""
    name = "select_heavy_hitters"
    dtype = head_shapes(name, k, k, v)
    sequences, sinks = len(cuts) // 3, eviction.sinks
    check_slots(name, slots, sequences, k, bits)
    state = tuple(slots.shape[1:4])
    need(len(cuts) == 3 * sequences and sum(cuts[::3]) == len(k) and min((*cuts, sinks)) >= 0
          and all(min(length, heavy + recent + sinks) <= state[2]
                  for length, heavy, recent in zip(*(cuts[i::3] for i in range(3)), strict=True)),
          name, f"cuts {list(cuts)} and {sinks} sinks do not fit {len(k)} tokens and {state[2]} "
          "slots")
    expect(name, torch.float32, scores=(scores, (k.shape[1], len(k))))
    check_state(name, eviction, state)
    need(eviction.scores is not None, name, "there is no state to write")
    lines(name, scores=scores)
    k, v = map(_rows, (k, v))
    cuts = _integers(cuts)
    _call(name, "Select",
          k=k.data_ptr(), v=v.data_ptr(), scores=_address(scores), cuts=ctypes.addressof(cuts),
          slots=slots.data_ptr(), kept_scores=_address(eviction.scores),
          positions=_address(eviction.positions), ranks=_address(eviction.ranks),
          layout=_layout(k.shape[2], bits, slots.shape[-1]), dtype=DTYPES[dtype],
          sequences=sequences, kv_heads=k.shape[1], head_dim=k.shape[2], num_slots=state[2],
          **_strides(k, v), scores_head=0 if scores is None else scores.stride(0),
          **_slot_strides(slots), mean=eviction.mean, sinks=sinks)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, metadata: Tensor,
                     bits: int, eviction: EvictionArguments,
                     form: FormArguments = DEFAULT_ARGUMENTS, out: Tensor | None = None,
                     steps: Steps | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.decode_attention`; out is [sequences, heads, head_dim], contiguous."""
    name = "decode_attention"
    dtype, sequences = head_shapes(name, q, k, v), len(q)
    need(len(k) == sequences, name, f"{len(k)} new keys for {sequences} queries")
    check_slots(name, slots, sequences, k, bits)
    state, cos, sin = tuple(slots.shape[1:4]), eviction.cos, eviction.sin
    expect(name, torch.int32, metadata=(metadata, (4, sequences)))
    check_state(name, eviction, state)
    check_form(name, form, q.shape[1])
    need(not eviction.window or eviction.positions is not None, name,
         "a window needs the positions of what is cached")
    rope = (0, 0)
    if eviction.ranks is not None:
        need(eviction.scores is not None and cos is not None and cos.dim() == 2
              and 2 * cos.shape[1] <= q.shape[2], name,
              "ranks need scores, and cos and sin [positions, at most head_dim / 2]")
        rope = tuple(cos.shape)
        expect(name, torch.float32, cos=(cos, rope), sin=(sin, rope))
    out = q.new_empty(q.shape) if out is None else out
    expect(name, dtype, out=(out, q.shape))
    contiguous(name, metadata=metadata, cos=cos, sin=sin, out=out)
    if steps is not None:
        lines(name, q=q, k=k, v=v)
    q, k, v = map(_rows, (q, k, v))
    taken = q.new_empty(k.shape[:2], dtype=torch.int64)
    _call(name, "Decode", steps=steps,
          tensors=(q, k, v, out, slots, metadata, *eviction[:5], taken, form.sink_logits),
          q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(),
          slots=slots.data_ptr(), metadata=metadata.data_ptr(), scores=_address(eviction.scores),
          positions=_address(eviction.positions), ranks=_address(eviction.ranks),
          cos=_address(cos), sin=_address(sin), taken=taken.data_ptr(),
          layout=_layout(q.shape[2], bits, slots.shape[-1]), dtype=DTYPES[dtype],
          sequences=sequences, heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2],
          num_slots=state[2], rope_rows=rope[0], half_rotary=rope[1],
          q_row=q.stride(0), q_head=q.stride(1), **_strides(k, v), **_slot_strides(slots),
          mean=eviction.mean, sinks=eviction.sinks, window=eviction.window,
          decay=eviction.decay, form=_form(form))
    return out, taken


def quantize_groups(x: Tensor, bits: int) -> Tensor:
    """See `library.quantize_groups`."""
    dtype = floats("quantize_groups", x, x.dim())
    expect("quantize_groups", dtype, x=(x, x.shape))
    layout = GroupLayout(x.shape[-1], bits)
    rows = _rows(x.reshape(-1, layout.length))
    records = x.new_empty((*x.shape[:-1], layout.nbytes), dtype=torch.uint8)
    _groups("quantize_groups", rows, records.view(-1, layout.nbytes), layout)
    return records


def dequantize_groups(records: Tensor, bits: int, length: int) -> Tensor:
    """See `library.dequantize_groups`."""
    layout = GroupLayout(length, bits)
    expect("dequantize_groups", torch.uint8,
            records=(records, (*records.shape[:-1], layout.nbytes)))
    out = records.new_empty((*records.shape[:-1], length), dtype=torch.float32)
    _groups("dequantize_groups", out.view(-1, length),
            _rows(records.reshape(-1, layout.nbytes)), layout)
    return out


def _groups(name: str, x: Tensor, records: Tensor, layout: GroupLayout) -> None:
    _call(name, "Groups", x=x.data_ptr(), records=records.data_ptr(),
          layout=_layout(layout.length, layout.bits, layout.nbytes), dtype=DTYPES[x.dtype],
          rows=len(x), length=layout.length, x_row=x.stride(0), record_row=records.stride(0))


def linear_skinny(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool, *,
                  steps: Steps | None = None) -> None:
    """See `library.linear_skinny`."""
    name = "linear_skinny"
    need(x.dtype == torch.bfloat16 and len(x) <= SKINNY_ROWS, name,
         f"takes up to {SKINNY_ROWS} rows of bfloat16, got {x.dtype} {list(x.shape)}")
    _linear(name, x, weight, bias, out, add, steps)


def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool, *,
                   steps: Steps | None = None) -> None:
    """See `library.linear_float32`."""
    name = "linear_float32"
    need(x.dtype in (torch.bfloat16, torch.float16), name,
         f"takes bfloat16 or float16, got {x.dtype}")
    _linear(name, x, weight, bias, out, add, steps)


def _linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool,
            steps: Steps | None) -> None:
    outputs = len(weight)
    dtype = product_shapes(name, x, outputs, bias, out)
    expect(name, dtype, weight=(weight, (outputs, x.shape[1])))
    lines(name, x=x, weight=weight)
    _call(name, "Linear", steps=steps, tensors=(x, weight, bias, out),
          x=x.data_ptr(), weight=weight.data_ptr(), bias=_address(bias), out=out.data_ptr(),
          dtype=DTYPES[dtype], rows=len(x), inputs=x.shape[1], outputs=outputs, x_row=x.stride(0),
          weight_row=weight.stride(0), out_row=out.stride(0), add=add)


def matrix(name: str, data: Tensor, outputs: int, inputs: int, bits: int, group: int):
    """The struct of a quantized matrix, whose bytes are there; a group of 0: in MXFP4."""
    layout = MatrixLayout(outputs, inputs, bits, group or MXFP4_GROUP, mxfp4=not group)
    expect(name, torch.uint8, data=(data, (layout.nbytes,)))
    contiguous(name, data=data)
    return _STRUCTS["Matrix"](data.data_ptr(), outputs, inputs, bits, group)


def quantize_matrix(weight: Tensor, data: Tensor, bits: int, group: int, search: bool) -> None:
    """See `library.quantize_matrix`."""
    dtype = floats("quantize_matrix", weight, 2)
    need(group > 0, "quantize_matrix", "MXFP4 is for the reference")
    expect("quantize_matrix", dtype, weight=(weight, weight.shape))
    weight = _rows(weight)
    _call("quantize_matrix", "Quantize", weight=weight.data_ptr(),
          matrix=matrix("quantize_matrix", data, *weight.shape, bits, group),
          dtype=DTYPES[dtype], weight_row=weight.stride(0), search=search)


def unpack_rows(data: Tensor, outputs: int, inputs: int, bits: int, group: int, rows: Tensor,
                dtype: torch.dtype) -> Tensor:
    """See `library.unpack_rows`."""
    name = "unpack_rows"
    held = matrix(name, data, outputs, inputs, bits, group)
    need(dtype in DTYPES, name, f"cannot make {dtype}")
    expect(name, torch.int64, rows=(rows, (rows.numel(),)))
    rows = rows.contiguous()
    out = torch.empty(len(rows), inputs, dtype=dtype)
    _call(name, "Rows", rows=rows.data_ptr(), out=out.data_ptr(), matrix=held,
          dtype=DTYPES[dtype], count=len(rows))
    return out


def linear_quantized(x: Tensor, data: Tensor, outputs: int, inputs: int, bits: int, group: int,
                     bias: Tensor | None, out: Tensor, add: bool, *, steps: Steps | None = None
                     ) -> None:
    """See `library.linear_quantized`."""
    name = "linear_quantized"
    dtype = product_shapes(name, x, outputs, bias, out)
    need(x.shape[1] == inputs, name, f"{x.shape[1]} inputs for a matrix of {inputs}")
    held = matrix(name, data, outputs, inputs, bits, group)
    if steps is not None:
        lines(name, x=x)
    x = _rows(x)
    _call(name, "Product", steps=steps, tensors=(x, data, bias, out),
          x=x.data_ptr(), bias=_address(bias), out=out.data_ptr(), matrix=held,
          dtype=DTYPES[dtype], rows=len(x), x_row=x.stride(0), out_row=out.stride(0), add=add)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor, *, eps: float,
         centred: bool, steps: Steps | None = None) -> None:
    """See `reference_layer.norm`."""
    dtype = floats("norm", x, 2)
    expect("norm", dtype, x=(x, x.shape), out=(out, x.shape), weight=(weight, x.shape[1:]),
           bias=(bias, x.shape[1:]))
    lines("norm", x=x, weight=weight, bias=bias, out=out)
    _call("norm", "Norm", steps=steps, tensors=(x, weight, bias, out), x=x.data_ptr(),
          weight=_address(weight), bias=_address(bias), out=out.data_ptr(), dtype=DTYPES[dtype],
          rows=len(x), width=x.shape[1], x_row=x.stride(0), out_row=out.stride(0),
          centred=centred, eps=eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, steps: Steps | None = None) -> None:
    """See `reference_layer.rotate`."""
    dtype, tables = floats("rotate", x, 3), (len(x), cos.shape[-1])
    expect("rotate", dtype, x=(x, x.shape))
    expect("rotate", torch.float32, cos=(cos, tables), sin=(sin, tables))
    need(2 * tables[1] <= x.shape[2], "rotate", f"tables of {tables[1]} turn more than "
         f"{x.shape[2]} elements")
    lines("rotate", x=x)
    contiguous("rotate", cos=cos, sin=sin)
    _call("rotate", "Rotate", steps=steps, tensors=(x, cos, sin), x=x.data_ptr(),
          cos=cos.data_ptr(), sin=sin.data_ptr(), dtype=DTYPES[dtype], rows=len(x),
          heads=x.shape[1], half=tables[1], x_row=x.stride(0), x_head=x.stride(1))


def activate(x: Tensor, function: str, factor: Tensor | None = None, *,
             steps: Steps | None = None) -> None:
    """See `reference_layer.activate`."""
    dtype = floats("activate", x, 2)
    need(function in abi.ACTIVATIONS, "activate", f"there is no {function}")
    expect("activate", dtype, x=(x, x.shape), factor=(factor, x.shape))
    lines("activate", x=x, factor=factor)
    _call("activate", "Activate", steps=steps, tensors=(x, factor), x=x.data_ptr(),
          factor=_address(factor), dtype=DTYPES[dtype], rows=len(x), width=x.shape[1],
          function=abi.ACTIVATIONS.index(function), x_row=x.stride(0),
          factor_row=0 if factor is None else factor.stride(0))
