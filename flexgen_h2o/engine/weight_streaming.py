"""Matrices cut into parts of some outputs each, which have places of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import torch

from flexgen_h2o.config.limits import SHARD_BUFFERS
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.engine.weight_files import Pack, Weight
from flexgen_h2o.kernels.matrix import ShardedMatrix
from flexgen_h2o.models.model_config import TensorSpec
from flexgen_h2o.models.quantized import WeightFormat
from flexgen_h2o.storage.buffer_ring import BufferRing, StagingBuffer
from flexgen_h2o.storage.disk import Checksums, Extent, plan_reads
from flexgen_h2o.storage.placement import assign, shard_rows
from flexgen_h2o.storage.transfer import Lane, Transfers


class CutRows(NamedTuple):
    """Some outputs of a matrix, and where they rest: on disk, or in memory."""

    rows: slice
    on_disk: bool


def cut(specs: Mapping[str, TensorSpec], form: WeightFormat, placement: Placement, *,
        whole: Collection[str], layer: int) -> dict[str, list[CutRows]]:
    """The parts of the matrices that are on disk, all or in part.

    Parameters
    ----------
    specs : mapping of name to TensorSpec
        In the order in which they are placed. Vectors stay in memory.
    placement : Placement
        Share of the bytes on each tier.
    whole : collection of names
        Matrices that are on one tier, though they may be read in parts.
    layer : int
        Bytes of a decoder layer.
    """
    sizes: dict[tuple[str, int, int], int] = {}
    for name, spec in specs.items():
        if len(spec.shape) != 2:
            continue
        for rows in _chunks(spec, form, layer):
            first, end = (0, spec.shape[0]) if name in whole else (rows.start, rows.stop)
            sizes[name, first, end] = form.nbytes(TensorSpec(name, (end - first, spec.shape[1])))
    parts: dict[str, list[CutRows]] = {}
    for (name, first, end), tier in assign(sizes.items(), placement).items():
        before, on_disk = parts.setdefault(name, []), tier == "disk"
        if before and not on_disk and not before[-1].on_disk:  # one product instead of two
            first = before.pop().rows.start
        before.append(CutRows(slice(first, end), on_disk))
    for name in parts.keys() & set(whole):
        if parts[name][0].on_disk:
            parts[name] = [CutRows(rows, True) for rows in _chunks(specs[name], form, layer)]
    return {name: those for name, those in parts.items() if any(each.on_disk for each in those)}


def _chunks(spec: TensorSpec, form: WeightFormat, layer: int) -> list[slice]:
    """The outputs of each chunk of a matrix."""
    outputs = spec.shape[0]
    step = shard_rows(outputs, form.nbytes(spec), layer)
    return [slice(first, min(first + step, outputs)) for first in range(0, outputs, step)]


def piece_of(extent: Extent, rows: slice, spec: TensorSpec, form: WeightFormat
             ) -> tuple[TensorSpec, Extent]:
    """Some outputs of a matrix as a tensor, and where they lie; rows begin with a tile."""
    inputs = spec.shape[1]
    piece = TensorSpec(spec.name, (rows.stop - rows.start, inputs))
    before = form.nbytes(TensorSpec(spec.name, (rows.start, inputs))) if rows.start else 0
    return piece, Extent(extent.path, extent.offset + before, form.nbytes(piece))


# Matrices on disk that come in chunks, each when its product needs it.
#
# A chunk is some outputs of a matrix: its rows lie together in the file, and so does what a product
# with it gives. Chunks are read in the order in which products use them, a few ahead of the one
# that
# is used; each is given up when its product is done, and the next is read into its place. What is
# read ahead is a guess: a matrix that is asked for out of turn (a long prompt goes through a layer
# in
# blocks) is found, too, and the chunks that were read in vain are dropped.


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some outputs of a matrix on disk.

    Attributes
    ----------
    unit : int
        The layer step that uses the matrix.
    rows : slice
        Outputs.
    spec : TensorSpec
        The chunk as a tensor, by the matrix's name.
    extent : Extent
        Where it lies.
    pack : Pack
        How it is read, at the place "chunk".
    """

    unit: int
    rows: slice
    spec: TensorSpec
    extent: Extent
    pack: Pack


