"""Measured rates of a device, for rooflines: memory and matmuls."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexgen_h2o.storage.device import Device, typed
from flexgen_h2o.storage.links import median_seconds


def memory_read_rate(nbytes: int = 2 << 30, *, device: Device | None = None) -> float:
    """Return the bytes per second of a sum over memory of the device; None: host memory."""
    return nbytes / median_seconds(memory_reader(nbytes, device=device))


def memory_reader(nbytes: int, *, device: Device | None = None) -> Callable[[], None]:
    """Return a function that reads `nbytes` of the device's memory; None: host memory.

    On the host, the memory has huge pages, as weights and caches do.
    """
    device = device or Device()
    data = typed(device.empty(nbytes), 0, (nbytes // 4,), torch.float32).fill_(1)

    def read() -> None:
        data.sum()
        device.record_event().synchronize()

    return read


def gemm_rate(rows: int, dtype: torch.dtype, *, width: int = 2048, depth: int = 8192,
              device: Device | None = None) -> float:
    """Return the FLOP per second of [rows, width] x [width, depth], with several weights in turn.

    The output is reused. A device of None is the CPU.
    """
    device = device or Device()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device.torch_device).to(dtype)

    weights, x = [random(depth, width) for _ in range(8)], random(rows, width)
    out = torch.empty(rows, depth, dtype=dtype, device=device.torch_device)

    def multiply_all() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)
        device.record_event().synchronize()

    return len(weights) * 2 * rows * width * depth / median_seconds(multiply_all)


def best_gemm_rate(rows: int, dtype: torch.dtype, *, device: Device | None = None) -> float:
    """Return `gemm_rate` of a dtype or of float32, whichever is faster in a small matmul.

    CPUs without 16-bit matmul instructions are faster in float32.
    """
    device = device or Device()
    if device.is_gpu:
        return gemm_rate(rows, dtype, device=device)
    faster = max((dtype, torch.float32), key=lambda candidate: gemm_rate(
        256, candidate, width=1024, depth=1024, device=device))
    return gemm_rate(rows, faster, device=device)
