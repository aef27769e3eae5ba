"""Caches with the interface of `KVCache`: a simulation of H2O, and prefills that cache nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.cache.hot_set import RecallCounts
from flexgen_h2o.cache.token_attention import PendingAttention
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptSpan
from flexgen_h2o.h2o.key_smoothing import KeySmoothing, LayerSmoothing
from flexgen_h2o.h2o.simulation import SimulatedCache
from flexgen_h2o.kernels import ops


class AlternativeCache:
    """Base of caches that are in compute memory and support neither capture nor prefetch.

    Methods of `KVCache` that a cache lacks are not called on it.
    """

    attends_on_host = False
    supports_capture = False
    is_resident = True
    supports_prefetch = False
    recall_counts: RecallCounts | None = None
    begin: Any
    resume: Any
    nbytes: Any
    attend_prompt: Any
    repeat: Any
    attend_token: Any
    prefetch_token: Any
    capture_token: Any
    prepare_replay: Any

    def load(self, layer: int, batch: int, forward_pass: int) -> None:
        """Do nothing: the cache is resident."""

    store = load


class SimulatedBlockCache(AlternativeCache):
    """`SimulatedCache` with the interface of `KVCache`; parameters as in `SimulatedCache`."""

    def __init__(self, h2o: H2OConfig, rotate: Callable[[Tensor, Tensor, int], Tensor],
                 variant: Callable[[int], AttentionVariant],
                 smoothing: Sequence[LayerSmoothing] = ()):
        self._cache = SimulatedCache(h2o, rotate, variant, smoothing)
        self.begin = self._cache.begin
        self.resume = self._cache.resume
        self.repeat = self._cache.repeat
        self.nbytes = self._cache.nbytes

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptSpan],
                      rope, sinks: Tensor | None) -> Tensor:
        """Attend within prompts; see `PromptAttention.attend`. The simulation rotates by itself."""
        return self._cache.attend_prompt(layer, batch, q, k, v, spans=spans, sinks=sinks)

    def attend_token(self, layer: int, batch: int, q, k, v, *, token: int,
                     rope, sinks: Tensor | None, drafted: bool = False) -> PendingAttention:
        """Attend from a new token of each sequence; see `TokenAttention.attend`."""
        return PendingAttention({
            0: self._cache.attend_token(layer, batch, q, k, v, sinks=sinks)})


class UncachedAttention(AlternativeCache):
    """Attention within whole prompts that caches nothing.

    Parameters
    ----------
    variant : callable (layer) -> AttentionVariant
    """

    def __init__(self, variant: Callable[[int], AttentionVariant]):
        self._variant = variant

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a block of prompts."""

    def nbytes(self) -> int:
        """Return 0: nothing is cached."""
        return 0

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptSpan], rope,
                      sinks: Tensor | None) -> Tensor:
        """Attend within whole prompts; see `PromptAttention.attend`."""
        for x in (q, k):
            ops.rotate_(x, rope)
        return ops.prefill_attention(q, k, v, [len(span) for span in spans],
                                     variant=self._variant(layer), sinks=sinks)


class ProbedCache(AlternativeCache):
    """Prefills of one sequence each whose attention is a given function; caches nothing.

    Parameters
    ----------
    attend : callable (layer, number, q, k, v) -> Tensor like q
        q is [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]; q and k are rotated.
        `number` counts the sequences from 0.
    """

    def __init__(self, attend: Callable[..., Tensor]):
        self._attend = attend
        self._number = -1

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a block of the next sequence."""
        self._number += 1

    def nbytes(self) -> int:
        """Return 0: nothing is cached."""
        return 0

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptSpan], rope,
                      sinks: Tensor | None) -> Tensor:
        """Attend within one whole prompt; see `PromptAttention.attend`."""
        for x in (q, k):
            ops.rotate_(x, rope)
        return self._attend(layer, self._number, q, k, v)


class KeySampler(UncachedAttention):
    """Attention within one prompt that measures each layer's keys for `h2o.key_smoothing`.

    Parameters
    ----------
    variant : callable (layer) -> AttentionVariant
    rotate : callable (x, positions, layer) -> Tensor like x
        See `SimulatedCache`.
    positions : int
        The positions over which the sampled keys are spread.

    Attributes
    ----------
    layers : dict of int to LayerSmoothing
        The constants of each layer that has been computed.
    """

    def __init__(self, variant: Callable[[int], AttentionVariant],
                 rotate: Callable[[Tensor, Tensor, int], Tensor], positions: int):
        super().__init__(variant)
        self._rotate = rotate
        self._positions = positions
        self.layers: dict[int, LayerSmoothing] = {}

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptSpan], rope,
                      sinks: Tensor | None) -> Tensor:
        """Attend within the whole prompt; see `PromptAttention.attend`."""
        # A key's content hardly depends on its position, but its rotation does. Keys of a short
        # prompt, rotated to positions far apart, represent the keys of a long prompt.
        positions = torch.arange(len(k), device=k.device) * self._positions // len(k)
        unrotated = k.float(), q.float()
        rotated = (self._rotate(x.transpose(0, 1), positions[None], layer).transpose(0, 1)
                   for x in unrotated)
        variant = self._variant(layer)
        # Soft caps and attention sinks need q . c added to products again; only CPU kernels do.
        centered = q.is_cpu or not (variant.softcap or variant.sinks)
        self.layers[layer] = LayerSmoothing(
            *(KeySmoothing.fit(*sample, centered=centered) for sample in (rotated, unrotated)))
        return super().attend_prompt(layer, batch, q, k, v, spans=spans, rope=rope, sinks=sinks)
