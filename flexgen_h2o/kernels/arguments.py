"""Arguments of the kernels, and the checks that C++ needs because it gets pointers.

Every check raises ValueError with the operation's name and the condition that does not hold. All
checks run before anything is written. They take some microseconds a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.config.layers import DEFAULT_VARIANT, AttentionVariant
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.h2o.eviction import EvictionState


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized weight [outputs, inputs].

    Attributes
    ----------
    data : uint8 Tensor [layout.nbytes]
        Contiguous, aligned to 4 bytes; on any device.
    layout : MatrixLayout
    activation_bits : int
        Bit width of the activations in matmuls: 16 to leave them as they are, 8 to quantize them
        (`reference.matrix.quantize_activations`).
    """

    data: Tensor
    layout: MatrixLayout
    activation_bits: int = 16

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.layout.outputs, self.layout.inputs

    def __len__(self) -> int:
        return self.layout.outputs


@dataclass(frozen=True)
class ShardedMatrix:
    """A weight [outputs, inputs] of which only one row shard is in memory at a time.

    Attributes
    ----------
    shape : (int, int)
        (outputs, inputs).
    shards : callable (x) -> iterator of (slice, Tensor or QuantizedMatrix)
        Yields every row shard in order: its range of outputs, and its weight [outputs, inputs]. x
        [rows, inputs] is multiplied with the shards. A shard is valid until the next one
        is requested; its matmul has to be finished by then.
    """

    shape: tuple[int, int]
    shards: Callable[[Tensor], Iterator[tuple[slice, Tensor | QuantizedMatrix]]]

    def __len__(self) -> int:
        return self.shape[0]


Matrix = Tensor | QuantizedMatrix | ShardedMatrix
"""A weight [outputs, inputs] of any kind."""


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of floating-point inputs, and their numbers in the C ABI (DType of cpu/kernels.h)."""


class EvictionArguments(NamedTuple):
    """An `EvictionState` as arguments of the kernels; without tensors nothing is evicted.

    Attributes
    ----------
    scores : float32 Tensor [sequences, kv_heads, slots]
    positions : int32 Tensor [sequences, kv_heads, slots]
    ranks : int32 Tensor [sequences, kv_heads, slots]
        Rank of each cached token, if positions roll.
    cos, sin : float32 Tensor [positions, rotary_dim / 2]
        Rotations by rank, if there are ranks.
    mean : bool
        Divide scores by the number of queries that could see the key.
    decay : float
        Factor of the scores per token.
    sinks : int
        First tokens that are never evicted.
    window : int
        Tokens that attention sees; 0 for all.
    factor, shift : float32 Tensor [kv_heads, head_dim]
        Constants of key smoothing (`BasisChange`), if there are ranks.
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
    def from_state(cls, state: EvictionState | None) -> EvictionArguments:
        """Return the arguments of a state: its own tensors, which operations update."""
        if state is None:
            return cls()
        cos, sin = (None, None) if state.rope is None else (
            table.contiguous() for table in state.rope)
        eviction = state.eviction
        rolls = state.smoothing is not None and state.ranks is not None
        change = state.smoothing.keys if rolls else None
        return cls(state.scores, state.positions, state.ranks, cos, sin, mean=eviction.mean,
                   decay=eviction.decay, sinks=eviction.sinks, window=eviction.window,
                   factor=None if change is None else change.factor,
                   shift=None if change is None else change.shift)


class VariantArguments(NamedTuple):
    """An `AttentionVariant` as arguments of the kernels.

    Attributes
    ----------
    scale : float
        Factor of the logits; 0 for 1 / sqrt(head_dim).
    softcap : float
        0 for none.
    window : int
        0 for none.
    sink_logits : float32 Tensor [heads] or None
        Learned attention sinks.
    offsets : float32 Tensor [sequences, heads] or None
        Added to the products of a new token's queries with all keys, for smoothed keys.
    """

    scale: float = 0.0
    softcap: float = 0.0
    window: int = 0
    sink_logits: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def from_variant(cls, variant: AttentionVariant, sinks: Tensor | None,
                     offsets: Tensor | None = None) -> VariantArguments:
        """Return the arguments of a variant; `sinks` are [heads] of any floating dtype, or None."""
        if variant == DEFAULT_VARIANT:
            return DEFAULT_ARGUMENTS
        return cls(variant.scale or 0.0, variant.softcap, variant.window or 0,
                   sinks.float().contiguous() if variant.sinks else None, offsets)


DEFAULT_ARGUMENTS = VariantArguments()


def check(condition: bool, name: str, message: str) -> None:
    """Raise ValueError if a condition of operation `name` does not hold."""
    if not condition:
        raise ValueError(f"{name}: {message}")


