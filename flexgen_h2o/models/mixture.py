"""The mixture-of-experts decoder (arXiv 1701.06538) that families share: router, experts, tables.

torch is imported with the first rows: the memory plan reads sizes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from flexgen_h2o.config.layers import ExpertsConfig, RouterConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.decoder import Decoder, layer_number, mlp_specs, norm
from flexgen_h2o.models.fields import Fields, first
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.tensors import ModelWeights, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.checkpoint import View
    from flexgen_h2o.models.layers import Operations

MATRICES = ("gate", "up", "down")
"""Short names of an expert's matrices, in the order of their use."""
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts; transformers 5 saves the first two under either name."""
_MAX_EXPERTS = 1 << 16  # each has a place in tables; the largest of published models have 24,000


class MixtureDecoder(Decoder):
    """A family whose layers have experts in place of an MLP, except for `ModelConfig.dense_layers`.

    The first half of a layer with experts has the norm "router_norm", if there is one, and the
    router "router". The second half has the shared expert and the norm "post2" of the output, if
    it has them.

    Attributes
    ----------
    block : str
        Name of a layer's mixture in checkpoints.
    router, correction : str
        Names in it of the router, and of the correction of scores if there is one.
    shared_expert : str
        Name of a layer's shared expert in checkpoints.
    gated_shared : bool
        Whether the shared expert's output is multiplied by the sigmoid of its own gate.
    stacks : tuple of (str, str)
        Names in a layer of the tensors that have gate and up, and down, of all experts; in memory
        transformers 5 has the first pair.
    transposed_stacks : bool
        Whether they are stored as [experts, inputs, outputs].
    renames : tuple of (str, str)
        Pairs (in checkpoints, in memory) of parts of names that transformers 5 changes.
    expert_names : mapping of str to str
        Names of an expert's matrices in checkpoints, by short name.
    """

    block = "mlp"
    router = "gate"
    correction = ""
    shared_expert = "mlp.shared_experts"
    gated_shared = False
    stacks: tuple[tuple[str, str], ...] = (
        ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)
    transposed_stacks = False
    renames: tuple[tuple[str, str], ...] = ()
    expert_names: Mapping[str, str] = {name: f"{name}_proj" for name in MATRICES}

    def weights(self, cfg: ModelConfig) -> ModelWeights:
        weights = super().weights(cfg)
        if cfg.experts is None:
            return weights
        experts = tuple(
            tuple(self.expert_specs(
                cfg, f"model.layers.{cfg.first_layer + layer}.{self.block}.experts.{number}.")
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

    def layer_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().layer_norm_specs(cfg, prefix)
        if not cfg.has_experts(layer_number(prefix)):
            return specs
        return {short.replace("ln2", "router_norm"): spec for short, spec in specs.items()}

    def mlp_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        """Return the MLP of one layer, or the router and the shared expert in its place."""
        if not cfg.has_experts(layer_number(prefix)):
            return mlp_specs(cfg, prefix, self.block)
        return {**self.router_specs(cfg, prefix), **self.shared_specs(cfg, prefix)}

    def router_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        """Return the router of a layer.

        With a correction it is always in float32, as in transformers.
        """
        count, block = cfg.experts.count, f"{prefix}{self.block}."
        specs = {"router": TensorSpec(f"{block}{self.router}.weight", (count, cfg.hidden_size),
                                      float32=bool(self.correction) or cfg.float32_routers)}
        if self.correction:
            specs["router_correction"] = TensorSpec(f"{block}{self.correction}", (count,),
                                                    float32=True)
        return specs

    def shared_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        """Return the shared expert of a layer; none unless the model has one."""
        hidden, name = cfg.hidden_size, f"{prefix}{self.shared_expert}"
        if not cfg.experts.shared_ffn_size:
            return {}
        gate = {"router": TensorSpec(f"{name}_gate.weight", (1, hidden))}
        specs = (gate if self.gated_shared else {}) | self._gated_specs(
            f"{name}.", cfg.experts.shared_ffn_size, hidden)
        return {f"shared_{short}": spec for short, spec in specs.items()}

    def aliases(self, name: str) -> tuple[str, ...]:
        other = name
        for saved, loaded in self.renames:
            other = other.replace(saved, loaded)
        return tuple(dict.fromkeys((*super().aliases(name), *super().aliases(other))))

    def views(self, cfg: ModelConfig) -> dict[str, Sequence[View]]:
        """Return the views of the experts, for checkpoints that stack all experts of a layer."""
        from flexgen_h2o.models.checkpoint import View  # here, because it imports torch

        views: dict[str, Sequence[View]] = {}
        for layer, experts in enumerate(cfg.weights.experts, cfg.first_layer):
            starts = self.aliases(f"model.layers.{layer}.")
            for number, specs in enumerate(experts):
                ffn = specs["gate"].shape[0]
                for short, tensor, rows in (("gate", 0, range(ffn)), ("up", 0, range(ffn, 2 * ffn)),
                                            ("down", 1, None)):
                    views[specs[short].name] = tuple(
                        View(start + stack[tensor], number, self.transposed_stacks, rows)
                        for stack in self.stacks for start in starts)
        return views

    def route(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, ops: Operations, *,
              out: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row, in float32.

        Parameters
        ----------
        w : mapping
            With ``router`` [experts, hidden] and maybe ``router_norm`` and ``router_norm_bias``
            [hidden], ``router_bias`` and ``router_correction`` [experts].
        x : Tensor [rows, hidden]
        out : Tensor [rows, hidden]
            Receives the norm of x, or x if there is none: the input of the experts.

        Returns
        -------
        ids : int64 Tensor [rows, per_token]
        routing_weights : float32 Tensor [rows, per_token]
            The weight of each expert's output.
        """
        if "router_norm" in w:
            norm(cfg, w, "router_norm", x, ops, out=out)
        else:
            ops.copy_(out, x)
        return ops.route(out, w["router"], w.get("router_bias"), w.get("router_correction"),
                         per_token=cfg.experts.per_token, config=cfg.experts.router)

    def expert(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
               ops: Operations) -> Tensor:
        """Return ``down(act(gate(x)) * up(x))`` of one expert; x [rows, hidden] is normed."""
        return _gated(cfg, [w[name] for name in MATRICES], x, ops)

    def add_experts(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, inputs: Tensor,
                    sums: Tensor, ops: Operations) -> None:
        """Add the output of the experts, and of the shared expert if there is one, to x.

        Parameters
        ----------
        w : mapping
            The second half of a layer.
        x, inputs : Tensor [rows, hidden]
            Hidden states, and `out` of `route`; at most `ROW_BLOCK` rows.
        sums : Tensor [rows, hidden]
            The weighted sums of experts' outputs, in a wider dtype; overwritten.
        """
        if cfg.experts.shared_ffn_size:
            sums += self.shared(cfg, w, inputs, ops)
        if "post2" in w:
            out = ops.get("normed", tuple(x.shape), x.dtype).copy_(sums)
            sums = norm(cfg, w, "post2", out, ops, out=out)
        ops.add_(x, sums, cfg.residual_scale)

    def shared(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
               ops: Operations) -> Tensor:
        """Return the shared expert's output, times its gate's sigmoid if it has one.

        Returns
        -------
        Tensor [rows, hidden]
            In float32 with a gate, otherwise in x's dtype.
        """
        out = _gated(cfg, [w[f"shared_{name}"] for name in MATRICES], x, ops)
        if "shared_router" not in w:
            return out
        gate = ops.linear(x.float(), w["shared_router"].float())
        return ops.sigmoid_(gate) * out


