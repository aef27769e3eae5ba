"""The memory of a run: KV cache, hidden states between layers, scratch memory, files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from flexgen_h2o.cache.alternatives import AlternativeCache, SimulatedBlockCache
from flexgen_h2o.cache.kv_cache import GroupedCache, KVCache
from flexgen_h2o.cache.layout import CacheShape, CacheSize, slots_of
from flexgen_h2o.cache.recurrent_state import RecurrentStates
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig, select_layers
from flexgen_h2o.config.limits import HIDDEN_BUFFERS
from flexgen_h2o.config.placement import Placement, split
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.engine.blocks import BlockQueue
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.key_smoothing import LayerSmoothing
from flexgen_h2o.kernels.torch_ops import rotated_to
from flexgen_h2o.models.layers import Operations
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import rope_tables
from flexgen_h2o.storage.device import PAGE, round_up, typed
from flexgen_h2o.storage.disk import AlignedRead, Extent
from flexgen_h2o.storage.offload_dirs import OffloadDirs
from flexgen_h2o.storage.run_folder import RunFolder
from flexgen_h2o.storage.transfer import (
    D2H,
    H2D,
    BackingStore,
    BufferRing,
    StagingBuffer,
    TransferQueue,
    Transfers,
)

BlockCache = KVCache | GroupedCache | AlternativeCache
"""The cache of a block. The others have the interface of `KVCache`."""


class HiddenStates:
    """The hidden states of a block between layers: [rows, hidden] for each batch.

    If they are resident in compute memory, they are used in place. Otherwise a batch's rows are
    gathered into a staging buffer before a layer, and scattered back to their tiers after it.

    Parameters
    ----------
    rows, hidden : int
        Maximum rows of a batch, and the hidden size.
    batches : int
        Number of batches of a block.
    placement : Placement
        Share of each batch's rows on each tier.
    """

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype, *, batches: int,
                 placement: Placement, transfers: Transfers, run_folder: RunFolder):
        self._transfers = transfers
        self._device = transfers.device
        self._placement = placement
        self._width = hidden
        self._dtype = dtype
        self._row_bytes = hidden * dtype.itemsize
        # Without a GPU, copies between compute memory and host memory use no link.
        self._h2d, self._d2h = (H2D, D2H) if self._device.is_gpu else (None, None)
        self._away = placement.disk > 0 or (self._device.is_gpu and placement.cpu > 0)
        size = rows * self._row_bytes
        gpu, cpu, _ = (min(size, self._row_bytes + int(size * f)) for f in placement.fractions())
        self._stores = [BackingStore(self._device.empty(gpu if self._away else size))
                        for _ in range(batches)]
        disk_bytes = round_up(size, PAGE) if placement.disk > 0 else 0
        path = run_folder.striped_file("hidden.bin", disk_bytes * batches) if disk_bytes else None
        for index, store in enumerate(self._stores if self._away else ()):
            if placement.cpu > 0:
                store.host = self._device.host_empty(cpu)
            if path:
                store.extent = Extent(path, index * disk_bytes, disk_bytes)
        self._ring: BufferRing[int] = BufferRing(transfers, [
            StagingBuffer(self._device.empty(size), self._device.host_empty(size) if path else None)
            for _ in range(HIDDEN_BUFFERS if self._away else 0)])

    @property
    def is_resident(self) -> bool:
        """True if hidden states are used in place."""
        return not self._away

    def _view(self, buffer: torch.Tensor, rows: int) -> torch.Tensor:
        return typed(buffer, 0, (rows, self._width), self._dtype)

    def load(self, batch: int, rows: int) -> None:
        """Start gathering a batch's hidden states for compute."""
        if self._away:
            store = self._stores[batch]
            self._ring.load(batch, partial(self._gather, store=store, rows=rows), after=store.busy)

    def get(self, batch: int, rows: int, *, fresh: bool = False) -> torch.Tensor:
        """Return [rows, hidden] to read and overwrite. `fresh`: skip loading the contents."""
        if not self._away:
            return self._view(self._stores[batch].gpu, rows)
        buffer = self._ring.take(batch) if fresh else self._ring.get(batch)
        return self._view(buffer.device, rows)

    def store(self, batch: int, rows: int) -> None:
        """Start writing a batch's hidden states back to their tiers."""
        if self._away:
            store = self._stores[batch]
            store.busy = [self._ring.store(batch, partial(self._scatter, store=store, rows=rows))]

    def drop(self, batch: int) -> None:
        """Release a batch's hidden states without writing them back."""
        self._ring.release(batch)

    def reset(self) -> None:
        """Wait for transfers; call it between blocks."""
        self._ring.reset()
        for store in self._stores:
            store.busy = []

    def _spans(self, rows: int) -> tuple[slice, slice, slice]:
        """Return the byte ranges of the staging buffer that belong to (gpu, cpu, disk)."""
        gpu, cpu, disk = split(rows, self._placement)
        first, second, third = (n * self._row_bytes for n in (gpu, gpu + cpu, gpu + cpu + disk))
        return slice(0, first), slice(first, second), slice(second, third)

    def _gather(self, queue: TransferQueue, staging: StagingBuffer, *, store: BackingStore,
                rows: int) -> None:
        gpu, cpu, disk = self._spans(rows)
        queue.copy(staging.device[gpu], store.gpu[gpu], None)
        if cpu.stop > cpu.start:
            queue.copy(staging.device[cpu], store.host[: cpu.stop - cpu.start], self._h2d)
        nbytes = disk.stop - disk.start
        if nbytes:
            padded = round_up(nbytes, PAGE)
            queue.disk.read([AlignedRead(store.extent.path, store.extent.offset, padded, 0)],
                           staging.host[:padded])
            queue.copy(staging.device[disk], staging.host[:nbytes], self._h2d)

    def _scatter(self, queue: TransferQueue, staging: StagingBuffer, *, store: BackingStore,
                 rows: int) -> None:
        gpu, cpu, disk = self._spans(rows)
        queue.copy(store.gpu[gpu], staging.device[gpu], None)
        if cpu.stop > cpu.start:
            queue.copy(store.host[: cpu.stop - cpu.start], staging.device[cpu], self._d2h)
        nbytes = disk.stop - disk.start
        if nbytes:
            extent = Extent(store.extent.path, store.extent.offset, round_up(nbytes, PAGE))
            queue.copy(staging.host[:nbytes], staging.device[disk], self._d2h)
            queue.flush()
            queue.disk.write(extent, staging.host[: extent.nbytes])


