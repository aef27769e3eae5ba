"""The matrices of a model that are cut: parts of them rest in memory, and parts come in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from flexgen_h2o.config.limits import CHUNK_BUFFERS
from flexgen_h2o.engine.chunk_stream import Chunk, ChunkStream
from flexgen_h2o.engine.cuts import CutRows, piece_of
from flexgen_h2o.engine.packs import Pack, Weight
from flexgen_h2o.kernels.matrix import ChunkedMatrix
from flexgen_h2o.models.spec import TensorSpec
from flexgen_h2o.models.weight_format import WeightFormat
from flexgen_h2o.storage.buffer_ring import StagingBuffer
from flexgen_h2o.storage.checksums import Checksums
from flexgen_h2o.storage.disk import plan_reads
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.transfer import Lane, Transfers


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

    def load(self, unit: int, spec: TensorSpec, extent: Extent) -> ChunkedMatrix:
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
        return ChunkedMatrix(spec.shape, partial(self._parts, parts))

    def open(self, *, ahead: bool) -> ChunkStream:
        """The stream of the chunks of all matrices that are loaded; ahead: see `ChunkStream`."""
        self._stream = ChunkStream(self._transfers, self._chunks, buffers=CHUNK_BUFFERS,
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