def check_tensors(name: str, dtype: torch.dtype,
                  **tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Check that each tensor is None, or on the CPU with this dtype and its shape."""
    for tensor, (x, shape) in tensors.items():
        if x is not None and not (x.is_cpu and x.dtype == dtype and x.shape == shape):
            raise ValueError(f"{name}: {tensor} must be {dtype} {list(shape)} on the CPU, got "
                             f"{x.dtype} {list(x.shape)} on {x.device}")


def check_floats(name: str, x: Tensor, dims: int) -> torch.dtype:
    """Return the dtype of an input of `dims` dimensions, which must be one of `DTYPES`."""
    check(x.dim() == dims and x.dtype in DTYPES, name,
          f"takes {dims} dimensions of float32, bfloat16 or float16, got {x.dtype} "
          f"{list(x.shape)}")
    return x.dtype


def check_contiguous(name: str, **tensors: Tensor | None) -> None:
    """Check that each tensor is None or contiguous."""
    for tensor, x in tensors.items():
        check(x is None or x.is_contiguous(), name, f"{tensor} must be contiguous")


def check_last_dim_contiguous(name: str, **tensors: Tensor | None) -> None:
    """Check that each tensor is None or contiguous in its last dimension.

    For tensors that are written, or read without a copy.
    """
    for tensor, x in tensors.items():
        check(x is None or x.shape[-1] <= 1 or x.stride(-1) == 1, name,
              f"{tensor} must be contiguous in its last dimension")


def check_attention(name: str, q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """Return the dtype of q [rows, heads, head_dim], k and v [key rows, kv_heads, head_dim]."""
    dtype, size, shape = q.dtype, q.shape, k.shape
    if not (len(size) == 3 == len(shape) and shape == v.shape and shape[2] == size[2]
            and shape[1] and size[1] % shape[1] == 0
            and dtype in DTYPES and dtype == k.dtype == v.dtype
            and q.is_cpu and k.is_cpu and v.is_cpu):
        shapes = ", ".join(f"{x.dtype} {list(x.shape)} on {x.device}" for x in (q, k, v))
        raise ValueError(
            f"{name}: q must be [rows, heads, head_dim] and k and v [key rows, KV heads, head_dim] "
            "of one of float32, bfloat16 and float16 on the CPU, with heads a multiple of KV "
            f"heads; got {shapes}")
    return dtype


def check_slots(name: str, slots: Tensor, sequences: int, k: Tensor, layout: CacheLayout | None
                ) -> None:
    """Check slots [kinds, sequences, kv_heads, n, width] of vectors like k's, or of a layout."""
    check(slots.dim() == 5, name, f"slots must have 5 dimensions, got {list(slots.shape)}")
    check(layout is None or k.shape[2] == layout.keys.length == layout.values.length, name,
         f"the layout is for another head_dim than {k.shape[2]}")
    kinds, width = (2, k.shape[2]) if layout is None else (layout.kinds, layout.width)
    check_tensors(name, k.dtype if layout is None else torch.uint8,
           slots=(slots, (kinds, sequences, k.shape[1], slots.shape[3], width)))
    check_last_dim_contiguous(name, slots=slots)


def check_state(name: str, eviction: EvictionArguments, shape: tuple[int, ...]) -> None:
    """Check scores, positions and ranks: [sequences, kv_heads, slots], contiguous."""
    scores, positions, ranks = eviction[:3]
    check((scores is None) == (positions is None), name, "scores and positions come together")
    check_tensors(name, torch.float32, kept_scores=(scores, shape))
    check_tensors(name, torch.int32, positions=(positions, shape), ranks=(ranks, shape))
    check_contiguous(name, kept_scores=scores, positions=positions, ranks=ranks)


def check_variant(name: str, variant: VariantArguments, heads: int, sequences: int = 0) -> None:
    """Check sinks [heads] and offsets [sequences, heads]: float32, contiguous."""
    check_tensors(name, torch.float32, sinks=(variant.sink_logits, (heads,)),
           offsets=(variant.offsets, (sequences, heads)))
    check_contiguous(name, sinks=variant.sink_logits, offsets=variant.offsets)


def check_linear(name: str, x: Tensor, outputs: int, bias: Tensor | None, out: Tensor
                   ) -> torch.dtype:
    """Return the dtype of a matmul of x [rows, inputs] that is written to out [rows, outputs]."""
    dtype = check_floats(name, x, 2)
    check_tensors(name, dtype, x=(x, x.shape), bias=(bias, (outputs,)),
                  out=(out, (len(x), outputs)))
    check_last_dim_contiguous(name, bias=bias, out=out)
    return dtype
