"""FlexOlmo (arXiv 2507.07024): OLMo 2 with a mixture of experts in each layer."""

from __future__ import annotations

from flexgen_h2o.models.families.olmo2 import Olmo2
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig


class FlexOlmo(MixtureDecoder):
    DEFAULTS = {
        "flex_olmo": {
            "vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000.0,
            "num_experts_per_tok": 5, "num_experts": 7, "norm_topk_prob": False,
            "eos_token_id": 100257,
        },
    }
    norms = Olmo2.norms
    qk_norm_of_all_heads = True

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(**self.common(f), qk_norm=True,
                           experts=read_experts(f, width="intermediate_size"))


FAMILY = FlexOlmo()
