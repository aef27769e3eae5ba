"""GPT-NeoX (arXiv 2204.06745) and Pythia: partial rotation, parallel residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexgen_h2o.models.decoder import Decoder, linear_specs, norm_specs, normed, row_blocks
from flexgen_h2o.models.fields import Fields, first
from flexgen_h2o.models.model_config import ModelConfig, ModelWeights, TensorSpec
from flexgen_h2o.models.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.layers import Operations


class GptNeoX(Decoder):
    DEFAULTS = {
        "gpt_neox": {
            "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44,
            "intermediate_size": 24576, "num_attention_heads": 64,
            "max_position_embeddings": 2048, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
            "attention_bias": True, "use_parallel_residual": True,
            "rotary_emb_base": 10000.0, "rotary_pct": 0.25,
            "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2,
        },
    }
    # Checkpoints saved from the bare model lack "gpt_neox."; transformers 5 names the output matrix
    # lm_head in memory, but saves it as embed_out.
    prefixes = (("gpt_neox.", ""), ("embed_out.", "lm_head."))

    def read(self, f: Fields) -> ModelConfig:
        # transformers 4 wrote both keys and used rotary_emb_base.
        theta = first(f.values.get("rotary_emb_base"), f.values.get("rope_theta"),
                      f.raw("rotary_emb_base"))
        bias = f.flag("attention_bias")
        return ModelConfig(
            **f.common("gpt_neox", grouped=False),
            ffn_size=f.count("intermediate_size"),
            activation=f.value(str, "hidden_act"),
            norm_eps=f.number("layer_norm_eps"),
            attention_bias=bias,
            out_bias=bias,
            mlp_bias=True,
            rope=read_rope(f, theta=theta, partial=True),
            parallel_residual=f.flag("use_parallel_residual"),
        )

    def weights(self, cfg: ModelConfig) -> ModelWeights:
        hidden = cfg.hidden_size
        table = (cfg.vocab_size, hidden)
        tokens = TensorSpec("gpt_neox.embed_in.weight", table)
        matrix = tokens if cfg.tie_word_embeddings else TensorSpec("embed_out.weight", table)
        head = norm_specs("norm", "gpt_neox.final_layer_norm", hidden, True) | {"lm_head": matrix}
        layers = tuple(self.layer_specs(cfg, f"gpt_neox.layers.{i}.")
                       for i in range(cfg.num_layers))
        return ModelWeights({"tokens": tokens}, layers, head, tables=("tokens",),
                            mlp=("ln2", "fc1", "fc2"))

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        hidden, ffn, bias = cfg.hidden_size, cfg.ffn_size, cfg.attention_bias
        out = linear_specs("out", f"{prefix}attention.dense", (hidden, cfg.q_size), bias)
        # With a parallel residual `attention_output` computes the MLP first.
        before, after = ({}, out) if cfg.parallel_residual else (out, {})
        return {
            **norm_specs("ln1", f"{prefix}input_layernorm", hidden, True),
            **norm_specs("ln2", f"{prefix}post_attention_layernorm", hidden, True),
            **linear_specs("qkv", f"{prefix}attention.query_key_value", (3 * cfg.q_size, hidden),
                           bias),
            **before,
            **linear_specs("fc1", f"{prefix}mlp.dense_h_to_4h", (ffn, hidden), cfg.mlp_bias),
            **linear_specs("fc2", f"{prefix}mlp.dense_4h_to_h", (hidden, ffn), cfg.mlp_bias),
            **after,
        }

    def attention_inputs(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         ops: Operations) -> tuple[Tensor, Tensor, Tensor]:
        # The fused matrix gives each head's query, key and value in turn; the results are strided.
        qkv = ops.get("qkv", (len(x), cfg.num_heads, 3 * cfg.head_dim), x.dtype)
        for block in row_blocks(len(x)):
            source = normed(cfg, w, "ln1", x[block], ops)
            ops.linear(source, w["qkv"], w.get("qkv_bias"), out=qkv[block].view(len(source), -1))
        return qkv.split(cfg.head_dim, dim=-1)

    def mlp(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, ops: Operations) -> Tensor:
        for block in row_blocks(len(x)):
            source = normed(cfg, w, "ln2", x[block], ops)
            wide = ops.get("ffn", (len(source), cfg.ffn_size), x.dtype)
            ops.linear(source, w["fc1"], w.get("fc1_bias"), out=wide)
            ops.add_linear_(x[block], ops.activate_(wide, cfg.activation), w["fc2"],
                            w.get("fc2_bias"))
        return x


FAMILY = GptNeoX()