class _Turn(NamedTuple):
    """One use of a chunk; no two have the same number."""

    number: int
    chunk: Chunk


class ChunkStream:
    """Staging buffers for chunks, which take turns.

    Parameters
    ----------
    transfers : Transfers
        Of a device that computes in host memory, where a product is done when its call returns.
    chunks : mapping of unit to sequence of Chunk
        In the order of their use.
    buffers : int
        How many; one fewer are read ahead.
    read : callable (Lane, Chunk, buffer)
        Fills a uint8 tensor with a chunk.
    ahead : bool
        Read before a chunk is asked for.
    """

    def __init__(self, transfers: Transfers, chunks: dict[int, Sequence[Chunk]], *, buffers: int,
                 read: Callable[[Lane, Chunk, StagingBuffer], None], ahead: bool):
        self._chunks = chunks
        nbytes = max((each.pack.nbytes for those in chunks.values() for each in those), default=0)
        self._ring: BufferRing[int] = BufferRing(transfers, [
            StagingBuffer(transfers.device.empty(nbytes)) for _ in range(buffers if nbytes else 0)],
            kind="weights")
        self._read = read
        self._most = buffers if ahead else 0
        self._numbers = count()
        self._expected: deque[_Turn] = deque()
        self._begun: deque[_Turn] = deque()
        self.misses = 0
        """Chunks that were asked for out of turn."""

    @property
    def buffers(self) -> tuple[StagingBuffer, ...]:
        """The staging buffers."""
        return self._ring.buffers

    def expect(self, unit: int, times: int = 1) -> None:
        """A unit's chunks are used next, as often as given, after those that are expected."""
        for _ in range(times):
            self._expected.extend(self._turns(self._chunks.get(unit, ())))
        self._go_on()

    @contextmanager
    def use(self, chunk: Chunk) -> Iterator[StagingBuffer]:
        """A chunk in its buffer, for the body of a ``with`` statement."""
        first = next(iter((*self._begun, *self._expected)), None)
        if first is None or first.chunk is not chunk:
            self._aim(chunk)
        if not self._begun:
            self._begin()
        number = self._begun[0].number
        try:
            yield self._ring.get(number)
        finally:
            if self._begun and self._begun[0].number == number:
                self._begun.popleft()
                self._ring.release(number)
        self._go_on()

    def release(self, unit: int) -> None:
        """A unit is not used again before others are: nothing is read for it any more."""
        while self._begun and self._begun[0].chunk.unit == unit:
            self._ring.release(self._begun.popleft().number)
        if not self._begun:
            while self._expected and self._expected[0].chunk.unit == unit:
                self._expected.popleft()
        self._go_on()

    def reset(self) -> None:
        """Forget what was expected and read ahead, and any error of a read."""
        self._expected.clear()
        self._begun.clear()
        self._ring.reset()

    def _turns(self, chunks: Sequence[Chunk]) -> list[_Turn]:
        return [_Turn(next(self._numbers), chunk) for chunk in chunks]

    def _aim(self, chunk: Chunk) -> None:
        """Expect a chunk that is not the next one, and then those that follow it in its unit."""
        self.misses += 1
        waiting = self._turns([turn.chunk for turn in (*self._begun, *self._expected)])
        self.reset()
        while waiting and waiting[0].chunk.unit == chunk.unit:
            waiting.pop(0)
        own = self._chunks[chunk.unit]
        place = next(number for number, each in enumerate(own) if each is chunk)
        self._expected.extend((*self._turns(own[place:]), *waiting))
        self._go_on()

    def _go_on(self) -> None:
        """Begin to read as far ahead as there are buffers."""
        while self._expected and len(self._begun) < self._most:
            self._begin()

    def _begin(self) -> None:
        turn = self._expected.popleft()
        self._begun.append(turn)
        self._ring.load(turn.number, partial(self._fill, turn.chunk))

    def _fill(self, chunk: Chunk, lane: Lane, buffer: StagingBuffer) -> None:
        self._read(lane, chunk, buffer)


