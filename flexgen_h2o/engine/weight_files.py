"""Packs of a unit's weights: a buffer for each tier."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import open_atomic
from flexgen_h2o.kernels.matrix import QuantizedMatrix, ShardedMatrix
from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.models.convert import Keep, locked
from flexgen_h2o.models.model_config import TensorSpec
from flexgen_h2o.models.quantized import WeightFormat
from flexgen_h2o.storage.disk import AlignedRead, Checksums, Disk, Extent, RunFolder, plan_reads
from flexgen_h2o.storage.tiers import PAGE, round_up, typed
from flexgen_h2o.storage.transfer import Transfers

ALIGN = 64
"""Bytes to a multiple of which a tensor is put, unless it stays as it was read from a file."""

Weight = torch.Tensor | QuantizedMatrix
"""A weight in memory."""


@dataclass
class Pack:
    """Tensors laid out in one buffer: where each lies, and the reads that fill the buffer.

    reads is None when the bytes do not lie plainly in a file and have to be converted.
    """

    nbytes: int = 0
    places: dict[str, int] = field(default_factory=dict)
    reads: list[AlignedRead] | None = None

    @property
    def lead(self) -> int:
        """Bytes in front without which most tensors lie at multiples of `ALIGN`.

        In a file they may lie at any multiple of 8 bytes (safetensors pads its header to no more),
        and reads keep that. What stays in memory, and a GPU's copy, does without the lead: cuBLAS
        multiplies matrices that are not at a multiple of 16 bytes by kernels of half the speed,
        and a Zen 4's decode steps take 8 % longer (benchmarks/results/epyc-zen4).
        """
        places = self.places.values()
        lead = Counter(place % ALIGN for place in places).most_common(1)[0][0] if places else 0
        return lead if lead <= min(places, default=0) else 0

    def after_lead(self, host: torch.Tensor) -> torch.Tensor:
        """The bytes of a filled host buffer behind the lead."""
        return host[self.lead : self.nbytes]

    def views(self, buffer: torch.Tensor, specs: Mapping[str, TensorSpec], form: WeightFormat, *,
              aligned: bool = False) -> dict[str, Weight]:
        """Local name to tensor, as views of `buffer`; `aligned`: which begins with `after_lead`."""
        lead = self.lead if aligned else 0
        return {name: form.view(buffer, place - lead, specs[name])
                for name, place in self.places.items()}


@dataclass
class Unit:
    """One layer step of the schedule: its tensors, and how those of each tier are packed.

    `resident` are the weights that need no load, or that come in chunks by themselves.
    """

    specs: dict[str, TensorSpec]
    packs: dict[str, Pack] = field(default_factory=dict)
    resident: dict[str, Weight | ShardedMatrix] = field(default_factory=dict)
    host: list[tuple[Pack, torch.Tensor]] = field(default_factory=list)

    @property
    def fetched_bytes(self) -> int:
        """Bytes that every load of this unit brings to compute memory."""
        packs = [pack for pack, _ in self.host] + [self.packs[t] for t in self.packs if t == "disk"]
        return sum(round_up(pack.nbytes, PAGE) for pack in packs)


# Weights that belong on disk but lie in no file as compute wants them: where they are written.
#
# Those of a checkpoint are written for a run, and go with it. Random weights in 8 or 4 bits stay
# for
# later runs: all of a model's have places in one file, of which only what was ever placed on disk
# is
# there, so that another placement writes no more than what is new to it.


_FORMAT = 1  # raise it when other bytes are written for the same tensors: files are made anew then


@dataclass(frozen=True)
class Spill:
    """Places of tensors on disk, by name, and the names of those that have to be written first."""

    extents: Mapping[str, Extent]
    left: Collection[str]


def spill_of_run(folder: RunFolder, sizes: Mapping[str, int]) -> Spill:
    """Places for tensors of these sizes in bytes, in a file of a run's own."""
    path = folder.file("weights.bin", sum(round_up(size, PAGE) for size in sizes.values()))
    return Spill(_places(path, sizes), sizes.keys())


def _places(path: Path, sizes: Mapping[str, int]) -> dict[str, Extent]:
    """Consecutive extents, each from a new page on."""
    places, offset = {}, 0
    for name, size in sizes.items():
        places[name] = Extent(path, offset, size)
        offset += round_up(size, PAGE)
    return places


