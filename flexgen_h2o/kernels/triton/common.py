"""Helpers of the Triton kernels: launch shapes, strides and small functions."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from flexgen_h2o.config import limits
from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.kernels.arguments import EvictionArguments
from flexgen_h2o.kernels.dispatch import gpu_of

EMPTY = tl.constexpr(limits.EMPTY)
MIN_DOT_SIZE = 16
"""Minimum size of each dimension of the operands of `tl.dot`."""


def interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def configs(small: dict[str, int], *tuned: tuple[dict[str, int], int, int]) -> list[triton.Config]:
    """Return configs for `triton.autotune`, given as (constants, warps, stages).

    The interpreter gets the single config `small`, whose blocks are so short that small tensors
    have several.
    """
    if interpreted():
        return [triton.Config(small)]
    return [triton.Config(constants, num_warps=warps, num_stages=stages)
            for constants, warps, stages in tuned]


@contextmanager
def one_layout(eviction: EvictionArguments) -> Iterator[EvictionArguments]:
    """Give scores, positions and ranks equal strides within the context, as kernels require.

    Tensors with other strides are replaced by copies, which are written back at the end.
    """
    states = [x for x in eviction[:3] if x is not None]
    if all(x.stride() == (*states[0].stride()[:2], 1) for x in states):
        yield eviction
        return
    copies = [x.clone(memory_format=torch.contiguous_format) for x in states]
    yield EvictionArguments._make(
        (*copies, *(None,) * (3 - len(states)), *eviction[3:]))
    for x, copy in zip(states, copies, strict=True):
        x.copy_(copy)


@functools.lru_cache(maxsize=32)
def device_ints(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """Return int32 rows on a device, cached because all layers of a run use the same few."""
    return torch.tensor(rows, dtype=torch.int32, device=device)


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. `triton.cdiv` takes 2 us, and a layer needs it 50 times."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the lowest power of two that is at least n, faster than Triton does."""
    return 1 << max(0, n - 1).bit_length()


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 1 if it is not a GPU."""
    gpu = gpu_of(device)
    return 1 if gpu is None else gpu.multiprocessors


def starts(lengths: Sequence[int]) -> list[int]:
    """Return the first row of each packed sequence."""
    begins, total = [], 0
    for length in lengths:
        begins.append(total)
        total += length
    return begins


def in_units(x: torch.Tensor) -> tuple[int, list[int]]:
    """Return the largest power of two, at most 16, that divides x's strides, and strides in it.

    The compiler only knows whether an argument is a multiple of 16: slots of 72 bytes would be read
    byte by byte. If a stride does not fit into 32 bits the unit is 1, since the product of stride
    and unit in the kernel would overflow.
    """
    return _in_units(x.stride()[:-1])


def slots_in_units(slots: torch.Tensor, layout: CacheLayout | None) -> tuple[int, list[int]]:
    """Return `in_units` of cache slots; the first stride is from a key to its value."""
    kind, *others = slots.stride()[:-1]
    return _in_units([layout.keys.nbytes if layout is not None and layout.mixed else kind, *others])


def _in_units(strides: Sequence[int]) -> tuple[int, list[int]]:
    unit = functools.reduce(int.__or__, strides, 16)
    unit = unit & -unit if max(strides) < 2**31 else 1
    return unit, [stride // unit for stride in strides]


def vector_format(length: int, layout: CacheLayout | None) -> dict[str, int]:
    """Return constants of kernels that read or write slots: bits and groups of keys and values."""
    if layout is None:
        return {"BITS": 16, "GROUP": length, "VALUE_BITS": 16, "VALUE_GROUP": length}
    keys, values = layout.keys, layout.values
    return {"BITS": keys.bits, "GROUP": keys.group, "VALUE_BITS": values.bits,
            "VALUE_GROUP": values.group}


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """Return x if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def soft_capped(x, cap):
    """Return cap * tanh(x / cap)."""
    size = tl.exp2(tl.abs(x) * (-2.0 * 1.4426950408889634 / cap))
    capped = (1.0 - size) / (1.0 + size) * cap
    return tl.where(x < 0, -capped, capped)
