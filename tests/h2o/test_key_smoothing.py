"""Key smoothing: attention is unchanged, and quantized keys are robust to outliers."""

from dataclasses import replace

import pytest
import torch
from helpers.selection import examples, full
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.engine import source
from flexgen_h2o.h2o.key_smoothing import KeySmoothing, block_size, hadamard
from flexgen_h2o.h2o.policies import register_policy

HEAD_DIMS = st.sampled_from([2, 6, 16, 20, 64, 80, 96, 128, 256])


def keys_with_outliers(tokens, kv_heads, dim, *, seed):
    """Keys with large means in some channels and large deviations in others."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(tokens, kv_heads, dim, generator=generator)
    keys[..., :: max(1, dim // 4)] += 100
    keys[..., 1 :: max(1, dim // 4)] *= 30
    return keys


@given(HEAD_DIMS, st.integers(0, 2**31))
@settings(max_examples=examples(40))
def test_hadamard_matrix_is_an_orthogonal_involution(dim, seed):
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed))
    turned = hadamard(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(turned), x, rtol=1e-5, atol=1e-5)
    size = block_size(dim)
    assert dim % size == 0 and (dim // size) % 2


@given(HEAD_DIMS, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=examples(60))
def test_smoothed_logits_differ_by_a_constant_per_query(dim, kv_heads, group, centered, seed):
    keys = keys_with_outliers(9, kv_heads, dim, seed=seed)
    queries = torch.randn(4, kv_heads * group, dim, generator=torch.Generator().manual_seed(seed))
    smoothing = KeySmoothing.fit(keys, queries, centered=centered)

    def products(q, k):
        return torch.einsum("qhgd,khd->qhgk", q.double().unflatten(1, (kv_heads, group)),
                            k.double())

    exact = products(queries, keys)
    change = products(smoothing.queries(queries), smoothing.keys(keys)) - exact
    if centered:
        change = change - change.mean(-1, keepdim=True)
    assert (change.abs() <= 1e-5 * exact.abs().amax() + 1e-4).all()
    back = smoothing.restored(smoothing.keys(keys).transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(back, keys, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("keys", [torch.zeros(5, 2, 8), torch.full((5, 2, 8), 3.0)])
def test_constant_keys_have_finite_smoothing(keys):
    smoothing = KeySmoothing.fit(keys, torch.zeros(5, 4, 8))
    assert smoothing.keys(keys).abs().max() < 1e-6
    assert torch.isfinite(smoothing.scale).all() and (smoothing.scale > 0).all()


# The engine


@pytest.fixture(scope="module")
def outliers(tiny_model, tmp_path_factory):
    """A copy of a tiny Qwen2 whose key biases have outliers, in channels that turn slowly."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("outliers")
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2").folder, dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[3::4] += 60.0
    model.save_pretrained(folder)
    return folder


def losses(folder, **options):
    """Negative log-likelihood of each token of some random texts."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(97, (4, 44), generator=generator).tolist()
    with LLM(str(folder), dtype="float32", weight_cache=None, progress=False,
             policy=options.pop("policy", Policy(gpu_batch_size=3)), **options) as llm:
        scored = llm.loglikelihood([(text[:32], text[32:]) for text in texts])
    return -torch.tensor(scored)


@pytest.mark.parametrize("key", ["gemma2", "gpt_oss", "gemma4"])
@pytest.mark.parametrize("options", [
    {"cache_bits": 8}, {"h2o": H2OConfig(heavy_tokens=10, recent_tokens=10, recall=True)}],
    ids=["cache", "recall"])
def test_soft_caps_and_attention_sinks_get_exact_logits(tiny_model, key, options):
    """The offsets are large enough to change results."""
    tiny = tiny_model(key)
    exact = losses(tiny.folder, h2o=options.get("h2o"))
    if options.get("h2o") is not None:
        exact = losses(tiny.folder, h2o=replace(options["h2o"], simulate=True))
    assert (losses(tiny.folder, **options) - exact).abs().mean() < 0.02


@pytest.mark.parametrize("options", [
    {"h2o": H2OConfig(heavy_tokens=10, recent_tokens=10, positions="rolling")},
    {"policy": Policy(gpu_batch_size=2, prefill_chunk=16, cache=Placement(0, 0, 100))},
    *full({}, {"h2o": H2OConfig(heavy_tokens=10, recent_tokens=10)})],
    ids=["rolling", "chunks, disk", "full", "h2o"])
def test_a_cache_of_four_bits_survives_outliers_of_key_biases(outliers, monkeypatch, options):
    exact = losses(outliers, **options)
    smoothed = (losses(outliers, cache_bits=4, **options) - exact).abs().mean()
    monkeypatch.setattr(KeySmoothing, "fit", classmethod(
        lambda cls, keys, queries, *, centered=True: cls(torch.zeros(keys.shape[1:]),
                                                         torch.ones(keys.shape[1:]))))
    assert smoothed < 0.3 * (losses(outliers, cache_bits=4, **options) - exact).abs().mean()


def test_a_registered_policy_gets_keys_before_smoothing(outliers):
    seen = []

    def score(state):
        seen.append(state.keys.abs().amax())
        return state.attention

    register_policy("largest_key_seen", score, needs=("keys",))
    h2o = H2OConfig(heavy_tokens=6, recent_tokens=6, score="largest_key_seen")
    losses(outliers, h2o=h2o, cache_bits=8)
    assert len(seen) > 3 and min(seen) > 40  # smoothed keys are a few deviations large at most


def test_slowly_measured_smoothing_is_cached(outliers, tmp_path, monkeypatch):
    cache, measured = tmp_path / "cache", []
    monkeypatch.setattr(source, "MIN_KEPT_SECONDS", 0.0)
    monkeypatch.setattr(KeySmoothing, "fit", classmethod(
        lambda cls, keys, *_, fit=KeySmoothing.fit, **options: measured.append(1) or fit(
            keys, *_, **options)))
    options = {"dtype": "float32", "cache_bits": 4, "progress": False}
    runs = []
    for place in (cache, cache, None):
        with LLM(str(outliers), weight_cache=place, **options) as llm:
            runs.append(llm.loglikelihood([([1, 2, 3], [4, 5, 6, 7])]))
        assert len(measured) == (6 if place else 12)  # two for each of three layers
    assert runs[0] == runs[1] == runs[2]
