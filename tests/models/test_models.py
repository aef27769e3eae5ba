"""The families' tensors, scratch memory and operations."""

import math
from collections import Counter

import pytest
import torch
from helpers.internals import scratch_bytes
from helpers.tiny_models import TINY
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from flexgen_h2o import LLM
from flexgen_h2o.models import family, layers
from flexgen_h2o.models.layers import Scratch
from flexgen_h2o.models.model_config import ACTIVATIONS, family_named
from flexgen_h2o.models.registry import from_transformers


@pytest.mark.parametrize("key", TINY)
def test_tensors_and_parameter_counts_equal_the_saved_model(tiny_model, key):
    tiny = tiny_model(key)
    cfg = from_transformers(tiny.config, key)
    specs = family(cfg).weights(cfg)
    wanted = {spec.name: spec.shape
              for group in (specs.embed, *specs.layers, specs.head) for spec in group.values()}
    with safe_open(tiny.folder / "model.safetensors", "pt") as saved:
        # Constants of an activation are not read.
        buffers = dict(tiny.model.named_buffers())
        names = set(saved.keys()) - (buffers.keys() - wanted.keys())
        present = {name: tuple(saved.get_slice(name).get_shape()) for name in names}
    views, larger = family(cfg).views(cfg), Counter()
    for name in views.keys() & (wanted.keys() - present.keys()):  # parts of larger tensors
        source = next(view.tensor for view in views[name] if view.tensor in present)
        larger[source] += math.prod(wanted.pop(name))
    assert {name: math.prod(present.pop(name)) for name in larger} == larger
    assert wanted == present
    assert set(specs.tables) <= set(specs.embed)
    assert (specs.head["lm_head"] == specs.embed["tokens"]) == cfg.tie_word_embeddings
    read_buffers = sum(buffers[name].numel() for name in buffers.keys() & names)
    assert cfg.num_parameters() == tiny.model.num_parameters() + read_buffers


@pytest.mark.parametrize("rows", [1, 10, 33])
@pytest.mark.parametrize("key", ["opt", "opt_350m_style", "llama", "llama_head_dim", "neox",
                                 "gemma4"])
def test_scratch_memory_equals_the_plan(tiny_model, key, rows):
    with LLM(str(tiny_model(key).folder), dtype="float32", progress=False) as llm:
        llm.generate([list(range(3, 3 + rows))], max_new_tokens=1, eos_token_id=-1)
        held, config = scratch_bytes(llm), llm.model_config
    normed = 0 if config.pre_norm else rows * config.hidden_size * 4
    assert held + normed == config.scratch_elements(rows) * 4


@pytest.mark.parametrize("name, other", [
    ("model.decoder.layers.0.fc1.weight", "decoder.layers.0.fc1.weight"),
    ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
    ("gpt_neox.embed_in.weight", "embed_in.weight"), ("embed_out.weight", "lm_head.weight")])
def test_aliases_begin_with_the_canonical_name(name, other):
    aliases = [family_named(decoder).aliases(name)
               for decoder in ("opt.Opt", "llama.Llama", "gpt_neox.GptNeoX")]
    assert any(len(names) > 1 and names[0] == name and other in names for names in aliases)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_transformers_in_place(name):
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101)
    wanted = ACT2FN[name](x.clone())
    got = layers.activate_(x, name)
    assert got.data_ptr() == x.data_ptr()
    torch.testing.assert_close(x, wanted, atol=2e-6, rtol=1e-5)


SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), SHAPES, DTYPES), min_size=1, max_size=12)


@given(REQUESTS)
def test_scratch_tensors_do_not_overlap(requests):
    scratch, current, largest = Scratch(), {}, {}
    for name, shape, dtype in requests:
        got = scratch.get(name, shape, dtype)
        assert got.shape == shape and got.dtype == dtype and got.is_contiguous()
        current[name, dtype] = got
        size = got.numel() * got.element_size()
        largest[name, dtype] = max(size, largest.get((name, dtype), 0))
    for mark, view in enumerate(current.values()):
        view.fill_(mark)
    for mark, view in enumerate(current.values()):
        assert (view == mark).all()
    assert scratch.nbytes == sum(largest.values())
