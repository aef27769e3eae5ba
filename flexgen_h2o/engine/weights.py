"""A layer's weights, wherever they live, ready when the step needs them.

Units are the layer steps of the schedule: 0 embeds, then come the decoder layers (or their halves),
the last is the head. The weights of a unit on one tier are packed into one buffer and travel as one
copy and a few large reads. On disk they are the checkpoint's own bytes, or the weight cache's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain

import torch

from flexgen_h2o.config.experts import ExpertChoices
from flexgen_h2o.config.limits import WEIGHT_BUFFERS
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.engine.weight_files import Pack, PersistentOffloadFile, Unit, Weight, WeightFiles
from flexgen_h2o.engine.weight_streaming import ChunkedWeights, ChunkStream, CutRows, cut
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.matrix import QuantizedMatrix, ShardedMatrix
from flexgen_h2o.models.model_config import ModelWeights, TensorSpec
from flexgen_h2o.storage.buffer_ring import BufferRing, StagingBuffer
from flexgen_h2o.storage.disk import RunFolder
from flexgen_h2o.storage.placement import (
    assign,
    compute_tiers,
    fill,
    place_experts,
    place_first,
)
from flexgen_h2o.storage.tiers import PAGE, Arena, Device, round_up
from flexgen_h2o.storage.transfer import H2D, Lane, Transfers


class WeightStore:
    """All weights of a model, spread over the tiers.

    Parameters
    ----------
    weights : ModelWeights
        What the model needs, by unit.
    files : WeightFiles
        Where it comes from, in which form.
    transfers : Transfers
    placement : Placement
        Share of the bytes on each tier, as they are in that form.
    experts : Placement, optional
        The same of the experts alone; see `Policy.experts`.
    choices : ExpertChoices, optional
        Those that are chosen most often rest on the fastest tier; None: each layer has as many
        there.
    pin : bool
        Page-lock the weights in host memory, which copies to a GPU need to run at full speed.
    read_ahead : bool, optional
        Matrices on disk come in chunks: ahead of their use, or else when they are used. Vectors
        stay in compute memory then. None: all that a layer step fetches comes together.
    """

    def __init__(self, weights: ModelWeights, files: WeightFiles, transfers: Transfers, *,
                 placement: Placement, experts: Placement | None = None,
                 choices: ExpertChoices | None = None, pin: bool = True,
                 read_ahead: bool | None = None):
        self.files = files
        self._form = files.form
        self._pin = pin
        self._transfers = transfers
        self._device: Device = transfers.device
        self.tables = weights.tables
        self.units = [Unit(dict(specs)) for specs in (weights.embed, *weights.layers, weights.head)]
        self.experts = {(layer, number): Unit(dict(specs))
                        for layer, those in enumerate(weights.experts)
                        for number, specs in enumerate(those)}
        self._read_ahead = read_ahead
        self._cuts: dict[str, list[CutRows]] = {}
        self.tiers = self._place(placement, experts, choices)
        self._tables: dict[str, Weight] = {}
        self._ring: BufferRing[int] = BufferRing(transfers, ())
        self._stream: ChunkStream | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors at rest, a tied one once."""
        return sum(map(self._bytes, {spec.name: spec for spec in self._specs()}.values()))

    @property
    def options(self) -> WeightOptions:
        """Storage options of the matrices, as they rest."""
        return self._form.options

    def _specs(self) -> Iterator[TensorSpec]:
        """All tensors, unit by unit; a tied one comes twice."""
        for unit in chain(self.units, self.experts.values()):
            yield from unit.specs.values()

    def _place(self, placement: Placement, experts: Placement | None,
               choices: ExpertChoices | None) -> dict[str, str]:
        """Tier of each tensor by checkpoint name, a tied one once.

        The head's matrix is the largest tensor that is ever fetched, and staging buffers would have
        to hold it: it stays in compute memory if the share there has room for it. Of the others the
        decoder layers go first: an embedding table in front would push whole layers to one side.
        """
        order = [*self.units[1:-1], self.units[0], self.units[-1]]
        sizes = {spec.name: self._bytes(spec) for unit in order for spec in unit.specs.values()}
        kept = {}
        each = {key: sum(map(self._bytes, unit.specs.values()))
                for key, unit in self.experts.items()}
        placement, experts = place_experts(sum(sizes.values()), sum(each.values()), placement,
                                           experts)
        if self.units[-1].specs:  # only the last rank of a pipeline has a head
            head = max((spec.name for spec in self.units[-1].specs.values()),
                       key=sizes.__getitem__)
            tier, placement = place_first(
                sizes[head], sum(sizes.values()), placement, compute_tiers(self._device.separate))
            kept = {} if tier is None else {head: tier}
        if choices is None:
            tiers = assign(each.items(), experts)
        else:
            tiers = fill([(key, each[key]) for key in choices.ranked], experts)
        spread = {spec.name: tier for key, tier in tiers.items()
                  for spec in self.experts[key].specs.values()}
        if self._read_ahead is not None:
            specs = {spec.name: spec for unit in order for spec in unit.specs.values()
                     if spec.name not in kept}
            self._cuts = cut(specs, self._form, placement, whole=self._looked_up(),
                             layer=max(sum(map(self._bytes, unit.specs.values()))
                                       for unit in self.units[1:-1]))
            return kept | {name: "disk" if name in self._cuts else "gpu" for name in specs}
        return kept | spread | assign(((name, nbytes) for name, nbytes in sizes.items()
                                       if name not in kept), placement)

    def _looked_up(self) -> set[str]:
        """The tables, by checkpoint names."""
        return {spec.name for short, spec in self.units[0].specs.items() if short in self.tables}

    def _bytes(self, spec: TensorSpec) -> int:
        return self._form.nbytes(spec)

    def load(self, run_folder: Callable[[], RunFolder],
             progress: Callable[[int, int], None] = lambda done, total: None, *,
             kept: PersistentOffloadFile | None = None) -> None:
        """Bring every tensor to its tier. `progress` gets bytes done and in all.

        Tensors for the disk tier stay where they lie in the checkpoint; those that do not lie
        plainly in a file of the right dtype (dummy weights) are written to the file that keeps
        them, or else to the run folder.
        """
        total = sum(map(self._bytes, self._specs()))
        done = 0
        self.files.write((spec for spec in self._specs() if self.tiers[spec.name] == "disk"),
                         run_folder, kept)
        self.files.expect_kept(self._specs())
        for index, unit in enumerate(self.units):
            for tier in ("gpu", "cpu", "disk"):
                wanted = self._wanted(index, tier)
                if wanted:
                    self._load_pack(unit, tier, wanted)
            done += sum(self._bytes(spec) for spec in unit.specs.values())
            progress(done, total)
        arena = None if self._device.separate else Arena(self._device)
        for unit in self.experts.values():
            tier = self.tiers[next(iter(unit.specs.values())).name]
            self._load_pack(unit, tier, unit.specs, arena)
            done += sum(self._bytes(spec) for spec in unit.specs.values())
            progress(done, total)
        self._tie_tables()
        self._load_cuts()
        self._make_buffers()

    def _wanted(self, index: int, tier: str) -> dict[str, TensorSpec]:
        """A unit's tensors on `tier` that are its own: no tied copy, no table left on disk."""
        specs = self.units[index].specs
        chosen = {n: s for n, s in specs.items()
                  if self.tiers[s.name] == tier and s.name not in self._cuts}
        if index == 0 and tier == "disk":
            return {n: s for n, s in chosen.items() if n not in self.tables}
        if index > 0 and tier != "disk":
            embedded = {s.name for s in self.units[0].specs.values()}
            return {n: s for n, s in chosen.items() if s.name not in embedded}
        return chosen

    def _load_pack(self, unit: Unit, tier: str, wanted: Mapping[str, TensorSpec],
                   arena: Arena | None = None) -> None:
        pack = self.files.pack(wanted)
        unit.packs[tier] = pack
        if tier == "disk":
            if pack.reads is None:
                raise UserError("weights on disk must lie in the run's dtype; this is a bug")
            return
        if arena is None:
            host = self._device.host_empty(pack.nbytes, pinned=self._pin and tier == "cpu")
        else:
            host = arena.take(pack.nbytes)
        self.files.fill(pack, wanted, host)
        if tier == "cpu" and self._device.separate:
            unit.host.append((pack, host))
            return
        source = pack.after_lead(host)
        if self._device.separate:
            host = self._device.empty(pack.nbytes)
            host[: len(source)].copy_(source)
        elif pack.lead:
            ctypes.memmove(host.data_ptr(), source.data_ptr(), len(source))  # they overlap
        unit.resident.update(pack.views(host, wanted, self._form, aligned=True))

    def _tie_tables(self) -> None:
        """Keep the lookup tables that are in memory, and share a tied one with the head."""
        embed, head = self.units[0], self.units[-1]
        for table in self.tables:
            spec = embed.specs[table]
            held = embed.resident.get(table)
            for pack, host in embed.host:
                if table in pack.places:
                    held = pack.views(host, embed.specs, self._form)[table]
                    source = host[pack.places[table] :][: self._bytes(spec)]
            if held is None:
                continue
            self._tables[table] = held
            for name in (n for n, s in head.specs.items() if s.name == spec.name):
                if table in embed.resident:
                    head.resident[name] = held
                else:
                    head.host.append((Pack(len(source), {name: 0}), source))

    def _load_cuts(self) -> None:
        """Read the parts of matrices that stay in memory, and make ready for those that come."""
        if self._read_ahead is None:
            return
        chunked = ChunkedWeights(self._cuts, self._form, self._transfers,
                                 checksums=self.files.checksums)
        for index, unit in enumerate(self.units):
            for short, spec in unit.specs.items():
                if spec.name in self._cuts and not (index == 0 and short in self.tables):
                    unit.resident[short] = chunked.load(index, spec, self.files.extent(spec))
        self._stream = chunked.open(ahead=self._read_ahead)

    def _make_buffers(self) -> None:
        # The embedding unit's host packs hold its tables too, but those are never fetched whole.
        self.units[0].host = [(pack, host) for pack, host in self.units[0].host
                              if not set(pack.places) <= set(self.tables)]
        largest = max(unit.fetched_bytes for unit in self.units)
        read = max(unit.packs["disk"].nbytes if "disk" in unit.packs else 0 for unit in self.units)
        passes_host = self._device.separate and read > 0
        self._ring = BufferRing(self._transfers, [
            StagingBuffer(self._device.empty(largest),
                          self._device.host_empty(read) if passes_host else None)
            for _ in range(WEIGHT_BUFFERS if largest else 0)], kind="weights")

    def fetch(self, index: int, times: int = 1) -> None:
        """Start bringing unit `index` to compute memory; nothing to do when it is there.

        times: how often compute goes through it before the next unit.
        """
        if self._stream is not None:
            self._stream.expect(index, times)
        unit = self.units[index]
        if unit.fetched_bytes:
            # A layer ahead of its use: the cache of the batches before comes first.
            self._ring.load(index, partial(self.bring, unit=unit, ahead=True))

    def bring(self, lane: Lane, buffer: StagingBuffer, *, unit: Unit, ahead: bool = False) -> None:
        """Fill a buffer with a unit's weights that are not in compute memory: a job on a lane.

        `ahead` as of `Disk.read`.
        """
        start = 0
        for pack, host in unit.host:
            _send(lane, pack, host, buffer.device[start:])
            start += round_up(pack.nbytes, PAGE)
        pack = unit.packs.get("disk")
        if pack is None:
            return
        if self._device.separate:
            self.files.read_pack(lane.disk, pack, unit.specs, buffer.host, ahead=ahead)
            _send(lane, pack, buffer.host, buffer.device[start:])
        else:
            end = start + round_up(pack.nbytes, PAGE)
            self.files.read_pack(lane.disk, pack, unit.specs, buffer.device[start:end],
                                 ahead=ahead)

    def is_resident(self, index: int) -> bool:
        """True if all weights of a unit are in compute memory for good."""
        comes = any(isinstance(each, ShardedMatrix) for each in self.units[index].resident.values())
        return not comes and not self.units[index].fetched_bytes

    def resident_weights(self, index: int, *names: str) -> dict[str, Weight] | None:
        """A unit's weights that are in compute memory for good, if the tensors of these names are;
        None if not, or if there is no such unit."""
        held = self.units[index].resident if index < len(self.units) else {}
        return held if held.keys() >= set(names) else None

    def get(self, index: int) -> dict[str, Weight | ShardedMatrix]:
        """A unit's weights by local name, on the compute device, ready for compute to use.

        A fetched tensor stays valid until `release`.
        """
        unit = self.units[index]
        if not unit.fetched_bytes:
            return unit.resident
        return self.views(unit, self._ring.get(index))

    def views(self, unit: Unit, buffer: StagingBuffer) -> dict[str, Weight]:
        """A unit's weights by local name, of which `buffer` has those that `bring` has brought."""
        weights = dict(unit.resident)
        start = 0
        for pack in [p for p, _ in unit.host] + [p for t, p in unit.packs.items() if t == "disk"]:
            weights.update(pack.views(buffer.device[start:], unit.specs, self._form,
                                      aligned=self._device.separate))
            start += round_up(pack.nbytes, PAGE)
        return weights

    def on_host(self, unit: Unit) -> dict[str, Weight]:
        """A unit's weights by local name that are in host memory beside a GPU, where they lie."""
        return {name: held for pack, host in unit.host
                for name, held in pack.views(host, unit.specs, self._form).items()}

    def reset(self) -> None:
        """Forget what was fetched ahead and will not be used; call between runs."""
        self._ring.reset()
        if self._stream is not None:
            self._stream.reset()

    def release(self, index: int) -> None:
        """Compute has been given its last use of the unit: its buffer may be filled again."""
        self._ring.release(index)
        if self._stream is not None:
            self._stream.release(index)

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
        held = self._tables.get(table)
        if held is None:
            held, index = self.files.strips(self.units[0].specs[table], index)
        if isinstance(held, QuantizedMatrix):
            found = ops.unpack_rows(held, index.to(held.data.device), self._form.dtype)
        else:
            found = held[index.to(held.device)]
        return found.to(self._device.torch)


def _send(lane: Lane, pack: Pack, host: torch.Tensor, target: torch.Tensor) -> None:
    """Queue the copy of a filled host buffer to the front of a GPU's."""
    source = pack.after_lead(host)
    lane.copy(target[: len(source)], source, H2D)
