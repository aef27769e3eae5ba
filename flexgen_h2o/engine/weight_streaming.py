"""Row shards: matrices on disk that are streamed through memory piece by piece.

A row shard is some outputs (rows) of a matrix. Its bytes are contiguous in the file, and so is its
part of a matmul's output. Shards are read in the order of their use, a few ahead of the matmul.
After the matmul, the next read reuses the shard's staging buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch

from flexgen_h2o.config.limits import SHARD_BUFFERS
from flexgen_h2o.config.placement import Placement, assign, shard_rows
from flexgen_h2o.engine.weight_files import WeightBuffer, WeightFiles
from flexgen_h2o.kernels.arguments import ShardedMatrix
from flexgen_h2o.models.quantized import WeightFormat
from flexgen_h2o.models.tensors import TensorSpec
from flexgen_h2o.storage.disk import Extent
from flexgen_h2o.storage.transfer import BufferRing, StagingBuffer, TransferQueue, Transfers


class RowShard(NamedTuple):
    """Some rows of a matrix, on disk or in memory."""

    rows: slice
    on_disk: bool


def shard_weights(specs: Mapping[str, TensorSpec], weight_format: WeightFormat,
                  placement: Placement, *, unsplit: Collection[str], layer_bytes: int
                  ) -> dict[str, list[RowShard]]:
    """Return the shards of all matrices that are at least in part on disk.

    Parameters
    ----------
    specs : mapping of str to TensorSpec
        In placement order. Vectors stay in memory.
    placement : Placement
        Share of the bytes on each tier.
    unsplit : collection of str
        Matrices that are on one tier as a whole; on disk they are read in shards, too.
    layer_bytes : int
        Bytes of the largest decoder layer.
    """
    sizes: dict[tuple[str, int, int], int] = {}
    for name, spec in specs.items():
        if len(spec.shape) != 2:
            continue
        for rows in _shard_slices(spec, weight_format, layer_bytes):
            start, stop = (0, spec.shape[0]) if name in unsplit else (rows.start, rows.stop)
            shard = TensorSpec(name, (stop - start, spec.shape[1]))
            sizes[name, start, stop] = weight_format.nbytes(shard)
    sharded: dict[str, list[RowShard]] = {}
    for (name, start, stop), tier in assign(sizes.items(), placement).items():
        shards, on_disk = sharded.setdefault(name, []), tier == "disk"
        if shards and not on_disk and not shards[-1].on_disk:  # one matmul instead of two
            start = shards.pop().rows.start
        shards.append(RowShard(slice(start, stop), on_disk))
    for name in sharded.keys() & set(unsplit):
        if sharded[name][0].on_disk:
            sharded[name] = [RowShard(rows, True)
                             for rows in _shard_slices(specs[name], weight_format, layer_bytes)]
    return {name: shards for name, shards in sharded.items()
            if any(shard.on_disk for shard in shards)}


def _shard_slices(spec: TensorSpec, weight_format: WeightFormat, layer_bytes: int) -> list[slice]:
    rows = spec.shape[0]
    step = shard_rows(rows, weight_format.nbytes(spec), layer_bytes)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


@dataclass(frozen=True, eq=False)
class _DiskShard:
    """A row shard on disk: the unit that uses it, its rows, and how it is read."""

    unit: int
    rows: slice
    spec: TensorSpec
    buffer: WeightBuffer


class _Use(NamedTuple):
    """One use of a shard, with a unique number."""

    number: int
    shard: _DiskShard


class ShardStream:
    """Staging buffers through which the shards of all units are streamed.

    Prefetching follows the order of `add`. A shard that is used out of order (a long prompt goes
    through a layer in chunks) is read when it is used, and the prefetched ones are dropped.

    Parameters
    ----------
    transfers : Transfers
        Transfers of a device that computes in host memory, where a matmul is done when its call
        returns.
    prefetch : bool
        Read shards before they are used.

    Attributes
    ----------
    misses : int
        Number of shards that were used out of order.
    """

    def __init__(self, files: WeightFiles, transfers: Transfers, *, prefetch: bool):
        self._files, self._transfers = files, transfers
        self._max_started = SHARD_BUFFERS if prefetch else 0
        self._shards: dict[int, list[_DiskShard]] = {}
        self._ring: BufferRing[int] = BufferRing(transfers, ())
        self._numbers = count()
        self._scheduled: deque[_Use] = deque()
        self._started: deque[_Use] = deque()
        self.misses = 0

    @property
    def buffers(self) -> tuple[StagingBuffer, ...]:
        """The staging buffers."""
        return self._ring.buffers

    def add(self, unit: int, spec: TensorSpec, shards: Sequence[RowShard]) -> ShardedMatrix:
        """Add the next matrix that a unit uses, in order of use; read its shards in memory."""
        extent = self._files.extent(spec)
        assert extent is not None  # tensors of the disk tier have been offloaded
        if len(shards) > 1:
            self._files.verify_whole(extent)
        opened = [self._open_shard(unit, shard, spec, extent) for shard in shards]
        self._shards.setdefault(unit, []).extend(
            shard for shard in opened if isinstance(shard, _DiskShard))
        return ShardedMatrix((spec.shape[0], spec.shape[1]), partial(self._contents, opened))

    def open(self) -> None:
        """Allocate the staging buffers, once all matrices are added."""
        nbytes = max((shard.buffer.nbytes for shards in self._shards.values() for shard in shards),
                     default=0)
        empty = self._transfers.device.empty
        self._ring = BufferRing(self._transfers, [
            StagingBuffer(empty(nbytes)) for _ in range(SHARD_BUFFERS if nbytes else 0)],
            kind="weights")

    def schedule(self, unit: int, times: int = 1) -> None:
        """Append a number of uses of a unit's shards to the schedule."""
        for _ in range(times):
            self._scheduled.extend(self._uses(self._shards.get(unit, ())))
        self._prefetch()

    def release(self, unit: int) -> None:
        """Drop the next uses of a unit from the schedule, because compute has finished it."""
        while self._started and self._started[0].shard.unit == unit:
            self._ring.release(self._started.popleft().number)
        if not self._started:
            while self._scheduled and self._scheduled[0].shard.unit == unit:
                self._scheduled.popleft()
        self._prefetch()

    def reset(self) -> None:
        """Clear the schedule and drop started reads and their errors."""
        self._scheduled.clear()
        self._started.clear()
        self._ring.reset()

    def _open_shard(self, unit: int, shard: RowShard, spec: TensorSpec, extent: Extent
                    ) -> _DiskShard | tuple[slice, Any]:
        """Return a shard on disk, or the rows and content of one in memory."""
        weight_format, rows, columns = self._files.weight_format, shard.rows, spec.shape[1]
        shard_spec = TensorSpec(spec.name, (rows.stop - rows.start, columns))
        before = TensorSpec(spec.name, (rows.start, columns))
        skipped = weight_format.nbytes(before) if rows.start else 0
        extent = Extent(extent.path, extent.offset + skipped, weight_format.nbytes(shard_spec))
        if shard.on_disk:
            return _DiskShard(unit, rows, shard_spec, WeightBuffer.of_extents({"shard": extent}))
        content, offsets = self._files.read_extents([extent])
        return rows, weight_format.view(content, offsets[extent], shard_spec)

    def _contents(self, shards: Sequence[_DiskShard | tuple[slice, Any]], x: torch.Tensor
                  ) -> Iterator[tuple[slice, Any]]:
        """Yield the rows and the content of each shard of a matrix; see `ShardedMatrix`."""
        for shard in shards:
            if isinstance(shard, _DiskShard):
                with self._use(shard) as buffer:
                    yield shard.rows, shard.buffer.views(
                        buffer.device, {"shard": shard.spec}, self._files.weight_format)["shard"]
            else:
                yield shard

    @contextmanager
    def _use(self, shard: _DiskShard) -> Iterator[StagingBuffer]:
        """Have a shard in a staging buffer during a ``with`` statement."""
        first = next(iter((*self._started, *self._scheduled)), None)
        if first is None or first.shard is not shard:
            self._reschedule(shard)
        if not self._started:
            self._start_next()
        number = self._started[0].number
        try:
            yield self._ring.get(number)
        finally:
            if self._started and self._started[0].number == number:
                self._started.popleft()
                self._ring.release(number)
        self._prefetch()

    def _uses(self, shards: Sequence[_DiskShard]) -> list[_Use]:
        return [_Use(next(self._numbers), shard) for shard in shards]

    def _reschedule(self, shard: _DiskShard) -> None:
        """Schedule a shard out of order, then the later ones of its unit, then the other units."""
        self.misses += 1
        scheduled = self._uses([use.shard for use in (*self._started, *self._scheduled)])
        self.reset()
        while scheduled and scheduled[0].shard.unit == shard.unit:
            scheduled.pop(0)
        shards = self._shards[shard.unit]
        position = next(number for number, other in enumerate(shards) if other is shard)
        self._scheduled.extend((*self._uses(shards[position:]), *scheduled))
        self._prefetch()

    def _prefetch(self) -> None:
        """Start reads while there are free buffers."""
        while self._scheduled and len(self._started) < self._max_started:
            self._start_next()

    def _start_next(self) -> None:
        use = self._scheduled.popleft()
        self._started.append(use)

        def read(queue: TransferQueue, buffer: StagingBuffer) -> None:
            self._files.read(use.shard.buffer, buffer.device)

        self._ring.load(use.number, read)
