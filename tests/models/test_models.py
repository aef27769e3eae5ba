"""The families against transformers: logits in prefill and decode, and what they are built of."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.selection import examples
from helpers.tiny_models import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from flexgen_h2o.h2o.eviction import attention_weights
from flexgen_h2o.integrations.transformers.enable import CACHE_NAME
from flexgen_h2o.kernels import torch_ops
from flexgen_h2o.kernels.rotary import apply_rope_
from flexgen_h2o.models import decoder, family, layers
from flexgen_h2o.models.layers import Operations, Scratch
from flexgen_h2o.models.model_config import ACTIVATIONS
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.models.rope import RopeConfig, all_tables, rope_tables

pytestmark = pytest.mark.usefixtures("isa")

TOLERANCE = 1e-4


class Runner:
    """The plainest engine: one sequence, all weights in memory, a cache that is concatenated."""

    def __init__(self, model, dtype=torch.float32):
        self.cfg = from_transformers(model.config, "tiny")
        self.family = family(self.cfg)
        specs = self.family.weights(self.cfg)
        state = model.state_dict()

        def tensors(group):
            return {short: next(state[name] for name in self.family.aliases(spec.name)
                                if name in state).to(dtype) for short, spec in group.items()}

        self.embed, self.head = tensors(specs.embed), tensors(specs.head)
        self.layers = [tensors(group) for group in specs.layers]
        self.caches = [[] for _ in self.layers]
        self.tables = specs.tables
        self.do, self.dtype, self.seen = Operations(), dtype, 0

    def step(self, ids):
        """Logits [rows, vocab] of the next tokens of the sequence."""
        positions = torch.arange(self.seen, self.seen + len(ids))
        self.seen += len(ids)
        plain = {name: t for name, t in self.embed.items() if name not in self.tables}
        x = self.family.embed(self.cfg, plain, lambda name, index: self.embed[name][index],
                              ids, positions)
        ropes = all_tables(self.cfg.ropes, positions, self.dtype)
        for layer, (w, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            tables = ropes[self.cfg.rope_number(layer)] if ropes else None
            qkv = self.family.attention_inputs(self.cfg, w, x, self.do)
            attended = attend(*qkv, cache=cache, rope=tables, form=self.cfg.form(layer))
            x = self.family.attention_output(self.cfg, w, x, attended, self.do)
            if not self.cfg.parallel_residual:
                x = self.family.mlp(self.cfg, w, x, self.do)
        return self.family.head(self.cfg, self.head, x)


def attend(q, k, v, *, cache, rope, form):
    """Attention by its form over everything cached, which the new keys and values join."""
    if rope is not None:
        q, k = (apply_rope_(x, *rope) for x in (q, k))
    cache.append((k.clone(), v.clone()))
    keys, values = (torch.cat(parts) for parts in zip(*cache, strict=True))
    group = q.shape[1] // k.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    products = torch.einsum("qhd,khd->hqk", q.float(), keys.float())
    place = torch.arange(len(keys) - len(q), len(keys))[:, None]
    hidden = torch.arange(len(keys)) > place
    if form.window is not None:
        hidden |= torch.arange(len(keys)) <= place - form.window
    shares = attention_weights(products, hidden, dim=q.shape[-1], form=form, sinks=None)
    return torch.einsum("hqk,khd->qhd", shares, values.float()).to(q.dtype)


def random_ids(cfg, count, seed=0):
    return torch.randint(cfg.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("key", TINY)
def test_logits_of_prefill_and_ten_steps(tiny_model, key):
    model = tiny_model(key).model
    runner = Runner(model)
    ids = random_ids(runner.cfg, 100)
    wanted = model(ids[None, :90], use_cache=True)
    got = runner.step(ids[:90])
    assert wanted.logits.std() > 0.5  # spread out, so that the tolerance means something
    assert (got - wanted.logits[0]).abs().max() < TOLERANCE
    for token in ids[90:]:
        wanted = model(token[None, None], **{CACHE_NAME: wanted[CACHE_NAME]}, use_cache=True)
        got = runner.step(token[None])
        assert (got - wanted.logits[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("key", ["opt", "opt_350m_style", "llama", "neox", "neox_sequential"])
def test_blocks_and_chunks_of_rows_change_nothing(tiny_model, key, monkeypatch):
    monkeypatch.setattr(decoder, "ROW_BLOCK", 7)
    monkeypatch.setattr(torch_ops, "CHUNK_BYTES", 1000)
    model = tiny_model(key).model
    runner = Runner(model)
    ids = random_ids(runner.cfg, 30)
    assert (runner.step(ids) - model(ids[None]).logits[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("key", ["opt", "llama", "gemma2", "neox"])
def test_bfloat16_stays_near(tiny_model, key):
    model = tiny_model(key).model
    runner = Runner(model, torch.bfloat16)
    ids = random_ids(runner.cfg, 20)
    got, wanted = runner.step(ids), model(ids[None]).logits[0]
    theirs = copy.deepcopy(model).bfloat16()(ids[None]).logits[0]
    assert got.dtype == torch.bfloat16
    # Rounding accumulates alike: about as far from float32 as transformers is in bfloat16.
    assert (got - wanted).norm() < 2 * (theirs - wanted).norm()


@pytest.mark.parametrize("key", TINY)
def test_tensors_and_their_counts_are_those_of_the_saved_model(tiny_model, key):
    tiny = tiny_model(key)
    cfg = from_transformers(tiny.config, key)
    specs = family(cfg).weights(cfg)
    wanted = {spec.name: spec.shape
              for group in (specs.embed, *specs.layers, specs.head) for spec in group.values()}
    with safe_open(tiny.folder / "model.safetensors", "pt") as saved:
        names = saved.keys()
        present = {name: tuple(saved.get_slice(name).get_shape()) for name in names}
    assert wanted == present
    assert set(specs.tables) <= set(specs.embed)
    assert (specs.head["lm_head"] == specs.embed["tokens"]) == cfg.tie_word_embeddings

    def count(group):
        return sum(torch.Size(spec.shape).numel() for spec in group.values())

    tied = count({"_": specs.embed["tokens"]}) if cfg.tie_word_embeddings else 0
    assert cfg.num_parameters() == tiny.model.num_parameters()
    assert cfg.embed_parameters() == count(specs.embed)
    assert cfg.head_parameters() == count(specs.head) - tied
    assert {cfg.layer_parameters()} == {count(group) for group in specs.layers}


@pytest.mark.parametrize("rows", [1, 10, 33])
@pytest.mark.parametrize("key", ["opt", "opt_350m_style", "llama", "llama_head_dim", "neox"])
def test_scratch_is_what_the_plan_says(tiny_model, key, rows):
    runner = Runner(tiny_model(key).model)
    runner.step(random_ids(runner.cfg, rows))
    held = runner.do.nbytes
    normed = 0 if runner.cfg.pre_norm else rows * runner.cfg.hidden_size * 4
    assert held + normed == runner.cfg.scratch_elements(rows) * 4
    runner.step(random_ids(runner.cfg, 1))
    assert runner.do.nbytes == held


@pytest.mark.parametrize("name, other", [
    ("model.decoder.layers.0.fc1.weight", "decoder.layers.0.fc1.weight"),
    ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
    ("gpt_neox.embed_in.weight", "embed_in.weight"),
    ("embed_out.weight", "lm_head.weight"),
])
def test_aliases_begin_with_the_canonical_name(name, other):
    modules = [m for m in map(_module, ("opt", "llama", "gpt_neox")) if len(m.aliases(name)) > 1]
    assert any(m.aliases(name)[0] == name and other in m.aliases(name) for m in modules)


def _module(name):
    return family(type("Config", (), {"family": name}))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers_and_in_place(name):
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101)
    wanted = ACT2FN[name](x.clone())
    got = layers.activate_(x, name)
    assert got.data_ptr() == x.data_ptr()
    torch.testing.assert_close(x, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_strided_rows_are_activated_and_normed_in_float32_whoever_does_it(
        monkeypatch, dtype, kernels):
    """Halves of wider rows, as those of a fused matrix are, with a factor and in place."""
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", kernels)
    eps = torch.finfo(dtype).eps
    for name in ACTIVATIONS:
        gate, up = torch.randn(70, 48).to(dtype).split(24, dim=-1)
        wanted = layers.activate_(gate.double(), name, up.double())
        got = layers.activate_(gate, name, up)
        assert got.data_ptr() == gate.data_ptr()
        torch.testing.assert_close(gate.double(), wanted, atol=2e-6, rtol=2 * eps)
    x, weight = torch.randn(70, 48).to(dtype)[:, 24:], torch.randn(24).to(dtype)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    scale = centred.square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    wanted = centred * scale * weight.double() + weight.double()
    for got in (layers.layer_norm(x, weight, weight, eps=1e-5),
                layers.layer_norm(x, weight, weight, eps=1e-5,
                                  out=torch.full_like(x, float("nan")))):
        torch.testing.assert_close(got.double(), wanted, atol=2e-6, rtol=2 * eps)
    scale = x.double().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    wanted = x.double() * scale * weight.double()
    for got in (layers.rms_norm(x, weight, eps=1e-5),
                layers.rms_norm(x, weight, eps=1e-5, out=torch.full_like(x, float("nan"))),
                layers.rms_norm(x, weight, eps=1e-5, out=x)):  # last, as it overwrites x
        torch.testing.assert_close(got.double(), wanted, atol=2e-6, rtol=2 * eps)


@given(rotary=st.integers(1, 8).map(lambda n: 2 * n), extra=st.integers(0, 5),
       positions=st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
       kind=st.sampled_from(["default", "linear", "llama3"]), seed=st.integers(0, 99))
@settings(max_examples=examples(60))
def test_rotation_keeps_lengths_and_depends_on_distance(rotary, extra, positions, kind, seed):
    rope = RopeConfig(10000.0, rotary, kind, factor=4.0, original_max_positions=64)
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 3, rotary + extra, generator=generator, dtype=torch.float64)

    def rotated(x, position):
        tables = rope_tables(rope, torch.tensor([position]), torch.float64)
        return apply_rope_(x[None].clone(), *tables)[0]

    for position in positions:
        at = rotated(q, position)
        torch.testing.assert_close(at.norm(dim=-1), q.norm(dim=-1))
        assert torch.equal(at[:, rotary:], q[:, rotary:])
    start = positions[0] % 1000  # float32 angles: exact enough only near the beginning
    near = (rotated(q, 5) * rotated(k, 2)).sum(-1)
    far = (rotated(q, start + 5) * rotated(k, start + 2)).sum(-1)
    torch.testing.assert_close(near, far, atol=2e-3, rtol=1e-3)


def test_rope_in_place_on_strided_views():
    rope = RopeConfig(10000.0, 4)
    tables = rope_tables(rope, torch.arange(5), torch.float32)
    fused = torch.randn(5, 3, 24)
    wanted = apply_rope_(fused[..., 8:16].clone(), *tables)
    untouched = fused.clone()
    apply_rope_(fused[..., 8:16], *tables)
    assert torch.equal(fused[..., 8:16], wanted)
    assert torch.equal(fused[..., :8], untouched[..., :8])
    assert torch.equal(fused[..., 16:], untouched[..., 16:])


@pytest.mark.parametrize("bias", [None, torch.randn(6)])
def test_linear_into_a_given_tensor(bias):
    x, weight, out = torch.randn(5, 4), torch.randn(6, 4), torch.full((5, 6), torch.nan)
    wanted = layers.linear(x, weight, bias)
    assert layers.linear(x, weight, bias, out=out) is out
    torch.testing.assert_close(out, wanted)
    residual = torch.randn(5, 6)
    expected = residual + wanted
    assert layers.add_linear_(residual, x, weight, bias) is residual
    torch.testing.assert_close(residual, expected)


SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), SHAPES, DTYPES), min_size=1, max_size=12)


@given(REQUESTS)
def test_scratch_never_hands_the_same_memory_to_two_names(requests):
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


def test_scratch_reuses_and_only_grows():
    scratch = Scratch()
    first = scratch.get("a", (4, 8), torch.float32)
    assert scratch.get("a", (2, 8), torch.float32).data_ptr() == first.data_ptr()
    assert scratch.nbytes == 128
    scratch.get("a", (8, 8), torch.float32)
    assert scratch.nbytes == 256
