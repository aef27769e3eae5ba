"""The definition of H2O in running code: a mask over a full cache, and nothing clever.

Every key and value stays; what eviction took is masked out. `KVCache`, which really drops tokens,
has to give the same tokens in float32. See arXiv 2306.14048, algorithm 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexgen_h2o.config.attention_form import DEFAULT_FORM, AttentionForm
from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.limits import EMPTY
from flexgen_h2o.h2o.attention_weights import attention_weights
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptChunk
from flexgen_h2o.h2o.budget import Budget, budget, recalled
from flexgen_h2o.h2o.key_smoothing import LayerSmoothing
from flexgen_h2o.h2o.policies import PolicyState, policy_named
from flexgen_h2o.h2o.recall import choose, index_weights, indexed


class Memory:
    """The simulated cache of one sequence in one layer; tokens stand in order of their positions.

    keys and values are [kv_heads, tokens, head_dim]; alive (bool) and attention score (float32),
    the attention that each key has received, are [kv_heads, tokens].
    """

    def __init__(self, keys: Tensor, values: Tensor):
        """Keys and values of the first tokens, both [tokens, kv_heads, head_dim]."""
        # Copies: what is given lies in scratch memory.
        self.keys, self.values = (x.transpose(0, 1).to(torch.float32, copy=True)
                                  for x in (keys, values))
        self.alive = torch.ones(self.keys.shape[:2], dtype=torch.bool, device=keys.device)
        self.scores = torch.zeros(self.keys.shape[:2], device=keys.device)

    def append(self, other: Memory) -> None:
        """Add the tokens of `other` at the end."""
        for name in ("keys", "values", "alive", "scores"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)], dim=1))


class SimulatedCache:
    """Keys and values of the batches of a block, in compute memory alone.

    Parameters
    ----------
    h2o : H2OConfig
    rotate : callable (x, positions, layer) -> Tensor like x
        x [heads, tokens, head_dim], float32, rotated to positions [heads or 1, tokens]; x itself
        where the model has no rotary positions.
    form : callable (layer) -> AttentionForm, optional
        None: all layers have the default form.
    smoothing : sequence of LayerSmoothing
        By which recall's index holds the keys of each layer; empty: as they are.
    """

    def __init__(self, h2o: H2OConfig, rotate: Callable[[Tensor, Tensor, int], Tensor],
                 form: Callable[[int], AttentionForm] | None = None,
                 smoothing: Sequence[LayerSmoothing] = ()):
        self._smoothing = smoothing
        self._h2o = h2o
        self._rotate = rotate
        self._form = form or (lambda layer: DEFAULT_FORM)
        self._policy = policy_named(h2o.score)
        self._decay = h2o.decay if self._policy.fades else 1.0
        self._memories: dict[tuple[int, int, int], Memory] = {}

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a new block: forget the cache, except for sequences that continue into it."""
        self._batch_layouts = list(batches)
        moved = {(one.batch, one.sequence): (batch, sequence)
                 for batch, batch_layout in enumerate(batches)
                 for sequence, one in enumerate(batch_layout.continued) if one is not None}
        self._memories = {(layer, *moved[batch, sequence]): memory
                          for (layer, batch, sequence), memory in self._memories.items()
                          if (batch, sequence) in moved}

    def resume(self, batches: Sequence[BatchLayout]) -> None:
        """Go on with the same sequences, in another run."""
        self._batch_layouts = list(batches)

    def nbytes(self) -> int:
        """Bytes of the keys and values that are held: all of them, in float32."""
        return sum(memory.keys.nbytes + memory.values.nbytes for memory in self._memories.values())

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptChunk],
                      sinks: Tensor | None = None) -> Tensor:
        """Attend within prompts and remember them; see `KVCache.attend_prompt`."""
        outputs, row = [], 0
        for span in spans:
            rows = slice(row, row + len(span))
            row = rows.stop
            key = (layer, batch, span.sequence)
            outputs.append(self._attend(key, q[rows], k[rows], v[rows], sinks))
            # Of a chunk that is not the last only if chunks are to be evicted as they come.
            whole = span.end == self._batch_layouts[batch].lengths[span.sequence]
            if whole or self._h2o.prompt_chunk:
                self._evict(key)
        return torch.cat(outputs)

    def repeat(self, layer: int, batch: int, source: int, *targets: int) -> None:
        """Remember one prompt for other sequences; see `KVCache.repeat`."""
        for target in targets:
            self._memories[layer, batch, target] = copy.deepcopy(
                self._memories[layer, batch, source])

    def attend_token(self, layer: int, batch: int, q, k, v, *, sinks: Tensor | None = None
                     ) -> Tensor:
        """Like `KVCache.attend_token`, at once: [sequences, heads, head_dim]."""
        outputs = []
        for sequence in range(len(q)):
            row, key = slice(sequence, sequence + 1), (layer, batch, sequence)
            outputs.append(self._attend(key, q[row], k[row], v[row], sinks, recalls=True))
            if self._h2o.evicts_generated_at(layer):
                self._evict(key)
        return torch.cat(outputs)

    def _attend(self, key: tuple[int, int, int], q, k, v, sinks: Tensor | None, *,
                recalls: bool = False) -> Tensor:
        """Append new tokens, attend from each over what is alive up to itself, add to the attention
        score. With `recalls` a new token sees what recall chooses, if that is configured.

        q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim], all before rotation.
        """
        if key in self._memories:
            self._memories[key].append(Memory(k, v))
        else:
            self._memories[key] = Memory(k, v)
        memory = self._memories[key]
        rows, tokens = len(q), memory.keys.shape[1]
        position = torch.arange(tokens, device=q.device)
        newest = position[tokens - rows :]
        places = position.expand(len(memory.keys), -1)
        if self._h2o.positions == "rolling":
            places = memory.alive.cumsum(1) - 1
        # All heads have as many tokens alive, so that a query's place is the same in each.
        keys, queries = self._rotate(memory.keys, places, key[0]), self._rotate(
            q.float().transpose(0, 1), places[:1, newest], key[0])
        queries = queries.unflatten(0, (len(keys), -1))  # [kv_heads, group, rows, head_dim]
        products = torch.einsum("hgrd,htd->hgrt", queries, keys)
        form = self._form(key[0])
        seen = memory.alive[:, None] & (position <= newest[:, None])  # [kv_heads, rows, tokens]
        if form.window is not None:
            seen &= position > newest[:, None] - form.window
        if sinks is not None:
            sinks = sinks.view(len(keys), -1, 1, 1)
        if recalls:
            seen &= self._recalled(key, queries, keys, sinks)
        probabilities = attention_weights(products, ~seen[:, None], dim=q.shape[-1], form=form,
                                          sinks=sinks)
        for row in probabilities.sum(1).unbind(1):
            memory.scores = memory.scores * self._decay + row
        out = torch.einsum("hgrt,htd->rhgd", probabilities, memory.values)
        return out.flatten(1, 2).to(q.dtype)

    def _recalled(self, key: tuple[int, int, int], queries: Tensor, keys: Tensor,
                  sinks: Tensor | None) -> Tensor:
        """The tokens that a new one sees by recall, itself included: bool [kv_heads, 1, tokens].

        queries [kv_heads, group, 1, head_dim] and keys [kv_heads, tokens, head_dim], rotated.
        """
        layer, batch, sequence = key
        length, cached = self._batch_layouts[batch].lengths[sequence], keys.shape[1] - 1
        count = recalled(self._h2o, layer, length, cached + 1 - length)
        seen = keys.new_ones((len(keys), 1, cached + 1), dtype=torch.bool)
        if count is None or count >= cached:
            return seen
        layout = IndexLayout(keys.shape[-1], self._h2o.index_bits)
        queries, offsets, form = queries[:, :, 0], None, self._form(layer)
        if self._smoothing:
            smoothing = self._smoothing[layer].rotated
            if form.softcap or form.sinks:
                offsets = smoothing.queries.offsets(queries.flatten(0, 1))
                offsets = offsets.view(len(keys), -1, 1)
            queries = smoothing.queries(queries.flatten(0, 1)).unflatten(0, (len(keys), -1))
            keys = smoothing.keys(keys.transpose(0, 1)).transpose(0, 1)
        weights = index_weights(
            queries, keys[:, -1], indexed(keys[:, :-1], layout), layout=layout,
            hidden=~seen[:, :, :-1], form=form, offsets=offsets,
            sinks=None if sinks is None else sinks[..., 0])
        count, cached = torch.tensor([count, cached], device=keys.device)
        seen[:, 0, :-1] = choose(weights, count, cached=cached)
        return seen

    def _evict(self, key: tuple[int, int, int]) -> None:
        """Down to the budget: lowest score first, of equals the oldest; never sinks and recent."""
        memory, limit = self._memories[key], self._budget(key)
        tokens = memory.keys.shape[1]
        if limit is None or memory.alive[0].sum() <= limit.total:
            return
        excess = int(memory.alive[0].sum()) - limit.total
        score = self._score(memory, key[0])
        window = self._form(key[0]).window
        if window is not None:  # the next token does not see the first ones
            score = score.clone()
            score[:, : max(0, tokens + 1 - window)] = float("-inf")
        for head, (alive, scores) in enumerate(zip(memory.alive.tolist(), score.tolist(),
                                                   strict=True)):
            candidates = [i for i in range(limit.sinks, tokens - limit.recent) if alive[i]]
            for victim in sorted(candidates, key=lambda i, s=scores: (s[i], i))[:excess]:
                memory.alive[head, victim] = False

    def _score(self, memory: Memory, layer: int) -> Tensor:
        """The scores by the policy, [kv_heads, tokens]; it is told nothing of what is gone."""
        gone = ~memory.alive
        position = torch.arange(memory.keys.shape[1], device=gone.device)
        state = PolicyState(memory.scores.masked_fill(gone, 0),
                            position.expand(gone.shape).masked_fill(gone, EMPTY), len(position))
        vectors = None
        if self._policy.needs:
            keys = memory.keys
            if self._h2o.positions != "rolling":  # those that are cached are rotated
                keys = self._rotate(keys, position[None], layer)
            vectors = torch.stack((keys, memory.values)).masked_fill(gone[..., None], 0)
        return self._policy.scores(state, vectors)

    def _budget(self, key: tuple[int, int, int]) -> Budget | None:
        layer, batch, sequence = key
        length = self._batch_layouts[batch].lengths[sequence]
        tokens = self._memories[key].keys.shape[1]
        return budget(self._h2o, layer, length, max(0, tokens - length))
