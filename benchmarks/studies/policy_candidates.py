"""Candidate eviction policies, simulated as masks over a full cache in plain PyTorch.

Shapes: a articles, h KV heads, g query heads of each, n tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from flexgen_h2o.h2o.policies import PolicyState, attention_mean, attention_sum

POOL = 5
"""Width of SnapKV's pooling."""
FLOOR = 0.2
"""Share of the even budget that Ada-KV guarantees each head, as in its authors' code."""
REDUNDANCY = 0.1
"""Weight of attention in R-KV's score, as in its authors' code."""


@dataclass(frozen=True)
class Candidate:
    """A candidate policy.

    Attributes
    ----------
    name : str
    score : callable (CandidateState) -> Tensor [a, h, n]
        The lowest is evicted first.
    decay : float
        Factor per query on accumulated attention.
    window : int
        Queries whose attention rows are kept for the score.
    prompt_window : int
        Queries at a prompt's end that accumulate attention; 0 for all.
    joint : bool
        Whether heads of a layer share one budget.
    pyramid : float
        Extra share of heavy hitters for the first layer, taken from the last.
    sinks : int
    """

    name: str
    score: Callable[[CandidateState], torch.Tensor]
    decay: float = 1.0
    window: int = 0
    prompt_window: int = 0
    joint: bool = False
    pyramid: float = 0.0
    sinks: int = 0

    def layer_share(self, layer: int, layers: int) -> float:
        """Return a layer's heavy hitters over the even share; the mean over layers is 1."""
        return 1 + self.pyramid * (1 - 2 * layer / max(1, layers - 1))


class CandidateState:
    """A masked cache of one layer: alive keys, and the inputs of scores.

    keys and values [a, h, all tokens, dim] are of the whole text; only the first n are visible.
    """

    def __init__(self, candidate: Candidate, keys, values, prompt: int):
        self.candidate, self.tokens = candidate, prompt
        self._keys, self._values = keys, values
        self._norms = values.norm(dim=-1)
        self._units = F.normalize(keys, dim=-1)
        shape = keys.shape[:3]
        self.alive = torch.zeros(shape, dtype=torch.bool)
        self.alive[:, :, :prompt] = True
        self.cached = prompt
        self._attention = torch.zeros(shape)
        self._rows: list[torch.Tensor] = []
        self._recent = torch.zeros(shape)

    def read_prompt(self, weights: torch.Tensor) -> None:
        """Accumulate attention weights [a, h, g, n, n] of the prompt's queries."""
        candidate, n = self.candidate, self.tokens
        first = n - candidate.prompt_window if candidate.prompt_window else 0
        age = torch.arange(n - 1, -1, -1)[first:]
        self._attention[:, :, :n] = torch.einsum("ahgqk,q->ahk", weights[:, :, :, first:],
                                                 candidate.decay ** age.float())
        if candidate.window:
            self._rows = list(weights[:, :, :, -candidate.window :].unbind(3))
            self._recent[:, :, :n] = weights[:, :, :, -candidate.window :].sum((2, 3))

    def append(self) -> None:
        """Add a new token."""
        self.alive[:, :, self.tokens] = True
        self.tokens += 1
        self.cached += 1

    def receive(self, row: torch.Tensor) -> None:
        """Accumulate attention weights [a, h, g, n] of the new token's query."""
        attention = self._attention[:, :, : self.tokens]
        attention.mul_(self.candidate.decay).add_(row.sum(2))
        if self.candidate.window:
            oldest, *self._rows = [*self._rows, row]
            self._recent[:, :, : oldest.shape[-1]] -= oldest.sum(2)
            self._recent[:, :, : self.tokens] += row.sum(2)

    def evict(self, keep: int, recent: int) -> None:
        """Evict down to `keep` in each head, or in the mean of heads if `joint`."""
        n, alive = self.tokens, self.alive[:, :, : self.tokens]
        score = self.candidate.score(self).clone()
        score[:, :, n - recent :] = torch.inf
        score[:, :, : self.candidate.sinks] = torch.inf
        if self.candidate.joint:
            floor = max(1, int(FLOOR * keep))
            safe = score.masked_fill(~alive, -torch.inf).topk(floor, -1).indices
            score.scatter_(-1, safe, torch.inf)
        score.masked_fill_(~alive, torch.inf)
        excess = self.cached - keep
        if self.candidate.joint:
            evicted = score.flatten(1).topk(excess * score.shape[1], -1, largest=False).indices
            flat = alive.flatten(1).scatter(-1, evicted, False)
            alive.copy_(flat.view_as(alive))
        elif excess == 1:
            alive.scatter_(-1, score.argmin(-1, keepdim=True), False)
        else:
            alive.scatter_(-1, score.topk(excess, -1, largest=False).indices, False)
        self.cached = keep

    @property
    def rows(self) -> torch.Tensor:
        """Attention rows of the newest queries, [a, h, g, queries, n]; 0 for later keys."""
        n = self.tokens
        return torch.stack([F.pad(row, (0, n - row.shape[-1])) for row in self._rows], 3)

    @property
    def recent(self) -> torch.Tensor:
        """Attention from the newest queries, [a, h, n]."""
        return self._recent[:, :, : self.tokens]

    @property
    def plain(self) -> PolicyState:
        """The state as the engine's policies get it."""
        n = self.tokens
        return PolicyState(self._attention[:, :, :n], torch.arange(n), n,
                           self._keys[:, :, :n], self._values[:, :, :n])

    @property
    def norms(self) -> torch.Tensor:
        """Norms of the values, [a, h, n]."""
        return self._norms[:, :, : self.tokens]

    @property
    def values(self) -> torch.Tensor:
        """[a, h, n, dim]."""
        return self._values[:, :, : self.tokens]

    @property
    def living(self) -> torch.Tensor:
        """[a, h, n], 1 where a key is alive, else 0."""
        return self.alive[:, :, : self.tokens].float()

    @property
    def units(self) -> torch.Tensor:
        """Keys of length 1, [a, h, n, dim]."""
        return self._units[:, :, : self.tokens]


