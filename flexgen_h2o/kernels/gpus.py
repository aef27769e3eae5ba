"""A GPU as kernels and dispatch see it: its architecture, and how many programs it runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch


class GPU(NamedTuple):
    """A GPU as choices see it.

    Attributes
    ----------
    architecture : int
        Compute capability without its point: 75 of a T4, 80 of an A100, 90 of an H100.
    multiprocessors : int
        Programs that it runs side by side, at least.
    """

    architecture: int
    multiprocessors: int


_pretended: ContextVar[GPU | None] = ContextVar("pretended", default=None)


@contextmanager
def assume_gpu(gpu: GPU | None) -> Iterator[None]:
    """Within it, every device counts as this GPU: its choices run, and compile, without one. None:
    each as what it is."""
    token = _pretended.set(gpu)
    try:
        yield
    finally:
        _pretended.reset(token)


def gpu_of(device: torch.device) -> GPU | None:
    """The GPU that a device is; None of any other device."""
    return _pretended.get() or (_properties(device) if device.type == "cuda" else None)


@functools.lru_cache(maxsize=16)
def _properties(device: torch.device) -> GPU:
    found = torch.cuda.get_device_properties(device)
    return GPU(10 * found.major + found.minor, found.multi_processor_count)


def has_tensor_cores(gpu: GPU | None, dtype: torch.dtype) -> bool:
    """True if Triton multiplies blocks of `dtype` on matrix units; None: its interpreter does.

    It has none for float32, as the kernels want its full precision, and dropped those before
    Ampere.
    """
    return dtype.itemsize == 2 and (gpu is None or gpu.architecture >= 80)