# The matrices of a model that are cut: parts of them rest in memory, and parts come in chunks.


class ChunkedWeights:
    """Matrices that are cut into parts of some outputs each.

    Parameters
    ----------
    cuts : mapping of name to sequence of CutRows
        The parts of each matrix, by checkpoint name.
    form : WeightFormat
        Of the matrices as they lie on disk, and in memory.
    transfers : Transfers
    checksums : Checksums, optional
        Against which what is read is held.
    """

    def __init__(self, cuts: Mapping[str, Sequence[CutRows]], form: WeightFormat,
                 transfers: Transfers, *, checksums: Checksums | None):
        self._cuts = cuts
        self._form = form
        self._transfers = transfers
        self._checksums = checksums
        self._chunks: dict[int, list[Chunk]] = {}
        self._stream: ChunkStream | None = None

    def load(self, unit: int, spec: TensorSpec, extent: Extent) -> ShardedMatrix:
        """Read what stays in memory of a matrix that a unit uses after those loaded before.

        Parameters
        ----------
        spec : TensorSpec
            One of those that are cut.
        extent : Extent
            Where all of it lies.
        """
        cuts = self._cuts[spec.name]
        if self._checksums is not None and len(cuts) > 1:
            self._read(extent)  # the file may keep a checksum of the whole
        parts = [self._part(unit, each, spec, extent) for each in cuts]
        self._chunks.setdefault(unit, []).extend(
            part for part in parts if isinstance(part, Chunk))
        return ShardedMatrix(spec.shape, partial(self._parts, parts))

    def open(self, *, ahead: bool) -> ChunkStream:
        """The stream of the chunks of all matrices that are loaded; ahead: see `ChunkStream`."""
        self._stream = ChunkStream(self._transfers, self._chunks, buffers=SHARD_BUFFERS,
                                   read=self._read_chunk, ahead=ahead)
        return self._stream

    def _part(self, unit: int, cut: CutRows, spec: TensorSpec, extent: Extent
              ) -> Chunk | tuple[slice, Weight]:
        """Some outputs of a matrix: a chunk, or what stays in memory."""
        piece, where = piece_of(extent, cut.rows, spec, self._form)
        if cut.on_disk:
            reads, places, nbytes = plan_reads([where])
            return Chunk(unit, cut.rows, piece, where,
                         Pack(nbytes, {"chunk": places[where]}, reads))
        buffer, place = self._read(where)
        return cut.rows, self._form.view(buffer, place, piece)

    def _read(self, extent: Extent) -> tuple[torch.Tensor, int]:
        """An extent in a new buffer, and its place there."""
        reads, places, nbytes = plan_reads([extent])
        buffer, place = self._transfers.device.host_empty(nbytes, pinned=False), places[extent]
        self._transfers.disk.read(reads, buffer)
        self._check(extent, buffer, place)
        return buffer, place

    def _read_chunk(self, lane: Lane, chunk: Chunk, buffer: StagingBuffer) -> None:
        lane.disk.read(chunk.pack.reads, buffer.device)
        self._check(chunk.extent, buffer.device, chunk.pack.places["chunk"])

    def _check(self, extent: Extent, buffer: torch.Tensor, place: int) -> None:
        if self._checksums is not None:
            self._checksums.read(extent, buffer[place : place + extent.nbytes])

    def _parts(self, parts: Sequence[Chunk | tuple[slice, Weight]], x: torch.Tensor
               ) -> Iterator[tuple[slice, Weight]]:
        """The parts of a matrix, one after the other."""
        for part in parts:
            if isinstance(part, Chunk):
                with self._stream.use(part) as buffer:
                    yield part.rows, part.pack.views(
                        buffer.device, {"chunk": part.spec}, self._form)["chunk"]
            else:
                yield part
