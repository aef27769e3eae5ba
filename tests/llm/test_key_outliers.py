"""A 4-bit cache of keys with outliers: smollm2-135m with large key biases, as Qwen2 models have.

A small form of `make check-quality`: without smoothed keys the perplexity of this model with a
4-bit cache is 70 times that of the full cache, as that of Qwen2.5-Coder 1.5B is 116 times.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from flexgen_h2o import LLM, Policy
from flexgen_h2o.files.articles import read_articles
from flexgen_h2o.metrics.statistics import perplexity
from flexgen_h2o.models import checkpoint_folder
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.safetensors_io import write_safetensors

CONTEXT, SCORED, ARTICLES = 128, 32, 4
OUTLIERS = {30: 60.0, 31: -90.0, 62: 75.0}
"""Channels of each head and what is added to their keys. RoPE turns these channels by less than
0.02 radians within a text, so that the same number is added to all logits of a query."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A float32 copy with Qwen2's biases of queries, keys and values, zero but for OUTLIERS."""
    source, made = checkpoint_folder("smollm2-135m"), tmp_path_factory.mktemp("outliers")
    for name in source.glob("tokenizer*"):
        shutil.copy(name, made)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    bias = torch.zeros(config["num_key_value_heads"], head_dim)
    for channel, value in OUTLIERS.items():
        bias[:, channel] = value
    with open_checkpoint(source) as checkpoint:
        sizes = {"q": config["hidden_size"], "k": bias.numel(), "v": bias.numel()}
        layout = {name: (torch.float32, checkpoint.info(name).shape)
                  for name in checkpoint.names()}
        layout |= {f"model.layers.{layer}.self_attn.{part}_proj.bias": (torch.float32, (size,))
                   for layer in range(config["num_hidden_layers"])
                   for part, size in sizes.items()}

        def chunks(name: str):
            if name.endswith(".bias"):
                yield bias.flatten() if "k_proj" in name else torch.zeros(layout[name][1])
                return
            tensor = torch.empty(layout[name][1])
            checkpoint.read(name, tensor)
            yield tensor

        write_safetensors(made / "model.safetensors", layout, chunks)
    return str(made)


def score(folder: str, **options) -> float:
    """The perplexity of articles' tokens after the first CONTEXT."""
    texts = read_articles("examples/data/articles.jsonl")[:ARTICLES]
    with LLM(folder, dtype="float32", policy=Policy(gpu_batch_size=ARTICLES), progress=False,
             **options) as llm:
        ids = [llm.encode(text)[: CONTEXT + SCORED] for text in texts]
        return perplexity(llm.loglikelihood([(each[:CONTEXT], each[CONTEXT:]) for each in ids]))


@pytest.mark.full  # a real model of 135 million parameters in float32
def test_a_4_bit_cache_survives_outliers_of_keys(folder):
    full = score(folder)
    assert full < 60, "the outliers alone must not break the model"
    assert score(folder, cache_bits=8) < 1.01 * full
    assert score(folder, cache_bits=4) < 1.1 * full
