"""SmolLM3: LLaMA without rotation in every fourth layer (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import nope


class SmolLM3(Decoder):
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
        rotated, windows = rotated_layers(f), f.flag("use_sliding_window")
        local = f.local_layers(lambda layer: windows and not rotated[layer])
        return ModelConfig(
            **self.common(f),
            **nope([not rotates for rotates in rotated]),
            mlp_bias=f.flag("mlp_bias"),
            attention=f.attention_variants(local) if windows else (),
        )


def rotated_layers(f: Fields) -> list[bool]:
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


FAMILY = SmolLM3()
