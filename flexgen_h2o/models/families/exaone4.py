"""EXAONE 4.0 (arXiv 2507.11407): OLMo 2 with a norm for each head.

In the 32B three of four layers have windows, and the others do not rotate.
"""

from __future__ import annotations

from typing import Any

from flexgen_h2o.models.families.olmo2 import Olmo2
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import nope

EXAONE = {
    "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
}


class Exaone4(Olmo2):
    DEFAULTS = {"exaone4": {**EXAONE, "bos_token_id": 0, "eos_token_id": 2}}
    qk_norm_of_all_heads = False

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(**self.common(f, bias=""), **read_windows(f), qk_norm=True)


def read_windows(f: Fields) -> dict[str, Any]:
    """Return the fields of layers with windows and, beside these, of layers without rotation."""
    windows = f.window() is not None
    local = f.local_layers(
        lambda layer: windows and bool((layer + 1) % f.count("sliding_window_pattern")))
    return {**nope([windows and not is_local for is_local in local]),
            "attention": f.attention_variants(local)}


FAMILY = Exaone4()