def read_experts(f: Fields, *, width: str = "moe_intermediate_size",
                 per_token: str = "num_experts_per_tok", router: RouterConfig | None = None,
                 shared_experts: str = "", shared_ffn_size: int = 0) -> ExpertsConfig:
    """Return the experts that a config.json describes.

    Parameters
    ----------
    width, per_token : str
        The keys of an expert's width and of the experts per token.
    router : RouterConfig, optional
        None: softmax scores, normalized by norm_topk_prob.
    shared_experts : str
        The key of the number of shared experts, each as wide as the others.
    shared_ffn_size : int
        Width of the shared expert if there is no key for it; 0: there is none.

    Raises
    ------
    UserError
        There are too many experts, or fewer than a token is routed to.
    """
    keys = [key for key in COUNTS if f.values.get(key)]
    count = f.count(first(*keys, *(key for key in COUNTS if f.raw(key))) or COUNTS[0])
    if router is None:
        router = RouterConfig(normalize=f.flag("norm_topk_prob"))
    if f.raw(shared_experts):
        shared_ffn_size = f.count(width) * f.count(shared_experts)
    experts = ExpertsConfig(count, f.count(per_token), f.count(width), router, shared_ffn_size)
    total = experts.count * f.count("num_hidden_layers")
    if total > _MAX_EXPERTS:
        raise UserError(f"{f.name}: {total} experts in all layers are more than the "
                        f"{_MAX_EXPERTS} that are supported; is config.json damaged?")
    groups = router.groups
    if count % groups or experts.per_token > count // groups * router.groups_per_token:
        of_groups = f" of {router.groups_per_token} of {groups} equal groups" if groups > 1 else ""
        raise UserError(f"{f.name}: config value {per_token} must be at most the {count} experts"
                        f"{of_groups}, got {experts.per_token}")
    return experts


