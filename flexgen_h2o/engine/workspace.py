"""The workspace of a run: KV cache, hidden states, scratch, and the run folder under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from flexgen_h2o.cache.attending import PendingAttention
from flexgen_h2o.cache.fast_set import RecallCounts
from flexgen_h2o.cache.kv_cache import KVCache
from flexgen_h2o.cache.shape import CacheShape, CacheSize, slots_of
from flexgen_h2o.cache.stand_ins import SimulatedBlockCache
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.engine.block_queue import BlockQueue
from flexgen_h2o.engine.hidden import HiddenStates
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptChunk
from flexgen_h2o.h2o.key_smoothing import LayerSmoothing
from flexgen_h2o.kernels.rotary import rotated_to
from flexgen_h2o.models.layers import Operations
from flexgen_h2o.models.rope import rope_tables
from flexgen_h2o.models.spec import ModelConfig
from flexgen_h2o.storage.disk import RunFolder
from flexgen_h2o.storage.transfer import Transfers


@dataclass(frozen=True)
class WorkspaceSize:
    """Sizes of the largest block: in the cache, and rows of hidden states of a batch."""

    cache: CacheSize
    rows: int

    @classmethod
    def of(cls, queue: BlockQueue, h2o: H2OConfig | None, num_layers: int) -> WorkspaceSize:
        """The size that holds every block of a queue of which none has come yet."""
        chunked = queue.size.prefill_chunk is not None and queue.longest > queue.size.prefill_chunk
        cache = CacheSize(*queue.batches(), slots_of(queue.sizes, h2o, num_layers),
                          queue.longest if chunked else 0)
        return cls(cache, queue.rows())

    def covers(self, other: WorkspaceSize) -> bool:
        """True if a block of size `other` fits in."""
        return self.rows >= other.rows and self.cache.covers(other.cache)


class BlockCache(Protocol):
    """The cache of a block, real or a stand-in: see `KVCache`, which caches for real."""

    attends_on_host: bool
    binds: bool
    stays: bool
    guesses: bool
    recall_counts: RecallCounts | None

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a new block with nothing cached."""

    def resume(self, batches: Sequence[BatchLayout]) -> None:
        """Go on with the sequences of `begin`."""

    def load(self, layer: int, batch: int, forward_pass: int) -> None:
        """Bring what compute of (layer, batch) needs."""

    def store(self, layer: int, batch: int, forward_pass: int) -> None:
        """Write back what it changed."""

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptChunk],
                      rope, sinks) -> torch.Tensor:
        """Attend within prompts, and cache them."""

    def repeat(self, layer: int, batch: int, source: int, *targets: int) -> None:
        """Cache the prompt of one sequence, which has ended, for others that have the same."""

    def attend_token(self, layer: int, batch: int, q, k, v, *, token: int,
                     rope, sinks) -> PendingAttention:
        """Attend from a new token of each sequence, and cache it."""

    def expect_token(self, layer: int, batch: int, q, k, *, token: int, rope, sinks) -> None:
        """Start bringing what a new token may recall; only where it `guesses`."""

    def bind_token(self, layer: int, batch: int, q, k, v, *, rope, sinks, out, steps) -> None:
        """Note the attention of a token step for a program; only where `binds`."""

    def begin_token(self, batch: int, token: int) -> None:
        """Tell what was bound which token comes."""

    def nbytes(self) -> int:
        """Bytes of what is cached."""


def rotation_of(config: ModelConfig) -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]:
    """Return the function (x, positions, layer) that rotates x [heads, tokens, head_dim] as a layer
    does, to positions [heads or 1, tokens]."""
    def rotate(x: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
        if not config.ropes:
            return x
        own = config.ropes[config.rope_number(layer)]
        return rotated_to(x, positions, partial(rope_tables, own, dtype=torch.float32))

    return rotate


class Workspace:
    """Cache and hidden states for blocks up to `size`; one call after the other can use them.

    Fresh memory is slow the first time that it is touched, so a run does better in a workspace that
    is there already than in one of its own.

    Parameters
    ----------
    config : ModelConfig
    shape : CacheShape
    size : WorkspaceSize
    policy : Policy
    h2o : H2OConfig or None
    transfers : Transfers
    offload_dir : str
    cache : BlockCache, optional
        Stands in for the one of `policy` and `h2o`.
    smoothing : sequence of LayerSmoothing
        As of `KVCache`.

    Attributes
    ----------
    dtype : torch.dtype
        Of weights, activations, and a cache that is not compressed.
    """

    def __init__(self, config: ModelConfig, shape: CacheShape, size: WorkspaceSize, *,
                 policy: Policy,
                 h2o: H2OConfig | None, transfers: Transfers, offload_dir: str,
                 cache: BlockCache | None = None, smoothing: Sequence[LayerSmoothing] = ()):
        self.size = size
        self.dtype = shape.dtype
        self.operations = Operations(transfers.device.torch)
        self._offload_dir = offload_dir
        self._transfers = transfers
        self._folder: RunFolder | None = None

        def rope(positions: torch.Tensor):
            return None if config.rope is None else rope_tables(config.rope, positions,
                                                                torch.float32)

        with ExitStack() as opened:
            self._opened = opened
            if cache is not None:
                self.cache = cache
            elif h2o is not None and h2o.simulate:
                self.cache = SimulatedBlockCache(h2o, rotation_of(config), shape.form, smoothing)
            else:
                self.cache = KVCache(shape, size.cache, policy, h2o=h2o, rope=rope,
                                     transfers=transfers, run_folder=self._run_folder,
                                     smoothing=smoothing)
            self.hidden = HiddenStates(
                size.rows, config.hidden_size, shape.dtype, batches=size.cache.batches,
                placement=policy.activations, transfers=transfers, run_folder=self._run_folder)
            # Last in, first out: nothing may be under way when files and buffers go.
            opened.callback(transfers.abandon)
            self._opened = opened.pop_all()

    def _run_folder(self) -> RunFolder:
        if self._folder is None:
            self._folder = RunFolder(self._offload_dir)
            self._opened.callback(self._folder.close)
            self._opened.callback(self._transfers.disk.forget, self._folder.path)
        return self._folder

    def close(self) -> None:
        """Wait for what is under way and remove the files; a second call does nothing."""
        self._opened.close()