@dataclass(frozen=True)
class WorkspaceSize:
    """Size of the largest block: its cache, and the rows of hidden states of a batch."""

    cache: CacheSize
    rows: int

    @classmethod
    def from_queue(cls, queue: BlockQueue, h2o: H2OConfig | None, num_layers: int) -> WorkspaceSize:
        """Return the size that fits every block of a queue. Call it before the first block."""
        chunked = queue.size.prefill_chunk is not None and queue.longest > queue.size.prefill_chunk
        cache = CacheSize(*queue.batches(), slots_of(queue.sizes, h2o, num_layers),
                          queue.longest if chunked else 0)
        return cls(cache, queue.rows())

    @classmethod
    def of_one(cls, sizes: Collection[tuple[int, int]], h2o: H2OConfig | None, num_layers: int, *,
               rows: int) -> WorkspaceSize:
        """Return the size for one sequence, of any of these pairs (prompt, new tokens)."""
        return cls(CacheSize(1, 1, slots_of(sizes, h2o, num_layers)), rows)

    def covers(self, other: WorkspaceSize) -> bool:
        """Return True if a block of size `other` fits."""
        return self.rows >= other.rows and self.cache.covers(other.cache)


def cache_shape(config: ModelConfig, options: CacheOptions, dtype: torch.dtype) -> CacheShape:
    """Return the shape of the cache of a model whose layers all have the same heads.

    `dtype` is that of a cache that is not quantized.
    """
    latent = config.latent is not None
    return CacheShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype,
                      options.layout(config.head_dim, latent=latent), options.attn_sparsity,
                      config.attention, latent)