def read_grouped_router(f: Fields) -> RouterConfig:
    """Return the router of DeepSeek V3 (arXiv 2412.19437, section 2.1.2) and its relatives."""
    return RouterConfig("sigmoid", normalize=f.flag("norm_topk_prob"),
                        scale=f.number("routed_scaling_factor"), groups=f.count("n_group"),
                        groups_per_token=f.count("topk_group"))


def read_grouped_experts(f: Fields, shared_experts: str = "n_shared_experts") -> dict[str, Any]:
    """Return the `ModelConfig` fields of experts as in DeepSeek V3, and of leading dense layers."""
    return {"experts": read_experts(f, router=read_grouped_router(f),
                                    shared_experts=shared_experts),
            "dense_layers": read_leading_dense(f)}


def leading_dense(f: Fields, key: str) -> tuple[bool, ...]:
    """Return, for each layer, whether it has an MLP; the value of a key is how many have."""
    dense = f.value(Annotated[int, Meta(ge=0)], key)
    return tuple(layer < dense for layer in range(f.count("num_hidden_layers")))


def read_leading_dense(f: Fields) -> tuple[bool, ...]:
    """Return, for each layer, whether it has an MLP.

    It follows from mlp_layer_types or, without this key, from first_k_dense_replace.
    """
    layers, kinds = f.count("num_hidden_layers"), f.raw("mlp_layer_types")
    if kinds is None:
        return leading_dense(f, "first_k_dense_replace")
    kinds = f.fit(list[str], list(kinds) if isinstance(kinds, tuple) else kinds, "mlp_layer_types")
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise UserError(f"{f.name}: config value mlp_layer_types must say dense or sparse for each "
                        f"of {layers} layers")
    return tuple(kind == "dense" for kind in kinds)


def read_dense_layers(f: Fields) -> tuple[bool, ...]:
    """Return, for each layer of Qwen's mixtures, whether it has an MLP and no experts.

    mlp_only_layers lists layers with an MLP; of each `decoder_sparse_step` layers only the last has
    experts.
    """
    value = f.raw("mlp_only_layers") or []
    mlp_only = set(f.fit(list[int], list(value) if isinstance(value, tuple) else value,
                         "mlp_only_layers"))
    step = f.count_or("decoder_sparse_step", 1)
    return tuple(layer in mlp_only or (layer + 1) % step > 0
                 for layer in range(f.count("num_hidden_layers")))


def _gated(cfg: ModelConfig, matrices: Sequence[Tensor], x: Tensor, ops: Operations) -> Tensor:
    gate, up, down = matrices
    wide = [ops.get(f"expert's {name}", (len(x), len(gate)), x.dtype) for name in ("gate", "up")]
    for weight, out in zip((gate, up), wide, strict=True):
        ops.linear(x, weight, None, out=out)
    ops.activate_(wide[0], cfg.activation, wide[1])
    out = ops.get("expert's output", (len(x), cfg.hidden_size), x.dtype)
    ops.linear(wide[0], down, None, out=out)
    return out
