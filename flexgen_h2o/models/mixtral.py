from flexgen_h2o.models.llama import *
from flexgen_h2o.models.llama import _layer_specs
from flexgen_h2o.models import llama, mixture
from flexgen_h2o.models.mixture import expert_specs, route, expert, shared
from flexgen_h2o.models.spec import renamed, TensorSpec
from dataclasses import replace
def weights(cfg):
    w = llama.weights(cfg)
    layers = []
    for i, l in enumerate(w.layers):
        l = {k: v for k, v in l.items() if k not in ("gate","up","down")}
        l["router"] = TensorSpec(f"model.layers.{i}.block_sparse_moe.gate.weight", (cfg.experts.count, cfg.hidden_size))
        layers.append(l)
    return replace(w, layers=tuple(layers), mlp=(), experts=expert_specs(cfg, "model.layers.{layer}.block_sparse_moe.experts.{expert}.", {"gate":"w1.weight","up":"w3.weight","down":"w2.weight"}))
