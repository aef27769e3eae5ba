"""LLaMA, and models that differ from it in positions, scales, experts or activation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.decoder import Decoder, layer_number, normed, product, row_blocks
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import nope, read_rope
from flexgen_h2o.models.tensors import ModelWeights, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.checkpoint import View
    from flexgen_h2o.models.layers import Operations


class Llama(Decoder):
    """LLaMA 1, 2, 3 (arXiv 2302.13971), and Mistral and SmolLM2, which share the architecture."""

    DEFAULTS = {
        "llama": {"bos_token_id": 1, "eos_token_id": 2},
        "mistral": {
            "intermediate_size": 14336, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "sliding_window": 4096, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        mistral = f.values["model_type"] == "mistral"  # has a window, and never a bias
        return ModelConfig(
            **self.common(f, bias="" if mistral else "attention_bias"),
            mlp_bias=not mistral and f.flag("mlp_bias"),
            # A Mistral with layer_types is a Ministral in transformers.
            attention=f.attention_variants(f.local_layers(lambda layer: True)) if mistral else (),
        )


class SmolLM3(Decoder):
    """SmolLM3: LLaMA without rotation in every fourth layer (NoPE, arXiv 2501.18795)."""

    DEFAULTS = {
        "smollm3": {
            "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 4,
            "max_position_embeddings": 32768, "rope_theta": 2000000.0,
            "no_rope_layer_interval": 4, "use_sliding_window": False,
            "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        rotated, windows = _rotated_layers(f), f.flag("use_sliding_window")
        local = f.local_layers(lambda layer: windows and not rotated[layer])
        return ModelConfig(
            **self.common(f),
            **nope([not rotates for rotates in rotated]),
            mlp_bias=f.flag("mlp_bias"),
            attention=f.attention_variants(local) if windows else (),
        )


def _rotated_layers(f: Fields) -> list[bool]:
    """Return whether each layer rotates: despite its name, no_rope_layers has a 1 for these."""
    layers, listed = f.count("num_hidden_layers"), f.raw("no_rope_layers")
    if not listed:
        interval = f.count("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    rotated = f.fit(list[int], listed, "no_rope_layers")
    if len(rotated) < layers:
        raise UserError(f"{f.name}: config value no_rope_layers must have a number for each of "
                        f"{layers} layers, got {len(rotated)}")
    return [bool(rotates) for rotates in rotated[:layers]]


class Llama4(MixtureDecoder):
    """The text models of Llama 4: a shared and one routed expert per token.

    The context ends where attention in chunks begins, and the scale of queries that grows with the
    position (arXiv 2501.19399). Before, both change nothing. Some layers do not rotate.

    In layers whose query and key heads are normed, "q" and "k" are "normed_q" and "normed_k".
    """

    DEFAULTS = {
        "llama4_text": {
            "vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 48,
            "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "no_rope_layer_interval": 4, "use_qk_norm": True, "attention_chunk_size": 8192,
            "attn_temperature_tuning": True, "floor_scale": 8192, "num_experts_per_tok": 1,
            "num_local_experts": 16, "interleave_moe_layer_step": 1, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    }
    block = "feed_forward"
    router = "router"
    shared_expert = "feed_forward.shared_expert"
    stacks = (("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),)
    transposed_stacks = True

    def read(self, f: Fields) -> ModelConfig:
        common, rotated = self.common(f), _rotated_layers(f)
        experts = read_experts(f, width="intermediate_size",
                               router=RouterConfig("sigmoid", normalize=False),
                               shared_ffn_size=f.count("intermediate_size"))
        if experts.per_token > 1:
            raise UserError(f"{f.name}: num_experts_per_tok = {experts.per_token} is not supported "
                            "in a llama4_text model (1 is)")
        return ModelConfig(
            **common | {"ffn_size": f.count("intermediate_size_mlp"),
                        "max_positions": min(common["max_positions"], *_ends(f, rotated))},
            **nope([not rotates for rotates in rotated]),
            rope_interleaved=True,
            qk_norm=f.flag("use_qk_norm"),
            experts=replace(experts, scale_inputs=True),
            dense_layers=_dense_layers(f),
        )

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().layer_specs(cfg, prefix)
        if not cfg.qk_norm or cfg.rope_number(layer_number(prefix)):
            return specs
        return {f"normed_{short}" if short.split("_")[0] in ("q", "k") else short: spec
                for short, spec in specs.items()}

    def qk_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        return {}  # they have no weights

    def attention_inputs(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         ops: Operations) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values; a rotation does not change norms, so it comes later."""
        named = {short.removeprefix("normed_"): weight for short, weight in w.items()}
        q, k, v = super().attention_inputs(cfg, named, x, ops)
        for heads in (q, k) if "normed_q" in w else ():
            rows = heads.view(-1, cfg.head_dim)
            ops.rms_norm(rows, None, eps=cfg.norm_eps, out=rows)
        return q, k, v


