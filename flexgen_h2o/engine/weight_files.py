"""Weights in files: the layout of weight buffers, and reads that fill them.

A tensor whose bytes in the checkpoint (or in the weight cache) have the run's format is read from
there for every use. Other tensors are converted when they are read; for the disk tier, they are
first written to an offload file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.disk_cache import CacheFolder, locked, use
from flexgen_h2o.files.writing import open_atomic
from flexgen_h2o.kernels.arguments import Matrix
from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.models.quantized import WeightFormat
from flexgen_h2o.models.tensors import TensorSpec
from flexgen_h2o.storage.device import PAGE, round_up, typed
from flexgen_h2o.storage.disk import AlignedRead, Checksums, Extent, plan_reads
from flexgen_h2o.storage.offload_dirs import StripedFile
from flexgen_h2o.storage.run_folder import RunFolder
from flexgen_h2o.storage.transfer import Transfers

ALIGN = 64
"""Alignment of tensors in a weight buffer, in bytes."""

Weight = Matrix
"""A weight in memory."""

_OFFLOAD_VERSION = 1  # increase it when the bytes of offloaded tensors change


def attention_sinks(weights: Mapping[str, Weight]) -> torch.Tensor | None:
    """Return the learned attention sinks of a layer, which are never quantized; None without."""
    sinks: Any = weights.get("sinks")
    return sinks


@dataclass
class WeightBuffer:
    """Layout of tensors that are stored and transferred together in one contiguous buffer.

    Attributes
    ----------
    nbytes : int
    offsets : dict of str to int
        Byte offset of each tensor by local name.
    extents : dict of str to Extent
        Bytes of each tensor on disk; empty if they must be converted.
    reads : list of AlignedRead or None
        Reads that fill the buffer; None if the tensors must be converted.
    host : uint8 Tensor or None
        The content in host memory; None if it is on disk.
    """

    nbytes: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    extents: dict[str, Extent] = field(default_factory=dict)
    reads: list[AlignedRead] | None = None
    host: torch.Tensor | None = None

    @classmethod
    def of_extents(cls, extents: dict[str, Extent]) -> WeightBuffer:
        """Return a buffer that reads of these extents fill."""
        reads, offsets, nbytes = plan_reads(extents.values())
        return cls(nbytes, {name: offsets[extent] for name, extent in extents.items()}, extents,
                   reads)

    @property
    def lead(self) -> int:
        """Leading bytes to drop so that most tensors are aligned to `ALIGN` bytes.

        Files align tensors to as little as 8 bytes, which reads into the buffer keep. Copies drop
        the lead: cuBLAS runs at half speed on matrices that are not aligned to 16 bytes, and decode
        steps on a Zen 4 take 8 % longer (benchmarks/results/epyc-zen4).
        """
        offsets = self.offsets.values()
        lead = Counter(offset % ALIGN for offset in offsets).most_common(1)[0][0] if offsets else 0
        lead -= lead % 4  # float32 tensors beside 16-bit ones stay aligned
        return lead if lead <= min(offsets, default=0) else 0

    def without_lead(self, content: torch.Tensor) -> torch.Tensor:
        """Return the content of the buffer, uint8 [nbytes or more], without the lead."""
        return content[self.lead : self.nbytes]

    def views(self, content: torch.Tensor, specs: Mapping[str, TensorSpec],
              weight_format: WeightFormat, *, aligned: bool = False) -> dict[str, Weight]:
        """Return the tensors by local name, as views of `content`.

        Parameters
        ----------
        aligned : bool
            The content was copied without the lead.
        """
        lead = self.lead if aligned else 0
        return {name: weight_format.view(content, offset - lead, specs[name])
                for name, offset in self.offsets.items()}


@dataclass
class UnitWeights:
    """The weights of one unit of the schedule, or of one expert.

    Attributes
    ----------
    specs : dict of str to TensorSpec
        All tensors by local name.
    resident : dict of str to Weight
        Weights that need no fetch, or whose shards are streamed.
    fetched : list of WeightBuffer
        Buffers that are copied or read to compute memory for every use; at most one is on disk.
    """

    specs: dict[str, TensorSpec]
    resident: dict[str, Weight] = field(default_factory=dict)
    fetched: list[WeightBuffer] = field(default_factory=list)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of compute memory that a fetch needs."""
        return sum(round_up(buffer.nbytes, PAGE) for buffer in self.fetched)

    @property
    def disk_bytes(self) -> int:
        """Bytes that a fetch reads from disk."""
        return sum(buffer.nbytes for buffer in self.fetched if buffer.host is None)


class OffloadExtents(NamedTuple):
    """Extents of offloaded tensors by name, and the names of those that are not written yet."""

    extents: Mapping[str, Extent]
    missing: Collection[str]


