"""GLM-4-0414: GLM-4 with norms after attention and MLP."""

from __future__ import annotations

from flexgen_h2o.models.families.glm import GLM, Glm


class Glm4(Glm):
    DEFAULTS = {"glm4": GLM}
    norms = {**Glm.norms, "post1": "post_self_attn_layernorm", "post2": "post_mlp_layernorm"}


FAMILY = Glm4()
