"""The model without some keys of the first half of a text: heavy hitters, others, none.

In every layer and KV head the queries of the second half do not see as many keys: those with the
most accumulated attention (heavy hitters), the same but for the first tokens, which are often the
heaviest by far (attention sinks, arXiv 2309.17453), random ones, or those with the least (arXiv
2306.14048, section 4: without heavy hitters a model breaks down).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention_study.stats import heaviest, logit_blocks, observe
from flexgen_h2o.config.h2o import SINK_WINDOW_SINKS
from flexgen_h2o.kernels import ops

KINDS = ("heavy", "heavy but sinks", "random", "lowest")


def chosen_keys(kind: str, scores: Tensor, count: int, *, seed: int = 0) -> Tensor:
    """The `count` keys of each KV head that are taken away: int64 [kv_heads, count].

    Parameters
    ----------
    kind : str
        One of `KINDS`. Of equal scores the newer is the heavier; random keys are of the `seed`;
        the sinks go last of all.
    scores : Tensor [kv_heads, tokens]
        Accumulated scores.
    count : int
        At most tokens.
    """
    if kind == "heavy":
        return heaviest(scores, count)
    if kind == "heavy but sinks":
        scores = scores.clone()
        scores[:, :SINK_WINDOW_SINKS] = -1  # below all that attention sums up to
        return heaviest(scores, count)
    if kind == "lowest":
        return scores.argsort(dim=1, stable=True)[:, :count]
    generator = torch.Generator().manual_seed(seed)  # the processor's: alike on every device
    draws = torch.rand(scores.shape, generator=generator)
    return draws.argsort(dim=1)[:, :count].to(scores.device)


def attend_without(q: Tensor, k: Tensor, v: Tensor, gone: Tensor) -> Tensor:
    """Causal attention in which the later queries do not see some of the first keys.

    Parameters
    ----------
    q : Tensor [tokens, heads, head_dim]
    k, v : Tensor [tokens, kv_heads, head_dim]
    gone : bool Tensor [kv_heads, context]
        Of the first `context` keys, those that queries from `context` on do not see.

    Returns
    -------
    Tensor like q
    """
    context, values = gone.shape[1], v.float()
    out = torch.empty_like(q)
    out[:context] = ops.prefill_attention(q[:context], k[:context], v[:context], [context])
    for start, logits in logit_blocks(q, k, begin=context):
        logits[..., :context].masked_fill_(gone[:, None, None], float("-inf"))
        rows, seen = logits.shape[2:]
        attended = torch.einsum("kgrt,tkd->rkgd", logits.softmax(-1), values[:seen])
        out[start : start + rows] = attended.flatten(1, 2).to(q.dtype)
    return out


class Without:
    """Attention for `LLM.probe` that takes `counts[pair]` keys of the first half away.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    contexts, counts : list of int
        For each pair the tokens of its first half, and how many of them are not seen.
    """

    def __init__(self, kind: str, contexts: list[int], counts: list[int]):
        self._kind, self._contexts, self._counts = kind, contexts, counts

    def __call__(self, layer: int, pair: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend for `LLM.probe`."""
        context = self._contexts[pair]
        scores = observe(q[:context], k[:context]).scores
        keys = chosen_keys(self._kind, scores, self._counts[pair], seed=pair << 16 | layer)
        gone = torch.zeros(scores.shape, dtype=torch.bool, device=q.device).scatter_(1, keys, True)
        return attend_without(q, k, v, gone)