def total(state: CandidateState) -> torch.Tensor:
    """H2O: accumulated attention."""
    return attention_sum(state.plain)


def mean(state: CandidateState) -> torch.Tensor:
    """Accumulated attention over the number of queries that could see the key."""
    return attention_mean(state.plain)


def by_value(score) -> Callable[[CandidateState], torch.Tensor]:
    """Return a score times the norm of the value."""
    return lambda state: score(state) * state.norms


def caote(score) -> Callable[[CandidateState], torch.Tensor]:
    """CAOTE (arXiv 2504.14051): the output error if a token is evicted, with normalized scores as
    attention weights."""

    def error(state: CandidateState) -> torch.Tensor:
        share = score(state) * state.living
        share = share / share.sum(-1, keepdim=True)
        out = torch.einsum("ahn,ahnd->ahd", share, state.values)
        # |out - v| without a tensor of [a, h, n, dim]
        squared = (state.norms**2 + (out**2).sum(-1, keepdim=True)
                   - 2 * torch.einsum("ahd,ahnd->ahn", out, state.values))
        return share / (1 - share).clamp(min=1e-6) * squared.clamp(min=0).sqrt()

    return error


def last_queries(state: CandidateState) -> torch.Tensor:
    """Mean attention from the newest queries that could see the key (one query: TOVA)."""
    return state.recent / state.plain.queries.clamp(max=state.candidate.window)


