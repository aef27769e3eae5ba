"""GPT-NeoX and StableLM: partial rotation, layer norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexgen_h2o.models.decoder import Decoder, linear_specs, norm_specs, normed, row_blocks
from flexgen_h2o.models.fields import Fields, first
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope
from flexgen_h2o.models.tensors import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.layers import Operations


class GptNeoX(Decoder):
    """GPT-NeoX (arXiv 2204.06745) and Pythia: a parallel residual, fused q, k and v."""

    DEFAULTS = {
        "gpt_neox": {
            "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44,
            "intermediate_size": 24576, "num_attention_heads": 64, "hidden_act": "gelu",
            "layer_norm_eps": 1e-5, "attention_bias": True, "use_parallel_residual": True,
            "rotary_emb_base": 10000.0, "rotary_pct": 0.25, "bos_token_id": 0, "eos_token_id": 2,
        },
    }
    # Checkpoints saved from the bare model lack "gpt_neox."; transformers 5 names the output matrix
    # lm_head in memory, but saves it as embed_out.
    prefixes = (("gpt_neox.", ""), ("embed_out.", "lm_head."))
    embedding, final_norm, output, layers = (
        "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out", "gpt_neox.layers")
    norm_bias = True

    def read(self, f: Fields) -> ModelConfig:
        # transformers 4 wrote both keys and used rotary_emb_base.
        theta = first(f.values.get("rotary_emb_base"), f.values.get("rope_theta"),
                      f.raw("rotary_emb_base"))
        bias = f.flag("attention_bias")
        return ModelConfig(
            **f.sizes(grouped=False),
            ffn_size=f.count("intermediate_size"),
            activation=f.value(str, "hidden_act"),
            norm_eps=f.number("layer_norm_eps"),
            attention_bias=bias,
            out_bias=bias,
            mlp_bias=True,
            rope=read_rope(f, theta=theta, partial=True),
            parallel_residual=f.flag("use_parallel_residual"),
        )

    def attention_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        name, hidden, bias = f"{prefix}attention.", cfg.hidden_size, cfg.attention_bias
        return {**linear_specs("qkv", f"{name}query_key_value", (3 * cfg.q_size, hidden), bias),
                **linear_specs("out", f"{name}dense", (hidden, cfg.q_size), bias)}

    def mlp_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        name, hidden, ffn = f"{prefix}mlp.dense", cfg.hidden_size, cfg.ffn_size
        return {**linear_specs("up", f"{name}_h_to_4h", (ffn, hidden), cfg.mlp_bias),
                **linear_specs("down", f"{name}_4h_to_h", (hidden, ffn), cfg.mlp_bias)}

    def attention_inputs(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         ops: Operations) -> tuple[Tensor, Tensor, Tensor]:
        # The fused matrix gives each head's query, key and value in turn; the results are strided.
        qkv = ops.get("qkv", (len(x), cfg.num_heads, 3 * cfg.head_dim), x.dtype)
        for block in row_blocks(len(x)):
            source = normed(cfg, w, "ln1", x[block], ops)
            ops.linear(source, w["qkv"], w.get("qkv_bias"), out=qkv[block].view(len(source), -1))
        return qkv.split(cfg.head_dim, dim=-1)


class StableLm(Decoder):
    """StableLM 3B and StableLM 2 (arXiv 2402.17834).

    StableLM 2 12B has separate norms for each query and key head, and a parallel residual.
    """

    DEFAULTS = {
        "stablelm": {
            "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912,
            "num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25, "use_qkv_bias": False, "qk_layernorm": False,
            "use_parallel_residual": False, "bos_token_id": 0, "eos_token_id": 0,
        },
    }
    norm_bias = True

    def read(self, f: Fields) -> ModelConfig:
        rope = read_rope(f, partial=True)
        common = self.common(f, rope, eps="layer_norm_eps", bias="use_qkv_bias")
        return ModelConfig(
            **common | {"out_bias": False},
            qk_norm=f.flag("qk_layernorm"),
            parallel_residual=f.flag("use_parallel_residual"),
        )

    def layer_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().layer_norm_specs(cfg, prefix)
        return {short: spec for short, spec in specs.items()
                if not (cfg.parallel_residual and short.startswith("ln2"))}

    def qk_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for name, heads in (("q", cfg.num_heads), ("k", cfg.num_kv_heads)) if cfg.qk_norm else ():
            for head in range(heads):
                specs |= norm_specs(f"{name}_norm{head}",
                                    f"{prefix}self_attn.{name}_layernorm.norms.{head}",
                                    cfg.head_dim)
        return specs