def _consecutive(path: Path | StripedFile, sizes: Mapping[str, int]) -> dict[str, Extent]:
    """Return consecutive page-aligned extents of a file for tensors of these sizes in bytes."""
    extents, offset = {}, 0
    for name, size in sizes.items():
        extents[name] = Extent(path, offset, size)
        offset += round_up(size, PAGE)
    return extents


class PersistentOffloadFile:
    """Offload file with random weights that later runs reuse.

    Every tensor of the model has an extent, but only tensors that a run has placed on disk are
    written. Another placement writes only the missing tensors.

    Parameters
    ----------
    cache : CacheFolder
        Root of the cache.
    title : str
        Readable part of the folder's name.
    identity : object
        Everything that determines the tensors' bytes, as JSON.
    sizes : mapping of str to int
        Bytes of all tensors.
    """

    def __init__(self, cache: CacheFolder, title: str, identity: object, sizes: Mapping[str, int]):
        text = json.dumps([_OFFLOAD_VERSION, identity, list(sizes.items())])
        self._cache = cache
        self._folder = cache.root / f"{title}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self._file = self._folder / "weights.bin"
        self._extents = _consecutive(self._file, sizes)

    @contextlib.contextmanager
    def writing(self, names: Collection[str]) -> Iterator[OffloadExtents]:
        """Lock the file while the caller writes the missing tensors among `names`.

        When the ``with`` statement ends without an error, they count as written.

        Raises
        ------
        UserError
            The file cannot be created, or the disk is full.
        """
        index = self._folder / "written.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            use(self._folder)
            with locked(self._folder / ".lock"):
                written = self._written(index)
                absent = set(names) - set(written)
                missing = [name for name in self._extents if name in absent]
                with self._reserved(missing):
                    yield OffloadExtents({name: self._extents[name] for name in names}, missing)
                if missing:
                    with open_atomic(index) as file:
                        json.dump([*written, *missing], file)
        except OSError as error:
            raise UserError(f"cannot keep random weights in {self._folder} "
                            f"({error.strerror or error}); free space there or "
                            f"{self._cache.advice}") from error

    def _written(self, index: Path) -> list[str]:
        """Return the tensors in the index, except for tensors that a truncated file lacks."""
        try:
            size = self._file.stat().st_size
            indexed = json.loads(index.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return []
        names = set(map(str, indexed)) if isinstance(indexed, list) else set()
        return [name for name, extent in self._extents.items()
                if name in names and extent.offset + extent.nbytes <= size]

    @contextlib.contextmanager
    def _reserved(self, names: Collection[str]) -> Iterator[None]:
        """Allocate disk space first, so that a full disk is found before tensors are converted.

        An error truncates the file to its old size.
        """
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        size = os.fstat(descriptor).st_size
        try:
            for extent in (self._extents[name] for name in names):
                os.posix_fallocate(descriptor, extent.offset, round_up(extent.nbytes, PAGE))
            yield
            if names:
                os.fsync(descriptor)
        except BaseException:
            os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)


