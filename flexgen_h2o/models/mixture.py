"""The mixture-of-experts decoder (arXiv 1701.06538) that families share: router, experts, tables.

torch is imported with the first rows: the memory plan reads sizes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.layers import ExpertsConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.decoder import Decoder, attention_specs, mlp_specs, norm_specs
from flexgen_h2o.models.fields import Fields, first
from flexgen_h2o.models.model_config import ModelConfig, ModelWeights, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.checkpoint import View
    from flexgen_h2o.models.layers import Operations

MATRICES = ("gate", "up", "down")
"""Short names of an expert's matrices, in the order of their use."""
_MAX_EXPERTS = 1 << 16  # each has a place in tables; the largest of published models have 24,000


class MixtureDecoder(Decoder):
    """A family whose layers have experts in place of an MLP, except for `ModelConfig.dense_layers`.

    The first half of a layer with experts has the norm "router_norm" and the router "router", the
    second half the shared expert, if there is one.

    Attributes
    ----------
    block : str
        Name of a layer's mixture in checkpoints.
    expert_names : mapping of str to str
        Names of an expert's matrices in checkpoints, by short name.
    """

    block = "mlp"
    expert_names: Mapping[str, str] = {name: f"{name}_proj" for name in MATRICES}

    def weights(self, cfg: ModelConfig) -> ModelWeights:
        weights = super().weights(cfg)
        experts = tuple(
            tuple(self.expert_specs(cfg, f"model.layers.{layer}.{self.block}.experts.{number}.")
                  for number in range(cfg.experts.count if cfg.has_experts(layer) else 0))
            for layer in range(cfg.num_layers))
        shared = tuple(f"shared_{name}" for name in (*MATRICES, "router"))
        return replace(weights, mlp=weights.mlp + shared, experts=experts)

    def expert_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        """Return the tensors of one expert, whose names begin with `prefix`."""
        return self._gated_specs(prefix, cfg.experts.ffn_size, cfg.hidden_size)

    def _gated_specs(self, prefix: str, ffn: int, hidden: int) -> dict[str, TensorSpec]:
        return {name: TensorSpec(f"{prefix}{self.expert_names[name]}.weight",
                                 (hidden, ffn) if name == "down" else (ffn, hidden))
                for name in MATRICES}

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        hidden, experts = cfg.hidden_size, cfg.experts
        specs = {**norm_specs("ln1", f"{prefix}input_layernorm", hidden),
                 **attention_specs(cfg, prefix), **self.qk_norm_specs(cfg, prefix)}
        post = f"{prefix}post_attention_layernorm"
        if not cfg.has_experts(int(prefix.split(".")[2])):
            return specs | norm_specs("ln2", post, hidden) | mlp_specs(cfg, prefix)
        block = f"{prefix}{self.block}."
        specs |= norm_specs("router_norm", post, hidden)
        specs["router"] = TensorSpec(f"{block}gate.weight", (experts.count, hidden))
        if experts.shared_ffn_size:
            specs["shared_router"] = TensorSpec(f"{block}shared_expert_gate.weight", (1, hidden))
            shared = self._gated_specs(f"{block}shared_expert.", experts.shared_ffn_size, hidden)
            specs |= {f"shared_{name}": spec for name, spec in shared.items()}
        return specs

    def views(self, cfg: ModelConfig) -> dict[str, Sequence[View]]:
        """Return the place of each expert's matrices in checkpoints that stack those of a layer."""
        from flexgen_h2o.models.checkpoint import View  # here, because it imports torch

        views: dict[str, Sequence[View]] = {}
        for layer, experts in enumerate(cfg.weights.experts):
            stacks = [f"{start}layers.{layer}.mlp.experts." for start in ("model.", "")]
            for number, specs in enumerate(experts):
                ffn = specs["gate"].shape[0]
                for short, tensor, rows in (("gate", "gate_up_proj", range(ffn)),
                                            ("up", "gate_up_proj", range(ffn, 2 * ffn)),
                                            ("down", "down_proj", None)):
                    views[specs[short].name] = tuple(
                        View(stack + tensor, entry=number, rows=rows) for stack in stacks)
        return views

    def route(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, ops: Operations, *,
              out: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row, in float32.

        Parameters
        ----------
        w : mapping
            With ``router_norm`` [hidden], ``router`` [experts, hidden] and maybe ``router_bias``
            [experts].
        x : Tensor [rows, hidden]
        out : Tensor [rows, hidden]
            Receives the norm of x, which is the input of the experts.

        Returns
        -------
        ids : int64 Tensor [rows, per_token]
        routing_weights : float32 Tensor [rows, per_token]
            The weight of each expert's output.
        """
        ops.rms_norm(x, w["router_norm"], eps=cfg.norm_eps, out=out)
        return ops.route(out, w["router"], w.get("router_bias"), per_token=cfg.experts.per_token,
                         normalize=cfg.experts.normalize)

    def expert(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
               ops: Operations) -> Tensor:
        """Return ``down(act(gate(x)) * up(x))`` of one expert; x [rows, hidden] is normed."""
        return _gated(cfg, [w[name] for name in MATRICES], x, ops)

    def shared(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
               ops: Operations) -> Tensor:
        """Return the shared expert's output times its gate's sigmoid, float32 [rows, hidden]."""
        out = _gated(cfg, [w[f"shared_{name}"] for name in MATRICES], x, ops)
        return (x.float() @ w["shared_router"].float().t()).sigmoid() * out


def read_experts(f: Fields, *, width: str = "moe_intermediate_size", normalize: bool | None = None,
                 shared: str | None = None) -> ExpertsConfig:
    """Return the experts that a config.json describes.

    Parameters
    ----------
    width : str
        The key of an expert's width.
    normalize : bool, optional
        Whether the weights of a token's experts are divided by their sum. None: norm_topk_prob.
    shared : str, optional
        The key of the width of the shared expert, if there is one.

    Raises
    ------
    UserError
        There are too many experts, or fewer than a token is routed to.
    """
    # transformers 5 saves either under the other's name.
    keys = [key for key in ("num_experts", "num_local_experts") if f.values.get(key)]
    count = first(*keys, *(key for key in ("num_experts", "num_local_experts") if f.raw(key)))
    experts = ExpertsConfig(
        f.count(count or "num_experts"), f.count("num_experts_per_tok"), f.count(width),
        normalize=f.flag("norm_topk_prob") if normalize is None else normalize,
        shared_ffn_size=f.count(shared) if shared else 0)
    total = experts.count * f.count("num_hidden_layers")
    if total > _MAX_EXPERTS:
        raise UserError(f"{f.name}: {total} experts in all layers are more than the "
                        f"{_MAX_EXPERTS} that are supported; is config.json damaged?")
    if experts.per_token > experts.count:
        raise UserError(f"{f.name}: config value num_experts_per_tok must be at most the "
                        f"{experts.count} experts, got {experts.per_token}")
    return experts


def read_dense_layers(f: Fields) -> tuple[bool, ...]:
    """Return, for each layer of Qwen's mixtures, whether it has an MLP and no experts.

    mlp_only_layers lists such layers; of each `decoder_sparse_step` layers only the last has
    experts. Empty if all layers have experts.
    """
    value = f.raw("mlp_only_layers") or []
    mlp_only = set(f.fit(list[int], list(value) if isinstance(value, tuple) else value,
                         "mlp_only_layers"))
    step = f.count_or("decoder_sparse_step", 1)
    dense = tuple(layer in mlp_only or (layer + 1) % step > 0
                  for layer in range(f.count("num_hidden_layers")))
    return dense if any(dense) else ()


def _gated(cfg: ModelConfig, matrices: Sequence[Tensor], x: Tensor, ops: Operations) -> Tensor:
    gate, up, down = matrices
    wide = [ops.get(f"expert's {name}", (len(x), len(gate)), x.dtype) for name in ("gate", "up")]
    for weight, out in zip((gate, up), wide, strict=True):
        ops.linear(x, weight, None, out=out)
    ops.activate_(wide[0], cfg.activation, wide[1])
    out = ops.get("expert's output", (len(x), cfg.hidden_size), x.dtype)
    ops.linear(wide[0], down, None, out=out)
    return out
