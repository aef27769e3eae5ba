"""The room that a run takes: KV cache, hidden states, scratch, and the run folder under them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass

import torch

from flexgen_h2o.cache.kv_cache import CacheShape, KVCache
from flexgen_h2o.config import Policy
from flexgen_h2o.engine.batching import Batch
from flexgen_h2o.engine.hidden import HiddenStates
from flexgen_h2o.models.layers import Scratch
from flexgen_h2o.models.spec import ModelConfig
from flexgen_h2o.storage.disk import RunFolder
from flexgen_h2o.storage.transfer import Transfers


@dataclass(frozen=True)
class Size:
    """What the largest block takes: sequences and rows of a batch, batches, slots of a sequence."""

    sequences: int
    batches: int
    slots: int
    rows: int

    @classmethod
    def of(cls, blocks: Sequence[Sequence[Batch]], steps: int) -> Size:
        """The size that holds each of `blocks` for `steps` tokens."""
        batches = [batch for block in blocks for batch in block]
        return cls(max(map(len, batches)), max(map(len, blocks)),
                   max(batch.padded for batch in batches) + steps - 1,
                   max(batch.rows(0) for batch in batches))

    def covers(self, other: Size) -> bool:
        """Whether a block of size `other` fits in."""
        return all(mine >= its for mine, its in zip(astuple(self), astuple(other), strict=True))


class Room:
    """Cache and hidden states for blocks up to `size`; one call after the other can use them.

    Fresh memory is slow the first time that it is touched, so a run does better in a room that
    is there already than in one of its own.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, size: Size, *, policy: Policy,
                 transfers: Transfers, offload_dir: str):
        self.size = size
        self.scratch = Scratch(transfers.device.torch)
        self._offload_dir = offload_dir
        self._transfers = transfers
        self._folder: RunFolder | None = None
        with ExitStack() as opened:
            self._opened = opened
            shape = CacheShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
            self.cache = KVCache(
                shape, batch_size=size.sequences, batches=size.batches, slots=size.slots,
                placement=policy.cache, transfers=transfers, run_folder=self._run_folder)
            self.hidden = HiddenStates(
                size.rows, config.hidden_size, dtype, batches=size.batches,
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