class PersistentOffloadFile:
    """A model's tensors in a file that stays.

    Parameters
    ----------
    keep : Keep
        Where the file's folder is.
    title : str
        For people who look into it.
    identity : object
        All that the tensors' bytes follow from, for JSON.
    sizes : mapping of str to int
        Bytes of all tensors.
    """

    def __init__(self, keep: Keep, title: str, identity: object, sizes: Mapping[str, int]):
        text = json.dumps([_FORMAT, identity, list(sizes.items())])
        self._keep = keep
        self._folder = keep.root / f"{title}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self._file = self._folder / "weights.bin"
        self._extents = _places(self._file, sizes)

    @contextlib.contextmanager
    def writing(self, names: Collection[str]) -> Iterator[Spill]:
        """Places for some of the tensors; those that are left must be written in the meantime, and
        count as written from then on. Other processes wait.

        Raises
        ------
        UserError
            There can't be such a file, or the disk has no room for it.
        """
        noted = self._folder / "written.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / ".lock"):
                written = self._written(noted)
                lacking = set(names) - set(written)
                left = [name for name in self._extents if name in lacking]
                with self._reserved(left):
                    yield Spill({name: self._extents[name] for name in names}, left)
                if left:
                    with open_atomic(noted) as file:
                        json.dump([*written, *left], file)
        except OSError as error:
            raise UserError(f"cannot keep random weights in {self._folder} "
                            f"({error.strerror or error}); free space there or "
                            f"{self._keep.advice}") from error

    def _written(self, noted: Path) -> list[str]:
        """The tensors that are there: none if the file or the note of them is gone or damaged, and
        none that a file which was cut short lacks the end of."""
        try:
            size = self._file.stat().st_size
            found = json.loads(noted.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return []
        noted_names = set(map(str, found)) if isinstance(found, list) else set()
        return [name for name, extent in self._extents.items()
                if name in noted_names and extent.offset + extent.nbytes <= size]

    @contextlib.contextmanager
    def _reserved(self, names: Collection[str]) -> Iterator[None]:
        """Have room on disk for tensors, so that a full one shows now; then have them for good.

        After an error the file is no longer than before.
        """
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        before = os.fstat(descriptor).st_size
        try:
            for extent in (self._extents[name] for name in names):
                os.posix_fallocate(descriptor, extent.offset, round_up(extent.nbytes, PAGE))
            yield
            if names:
                os.fsync(descriptor)
        except BaseException:
            os.ftruncate(descriptor, before)
            raise
        finally:
            os.close(descriptor)


# A model's weights in files: where each tensor's bytes lie, and how they are read.
#
# Bytes that lie plainly in the checkpoint, or in the weight cache, are read from there again and
# again; others are converted when they are read, or first written where they lie plainly.


class WeightFiles:
    """Reads the tensors of a model from a checkpoint, or from what was written of it.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : mapping
        Canonical tensor name to the checkpoint's own name.
    form : WeightFormat
        Of every tensor, once it is read.
    transfers : Transfers
        Its disk reads and writes; its device has the host memory for that.
    verify : bool
        Hold what is read from disk against checksums, tensor by tensor.

    Attributes
    ----------
    form : WeightFormat
    checksums : Checksums or None
        None: nothing is verified.
    """

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], form: WeightFormat,
                 transfers: Transfers, *, verify: bool = False):
        self._checkpoint = checkpoint
        self._names = names
        self.form = form
        self._disk = transfers.disk
        self._device = transfers.device
        self._spill: dict[str, Extent] = {}
        self.checksums = Checksums() if verify else None

    def extent(self, spec: TensorSpec) -> Extent | None:
        """The extent of a tensor's bytes if they lie as compute wants them, else None."""
        if spec.name in self._spill:
            return self._spill[spec.name]
        info = self._checkpoint.info(self._names[spec.name])
        dtype, _ = self.form.stored(spec)
        if info.extent is None or info.dtype != dtype:
            return None
        # A file with an odd header length would put elements astride their alignment.
        return None if info.extent.offset % dtype.itemsize else info.extent

    def write(self, specs: Iterable[TensorSpec], run_folder: Callable[[], RunFolder],
              kept: PersistentOffloadFile | None) -> None:
        """Write those of these tensors that do not lie on disk in the right form.

        Parameters
        ----------
        specs : iterable of TensorSpec
            All that belong on disk; a tied one may come twice.
        run_folder : callable
            Makes the folder for them if they have no other place.
        kept : PersistentOffloadFile or None
            The file that keeps them for later runs.
        """
        missing = {spec.name: spec for spec in specs if self.extent(spec) is None}
        if not missing:
            return
        sizes = {name: self.form.nbytes(spec) for name, spec in missing.items()}
        with (kept.writing(sizes) if kept is not None
              else nullcontext(spill_of_run(run_folder(), sizes))) as spill:
            self._spill.update(spill.extents)
            buffer = self._device.host_empty(max(sizes.values()), pinned=False)
            for name in spill.left:
                self._read(missing[name], buffer, 0)
                extent = spill.extents[name]
                whole = round_up(extent.nbytes, PAGE)
                self._disk.write(Extent(extent.path, extent.offset, whole), buffer[:whole])
                if self.checksums is not None:
                    self.checksums.written(extent, buffer[: extent.nbytes])

    def expect_kept(self, specs: Iterable[TensorSpec]) -> None:
        """Hold tensors against the checksums that their files keep, as copies in a cache do."""
        if self.checksums is None:
            return
        for spec in specs:
            info, extent = self._checkpoint.info(self._names[spec.name]), self.extent(spec)
            if info.checksum is not None and extent is not None and extent == info.extent:
                self.checksums.expect(extent, info.checksum)

    def pack(self, wanted: Mapping[str, TensorSpec]) -> Pack:
        """Lay tensors out in one buffer: as they lie in files, if all do plainly."""
        extents = {name: self.extent(spec) for name, spec in wanted.items()}
        if all(extents.values()):
            reads, places, nbytes = plan_reads(extents.values())
            return Pack(nbytes, {name: places[e] for name, e in extents.items()}, reads)
        pack = Pack()
        for name, spec in wanted.items():
            pack.places[name] = pack.nbytes
            pack.nbytes += round_up(self.form.nbytes(spec), ALIGN)
        return pack

    def fill(self, pack: Pack, wanted: Mapping[str, TensorSpec], buffer: torch.Tensor) -> None:
        """Read the tensors of a pack into a buffer on the host: uint8 [pack.nbytes or more]."""
        if pack.reads is not None:
            self.read_pack(self._disk, pack, wanted, buffer)
            return
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: self._read(wanted[name], buffer, pack.places[name]), wanted))

    def read_pack(self, disk: Disk, pack: Pack, specs: Mapping[str, TensorSpec],
                  buffer: torch.Tensor, *, ahead: bool = False) -> None:
        """Read a pack that lies plainly in files; a changed tensor raises where that is checked.

        `ahead` as of `Disk.read`.
        """
        disk.read(pack.reads, buffer, ahead=ahead)
        if self.checksums is not None:
            for name, place in pack.places.items():
                extent = self.extent(specs[name])
                self.checksums.read(extent, buffer[place : place + extent.nbytes])

    def _read(self, spec: TensorSpec, buffer: torch.Tensor, place: int) -> None:
        """Read a tensor to its place in a buffer, converting or quantizing it."""
        dtype, shape = self.form.stored(spec)
        self._checkpoint.read(self._names[spec.name], typed(buffer, place, shape, dtype))

    def strips(self, spec: TensorSpec, index: torch.Tensor) -> tuple[Weight, torch.Tensor]:
        """The strips of a table on disk that hold the rows `index`, int64 on the host, and the
        rows' places in them."""
        rows, columns = spec.shape
        layout = self.form.layout(spec)
        height = 1 if layout is None else MATRIX_TILE  # rows that lie together
        nbytes = self.form.nbytes(spec) // rows if layout is None else layout.tile_bytes
        strips, inverse = (index // height).unique(return_inverse=True)
        whole = self.extent(spec)
        extents = [Extent(whole.path, whole.offset + strip * nbytes, nbytes)
                   for strip in strips.tolist()]
        reads, places, size = plan_reads(extents)
        buffer = self._device.host_empty(size, pinned=False)
        self._disk.read(reads, buffer)
        if self.checksums is not None:
            for extent in extents:
                self.checksums.read(extent, buffer[places[extent] : places[extent] + nbytes])
        held = torch.cat([buffer[places[e] : places[e] + nbytes] for e in extents])
        return (self.form.view(held, 0, TensorSpec(spec.name, (len(extents) * height, columns))),
                inverse * height + index % height)
