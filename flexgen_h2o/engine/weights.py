"""The weights of a model on their tiers, loaded before compute needs them.

`engine.schedule` defines units. The weights of a unit on one tier share one buffer: they
are transferred by one copy and a few large reads. On disk they are the bytes of the checkpoint, the
weight cache or an offload file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from flexgen_h2o.config.layers import ExpertChoices, ExpertKey
from flexgen_h2o.config.limits import WEIGHT_BUFFERS
from flexgen_h2o.config.placement import (
    Placement,
    assign,
    compute_tiers,
    fill,
    place_experts,
    place_first,
    pool_experts,
)
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.engine.weight_files import (
    PersistentOffloadFile,
    UnitWeights,
    Weight,
    WeightBuffer,
    WeightFiles,
)
from flexgen_h2o.engine.weight_streaming import RowShard, ShardStream, shard_weights
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix, ShardedMatrix
from flexgen_h2o.models.tensors import ModelWeights, TensorSpec
from flexgen_h2o.storage.device import PAGE, Arena, Device, round_up
from flexgen_h2o.storage.run_folder import RunFolder
from flexgen_h2o.storage.transfer import H2D, BufferRing, StagingBuffer, TransferQueue, Transfers


class WeightStore:
    """All weights of a model, placed on the tiers.

    Parameters
    ----------
    weights : ModelWeights
        Tensors of each unit.
    placement : Placement
        Share of the bytes on each tier, in the format in which they are stored.
    experts : Placement, optional
        Share of the experts' bytes; see `Policy.experts`.
    choices : ExpertChoices, optional
        Place the most frequently selected experts on the fastest tier. None: each layer has the
        same share.
    pin : bool
        Page-lock weights in host memory, for copies to a GPU at full speed.
    shard_prefetch : bool, optional
        Stream matrices on disk in row shards, with or without prefetching; vectors stay in memory
        then. None: fetch all weights of a unit together.
    shared : mapping of str to Weight, optional
        Weights by canonical name that need not be loaded: `resident_by_name` of another store.

    Attributes
    ----------
    tiers : dict of str to str
        Tier of each tensor by checkpoint name.
    units : list of UnitWeights
    experts : dict of (layer, number) to UnitWeights
    pooled : float
        Share of the experts that slots must hold: see `pool_experts`.
    """

    def __init__(self, weights: ModelWeights, files: WeightFiles, transfers: Transfers, *,
                 placement: Placement, experts: Placement | None = None,
                 choices: ExpertChoices | None = None, pin: bool = True,
                 shard_prefetch: bool | None = None, shared: Mapping[str, Weight] | None = None):
        self.files = files
        self._shared = shared or {}
        self._weight_format = files.weight_format
        self._pin = pin
        self._transfers = transfers
        self._device: Device = transfers.device
        self._table_names = weights.tables
        self.units = [UnitWeights(dict(specs))
                      for specs in (weights.embed, *weights.layers, weights.head)]
        self.experts: dict[ExpertKey, UnitWeights] = {
            (layer, number): UnitWeights(dict(specs)) for layer, experts_of_layer in
            enumerate(weights.experts) for number, specs in enumerate(experts_of_layer)}
        self._shards: dict[str, list[RowShard]] = {}
        self._stream = (None if shard_prefetch is None
                        else ShardStream(files, transfers, prefetch=shard_prefetch))
        self.tiers = self._place(placement, experts, choices)
        self._tables: dict[str, Any] = {}
        self._ring: BufferRing[int] = BufferRing(transfers, ())

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors; a tied tensor counts once."""
        return sum(map(self._bytes, {spec.name: spec for spec in self._specs()}.values()))

    @property
    def options(self) -> WeightOptions:
        """Storage options of the matrices."""
        return self._weight_format.options

    def _specs(self) -> Iterator[TensorSpec]:
        """Yield all tensors, unit by unit; a tied tensor comes twice."""
        for unit in chain(self.units, self.experts.values()):
            yield from unit.specs.values()

    def _bytes(self, spec: TensorSpec) -> int:
        return self._weight_format.nbytes(spec)

    def _place(self, placement: Placement, experts: Placement | None,
               choices: ExpertChoices | None) -> dict[str, str]:
        """Return the tier of each tensor by checkpoint name.

        The head's matrix is the largest tensor that is ever fetched, and would set the size of the
        staging buffers: it stays in compute memory if its share there suffices. Decoder layers are
        placed before the embedding, whose large tables would shift whole layers to one tier.
        """
        order = [*self.units[1:-1], self.units[0], self.units[-1]]
        specs = {spec.name: spec for unit in order for spec in unit.specs.values()}
        total = sum(map(self._bytes, specs.values()))
        expert_sizes = {key: sum(map(self._bytes, unit.specs.values()))
                        for key, unit in self.experts.items()}
        placement, experts = place_experts(total, sum(expert_sizes.values()), placement, experts)
        experts, self.pooled = pool_experts(experts, self._device.is_gpu)
        tiers: dict[str, str] = {}
        if self.units[-1].specs:  # only the last stage of a pipeline has a head
            head = max(self.units[-1].specs.values(), key=self._bytes)
            tier, placement = place_first(self._bytes(head), total, placement,
                                          compute_tiers(self._device.is_gpu))
            if tier is not None:
                tiers[head.name] = tier
                del specs[head.name]
        if self._stream is not None:
            self._shards = shard_weights(
                specs, self._weight_format, placement,
                unsplit={self.units[0].specs[table].name for table in self._table_names},
                layer_bytes=max(sum(map(self._bytes, unit.specs.values()))
                                for unit in self.units[1:-1]))
            return tiers | {name: "disk" if name in self._shards else "gpu" for name in specs}
        if choices is None:
            expert_tiers = assign(expert_sizes.items(), experts)
        else:
            expert_tiers = fill([(key, expert_sizes[key]) for key in choices.ranked], experts)
        for key, tier in expert_tiers.items():
            tiers |= {spec.name: tier for spec in self.experts[key].specs.values()}
        return tiers | assign(((name, self._bytes(spec)) for name, spec in specs.items()),
                              placement)

    def load(self, run_folder: RunFolder,
             progress: Callable[[int, int], None] = lambda done, total: None, *,
             offload_file: PersistentOffloadFile | None = None) -> None:
        """Load every tensor to its tier.

        Parameters
        ----------
        run_folder : RunFolder
            For an offload file, if one is needed.
        progress : callable (done, total)
            Is called with bytes after each unit.
        offload_file : PersistentOffloadFile, optional
            Offload file to use in place of the run's own.
        """
        total = sum(map(self._bytes, self._specs()))
        done = 0
        self.files.offload((spec for spec in self._specs() if self.tiers[spec.name] == "disk"),
                           run_folder, offload_file)
        self.files.expect_checksums(self._specs())
        arena = None if self._device.is_gpu else Arena(self._device)
        for index, unit in enumerate(chain(self.units, self.experts.values())):
            if index < len(self.units):
                for tier in ("gpu", "cpu", "disk"):
                    specs = self._specs_on(index, tier)
                    if specs:
                        self._load_buffer(unit, tier, specs)
            else:
                tier = self.tiers[next(iter(unit.specs.values())).name]
                self._load_buffer(unit, tier, unit.specs, arena)
            done += sum(map(self._bytes, unit.specs.values()))
            progress(done, total)
        for unit in self.units:
            unit.resident |= {name: self._shared[spec.name] for name, spec in unit.specs.items()
                              if spec.name in self._shared}
        self._tie_tables()
        if self._stream is not None:
            for index, unit in enumerate(self.units):
                for name, spec in unit.specs.items():
                    if spec.name in self._shards and not (index == 0
                                                          and name in self._table_names):
                        unit.resident[name] = self._stream.add(index, spec,
                                                               self._shards[spec.name])
            self._stream.open()
        # Tables are looked up, never fetched.
        self.units[0].fetched = [buffer for buffer in self.units[0].fetched if buffer.host is None
                                 or not set(buffer.offsets) <= set(self._table_names)]
        self._ring = BufferRing(self._transfers, self.staging_buffers(self.units, WEIGHT_BUFFERS),
                                kind="weights")

    def _specs_on(self, index: int, tier: str) -> dict[str, TensorSpec]:
        """Return the tensors of a unit to load from a tier: no shards, no tied copies of resident
        tensors, and no tables on disk."""
        specs = {name: spec for name, spec in self.units[index].specs.items()
                 if self.tiers[spec.name] == tier
                 and spec.name not in self._shards and spec.name not in self._shared}
        if index == 0 and tier == "disk":
            return {name: spec for name, spec in specs.items() if name not in self._table_names}
        if index > 0 and tier != "disk":
            embedded = {spec.name for spec in self.units[0].specs.values()}
            return {name: spec for name, spec in specs.items() if spec.name not in embedded}
        return specs

    def _load_buffer(self, unit: UnitWeights, tier: str, specs: Mapping[str, TensorSpec],
                     arena: Arena | None = None) -> None:
        """Load tensors of a unit into one buffer on a tier."""
        buffer = self.files.buffer(specs)
        if tier == "disk":
            if buffer.reads is None:
                raise UserError("weights on disk must have the run's dtype; this is a bug")
            unit.fetched.append(buffer)
            return
        if arena is None:
            host = self._device.host_empty(buffer.nbytes, pinned=self._pin and tier == "cpu")
        else:
            host = arena.take(buffer.nbytes)
        self.files.fill(buffer, specs, host)
        if tier == "cpu" and self._device.is_gpu:
            buffer.host = host
            unit.fetched.append(buffer)
            return
        source = buffer.without_lead(host)
        if self._device.is_gpu:
            host = self._device.empty(buffer.nbytes)
            host[: len(source)].copy_(source)
        elif buffer.lead:
            ctypes.memmove(host.data_ptr(), source.data_ptr(), len(source))  # they overlap
        unit.resident.update(buffer.views(host, specs, self._weight_format, aligned=True))

    def _tie_tables(self) -> None:
        """Find the lookup tables in memory, and share a tied one with the head."""
        embed, head = self.units[0], self.units[-1]
        for table in self._table_names:
            spec = embed.specs[table]
            tied = [name for name, other in head.specs.items() if other.name == spec.name]
            if table in embed.resident:
                self._tables[table] = embed.resident[table]
                head.resident.update(dict.fromkeys(tied, embed.resident[table]))
            for buffer in embed.fetched:
                if buffer.host is not None and table in buffer.offsets:
                    views = buffer.views(buffer.host, embed.specs, self._weight_format)
                    self._tables[table] = views[table]
                    content = buffer.host[buffer.offsets[table] :][: self._bytes(spec)]
                    head.fetched[:0] = [WeightBuffer(len(content), {name: 0}, host=content)
                                        for name in tied]

    def staging_buffers(self, units: Sequence[UnitWeights], count: int, *, small: bool = False
                        ) -> list[StagingBuffer]:
        """Return a number of buffers into which each of these units can be fetched.

        With `small`, many buffers in host memory are taken from an `Arena`.
        """
        largest = max((unit.fetched_bytes for unit in units), default=0)
        read = max((unit.disk_bytes for unit in units), default=0)
        in_arena = small and not self._device.is_gpu
        empty = Arena(self._device).take if in_arena else self._device.empty
        return [StagingBuffer(empty(largest),
                              self._device.host_empty(read) if read and self._device.is_gpu
                              else None)
                for _ in range(count if largest else 0)]

    def fetch(self, index: int, times: int = 1) -> None:
        """Start fetching a unit to compute memory; a no-op if it is resident.

        Compute passes through the unit `times` times before the next unit.
        """
        if self._stream is not None:
            self._stream.schedule(index, times)
        unit = self.units[index]
        if unit.fetched_bytes:
            # It is used a layer later: reads of the previous batches' cache come first.
            self._ring.load(index, partial(self.load_unit, unit=unit, ahead=True))

    def load_unit(self, queue: TransferQueue, staging: StagingBuffer, *, unit: UnitWeights,
                  ahead: bool = False) -> None:
        """Fill a staging buffer with the weights of a unit that are not resident; a job of `queue`.

        `ahead` is as in `Disk.read`.
        """
        start = 0
        for buffer in unit.fetched:
            end = start + round_up(buffer.nbytes, PAGE)
            target, host = staging.device[start:end], buffer.host
            if host is None and not self._device.is_gpu:
                self.files.read(buffer, target, ahead=ahead)
            else:
                if host is None:
                    host = staging.host
                    self.files.read(buffer, host, ahead=ahead)
                source = buffer.without_lead(host)
                queue.copy(target[: len(source)], source, H2D)
            start = end

    def is_resident(self, index: int) -> bool:
        """Return True if all weights of a unit are in compute memory permanently."""
        unit = self.units[index]
        return not unit.fetched_bytes and not any(
            isinstance(weight, ShardedMatrix) for weight in unit.resident.values())

    def resident_weights(self, index: int, *names: str) -> dict[str, Weight] | None:
        """Return the resident weights of a unit; None without the unit or one of `names`."""
        resident = self.units[index].resident if index < len(self.units) else {}
        return resident if resident.keys() >= set(names) else None

    @property
    def resident_by_name(self) -> dict[str, Weight]:
        """The weights in compute memory by canonical name, without experts."""
        return {unit.specs[name].name: weight for unit in self.units
                for name, weight in unit.resident.items() if not isinstance(weight, ShardedMatrix)}

    def get(self, index: int) -> dict[str, Weight]:
        """Return the weights of a unit by local name, on the compute device and ready to use.

        A fetched weight is valid until `release`.
        """
        unit = self.units[index]
        if not unit.fetched_bytes:
            return unit.resident
        return self.unit_weights(unit, self._ring.get(index))

    def unit_weights(self, unit: UnitWeights, staging: StagingBuffer) -> dict[str, Weight]:
        """Return the weights of a unit by local name, after `load_unit` into a staging buffer."""
        weights = dict(unit.resident)
        start = 0
        for buffer in unit.fetched:
            weights.update(buffer.views(staging.device[start:], unit.specs, self._weight_format,
                                        aligned=self._device.is_gpu))
            start += round_up(buffer.nbytes, PAGE)
        return weights

    def host_weights(self, unit: UnitWeights) -> dict[str, Weight]:
        """Return the weights of a unit by local name that are in the host memory of a GPU."""
        weights: dict[str, Weight] = {}
        for buffer in unit.fetched:
            if buffer.host is not None:
                weights |= buffer.views(buffer.host, unit.specs, self._weight_format)
        return weights

    def reset(self) -> None:
        """Drop all fetches that have not been used; call it between runs."""
        self._ring.reset()
        if self._stream is not None:
            self._stream.reset()

    def release(self, index: int) -> None:
        """Allow the staging buffer of a unit to be reused, after compute's last use of it."""
        self._ring.release(index)
        if self._stream is not None:
            self._stream.release(index)

    def lookup(self, table: str, index: torch.Tensor) -> torch.Tensor:
        """Gather rows of an embedding table on its own tier; only these rows are copied.

        `table` is its local name, and `index` int64 [rows], on the host. The result is [rows, dim]
        on the compute device.
        """
        weight = self._tables.get(table)
        if weight is None:
            weight, index = self.files.read_rows(self.units[0].specs[table], index)
        if isinstance(weight, QuantizedMatrix):
            rows = ops.unpack_rows(weight, index.to(weight.data.device), self._weight_format.dtype)
        else:
            rows = weight[index.to(weight.device)]
        return rows.to(self._device.torch_device)