def _ends(f: Fields, rotated: list[bool]) -> list[int]:
    """Return the positions at which chunks and the scale of queries begin."""
    ends = [f.count("max_position_embeddings")]
    if f.values.get("attention_chunk_size", 0) is not None:
        ends.append(f.count("attention_chunk_size"))
    if f.raw("attn_temperature_tuning") and not all(rotated):
        ends.append(f.count("floor_scale") - 1)
    return ends


def _dense_layers(f: Fields) -> tuple[bool, ...]:
    """Return for each layer whether it has an MLP."""
    layers, step, listed = (f.count("num_hidden_layers"), f.count("interleave_moe_layer_step"),
                            f.raw("moe_layers"))
    mixtures = (range(step - 1, layers, step) if listed is None
                else f.fit(list[int], listed, "moe_layers"))
    return tuple(layer not in mixtures for layer in range(layers))


class Granite(Decoder):
    """Granite 3 (arXiv 2408.13359): LLaMA with scaled embeddings, residuals, attention, logits."""

    DEFAULTS = {
        "granite": {
            "bos_token_id": 1, "eos_token_id": 2, "embedding_multiplier": 1.0,
            "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f),
            mlp_bias=f.flag("mlp_bias"),
            embed_scale=f.number("embedding_multiplier"),
            residual_scale=f.number("residual_multiplier"),
            logit_divisor=f.number("logits_scaling"),
            attention=f.attention_variants(False, scale=f.number("attention_multiplier")),
        )


_GRANITE_MOE = {**Granite.DEFAULTS["granite"], "num_experts_per_tok": 2, "num_local_experts": 8}


class GraniteMoe(MixtureDecoder):
    """Granite with a mixture of experts, also with a shared expert."""

    DEFAULTS = {"granitemoe": _GRANITE_MOE,
                "granitemoeshared": {**_GRANITE_MOE, "shared_intermediate_size": 0}}
    block = "block_sparse_moe"
    router = "router.layer"
    shared_expert = "shared_mlp"
    stacks = (("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
              ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"))
    renames = ((".router.layer.", ".router."),)

    def read(self, f: Fields) -> ModelConfig:
        shared = f.raw("shared_intermediate_size")
        experts = read_experts(f, width="intermediate_size", router=RouterConfig(),
                               shared_ffn_size=f.count("shared_intermediate_size") if shared else 0)
        return replace(Granite().read(f), experts=experts)

    def views(self, cfg: ModelConfig) -> dict[str, Sequence[View]]:
        views, ffn = super().views(cfg), cfg.experts.shared_ffn_size
        for layer, specs in enumerate(cfg.weights.layers if ffn else ()):
            for short, tensor, rows in (("gate", "input_linear", range(ffn)),
                                        ("up", "input_linear", range(ffn, 2 * ffn)),
                                        ("down", "output_linear", None)):
                views[specs[f"shared_{short}"].name] = self.views_of(
                    f"model.layers.{layer}.shared_mlp.{tensor}.weight", rows=rows)
        return views


_ALPHAS = ("alpha_p", "alpha_n")


class Apertus(Decoder):
    """Apertus (arXiv 2509.14233): LLaMA with norms of heads, and an MLP without a gate.

    The activation of the MLP, xIELU, has learned parameters.
    """

    DEFAULTS = {
        "apertus": {
            "vocab_size": 131072, "intermediate_size": 14336, "max_position_embeddings": 65536,
            "hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12000000.0,
            "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0},
        },
    }
    norms = {"ln1": "attention_layernorm", "ln2": "feedforward_layernorm"}

    def read(self, f: Fields) -> ModelConfig:
        rope = f.mapping("rope_scaling") or f.mapping("rope_parameters")
        return ModelConfig(**self.common(f, read_rope(f, parameters=rope)), qk_norm=True)

    def weights(self, cfg: ModelConfig) -> ModelWeights:
        weights = super().weights(cfg)
        return replace(weights, mlp=weights.mlp + _ALPHAS)

    def mlp_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().mlp_specs(cfg, prefix)
        del specs["gate"]
        return specs | {name: TensorSpec(f"{prefix}mlp.act_fn.{name}", (1,)) for name in _ALPHAS}

    def mlp(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, ops: Operations) -> Tensor:
        """Add ``down(xielu(up(norm(x))))`` to x [rows, hidden] and return x."""
        for block in row_blocks(len(x)):
            source = normed(cfg, w, "ln2", x[block], ops)
            wide = product(w, "up", source, ops)
            ops.xielu_(wide, *(w[name] for name in _ALPHAS))
            ops.add_linear_(x[block], wide, w["down"], None)
        return x