def pooled(state: CandidateState) -> torch.Tensor:
    """SnapKV (arXiv 2404.14469): attention from the newest queries, average-pooled."""
    return F.avg_pool1d(last_queries(state), POOL, 1, POOL // 2)


def defensive(state: CandidateState) -> torch.Tensor:
    """DefensiveKV: the largest weight from any of the newest queries and heads of the group."""
    return state.rows.amax((2, 3))


def redundancy(state: CandidateState) -> torch.Tensor:
    """R-KV (arXiv 2505.24133): attention minus similarity to other cached keys."""
    living = state.living
    together = torch.einsum("ahn,ahnd->ahd", living, state.units)
    likeness = (torch.einsum("ahd,ahnd->ahn", together, state.units) - 1) / living.sum(
        -1, keepdim=True)
    likeness = likeness.masked_fill(living == 0, -torch.inf).softmax(-1)
    attention = F.max_pool1d(last_queries(state), POOL, 1, POOL // 2)
    return REDUNDANCY * attention - (1 - REDUNDANCY) * likeness


CANDIDATES = [
    Candidate("sum", total),
    Candidate("mean", mean),
    Candidate("decay 0.98", total, decay=0.98),
    Candidate("sum, 4 sinks", total, sinks=4),
    Candidate("sum x |v|", by_value(total)),
    Candidate("mean x |v|", by_value(mean)),
    Candidate("decay 0.98 x |v|", by_value(total), decay=0.98),
    Candidate("CAOTE on sum", caote(total)),
    Candidate("CAOTE on mean", caote(mean)),
    Candidate("SnapKV's prompt cut, then sum", total, prompt_window=32),
    Candidate("SnapKV, 32 queries", pooled, window=32),
    Candidate("TOVA, last query", last_queries, window=1),
    Candidate("Ada-KV on sum", total, joint=True),
    Candidate("layers: more at the bottom", total, pyramid=0.5),
    Candidate("layers: more at the top", total, pyramid=-0.5),
    Candidate("DefensiveKV, 32 queries", defensive, window=32),
    Candidate("R-KV, 32 queries", redundancy, window=32),
]

ENGINE = {one: next(each for each in CANDIDATES if each.name == name)
          for one, name in (("sum", "sum"), ("mean", "mean"), ("caote", "CAOTE on mean"))}
"""The engine's own policies, by name."""


CHUNK = 4
"""Articles whose logits are computed together."""


@dataclass(frozen=True)
class Setting:
    """A budget: `percent` of the prompt or of the text so far, half heavy, half recent tokens.

    Without `evicts_generated`, only prompts are cut.
    """

    percent: int
    budget_of: str
    evicts_generated: bool = True

    def sizes(self, prompt: int, tokens: int) -> tuple[int, int]:
        """Return the numbers of kept and of recent tokens after `tokens` tokens."""
        part = max(1, int(self.percent / 200 * (prompt if self.budget_of == "prompt" else tokens)
                          + 1e-9))
        return 2 * part, part


class MaskedModel:
    """A LLaMA of transformers over articles [articles, tokens] with prompts of `prompt` tokens."""

    def __init__(self, model, tokens: torch.Tensor, prompt: int):
        self.model, self.tokens, self.prompt = model, tokens, prompt
        config = model.config
        self.heads = config.num_key_value_heads
        self.layers = model.model.layers
        self.scale = self.layers[0].self_attn.scaling
        position = torch.arange(tokens.shape[1])[None]
        self._rope = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), position)
        self._prompts: list[tuple[torch.Tensor, ...]] = []

    def _project(self, layer, hidden: torch.Tensor, places: slice) -> list[torch.Tensor]:
        """Return rotated queries [articles, kv_heads, group, n, dim], keys and values."""
        normed, attention = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                   for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
        cos, sin = (x[:, places] for x in self._rope)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return [q.unflatten(1, (self.heads, -1)), k, v]

    @staticmethod
    def _finish(layer, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Run the rest of a layer on attended [articles, kv_heads, group, n, dim]."""
        hidden = hidden + layer.self_attn.o_proj(attended.flatten(1, 2).transpose(1, 2).flatten(2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def read_prompts(self) -> None:
        """Attend within all prompts, and keep queries, keys and values of each layer."""
        hidden = self.model.model.embed_tokens(self.tokens[:, : self.prompt])
        for layer in self.layers:
            q, k, v = self._project(layer, hidden, slice(0, self.prompt))
            self._prompts.append((q, k, v))
            attended = F.scaled_dot_product_attention(
                q.flatten(1, 2), k.repeat_interleave(q.shape[2], 1),
                v.repeat_interleave(q.shape[2], 1), is_causal=True)
            hidden = self._finish(layer, hidden, attended.unflatten(1, (self.heads, -1)))
        self._last = hidden[:, -1:]

    def log_probs(self, candidate: Candidate | None, setting: Setting | None) -> torch.Tensor:
        """Return log-probabilities [articles, tokens - prompt] after the prompts.

        None for both arguments means the full cache.
        """
        if not self._prompts:
            self.read_prompts()
        hidden = self.model.model.embed_tokens(self.tokens[:, self.prompt : -1])
        for index, layer in enumerate(self.layers):
            q, k, v = self._project(layer, hidden,
                                    slice(self.prompt, self.tokens.shape[1] - 1))
            _, old_k, old_v = self._prompts[index]
            keys, values = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
            products = torch.einsum("ahgqd,ahkd->ahgqk", q, keys) * self.scale
            if candidate is None:
                weights = self._full(products)
            else:
                share = candidate.layer_share(index, len(self.layers))
                weights = self._steps(products, keys, values, candidate, setting, index, share)
            hidden = self._finish(layer, hidden,
                                  torch.einsum("ahgqk,ahkd->ahgqd", weights, values))
        hidden = torch.cat((self._last, hidden), 1)
        targets = self.tokens[:, self.prompt :]
        parts = []
        for part, ids in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            logits = self.model.lm_head(self.model.model.norm(part))
            parts.append(logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0])
        return torch.cat(parts)

    def _full(self, products: torch.Tensor) -> torch.Tensor:
        rows, keys = products.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        return products.masked_fill(hidden, -torch.inf).softmax(-1)

    def _steps(self, products, keys, values, candidate: Candidate, setting: Setting, layer: int,
               share: float) -> torch.Tensor:
        """Return weights [articles, kv_heads, group, steps, keys] with evicted keys hidden."""
        weights = torch.zeros_like(products)
        q, k, _ = self._prompts[layer]
        state = CandidateState(candidate, keys, values, self.prompt)
        logits = torch.einsum("ahgqd,ahkd->ahgqk", q, k) * self.scale
        state.read_prompt(logits.masked_fill(
            torch.ones(self.prompt, self.prompt, dtype=torch.bool).triu(1), -torch.inf).softmax(-1))
        for step in range(-1, products.shape[3]):
            tokens = self.prompt + step + 1
            if step >= 0:
                state.append()
                row = products[:, :, :, step, :tokens].masked_fill(
                    ~state.alive[:, :, None, :tokens], -torch.inf).softmax(-1)
                weights[:, :, :, step, :tokens] = row
                if not setting.evicts_generated:
                    continue
                state.receive(row)
            total, recent = setting.sizes(self.prompt, tokens)
            heavy = max(1, round((total - recent) * share))
            if state.cached > heavy + recent:
                state.evict(heavy + recent, recent)
        return weights
