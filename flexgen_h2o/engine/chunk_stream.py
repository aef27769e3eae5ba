"""Matrices on disk that come in chunks, each when its product needs it.

A chunk is some outputs of a matrix: its rows lie together in the file, and so does what a product
with it gives. Chunks are read in the order in which products use them, a few ahead of the one that
is used; each is given up when its product is done, and the next is read into its place. What is
read ahead is a guess: a matrix that is asked for out of turn (a long prompt goes through a layer in
blocks) is found, too, and the chunks that were read in vain are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

from flexgen_h2o.engine.packs import Pack
from flexgen_h2o.models.spec import TensorSpec
from flexgen_h2o.storage.buffer_ring import BufferRing, StagingBuffer
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.transfer import Lane, Transfers


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
