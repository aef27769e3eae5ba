"""The definition of H2O (arXiv 2306.14048, algorithm 1) as a mask over a full cache.

Every key and value stays, and evicted tokens are masked. `KVCache`, which frees their slots, gives
the same output tokens in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.layers import DEFAULT_VARIANT, AttentionVariant
from flexgen_h2o.config.limits import EMPTY
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptSpan
from flexgen_h2o.h2o.budget import Budget, budget, num_selected
from flexgen_h2o.h2o.eviction import attention_weights
from flexgen_h2o.h2o.key_smoothing import LayerSmoothing
from flexgen_h2o.h2o.policies import PolicyState, policy_named
from flexgen_h2o.h2o.recall import index_weights, indexed_keys, select_tokens


class SequenceCache:
    """The simulated cache of one sequence in one layer, in the order of positions.

    Attributes
    ----------
    keys, values : float32 Tensor [kv_heads, tokens, head_dim]
    alive : bool Tensor [kv_heads, tokens]
        False for evicted tokens.
    scores : float32 Tensor [kv_heads, tokens]
        Attention that each key has received.
    """

    def __init__(self, keys: Tensor, values: Tensor):
        """Copy keys and values [tokens, kv_heads, head_dim], which are in scratch memory."""
        self.keys, self.values = (x.transpose(0, 1).to(torch.float32, copy=True)
                                  for x in (keys, values))
        self.alive = torch.ones(self.keys.shape[:2], dtype=torch.bool, device=keys.device)
        self.scores = torch.zeros(self.keys.shape[:2], device=keys.device)

    def append(self, other: SequenceCache) -> None:
        """Append the tokens of `other`."""
        for name in ("keys", "values", "alive", "scores"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)], dim=1))


class SimulatedCache:
    """Keys and values of the batches of a block, in compute memory.

    Parameters
    ----------
    h2o : H2OConfig
    rotate : callable (x, positions, layer) -> Tensor like x
        Rotate x, float32 [heads, tokens, head_dim], to positions [heads or 1, tokens]; return x
        itself if the model has no rotary embeddings.
    variant : callable (layer) -> AttentionVariant, optional
        None: all layers have the default variant.
    smoothing : sequence of LayerSmoothing
        Key smoothing of each layer, for recall's index; empty: none.
    """

    def __init__(self, h2o: H2OConfig, rotate: Callable[[Tensor, Tensor, int], Tensor],
                 variant: Callable[[int], AttentionVariant] | None = None,
                 smoothing: Sequence[LayerSmoothing] = ()):
        self._smoothing = smoothing
        self._h2o = h2o
        self._rotate = rotate
        self._variant = variant or (lambda layer: DEFAULT_VARIANT)
        self._policy = policy_named(h2o.score)
        self._decay = h2o.decay if self._policy.fades else 1.0
        self._caches: dict[tuple[int, int, int], SequenceCache] = {}

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a new block: forget the cache, except for sequences that continue into it."""
        self._batch_layouts = list(batches)
        moved = {(origin.batch, origin.sequence): (batch, sequence)
                 for batch, batch_layout in enumerate(batches)
                 for sequence, origin in enumerate(batch_layout.continued)
                 if origin is not None}
        self._caches = {(layer, *moved[batch, sequence]): cache
                          for (layer, batch, sequence), cache in self._caches.items()
                          if (batch, sequence) in moved}

    def resume(self, batches: Sequence[BatchLayout]) -> None:
        """Continue the same sequences in another run."""
        self._batch_layouts = list(batches)

    def nbytes(self) -> int:
        """Return the bytes of all keys and values, in float32."""
        return sum(cache.keys.nbytes + cache.values.nbytes for cache in self._caches.values())

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptSpan],
                      sinks: Tensor | None = None) -> Tensor:
        """Attend within prompts and cache them; see `PromptAttention.attend`."""
        outputs, row = [], 0
        for span in spans:
            rows = slice(row, row + len(span))
            row = rows.stop
            key = (layer, batch, span.sequence)
            outputs.append(self._attend(key, q[rows], k[rows], v[rows], sinks))
            # Chunks before the last one evict only with `prompt_chunk`.
            whole = span.end == self._batch_layouts[batch].lengths[span.sequence]
            if whole or self._h2o.prompt_chunk:
                self._evict(key)
        return torch.cat(outputs)

    def repeat(self, layer: int, batch: int, source: int, *targets: int) -> None:
        """Cache one prompt for other sequences; see `PromptAttention.repeat`."""
        for target in targets:
            self._caches[layer, batch, target] = copy.deepcopy(
                self._caches[layer, batch, source])

    def attend_token(self, layer: int, batch: int, q, k, v, *, sinks: Tensor | None = None
                     ) -> Tensor:
        """Attend as `TokenAttention.attend`; return [sequences, heads, head_dim]."""
        outputs = []
        for sequence in range(len(q)):
            row, key = slice(sequence, sequence + 1), (layer, batch, sequence)
            outputs.append(self._attend(key, q[row], k[row], v[row], sinks, recalls=True))
            if self._h2o.evicts_generated_at(layer):
                self._evict(key)
        return torch.cat(outputs)

    def _attend(self, key: tuple[int, int, int], q, k, v, sinks: Tensor | None, *,
                recalls: bool = False) -> Tensor:
        """Append new tokens, attend from each over alive tokens up to itself, and add to scores.

        q is [rows, heads, head_dim], k and v are [rows, kv_heads, head_dim], before rotation. With
        `recalls` a new token attends to the tokens that recall selects, if that is configured.
        """
        if key in self._caches:
            self._caches[key].append(SequenceCache(k, v))
        else:
            self._caches[key] = SequenceCache(k, v)
        cache = self._caches[key]
        rows, tokens = len(q), cache.keys.shape[1]
        position = torch.arange(tokens, device=q.device)
        newest = position[tokens - rows :]
        rope_positions = position.expand(len(cache.keys), -1)
        if self._h2o.positions == "rolling":
            rope_positions = cache.alive.cumsum(1) - 1
        # All heads have equally many alive tokens, so a query has the same rank in each.
        keys, queries = self._rotate(cache.keys, rope_positions, key[0]), self._rotate(
            q.float().transpose(0, 1), rope_positions[:1, newest], key[0])
        queries = queries.unflatten(0, (len(keys), -1))  # [kv_heads, group, rows, head_dim]
        products = torch.einsum("hgrd,htd->hgrt", queries, keys)
        variant = self._variant(key[0])
        visible = cache.alive[:, None] & (position <= newest[:, None])  # [kv_heads, rows, tokens]
        if variant.window is not None:
            visible &= position > newest[:, None] - variant.window
        if sinks is not None:
            sinks = sinks.view(len(keys), -1, 1, 1)
        if recalls:
            visible &= self._recalled(key, queries, keys, sinks)
        probabilities = attention_weights(products, ~visible[:, None], dim=q.shape[-1],
                                          variant=variant, sinks=sinks)
        for row in probabilities.sum(1).unbind(1):
            cache.scores = cache.scores * self._decay + row
        out = torch.einsum("hgrt,htd->rhgd", probabilities, cache.values)
        return out.flatten(1, 2).to(q.dtype)

    def _recalled(self, key: tuple[int, int, int], queries: Tensor, keys: Tensor,
                  sinks: Tensor | None) -> Tensor:
        """Return the tokens that a new one attends to by recall: bool [kv_heads, 1, tokens].

        queries are [kv_heads, group, 1, head_dim], keys [kv_heads, tokens, head_dim], rotated.
        """
        layer, batch, sequence = key
        length, cached = self._batch_layouts[batch].lengths[sequence], keys.shape[1] - 1
        count = num_selected(self._h2o, layer, length, cached + 1 - length)
        visible = keys.new_ones((len(keys), 1, cached + 1), dtype=torch.bool)
        if count is None or count >= cached:
            return visible
        layout = IndexLayout(keys.shape[-1], self._h2o.index_bits)
        queries, offsets, variant = queries[:, :, 0], None, self._variant(layer)
        if self._smoothing:
            smoothing = self._smoothing[layer].rotated
            if variant.softcap or variant.sinks:
                offsets = smoothing.queries.offsets(queries.flatten(0, 1))
                offsets = offsets.view(len(keys), -1, 1)
            queries = smoothing.queries(queries.flatten(0, 1)).unflatten(0, (len(keys), -1))
            keys = smoothing.keys(keys.transpose(0, 1)).transpose(0, 1)
        weights = index_weights(
            queries, keys[:, -1], indexed_keys(keys[:, :-1], layout), layout=layout,
            hidden=~visible[:, :, :-1], variant=variant, offsets=offsets,
            sinks=None if sinks is None else sinks[..., 0])
        count, cached = torch.tensor([count, cached], device=keys.device)
        visible[:, 0, :-1] = select_tokens(weights, count, cached=cached)
        return visible

    def _evict(self, key: tuple[int, int, int]) -> None:
        """Evict down to the budget: the lowest score first, of equal scores the oldest token."""
        cache, limit = self._caches[key], self._budget(key)
        tokens = cache.keys.shape[1]
        if limit is None or cache.alive[0].sum() <= limit.total:
            return
        excess = int(cache.alive[0].sum()) - limit.total
        score = self._score(cache, key[0])
        window = self._variant(key[0]).window
        if window is not None:  # the next token does not see the first tokens
            score = score.clone()
            score[:, : max(0, tokens + 1 - window)] = float("-inf")
        for head, (alive, scores) in enumerate(zip(cache.alive.tolist(), score.tolist(),
                                                   strict=True)):
            candidates = [i for i in range(limit.sinks, tokens - limit.recent) if alive[i]]
            for _, victim in sorted((scores[i], i) for i in candidates)[:excess]:
                cache.alive[head, victim] = False

    def _score(self, cache: SequenceCache, layer: int) -> Tensor:
        """Return the policy's scores [kv_heads, tokens]; evicted tokens are empty slots to it."""
        empty = ~cache.alive
        position = torch.arange(cache.keys.shape[1], device=empty.device)
        positions = position.expand(empty.shape).masked_fill(empty, EMPTY)
        state = PolicyState(cache.scores.masked_fill(empty, 0), positions, len(position))
        vectors = None
        if self._policy.needs:
            keys = cache.keys
            if self._h2o.positions != "rolling":  # keys are cached after rotation
                keys = self._rotate(keys, position[None], layer)
            vectors = [x.masked_fill(empty[..., None], 0) for x in (keys, cache.values)]
        return self._policy.scores(state, vectors)

    def _budget(self, key: tuple[int, int, int]) -> Budget | None:
        layer, batch, sequence = key
        length = self._batch_layouts[batch].lengths[sequence]
        tokens = self._caches[key].keys.shape[1]
        return budget(self._h2o, layer, length, max(0, tokens - length))