class WeightFiles:
    """Reads the tensors of a model from its checkpoint and from offload files.

    Parameters
    ----------
    names : mapping of str to str
        Canonical tensor name to the checkpoint's name.
    weight_format : WeightFormat
        Format of all tensors in memory and on the disk tier.
    transfers : Transfers
        Its disk and its device's host memory are used.
    verify : bool
        Check all reads of the disk tier against checksums, tensor by tensor.
    copy : bool
        Write all tensors of the disk tier to the offload file.

    Attributes
    ----------
    weight_format : WeightFormat
    """

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str],
                 weight_format: WeightFormat, transfers: Transfers, *, verify: bool = False,
                 copy: bool = False):
        self._checkpoint = checkpoint
        self._names = names
        self.weight_format = weight_format
        self._disk = transfers.disk
        self._device = transfers.device
        self._offloaded: dict[str, Extent] = {}
        self._checksums = Checksums() if verify else None
        self._copy = copy

    def extent(self, spec: TensorSpec) -> Extent | None:
        """Return the extent of a tensor in the run's format; None if no file has it."""
        if spec.name in self._offloaded:
            return self._offloaded[spec.name]
        info = self._checkpoint.info(self._names[spec.name])
        dtype, _ = self.weight_format.stored(spec)
        if info.extent is None or info.dtype != dtype:
            return None
        # A file with an odd header length does not align elements.
        return None if info.extent.offset % dtype.itemsize else info.extent

    def offload(self, specs: Iterable[TensorSpec], run_folder: RunFolder,
                offload_file: PersistentOffloadFile | None) -> None:
        """Write the tensors that have no extent yet, or all, to an offload file.

        Parameters
        ----------
        specs : iterable of TensorSpec
            All tensors of the disk tier; a tied one may come twice.
        run_folder : RunFolder
            For the run's own offload file.
        offload_file : PersistentOffloadFile or None
            Offload file to use in place of the run's own.
        """
        converted = {spec.name: spec for spec in specs
                     if self._copy or self.extent(spec) is None}
        if not converted:
            return
        sizes = {name: self.weight_format.nbytes(spec) for name, spec in converted.items()}
        with contextlib.ExitStack() as opened:
            if offload_file is not None:
                extents, missing = opened.enter_context(offload_file.writing(sizes))
            else:
                path = run_folder.striped_file(
                    "weights.bin", sum(round_up(size, PAGE) for size in sizes.values()))
                extents, missing = _consecutive(path, sizes), sizes.keys()
            self._offloaded.update(extents)
            buffer = self._device.host_empty(max(sizes.values()), pinned=False)
            for name in missing:
                self._convert(converted[name], buffer, 0)
                extent = extents[name]
                padded = round_up(extent.nbytes, PAGE)
                self._disk.write(Extent(extent.path, extent.offset, padded), buffer[:padded])
                if self._checksums is not None:
                    self._checksums.written(extent, buffer[: extent.nbytes])

    def expect_checksums(self, specs: Iterable[TensorSpec]) -> None:
        """Verify tensors also against the checksums in their file, as the weight cache has them."""
        if self._checksums is None:
            return
        for spec in specs:
            info, extent = self._checkpoint.info(self._names[spec.name]), self.extent(spec)
            if info.checksum is not None and extent is not None and extent == info.extent:
                self._checksums.expect(extent, info.checksum)

    def buffer(self, specs: Mapping[str, TensorSpec]) -> WeightBuffer:
        """Return a buffer layout for tensors: as in their files, unless one must be converted."""
        extents = {name: self.extent(spec) for name, spec in specs.items()}
        if all(extents.values()):
            return WeightBuffer.of_extents(extents)
        buffer = WeightBuffer()
        for name, spec in specs.items():
            buffer.offsets[name] = buffer.nbytes
            buffer.nbytes += round_up(self.weight_format.nbytes(spec), ALIGN)
        return buffer

    def fill(self, buffer: WeightBuffer, specs: Mapping[str, TensorSpec], out: torch.Tensor
             ) -> None:
        """Read or convert the tensors of a buffer into `out`, uint8 [nbytes or more], on the host.
        """
        if buffer.reads is not None:
            self.read(buffer, out)
            return
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: self._convert(specs[name], out, buffer.offsets[name]),
                          specs))

    def read(self, buffer: WeightBuffer, out: torch.Tensor, *, ahead: bool = False) -> None:
        """Read a buffer that needs no conversion into `out`, uint8 [nbytes or more], on the host.

        `ahead` is as in `Disk.read`. Raise `UserError` if a read fails, or bytes have changed and
        `verify` is on.
        """
        self._disk.read(buffer.reads, out, ahead=ahead)
        for name, extent in buffer.extents.items():
            self._verify(extent, out, buffer.offsets[name])

    def read_extents(self, extents: Sequence[Extent]) -> tuple[torch.Tensor, dict[Extent, int]]:
        """Read extents into a new host buffer. Return it and the offset of each extent."""
        reads, offsets, nbytes = plan_reads(extents)
        out = self._device.host_empty(nbytes, pinned=False)
        self._disk.read(reads, out)
        for extent in extents:
            self._verify(extent, out, offsets[extent])
        return out, offsets

    def verify_whole(self, extent: Extent) -> None:
        """Read an extent if reads are verified: its file may have a checksum of the whole."""
        if self._checksums is not None:
            self.read_extents([extent])

    def _verify(self, extent: Extent, content: torch.Tensor, offset: int) -> None:
        if self._checksums is not None:
            self._checksums.read(extent, content[offset : offset + extent.nbytes])

    def _convert(self, spec: TensorSpec, out: torch.Tensor, offset: int) -> None:
        """Read a tensor, convert or quantize it, and put it into `out` at an offset."""
        dtype, shape = self.weight_format.stored(spec)
        self._checkpoint.read(self._names[spec.name], typed(out, offset, shape, dtype))

    def read_rows(self, spec: TensorSpec, index: torch.Tensor) -> tuple[Weight, torch.Tensor]:
        """Read the rows `index`, int64 [n] on the host, of a table on disk.

        Return the tiles that contain the rows (single rows, or `MATRIX_TILE` rows of a quantized
        table), and the rows' numbers in these tiles, int64 [n].
        """
        rows, columns = spec.shape
        layout = self.weight_format.layout(spec)
        height = 1 if layout is None else MATRIX_TILE
        nbytes = self.weight_format.nbytes(spec) // rows if layout is None else layout.tile_bytes
        tiles, inverse = (index // height).unique(return_inverse=True)
        table = self.extent(spec)
        extents = [Extent(table.path, table.offset + tile * nbytes, nbytes)
                   for tile in tiles.tolist()]
        content, offsets = self.read_extents(extents)
        packed = torch.cat([content[offsets[extent] :][:nbytes] for extent in extents])
        panels = TensorSpec(spec.name, (len(extents) * height, columns))
        return (self.weight_format.view(packed, 0, panels),
                inverse * height + index % height)
