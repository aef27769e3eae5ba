"""Mixtures of experts (arXiv 1701.06538): the router, an expert and a shared one, of any family.

A family with experts has these functions beside those of every family; a layer's attention half
has the norm ``ln2`` and the router, its other half the shared expert:

    route(cfg, w, x, do, out) -> ids, shares     and the normed x in `out`
    expert(cfg, w, x, do) -> y                   of one expert's tensors; x is normed
    shared(cfg, w, x, do) -> y                   of the layer's, where there is one
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.models.layers import Operations
from flexgen_h2o.models.model_config import ModelConfig, TensorSpec


def expert_specs(cfg: ModelConfig, prefix: str, names: Mapping[str, str]
                 ) -> tuple[tuple[dict[str, TensorSpec], ...], ...]:
    """The tensors of all experts.

    Parameters
    ----------
    prefix : str
        Of an expert's names, with ``{layer}`` and ``{expert}``.
    names : mapping
        "gate", "up" and "down" to what follows the prefix.
    """
    wide, hidden = cfg.experts.ffn_size, cfg.hidden_size
    shapes = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}

    def each(layer: int, number: int) -> dict[str, TensorSpec]:
        start = prefix.format(layer=layer, expert=number)
        return {short: TensorSpec(start + names[short], shape) for short, shape in shapes.items()}

    return tuple(tuple(each(layer, number) for number in range(cfg.experts.count))
                 for layer in range(cfg.num_layers))


def route(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations, *, out: Tensor
          ) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row, in float32.

    Parameters
    ----------
    w : mapping
        With ``ln2`` [hidden] and ``router`` [experts, hidden].
    x : Tensor [rows, hidden]
    out : Tensor [rows, hidden]
        Gets the normed x, which is what experts take.

    Returns
    -------
    ids : int64 Tensor [rows, per_token]
    shares : float32 Tensor [rows, per_token]
        What each expert's output is multiplied with.
    """
    do.rms_norm(x, w["ln2"], eps=cfg.norm_eps, out=out)
    logits = F.linear(out.float(), w["router"].float())
    shares, ids = logits.softmax(-1).topk(cfg.experts.per_token, dim=-1)
    if cfg.experts.normalise:
        shares /= shares.sum(-1, keepdim=True)
    return ids, shares


def expert(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations) -> Tensor:
    """``down(act(gate(x)) * up(x))`` of x [rows, hidden], in a buffer of `do`."""
    return _gated(cfg, [w[name] for name in ("gate", "up", "down")], x, do)


def shared(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations) -> Tensor:
    """The expert of every row, behind the sigmoid of its gate: float32 [rows, hidden]."""
    out = _gated(cfg, [w[f"shared_{name}"] for name in ("gate", "up", "down")], x, do)
    return F.linear(x.float(), w["shared_router"].float()).sigmoid() * out


def _gated(cfg: ModelConfig, matrices: list[Tensor], x: Tensor, do: Operations) -> Tensor:
    gate, up, down = matrices
    wide = [do.get(f"expert's {name}", (len(x), len(gate)), x.dtype) for name in ("gate", "up")]
    for weight, out in zip((gate, up), wide, strict=True):
        do.linear(x, weight, None, out=out)
    do.activate_(wide[0], cfg.activation, wide[1])
    out = do.get("expert's output", (len(x), cfg.hidden_size), x.dtype)
    do.linear(wide[0], down, None, out=out)
    return out