def rotation_of(config: ModelConfig) -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]:
    """Return the function (x, positions, layer) that applies RoPE in a model's layers.

    x is [heads, tokens, head_dim], positions are [heads or 1, tokens].
    """
    def rotate(x: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
        if not config.ropes:
            return x
        rope = config.ropes[config.rope_number(layer)]
        return rotated_to(x, positions, partial(rope_tables, rope, dtype=torch.float32))

    return rotate


class Workspace:
    """KV cache, recurrent states, hidden states and scratch memory for blocks up to `size`.

    Runs reuse it one after the other, because fresh memory costs page faults.

    Parameters
    ----------
    options : CacheOptions
        Its `h2o` is not used.
    dtype : torch.dtype
        dtype of weights, activations, and a cache that is not quantized.
    h2o : H2OConfig or None
        Of the attention layers.
    cache : BlockCache, optional
        Replaces the cache that `policy` and `h2o` define.
    smoothing : sequence of LayerSmoothing
        See `KVCache`.

    Attributes
    ----------
    dtype : torch.dtype
    states : RecurrentStates or None
        The states of recurrent layers, if the model has any.
    """

    def __init__(self, config: ModelConfig, options: CacheOptions, size: WorkspaceSize, *,
                 dtype: torch.dtype, policy: Policy,
                 h2o: H2OConfig | None, transfers: Transfers, offload_dir: OffloadDirs,
                 cache: BlockCache | None = None, smoothing: Sequence[LayerSmoothing] = ()):
        self.size = size
        self.dtype = dtype
        self.operations = Operations(transfers.device.torch_device)
        self._transfers = transfers
        self._run_folder = RunFolder(offload_dir)

        with ExitStack() as resources:
            self._resources = resources
            resources.callback(self._remove_files)
            self.cache: BlockCache
            cached = config.attention_only
            if cache is not None:
                self.cache = cache
            elif h2o is not None and h2o.simulate:
                self.cache = SimulatedBlockCache(h2o, rotation_of(cached),
                                                 cached.attention_variant, smoothing)
            else:
                self.cache = self._kv_cache(cached, options, h2o, policy, smoothing)
            self.states: RecurrentStates | None = None
            if config.recurrent is not None:
                self.states = RecurrentStates(
                    config.recurrent, sum(config.recurrent_layers), size.cache, policy,
                    transfers=transfers, run_folder=self._run_folder)
            self.hidden = HiddenStates(
                size.rows, config.hidden_size, dtype, batches=size.cache.batches,
                placement=policy.activations, transfers=transfers, run_folder=self._run_folder)
            # Closed first: no transfer may be under way when files and buffers are freed.
            resources.callback(transfers.abandon)
            self._resources = resources.pop_all()

    def _kv_cache(self, config: ModelConfig, options: CacheOptions, h2o: H2OConfig | None,
                  policy: Policy, smoothing: Sequence[LayerSmoothing]) -> KVCache | GroupedCache:
        """Return the cache of the layers of `config`, which all have attention."""
        def rope(positions: torch.Tensor):
            return None if config.rope is None else rope_tables(config.rope, positions,
                                                                torch.float32)

        groups = {layers: KVCache(
            cache_shape(config.select_layers(layers), options, self.dtype),
            self.size.cache.select_layers(layers), policy, h2o=select_layers(h2o, layers),
            rope=rope, transfers=self._transfers, run_folder=self._run_folder,
            smoothing=[smoothing[layer] for layer in layers] if smoothing else (),
            suffix=f"-{number}" if number else "")
            for number, layers in enumerate(config.cache_groups)}
        return next(iter(groups.values())) if len(groups) == 1 else GroupedCache(groups)

    @property
    def caches(self) -> tuple[BlockCache | RecurrentStates, ...]:
        """The KV cache, and the recurrent states if there are any."""
        return (self.cache,) if self.states is None else (self.cache, self.states)

    def begin(self, batches: Sequence[BatchLayout], *, keep_cache: bool = False) -> None:
        """Start a block; with `keep_cache`, continue the sequences of the last one."""
        for cache in self.caches:
            (cache.resume if keep_cache else cache.begin)(batches)

    def _remove_files(self) -> None:
        for path in self._run_folder.paths:
            self._transfers.disk.forget(path)
        self._run_folder.close()

    def close(self) -> None:
        """Wait for transfers, and remove the files; a second call is a no-op."""
        self._resources.close()
