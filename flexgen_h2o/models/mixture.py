"""Mixtures of experts (arXiv 1701.06538): tables, router, experts and a shared one, of any family.

A family with experts has these beside what every family has, and `mlp` only if some of its layers
have no experts; the first half of a layer with experts has the norm "router_norm" and the router
"router", the second one the shared expert, if there is one:

    route(cfg, w, x, do, out) -> ids, shares     the experts of each row, and the normed x in `out`
    expert(cfg, w, x, do) -> y                   of one expert's tensors; x is normed
    shared(cfg, w, x, do) -> y                   of the layer's second half
    views(cfg) -> views                          where stacked checkpoints have each expert's tensor

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.experts import ExpertsConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.decoder import attention_specs, mlp_specs, model_specs, norm_specs
from flexgen_h2o.models.fields import Fields, first
from flexgen_h2o.models.model_config import ModelConfig, ModelWeights, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.checkpoint import View
    from flexgen_h2o.models.layers import Operations

MATRICES = {"gate": "gate_proj.weight", "up": "up_proj.weight", "down": "down_proj.weight"}
"""An expert's tensors, as most checkpoints call them."""
_MOST_EXPERTS = 1 << 16  # each has a place in tables; the largest of published models have 24,000
SHARED = ("shared_gate", "shared_up", "shared_down", "shared_router")


def read_experts(f: Fields, *, width: str = "moe_intermediate_size", normalise: bool | None = None,
                 shared: str | None = None) -> ExpertsConfig:
    """The experts of a config.json.

    Parameters
    ----------
    f : Fields
    width : str
        The key of an expert's width.
    normalise : bool, optional
        The weights of a token's experts are made to sum to 1; None: as norm_topk_prob says.
    shared : str, optional
        The key of the shared expert's width, where there is one.

    Raises
    ------
    UserError
        A token goes to more experts than there are.
    """
    # transformers 5 saves either under the other's name.
    given = [key for key in ("num_experts", "num_local_experts") if f.values.get(key)]
    count = first(*given, *(key for key in ("num_experts", "num_local_experts") if f.raw(key)))
    experts = ExpertsConfig(
        f.count(count or "num_experts"), f.count("num_experts_per_tok"), f.count(width),
        normalise=f.flag("norm_topk_prob") if normalise is None else normalise,
        shared_ffn_size=f.count(shared) if shared else 0)
    every = experts.count * f.count("num_hidden_layers")
    if every > _MOST_EXPERTS:
        raise UserError(f"{f.name}: {every} experts in all layers are more than the "
                        f"{_MOST_EXPERTS} that are supported; is config.json damaged?")
    if experts.per_token > experts.count:
        raise UserError(f"{f.name}: config value num_experts_per_tok must be at most the "
                        f"{experts.count} experts, got {experts.per_token}")
    return experts


def read_dense_layers(f: Fields) -> tuple[bool, ...]:
    """True for each layer of Qwen's mixtures that has an MLP and no experts.

    Those that mlp_only_layers names, and of `decoder_sparse_step` in turn all but the last; empty
    where there are none.
    """
    named = f.raw("mlp_only_layers") or []
    alone = set(f.fit(list[int], list(named) if isinstance(named, tuple) else named,
                      "mlp_only_layers"))
    step = f.count_or("decoder_sparse_step", 1)
    dense = tuple(layer in alone or (layer + 1) % step > 0
                  for layer in range(f.count("num_hidden_layers")))
    return dense if any(dense) else ()


