"""Gemma 2 (arXiv 2408.00118) and the text model of Gemma 3 (arXiv 2503.19786).

Windows in some layers, norms before and after attention and MLP, soft caps, scaled embeddings.
"""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder, attention_specs, mlp_specs, norm_specs
from flexgen_h2o.models.fields import LAYER_TYPES, Fields
from flexgen_h2o.models.model_config import ModelConfig, TensorSpec
from flexgen_h2o.models.rope import RopeConfig, read_rope

_GEMMA = {
    "hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "bos_token_id": 2, "eos_token_id": 1,
}
_GEMMA3 = {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072,
           "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}


class Gemma(Decoder):
    DEFAULTS = {
        "gemma2": {**_GEMMA, "vocab_size": 256000, "max_position_embeddings": 8192,
                   "rope_theta": 10000.0, "sliding_window_pattern": 2,
                   "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        "gemma3_text": _GEMMA3,
        "gemma3": _GEMMA3,
    }
    # Checkpoints with a vision model have one of two prefixes.
    prefixes = (("model.", ""), ("model.", "language_model.model."),
                ("model.", "model.language_model."), ("lm_head.", "language_model.lm_head."))

    def read(self, f: Fields) -> ModelConfig:
        """Return the configuration of a config.json; for a vision model, of its text part."""
        if f.values["model_type"] == "gemma3":
            f = f.inside("text_config")
        f.refuse("use_bidirectional_attention")
        pattern = f.count("sliding_window_pattern")
        local = f.local_layers(lambda layer: bool((layer + 1) % pattern))
        rope, local_rope = _ropes(f)
        common = f.decoder("gemma", rope, activation="hidden_activation")
        return ModelConfig(
            **common,
            norm_offset=1.0,  # weights are stored minus one
            attention_bias=f.flag("attention_bias"),
            out_bias=f.flag("attention_bias"),
            qk_norm=local_rope is not None,
            embed_scale=common["hidden_size"] ** 0.5,
            # Gemma 3 also has attn_logit_softcapping, which transformers ignores.
            logit_softcap=f.number_or("final_logit_softcapping", 0.0),
            local_rope=local_rope,
            local_layers=local if local_rope is not None else (),
            attention=f.attention_variants(
                local, scale=f.number("query_pre_attn_scalar") ** -0.5,
                softcap=0.0 if local_rope else f.number_or("attn_logit_softcapping", 0.0)),
        )

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        norms = {"ln1": "input_layernorm", "post1": "post_attention_layernorm",
                 "ln2": "pre_feedforward_layernorm", "post2": "post_feedforward_layernorm"}
        specs = {**attention_specs(cfg, prefix), **mlp_specs(cfg, prefix)}
        for short, name in norms.items():
            specs |= norm_specs(short, f"{prefix}{name}", cfg.hidden_size)
        return specs | self.qk_norm_specs(cfg, prefix)


def _ropes(f: Fields) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rope of global layers, and the rope of local layers if it differs."""
    if f.values["model_type"] == "gemma2":
        return read_rope(f), None
    parameters = f.mapping("rope_parameters")
    if not set(LAYER_TYPES) & set(parameters):  # transformers 4: scaling is of global layers alone
        parameters = {LAYER_TYPES[0]: f.mapping("rope_scaling") or parameters}
    global_rope, local_rope = (parameters.get(kind) or {} for kind in LAYER_TYPES)
    return (read_rope(f, parameters=global_rope),
            read_rope(f, parameters=local_rope, theta=f.raw("rope_local_base_freq")))


FAMILY = Gemma()
