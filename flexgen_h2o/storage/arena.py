"""Host memory for many small buffers that stay for good, taken from large ones."""

from __future__ import annotations

import torch

from flexgen_h2o.storage.tiers import PAGE, Device, round_up

ARENA_BYTES = 64 << 20


class Arena:
    """Buffers one after the other in shared memory, which goes when all of them have gone.

    Alone a buffer of few MB has small pages where it fills no huge one (`Device.host_empty`), and
    two mappings of its own; thousands of experts are read faster, and are fewer pages to look up,
    side by side.

    Parameters
    ----------
    device : Device
        Gives the memory: its `host_empty`.
    """

    def __init__(self, device: Device):
        self._device = device
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """Uninitialised page-aligned bytes in host memory: uint8 [nbytes rounded to a page]."""
        size = max(round_up(nbytes, PAGE), PAGE)
        if size > len(self._left):
            self._left = self._device.host_empty(max(size, ARENA_BYTES), pinned=False)
        taken, self._left = self._left[:size], self._left[size:]
        return taken
