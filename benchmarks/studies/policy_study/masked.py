"""Policies as masks over a full cache, for many articles at once, in plain PyTorch.

Every article has as many prompt tokens, and as many that follow are given one by one. A prompt is
attended to whole, so its keys and values are the same under every policy and are made once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from policy_study.candidates import Candidate, CandidateState

CHUNK = 4
"""Articles whose logits are made together."""


@dataclass(frozen=True)
class Setting:
    """A budget: `percent` of the prompt or of the text so far; half of it heavy, half recent.

    If generated tokens are not evicted, prompts alone are cut.
    """

    percent: int
    budget_of: str
    evicts_generated: bool = True

    def sizes(self, prompt: int, tokens: int) -> tuple[int, int]:
        """All tokens that are kept after so many, and the newest among them."""
        part = max(1, int(self.percent / 200 * (prompt if self.budget_of == "prompt" else tokens)
                          + 1e-9))
        return 2 * part, part


class MaskedModel:
    """A LLaMA of transformers over articles [articles, tokens], of which `prompt` come first."""

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
        """Rotated queries [articles, kv_heads, group, n, dim], and keys and values without a
        group."""
        normed, attention = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                   for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
        cos, sin = (x[:, places] for x in self._rope)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return [q.unflatten(1, (self.heads, -1)), k, v]

    @staticmethod
    def _finish(layer, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer: attended [articles, kv_heads, group, n, dim]."""
        hidden = hidden + layer.self_attn.o_proj(attended.flatten(1, 2).transpose(1, 2).flatten(2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def read_prompts(self) -> None:
        """Attend within all prompts; keep queries, keys and values of each layer."""
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
        """Log-probabilities [articles, tokens - prompt] of what follows the prompts.

        None for both gives the full cache's.
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
        wanted = self.tokens[:, self.prompt :]
        found = []
        for some, ids in zip(hidden.split(CHUNK), wanted.split(CHUNK), strict=True):
            logits = self.model.lm_head(self.model.model.norm(some))
            found.append(logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0])
        return torch.cat(found)

    def _full(self, products: torch.Tensor) -> torch.Tensor:
        rows, keys = products.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        return products.masked_fill(hidden, -torch.inf).softmax(-1)

    def _steps(self, products, keys, values, candidate: Candidate, setting: Setting, layer: int,
               share: float) -> torch.Tensor:
        """Weights of all steps [articles, kv_heads, group, steps, keys] with what is evicted
        hidden."""
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
