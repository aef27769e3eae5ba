"""A model's weights in files: where each tensor's bytes lie, and how they are read.

Bytes that lie plainly in the checkpoint, or in the weight cache, are read from there again and
again; others are converted when they are read, or first written where they lie plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.engine.packs import ALIGN, Pack, Weight
from flexgen_h2o.engine.spill import KeptWeights, spill_of_run
from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.models.spec import TensorSpec
from flexgen_h2o.models.weight_format import WeightFormat
from flexgen_h2o.storage.checksums import Checksums
from flexgen_h2o.storage.disk import Disk, RunFolder, plan_reads
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.tiers import PAGE, round_up, typed
from flexgen_h2o.storage.transfer import Transfers


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
              kept: KeptWeights | None) -> None:
        """Write those of these tensors that do not lie on disk in the right form.

        Parameters
        ----------
        specs : iterable of TensorSpec
            All that belong on disk; a tied one may come twice.
        run_folder : callable
            Makes the folder for them if they have no other place.
        kept : KeptWeights or None
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
