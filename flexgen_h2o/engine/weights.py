"""A layer's weights, wherever they live, ready when the step needs them.

Units are the stops of the schedule: 0 embeds, 1 to num_layers are the decoder layers, the last is
the head. The weights of a unit on one tier are packed into one buffer and travel as one copy
and a few large reads. On disk they are the checkpoint's own bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from flexgen_h2o.config import Placement
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.models.spec import ModelWeights, TensorSpec
from flexgen_h2o.storage.disk import AlignedRead, RunFolder, plan_reads
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.placement import assign
from flexgen_h2o.storage.tiers import PAGE, Device, Event, round_up, typed
from flexgen_h2o.storage.transfer import UP, Handle, Lane, Transfers

ALIGN = 64


@dataclass
class Pack:
    """Tensors laid out in one buffer: where each lies, and the reads that fill the buffer.

    reads is None when the bytes do not lie plainly in a file and have to be converted.
    """

    nbytes: int = 0
    places: dict[str, int] = field(default_factory=dict)
    reads: list[AlignedRead] | None = None

    def views(self, buffer: torch.Tensor, specs: Mapping[str, TensorSpec], dtype: torch.dtype):
        """Local name to tensor, as views of `buffer`."""
        return {name: typed(buffer, place, specs[name].shape, dtype)
                for name, place in self.places.items()}


@dataclass
class Unit:
    """One stop of the schedule: its tensors, and how those of each tier are packed."""

    specs: dict[str, TensorSpec]
    packs: dict[str, Pack] = field(default_factory=dict)
    resident: dict[str, torch.Tensor] = field(default_factory=dict)
    host: list[tuple[Pack, torch.Tensor]] = field(default_factory=list)

    @property
    def fetched_bytes(self) -> int:
        """Bytes that every load of this unit brings to compute memory."""
        packs = [pack for pack, _ in self.host] + [self.packs[t] for t in self.packs if t == "disk"]
        return sum(round_up(pack.nbytes, PAGE) for pack in packs)


@dataclass
class Slot:
    """A buffer that one unit's fetched weights occupy while they are live.

    host is where the disk's share lands on its way to a GPU; None where nothing is to land.
    """

    device: torch.Tensor
    host: torch.Tensor | None
    free: Event | None = None
    sent: Event | None = None
    unit: int | None = None
    handle: Handle | None = None


class WeightStore:
    """All weights of a model, spread over the tiers.

    Parameters
    ----------
    weights : ModelWeights
        What the model needs, by unit.
    checkpoint : Checkpoint
        Where it comes from.
    names : mapping
        Canonical tensor name to the checkpoint's own name.
    placement : Placement
        Share of the bytes on each tier.
    dtype : torch.dtype
        Of every tensor in compute memory.
    pin : bool
        Page-lock the weights in host memory, which copies to a GPU need to run at full speed.
    """

    def __init__(self, weights: ModelWeights, checkpoint: Checkpoint, names: Mapping[str, str],
                 *, placement: Placement, dtype: torch.dtype, transfers: Transfers,
                 pin: bool = True):
        self._checkpoint = checkpoint
        self._names = names
        self._dtype = dtype
        self._pin = pin
        self._transfers = transfers
        self._device: Device = transfers.device
        self.tables = weights.tables
        self.units = [Unit(dict(specs)) for specs in (weights.embed, *weights.layers, weights.head)]
        self.tiers = self._place(placement)
        self._tables: dict[str, torch.Tensor] = {}
        self._slots: list[Slot] = []
        self._next = 0
        self._spill: dict[str, Extent] = {}

    def _place(self, placement: Placement) -> dict[str, str]:
        """Tier of each tensor by checkpoint name, a tied one once.

        The decoder layers go first: an embedding table is the largest tensor, and in front it
        would push whole layers to one side to make up for it.
        """
        order = [*self.units[1:-1], self.units[0], self.units[-1]]
        sizes = {spec.name: self._bytes(spec) for unit in order for spec in unit.specs.values()}
        return assign(sizes.items(), placement)

    def _bytes(self, spec: TensorSpec) -> int:
        count = self._dtype.itemsize
        for size in spec.shape:
            count *= size
        return count

    def load(self, run_folder: Callable[[], RunFolder],
             progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Bring every tensor to its tier. `progress` gets bytes done and in all.

        Tensors for the disk tier stay where they lie in the checkpoint; those that do not lie
        plainly in a file of the right dtype (dummy weights) are written to the run folder.
        """
        total = sum(self._bytes(s) for u in self.units for s in u.specs.values())
        done = 0
        self._write_spill(run_folder)
        for index, unit in enumerate(self.units):
            for tier in ("gpu", "cpu", "disk"):
                wanted = self._wanted(index, tier)
                if wanted:
                    self._load_pack(unit, tier, wanted)
            done += sum(self._bytes(spec) for spec in unit.specs.values())
            progress(done, total)
        self._tie_tables()
        self._make_slots()

    def _wanted(self, index: int, tier: str) -> dict[str, TensorSpec]:
        """A unit's tensors on `tier` that are its own: no tied copy, no table left on disk."""
        specs = self.units[index].specs
        chosen = {n: s for n, s in specs.items() if self.tiers[s.name] == tier}
        if index == 0 and tier == "disk":
            return {n: s for n, s in chosen.items() if n not in self.tables}
        if index > 0 and tier != "disk":
            embedded = {s.name for s in self.units[0].specs.values()}
            return {n: s for n, s in chosen.items() if s.name not in embedded}
        return chosen

    def _load_pack(self, unit: Unit, tier: str, wanted: Mapping[str, TensorSpec]) -> None:
        pack = self._pack(wanted)
        unit.packs[tier] = pack
        if tier == "disk":
            if pack.reads is None:
                raise UserError("weights on disk must lie in the run's dtype; this is a bug")
            return
        host = self._device.host_empty(pack.nbytes, pinned=self._pin and tier == "cpu")
        self._fill(pack, wanted, host)
        if tier == "gpu" and self._device.separate:
            buffer = self._device.empty(pack.nbytes)
            buffer.copy_(host)
            host = buffer
        if tier == "gpu" or not self._device.separate:
            unit.resident.update(pack.views(host, wanted, self._dtype))
        else:
            unit.host.append((pack, host))

    def _extent(self, spec: TensorSpec) -> Extent | None:
        """Where a tensor's bytes lie exactly as compute wants them, or None."""
        if spec.name in self._spill:
            return self._spill[spec.name]
        info = self._checkpoint.info(self._names[spec.name])
        if info.extent is None or info.dtype != self._dtype:
            return None
        # A file with an odd header length would put elements astride their alignment.
        return None if info.extent.offset % self._dtype.itemsize else info.extent

    def _pack(self, wanted: Mapping[str, TensorSpec]) -> Pack:
        extents = {name: self._extent(spec) for name, spec in wanted.items()}
        if all(extents.values()):
            reads, places, nbytes = plan_reads(extents.values())
            return Pack(nbytes, {name: places[e] for name, e in extents.items()}, reads)
        pack = Pack()
        for name, spec in wanted.items():
            pack.places[name] = pack.nbytes
            pack.nbytes += round_up(self._bytes(spec), ALIGN)
        return pack

    def _fill(self, pack: Pack, wanted: Mapping[str, TensorSpec], buffer: torch.Tensor) -> None:
        if pack.reads is not None:
            self._transfers.disk.read(pack.reads, buffer)
            return
        views = pack.views(buffer, wanted, self._dtype)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(
                lambda name: self._checkpoint.read(self._names[wanted[name].name], views[name]),
                wanted,
            ))

    def _write_spill(self, run_folder: Callable[[], RunFolder]) -> None:
        """Write what belongs on disk but does not lie there in the right form."""
        missing = {s.name: s for u in self.units for s in u.specs.values()
                   if self.tiers[s.name] == "disk" and self._extent(s) is None}
        if not missing:
            return
        size = sum(round_up(self._bytes(spec), PAGE) for spec in missing.values())
        path = run_folder().file("weights.bin", size)
        largest = max(self._bytes(spec) for spec in missing.values())
        buffer = self._device.host_empty(largest, pinned=False)
        offset = 0
        for spec in missing.values():
            nbytes = self._bytes(spec)
            self._checkpoint.read(self._names[spec.name], typed(buffer, 0, spec.shape, self._dtype))
            whole = round_up(nbytes, PAGE)
            self._transfers.disk.write(Extent(path, offset, whole), buffer[:whole])
            self._spill[spec.name] = Extent(path, offset, nbytes)
            offset += whole

    def _tie_tables(self) -> None:
        """Keep the lookup tables that are in memory, and share a tied one with the head."""
        embed, head = self.units[0], self.units[-1]
        for table in self.tables:
            spec = embed.specs[table]
            held = embed.resident.get(table)
            for pack, host in embed.host:
                if table in pack.places:
                    held = pack.views(host, embed.specs, self._dtype)[table]
            if held is None:
                continue
            self._tables[table] = held
            for name in (n for n, s in head.specs.items() if s.name == spec.name):
                if table in embed.resident:
                    head.resident[name] = held
                else:
                    source = held.view(-1).view(torch.uint8)
                    head.host.append((Pack(held.nbytes, {name: 0}), source))

    def _make_slots(self) -> None:
        # The embedding unit's host packs hold its tables too, but those are never fetched whole.
        self.units[0].host = [(pack, host) for pack, host in self.units[0].host
                              if not set(pack.places) <= set(self.tables)]
        largest = max(unit.fetched_bytes for unit in self.units)
        staged = max(unit.packs["disk"].nbytes if "disk" in unit.packs else 0
                     for unit in self.units)
        if largest:
            for _ in range(2):
                host = None
                if self._device.separate and staged:
                    host = self._device.host_empty(staged)
                self._slots.append(Slot(self._device.empty(largest), host))

    def fetch(self, index: int) -> None:
        """Start bringing unit `index` to compute memory; nothing to do when it is there."""
        unit = self.units[index]
        if not unit.fetched_bytes:
            return
        slot = self._slots[self._next]
        self._next = 1 - self._next
        after = () if slot.free is None else (slot.free,)

        def job(lane: Lane) -> None:
            self._bring(lane, unit, slot)

        slot.handle = self._transfers.submit("weights", job, after=after)
        slot.unit = index

    def _bring(self, lane: Lane, unit: Unit, slot: Slot) -> None:
        start = 0
        for pack, host in unit.host:
            lane.copy(slot.device[start : start + pack.nbytes], host[: pack.nbytes], UP)
            start += round_up(pack.nbytes, PAGE)
        pack = unit.packs.get("disk")
        if pack is None:
            return
        end = start + round_up(pack.nbytes, PAGE)
        if not self._device.separate:
            lane.disk.read(pack.reads, slot.device[start:end])
            return
        if slot.sent is not None:
            slot.sent.synchronize()  # the last copy out of this host buffer
        lane.disk.read(pack.reads, slot.host)
        lane.copy(slot.device[start:end], slot.host[: end - start], UP)
        slot.sent = lane.stream.mark()

    def get(self, index: int) -> dict[str, torch.Tensor]:
        """A unit's weights by local name, on the compute device, ready for compute to use.

        A fetched tensor stays valid until `release`.
        """
        unit = self.units[index]
        slot = next((s for s in self._slots if s.unit == index), None)
        if slot is None:
            return unit.resident
        self._transfers.ready(slot.handle)
        weights = dict(unit.resident)
        start = 0
        for pack in [p for p, _ in unit.host] + [p for t, p in unit.packs.items() if t == "disk"]:
            weights.update(pack.views(slot.device[start:], unit.specs, self._dtype))
            start += round_up(pack.nbytes, PAGE)
        return weights

    def reset(self) -> None:
        """Forget what was fetched ahead and will not be used; call between runs."""
        for slot in self._slots:
            if slot.handle is not None:
                with contextlib.suppress(Exception):  # nobody wants these weights any more
                    slot.handle.synchronize()
            slot.free, slot.unit, slot.handle = self._device.mark(), None, None

    def release(self, index: int) -> None:
        """Compute has been given its last use of the unit: its buffer may be filled again."""
        for slot in self._slots:
            if slot.unit == index:
                slot.free, slot.unit, slot.handle = self._device.mark(), None, None

    def lookup(self, table: str, index: torch.Tensor) -> torch.Tensor:
        """Rows of an embedding table, gathered where the table lives; only they travel.

        Parameters
        ----------
        table : str
            Local name in the embedding unit.
        index : int64 Tensor [rows], on the host

        Returns
        -------
        Tensor [rows, dim] on the compute device
        """
        if table in self._tables:
            held = self._tables[table]
            if held.device.type != "cpu":
                return held[index.to(held.device)]
            return held[index].to(self._device.torch)
        spec = self.units[0].specs[table]
        unique, inverse = index.unique(return_inverse=True)
        whole = self._extent(spec)
        stride = spec.shape[1] * self._dtype.itemsize
        rows = [Extent(whole.path, whole.offset + row * stride, stride) for row in unique.tolist()]
        reads, places, nbytes = plan_reads(rows)
        buffer = self._device.host_empty(nbytes, pinned=False)
        self._transfers.disk.read(reads, buffer)
        found = torch.stack([typed(buffer, places[row], spec.shape[1:], self._dtype)
                             for row in rows])
        return found[inverse].to(self._device.torch)