def mixture_specs(cfg: ModelConfig, *, block: str = "mlp", names: Mapping[str, str] = MATRICES,
                  head_norms: tuple[int, int] | None = None) -> ModelWeights:
    """The tensors of a model whose layers are those of LLaMA but for the experts that most have.

    Parameters
    ----------
    block : str
        What a checkpoint calls the mixture of a layer.
    names : mapping
        An expert's tensors by short name, as it calls them.
    head_norms : (width for queries, width for keys), optional
        Of the norms of queries and keys, where there are any.
    """
    hidden, experts = cfg.hidden_size, cfg.experts

    def layer(prefix: str) -> dict[str, TensorSpec]:
        specs = {**norm_specs("ln1", f"{prefix}input_layernorm", hidden),
                 **attention_specs(cfg, prefix)}
        for name, width in zip(("q_norm", "k_norm"), head_norms or (), strict=False):
            specs |= norm_specs(name, f"{prefix}self_attn.{name}", width)
        after = f"{prefix}post_attention_layernorm"
        if prefix in dense:
            return specs | norm_specs("ln2", after, hidden) | mlp_specs(cfg, prefix)
        specs |= norm_specs("router_norm", after, hidden)
        specs["router"] = TensorSpec(f"{prefix}{block}.gate.weight", (experts.count, hidden))
        if experts.shared_ffn_size:
            specs["shared_router"] = TensorSpec(f"{prefix}{block}.shared_expert_gate.weight",
                                                (1, hidden))
            for short, shape in _shapes(experts.shared_ffn_size, hidden).items():
                specs[f"shared_{short}"] = TensorSpec(
                    f"{prefix}{block}.shared_expert.{names[short]}", shape)
        return specs

    prefixes = [f"model.layers.{place}." for place in range(cfg.num_layers)]
    dense = {prefix for place, prefix in enumerate(prefixes) if not cfg.has_experts(place)}
    every = tuple(tuple(
        {short: TensorSpec(f"{prefix}{block}.experts.{number}.{names[short]}", shape)
         for short, shape in _shapes(experts.ffn_size, hidden).items()}
        for number in range(0 if prefix in dense else experts.count)) for prefix in prefixes)
    specs = model_specs(cfg, layer)
    return replace(specs, mlp=specs.mlp + SHARED, experts=every)


def _shapes(wide: int, hidden: int) -> dict[str, tuple[int, int]]:
    return {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}


def views(cfg: ModelConfig) -> dict[str, Sequence[View]]:
    """Places of each expert's tensors in checkpoints that stack all experts of a layer."""
    from flexgen_h2o.models.checkpoint import View  # only now: it loads torch

    found: dict[str, Sequence[View]] = {}
    for place, layer in enumerate(cfg.weights.experts):
        stacks = [f"{start}layers.{place}.mlp.experts." for start in ("model.", "")]
        for number, specs in enumerate(layer):
            wide = specs["gate"].shape[0]
            for short, tensor, rows in (("gate", "gate_up_proj", range(wide)),
                                        ("up", "gate_up_proj", range(wide, 2 * wide)),
                                        ("down", "down_proj", None)):
                found[specs[short].name] = tuple(
                    View(stack + tensor, entry=number, rows=rows) for stack in stacks)
    return found


def route(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations, *, out: Tensor
          ) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row, in float32.

    Parameters
    ----------
    w : mapping
        With ``router_norm`` [hidden], ``router`` [experts, hidden] and maybe ``router_bias``
        [experts].
    x : Tensor [rows, hidden]
    out : Tensor [rows, hidden]
        Gets the normed x, which is what experts take.

    Returns
    -------
    ids : int64 Tensor [rows, per_token]
    shares : float32 Tensor [rows, per_token]
        What each expert's output is multiplied with.
    """
    do.rms_norm(x, w["router_norm"], eps=cfg.norm_eps, out=out)
    return do.route(out, w["router"], w.get("router_bias"), each=cfg.experts.per_token,
                    normalise=cfg.experts.normalise)


def expert(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations) -> Tensor:
    """``down(act(gate(x)) * up(x))`` of x [rows, hidden], in a buffer of `do`."""
    return _gated(cfg, [w[name] for name in ("gate", "up", "down")], x, do)


def shared(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations) -> Tensor:
    """The expert of every row, behind the sigmoid of its gate: float32 [rows, hidden]."""
    out = _gated(cfg, [w[f"shared_{name}"] for name in ("gate", "up", "down")], x, do)
    return (x.float() @ w["shared_router"].float().t()).sigmoid() * out


def _gated(cfg: ModelConfig, matrices: Sequence[Tensor], x: Tensor, do: Operations) -> Tensor:
    gate, up, down = matrices
    wide = [do.get(f"expert's {name}", (len(x), len(gate)), x.dtype) for name in ("gate", "up")]
    for weight, out in zip((gate, up), wide, strict=True):
        do.linear(x, weight, None, out=out)
    do.activate_(wide[0], cfg.activation, wide[1])
    out = do.get("expert's output", (len(x), cfg.hidden_size), x.dtype)
    do.linear(wide[0], down, None, out=out)
    return out
