"""The parts of a cache over the tiers that its sequences are placed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexgen_h2o.cache.fetched import FetchedPart
from flexgen_h2o.cache.mapped import MappedPart
from flexgen_h2o.cache.parts import CachePart, Grid, Records, ResidentPart
from flexgen_h2o.cache.recalled import RecalledPart
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.tiers import Device
from flexgen_h2o.storage.transfer import Transfers


def recalls_in_place(device: Device) -> bool:
    """True if kernels of a GPU read in host memory what a step recalls."""
    return device.zero_copy and not ops.plain_torch(device.torch.type)


def make_parts(records: Records, grid: Grid, counts: Sequence[int], *, transfers: Transfers,
               on_host: bool, file: Callable[[int], str], recalled: Sequence[bool] = (),
               fast: Sequence[int] = ()) -> list[CachePart]:
    """The parts of a cache.

    Parameters
    ----------
    counts : three ints
        Sequences of a batch on (gpu, cpu, disk).
    on_host : bool
        Attention over the sequences on cpu runs there.
    file : callable (bytes) -> path
        Makes a file for them on disk.
    recalled : sequence of bool
        Of a cache that is recalled: the layers of which steps choose tokens. A GPU reads those of
        host memory in place.
    fast : sequence of int
        Slots of the fast set in each layer, of a cache that is recalled: from disk without a GPU,
        and with one from host memory. Beside a GPU whole layers are fetched from disk.
    """
    device = transfers.device
    gpu, cpu, disk = counts
    if not device.separate:
        gpu, cpu = gpu + cpu, 0
    parts: list[CachePart] = []
    if gpu:
        parts.append(ResidentPart(records, 0, gpu, grid=grid, device=device))
    if cpu and on_host:
        parts.append(ResidentPart(records, gpu, gpu + cpu, grid=grid, device=device, on_host=True))
    elif cpu and any(recalled) and recalls_in_place(device):
        parts.append(MappedPart(records, gpu, gpu + cpu, grid=grid, transfers=transfers,
                                recalled=recalled, fast=fast))
    elif cpu:
        parts.append(FetchedPart(records, gpu, gpu + cpu, grid=grid, transfers=transfers,
                                 path=None))
    if disk and any(fast) and not device.separate:
        path = file(RecalledPart.recalled_file_bytes(records, disk, grid, fast))
        parts.append(RecalledPart(records, gpu, gpu + disk, grid=grid, transfers=transfers,
                                  path=path, fast=fast))
    elif disk:
        path = file(FetchedPart.file_bytes(records, disk, grid))
        parts.append(FetchedPart(records, gpu + cpu, gpu + cpu + disk, grid=grid,
                                 transfers=transfers, path=path))
    return parts
