"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms after attention and MLP, and over all query and key
heads. In OLMo 3 three of four layers have windows; rope scaling applies to the other layers."""

from __future__ import annotations

from typing import Any

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_layer_ropes, read_rope

_OLMO2 = {"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279}


class Olmo2(Decoder):
    DEFAULTS = {
        "olmo2": _OLMO2,
        "olmo3": {**_OLMO2, "rope_theta": 500000.0, "sliding_window": 4096},
    }
    norms = {"post1": "post_attention_layernorm", "post2": "post_feedforward_layernorm"}
    qk_norm_of_all_heads = True

    def read(self, f: Fields) -> ModelConfig:
        windows: dict[str, Any] = {}
        if f.values["model_type"] == "olmo2":
            rope = read_rope(f)
        else:
            local = f.local_layers(lambda layer: (layer + 1) % 4 != 0)
            rope, local_rope = read_layer_ropes(f)
            windows["attention"] = f.attention_variants(local)
            if local_rope != rope:
                windows |= {"other_rope": local_rope, "other_rope_layers": local}
        return ModelConfig(**self.common(f, rope), **windows, qk_norm=True)


FAMILY = Olmo2()
