"""Gemma 2 (arXiv 2408.00118) and the text model of Gemma 3 (arXiv 2503.19786).

Windows in some layers, norms before and after attention and MLP, soft caps, scaled embeddings.
"""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_layer_ropes, read_rope

_GEMMA = {
    "hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "bos_token_id": 2, "eos_token_id": 1,
}


class Gemma(Decoder):
    DEFAULTS = {
        "gemma2": {**_GEMMA, "vocab_size": 256000, "max_position_embeddings": 8192,
                   "sliding_window_pattern": 2, "final_logit_softcapping": 30.0,
                   "attn_logit_softcapping": 50.0},
        "gemma3_text": {
            **_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072,
            "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
    }
    norms = {"ln1": "input_layernorm", "post1": "post_attention_layernorm",
             "ln2": "pre_feedforward_layernorm", "post2": "post_feedforward_layernorm"}

    def read(self, f: Fields) -> ModelConfig:
        f.refuse("use_bidirectional_attention")
        pattern = f.count("sliding_window_pattern")
        local = f.local_layers(lambda layer: bool((layer + 1) % pattern))
        gemma3 = f.values["model_type"] == "gemma3_text"
        rope, local_rope = (read_layer_ropes(f, local_theta=f.raw("rope_local_base_freq"))
                            if gemma3 else (read_rope(f), None))
        return ModelConfig(
            **self.common(f, rope, activation="hidden_activation"),
            norm_offset=1.0,  # weights are stored minus one
            qk_norm=gemma3,
            embed_scale=f.count("hidden_size") ** 0.5,
            # Gemma 3 also has attn_logit_softcapping, which transformers ignores.
            logit_softcap=f.number_or("final_logit_softcapping", 0.0),
            other_rope=local_rope,
            other_rope_layers=local if gemma3 else (),
            attention=f.attention_variants(
                local, scale=f.number("query_pre_attn_scalar") ** -0.5,
                softcap=0.0 if gemma3 else f.number_or("attn_logit_softcapping", 0.0)),
        )


FAMILY = Gemma()
