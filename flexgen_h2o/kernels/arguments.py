"""Arguments of the kernels, and their checks for C++, which takes pointers at their word.

Each check raises ValueError with the operation's name and what does not hold; nothing has been
written by then. They cost some microseconds a call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexgen_h2o.config.attention_form import DEFAULT_FORM, AttentionForm
from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.h2o.eviction import EvictionState

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of floating-point inputs, and their numbers in the C ABI (DType of cpu/kernels.h)."""


class EvictionArguments(NamedTuple):
    """An `EvictionState` in the kernels' types; without tensors, nothing is evicted.

    `factor` and `shift` [kv_heads, head_dim] are those of the keys' smoothing where positions roll
    (`BasisChange`), else None. The custom ops of `library` take its fields one by one, in this
    order.
    """

    scores: Tensor | None = None
    positions: Tensor | None = None
    ranks: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    mean: bool = False
    decay: float = 1.0
    sinks: int = 0
    window: int = 0
    factor: Tensor | None = None
    shift: Tensor | None = None

    @classmethod
    def of(cls, state: EvictionState | None) -> EvictionArguments:
        """A state's arguments: the tensors themselves, which the operation updates."""
        if state is None:
            return cls()
        rope = (None, None) if state.rope is None else (table.contiguous() for table in state.rope)
        eviction = state.eviction
        rolls = state.smoothing is not None and state.ranks is not None
        change = state.smoothing.keys if rolls else None
        return cls(state.scores, state.positions, state.ranks, *rope, mean=eviction.mean,
                   decay=eviction.decay, sinks=eviction.sinks, window=eviction.window,
                   factor=change and change.factor, shift=change and change.shift)


class FormArguments(NamedTuple):
    """An `AttentionForm` in the kernels' types, with the learned logits that belong to it.

    A scale of 0 is that of the default form; a softcap or a window of 0 is none. `sink_logits` are
    float32 [heads], or None. `offsets`, float32 [sequences, heads] or None, are added to the
    products of a new token's queries with all keys: what smoothed keys lack. The custom ops of
    `library` take its fields one by one, in this order.
    """

    scale: float = 0.0
    softcap: float = 0.0
    window: int = 0
    sink_logits: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def of(cls, form: AttentionForm, sinks: Tensor | None, offsets: Tensor | None = None
           ) -> FormArguments:
        """A form's arguments; `sinks` [heads] of any floating dtype, or None."""
        if form == DEFAULT_FORM:
            return DEFAULT_ARGUMENTS
        return cls(form.scale or 0.0, form.softcap, form.window or 0,
                   sinks.float().contiguous() if form.sinks else None, offsets)


DEFAULT_ARGUMENTS = FormArguments()


def need(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise ValueError(f"{name}: {what}")


def expect(name: str, dtype: torch.dtype, **tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Each of `tensors` is None, or on the CPU with this dtype and shape."""
    for what, (x, shape) in tensors.items():
        if x is not None and not (x.is_cpu and x.dtype == dtype and x.shape == shape):
            raise ValueError(f"{name}: {what} must be {dtype} {list(shape)} on the CPU, got "
                             f"{x.dtype} {list(x.shape)} on {x.device}")


def floats(name: str, x: Tensor, dims: int) -> torch.dtype:
    """The dtype of an input, which has so many dimensions."""
    need(x.dim() == dims and x.dtype in DTYPES, name,
          f"takes {dims} dimensions of float32, bfloat16 or float16, got {x.dtype} "
          f"{list(x.shape)}")
    return x.dtype


def contiguous(name: str, **tensors: Tensor | None) -> None:
    for what, x in tensors.items():
        need(x is None or x.is_contiguous(), name, f"{what} must be contiguous")


def lines(name: str, **tensors: Tensor | None) -> None:
    """Each is contiguous in its last dimension: for what is written, or read where it lies."""
    for what, x in tensors.items():
        need(x is None or x.shape[-1] <= 1 or x.stride(-1) == 1, name,
              f"{what} must be contiguous in its last dimension")


def head_shapes(name: str, q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """The dtype of q [rows, heads, head_dim], k and v [key rows, kv_heads, head_dim]."""
    dtype, size, shape = q.dtype, q.shape, k.shape
    if not (len(size) == 3 == len(shape) and shape == v.shape and shape[2] == size[2]
            and shape[1] and size[1] % shape[1] == 0
            and dtype in DTYPES and dtype == k.dtype == v.dtype
            and q.is_cpu and k.is_cpu and v.is_cpu):
        each = ", ".join(f"{x.dtype} {list(x.shape)} on {x.device}" for x in (q, k, v))
        raise ValueError(
            f"{name}: q must be [rows, heads, head_dim] and k and v [key rows, KV heads, head_dim] "
            "of one of float32, bfloat16 and float16 on the CPU, with heads a multiple of KV "
            f"heads; got {each}")
    return dtype


def check_slots(name: str, slots: Tensor, sequences: int, k: Tensor, layout: CacheLayout | None
                ) -> None:
    """slots [kinds, sequences, kv_heads, n, width] hold vectors like k's, or records."""
    need(slots.dim() == 5, name, f"slots must have 5 dimensions, got {list(slots.shape)}")
    need(layout is None or k.shape[2] == layout.keys.length == layout.values.length, name,
         f"records of other vectors than of {k.shape[2]} elements")
    kinds, width = (2, k.shape[2]) if layout is None else (layout.kinds, layout.width)
    expect(name, k.dtype if layout is None else torch.uint8,
           slots=(slots, (kinds, sequences, k.shape[1], slots.shape[3], width)))
    lines(name, slots=slots)


def check_state(name: str, eviction: EvictionArguments, shape: tuple[int, ...]) -> None:
    """Scores, positions and ranks [sequences, kv_heads, slots], contiguous; not one of the first
    two alone."""
    scores, positions, ranks = eviction[:3]
    need((scores is None) == (positions is None), name, "scores and positions come together")
    expect(name, torch.float32, kept_scores=(scores, shape))
    expect(name, torch.int32, positions=(positions, shape), ranks=(ranks, shape))
    contiguous(name, kept_scores=scores, positions=positions, ranks=ranks)


def check_form(name: str, form: FormArguments, heads: int, sequences: int = 0) -> None:
    """Sinks are float32 [heads], offsets [sequences, heads], contiguous."""
    expect(name, torch.float32, sinks=(form.sink_logits, (heads,)),
           offsets=(form.offsets, (sequences, heads)))
    contiguous(name, sinks=form.sink_logits, offsets=form.offsets)


def product_shapes(name: str, x: Tensor, outputs: int, bias: Tensor | None, out: Tensor
                   ) -> torch.dtype:
    """The dtype of a product of x [rows, inputs] that is written to out [rows, outputs]."""
    dtype = floats(name, x, 2)
    expect(name, dtype, x=(x, x.shape), bias=(bias, (outputs,)), out=(out, (len(x), outputs)))
    lines(name, bias=bias, out=out)
    return dtype
