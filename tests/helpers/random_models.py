"""Models of random bfloat16 weights that are written without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from flexgen_h2o.models import family
from flexgen_h2o.models.convert import natural_key
from flexgen_h2o.models.dummy import DummyCheckpoint
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.models.safetensors_io import write_safetensors


def llama(**sizes) -> dict:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "tie_word_embeddings": False, "eos_token_id": None, **sizes}


# 26 layers of 26 MB and two tables of 16 MB.
LARGE = llama(vocab_size=8000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=26,
              num_attention_heads=16, num_key_value_heads=16)
# Small, but with tables and a cache of a megabyte or two: ten that were kept would be seen.
TINY = llama(vocab_size=4000, hidden_size=128, intermediate_size=128, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2)


def write_model(folder: Path, config: dict) -> None:
    """A folder of seeded random bfloat16 weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    cfg = from_transformers(config, folder.name)
    weights = family(cfg).weights(cfg)
    groups = (weights.embed, *weights.layers, weights.head)
    shapes = {spec.name: spec.shape for group in groups for spec in group.values()}
    dummy = DummyCheckpoint(shapes, torch.bfloat16, seed=0)

    def chunks(name: str):
        tensor = torch.empty(shapes[name], dtype=torch.bfloat16)
        dummy.read(name, tensor)
        yield tensor

    layout = {name: (torch.bfloat16, shapes[name]) for name in sorted(shapes, key=natural_key)}
    write_safetensors(folder / "model.safetensors", layout, chunks)
