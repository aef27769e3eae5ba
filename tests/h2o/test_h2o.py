"""H2O end to end on tiny random models: eviction against the simulation, on every tier."""

from dataclasses import replace

import pytest
from helpers.error_cases import refused
from helpers.fakes import LazyDevice
from helpers.generation import (
    MODES,
    NEW,
    PLACES,
    VARIANTS,
    prompts_of,
    run,
    tokens,
    transformers_tokens,
)
from helpers.internals import buffer_bytes, cache_of, open_devices
from helpers.selection import examples, full_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.cache import tiers
from flexgen_h2o.errors import UserError

HOST = Placement(0, 100, 0)


# The definition


@pytest.mark.parametrize("mode", [("opt", "original"), ("llama", "rolling"), ("neox", "original")])
@pytest.mark.parametrize("bits", [16, 8, 4, (8, 4)])
def test_kernels_give_the_reference_tokens(tiny_model, monkeypatch, mode, bits):
    key, positions = mode
    tiny = tiny_model(key)
    prompts = prompts_of(tiny, seed=1)  # no key of which lies halfway between two codes
    for h2o in (None, H2OConfig(heavy_ratio=0.1, positions=positions)):
        monkeypatch.delenv("FLEXGEN_H2O_KERNELS", raising=False)
        fused = tokens(tiny, prompts, h2o, cache_bits=bits)
        monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
        assert tokens(tiny, prompts, h2o, cache_bits=bits) == fused


SHARES = [{"heavy_ratio": 0.02}, {"heavy_ratio": 0.1}, {"heavy_ratio": 0.3}]
RARE = ("counts", "sinks and window", "of the text", "half of the text", "crossed mid-run", "decay",
        "caote", "one layer full")
"""Variants that other tests try, as those of the transformers plugin, or that others resemble."""
ROLLING, RECALL = {"positions": "rolling"}, {"heavy_ratio": 0.1, "recall": True}
CHUNKS = ({"prompt_chunk": 1}, {"prompt_chunk": 6, **ROLLING})
WINDOWS = [{"heavy_tokens": 2}, {"heavy_ratio": 0.1, "budget_of": "text"},
           {"heavy_tokens": 4, "recent_tokens": 5}, {"recent_tokens": 3, "sink_tokens": 2},
           {"heavy_tokens": 2, "recent_tokens": 1, "sink_tokens": 1, "score": "mean"},
           {"heavy_tokens": 3, "recent_tokens": 1, "score": "decay", "decay": 0.8},
           {"heavy_tokens": 2, "evict_generated": False}, {"heavy_tokens": 2, **ROLLING},
           {"heavy_tokens": 2, "recent_tokens": 2, "prompt_chunk": 3}, {**RECALL}]
SIMULATED = [
    *((key, {**share, "positions": positions})
      for (key, positions), share in zip(MODES, SHARES * 3, strict=True)),
    *(("llama", {**VARIANTS[name], **({}, ROLLING)[number % 2]})
      for number, name in enumerate(VARIANTS) if name not in RARE),
    *(("llama", {**VARIANTS[name], **chunk}) for name in ("mean", "sinks and heavy")
      for chunk in CHUNKS),
    ("opt", {"heavy_ratio": 0.15, "prompt_chunk": 5}),
    ("neox", {"heavy_ratio": 0.15, "prompt_chunk": 5}),
    ("opt", RECALL), ("llama", {**RECALL, "index_bits": 2, "budget_of": "text"}),
    *(("mistral_window", options) for options in WINDOWS),
    ("deepseek_v3", {"heavy_ratio": 0.1, **ROLLING}), ("deepseek_v3", {**RECALL}),
    ("glm4_moe", {**RECALL}), ("minimax_m2", {**RECALL}),
    ("deepseek_v3", {"heavy_ratio": 0.1, "score": "caote"}),
    ("deepseek_v3", {"heavy_ratio": 0.1, "prompt_chunk": 7}),
    *full_cases(
        *((key, {**share, "positions": positions}) for key, positions in MODES
          for share in (*SHARES, {"heavy_ratio": 0.15, "prompt_chunk": 5})),
        *(("llama", {**options, **more}) for options in VARIANTS.values()
          for more in ({}, ROLLING)),
        *(("llama", {**options, **chunk}) for name, options in VARIANTS.items()
          if name != "prompt only" and "budget_of" not in options for chunk in CHUNKS),
        *(("llama", {**RECALL, **more}) for more in ({}, {"index_bits": 2}, {"budget_of": "text"})),
        ("neox", {"heavy_tokens": 3, "recall": True}),
        ("deepseek_v2", {"heavy_ratio": 0.1, "score": "mean"}), ("deepseek_v2", RECALL),
        ("glm4_moe_lite", {"heavy_ratio": 0.1, "sink_tokens": 2}))]
"""Models, and options of `H2OConfig`."""


@pytest.mark.parametrize("key, options", SIMULATED)
def test_h2o_equals_its_simulation(tiny_model, monkeypatch, key, options):
    """In batches, and with prompts in chunks and a cache on disk whose log is full after 4 tokens.
    """
    monkeypatch.setattr(tiers, "WRITE_BACK_TOKENS", 4)
    tiny = tiny_model(key)
    prompts = prompts_of(tiny)
    expected = tokens(tiny, prompts, H2OConfig(simulate=True, **options))
    assert tokens(tiny, prompts, H2OConfig(**options)) == expected
    if "prompt_chunk" not in options:
        chunk = 5 if options.get("positions") == "rolling" else 16
        assert tokens(tiny, prompts, H2OConfig(**options), prefill_chunk=chunk,
                      cache=PLACES[2]) == expected
    if options in (SHARES[0], RECALL) and key != "mistral_window":
        assert expected != transformers_tokens(tiny, prompts, NEW), "nothing was evicted"


H2O = H2OConfig(heavy_ratio=0.1)


@settings(max_examples=examples(25))
@given(data=st.data())
def test_any_budget_and_batch_equal_the_simulation(tiny_model, data):
    tiny = tiny_model("llama")
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    if data.draw(st.booleans()):
        share = st.sampled_from([0.05, 0.15, 0.3, 0.5])
        sizes = {"heavy_ratio": data.draw(share), "recent_ratio": data.draw(share),
                 "budget_of": "text"}
    else:
        heavy, recent = data.draw(st.tuples(st.integers(0, 12), st.integers(1, 12)))
        sizes = {"heavy_tokens": heavy, "recent_tokens": recent,
                 "evict_generated": data.draw(st.booleans())}
    options = {**sizes, "sink_tokens": data.draw(st.integers(0, 3)),
               "score": data.draw(st.sampled_from(["sum", "mean", "decay"])),
               "positions": data.draw(st.sampled_from(["original", "rolling"]))}
    policy = {"gpu_batch_size": data.draw(st.integers(1, 5)),
              "num_gpu_batches": data.draw(st.integers(1, 2)),
              "prefill_chunk": data.draw(st.sampled_from([None, 4])),
              "cache": data.draw(st.sampled_from(PLACES))}
    prompts = prompts_of(tiny, lengths, seed=sum(lengths))
    expected = tokens(tiny, prompts, H2OConfig(simulate=True, **options))
    assert tokens(tiny, prompts, H2OConfig(**options), **policy) == expected


@pytest.mark.parametrize(("key", "options"), [
    ("opt", {"heavy_tokens": 100, "recent_tokens": 100}), ("llama", {"heavy_ratio": 1.0}),
    ("llama", {"heavy_tokens": 34, "recent_tokens": NEW, "recall": True}),
    ("opt", {"simulate": True}), ("neox", {"recent_tokens": 123, "heavy_tokens": 0})])
def test_a_budget_of_everything_is_the_full_cache(tiny_model, key, options):
    tiny = tiny_model(key)
    prompts = prompts_of(tiny)
    assert tokens(tiny, prompts, H2OConfig(**options)) == transformers_tokens(tiny, prompts, NEW)


@pytest.mark.parametrize("chunk", [None, 7])
def test_loglikelihood_under_eviction(tiny_model, chunk):
    tiny = tiny_model("llama")
    texts = prompts_of(tiny, [60, 33, 12, 50])
    pairs = [(text[:cut], text[cut:]) for text, cut in zip(texts, [30, 32, 1, 20], strict=True)]

    def score(h2o):
        policy = Policy(gpu_batch_size=3, prefill_chunk=chunk)
        with LLM(str(tiny.folder), policy=policy, h2o=h2o, dtype="float32") as llm:
            return llm.loglikelihood(pairs)

    exact = score(None)
    wide, narrow, defined = (score(H2OConfig(heavy_tokens=n, recent_tokens=n, simulate=simulate))
                             for n, simulate in ((50, False), (4, False), (4, True)))
    for a, b, c, d in zip(exact, wide, narrow, defined, strict=True):
        assert b == pytest.approx(a, abs=1e-4)
        assert c == pytest.approx(d, abs=1e-4)
    assert any(abs(x - y) > 0.01 for a, c in zip(exact, narrow, strict=True)
               for x, y in zip(a, c, strict=True))


# Positions


def test_rolling_positions_exceed_the_context_in_constant_memory(tiny_model):
    tiny = tiny_model("llama")  # 256 positions
    prompts = prompts_of(tiny, [240, 30])
    h2o = H2OConfig(heavy_tokens=16, recent_tokens=16, positions="rolling")
    short, few = run(tiny, prompts, h2o, new=8)
    long, many = run(tiny, prompts, h2o, new=25)
    assert [one[:8] for one in long] == short
    assert many.kv_cache_bytes == few.kv_cache_bytes
    assert long == tokens(tiny, prompts, replace(h2o, simulate=True), new=25)
    with pytest.raises(UserError, match="--enable-position-rolling"):
        run(tiny, prompts, H2OConfig(heavy_tokens=16, recent_tokens=16), new=700)
    with pytest.raises(UserError, match="lower the budget"):
        run(tiny, prompts, H2OConfig(heavy_tokens=200, recent_tokens=100, positions="rolling"),
            new=700)


def test_opt_stops_at_its_position_table(tiny_model):
    tiny = tiny_model("opt")  # 256 positions
    prompts = prompts_of(tiny, [240, 30])
    with pytest.raises(UserError, match="generate at most 17"):
        run(tiny, prompts, H2OConfig(heavy_tokens=16), new=25)
    within = tokens(tiny, prompts, H2OConfig(heavy_tokens=16), new=17)
    dropped = tokens(tiny, prompts, H2OConfig(heavy_tokens=16, drop_positions=True), new=25)
    assert [one[:17] for one in dropped] == within
    assert len(tokens(tiny, prompts, H2OConfig(drop_positions=True), new=25)[0]) == 25
    with pytest.raises(UserError, match="can't roll"):
        run(tiny, prompts, H2OConfig(heavy_tokens=16, positions="rolling"))
    with pytest.raises(UserError, match="rotary"):
        run(tiny_model("llama"), prompts, H2OConfig(heavy_tokens=16, drop_positions=True))


# Memory and traffic


def test_the_cache_takes_the_budget_and_no_more(tiny_model):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny, [200] * 4)
    _, full = run(tiny, prompts, None, new=40, gpu_batch_size=4)
    with LLM(str(tiny.folder), policy=Policy(gpu_batch_size=4), h2o=H2OConfig(heavy_ratio=0.1),
             dtype="float32") as llm:
        llm.generate(prompts, max_new_tokens=40, eos_token_id=-1)
        stats, (part,) = llm.stats, cache_of(llm).tiers
        token = llm.model_config.kv_bytes_per_token(4)
        assert stats.kv_bytes_per_token == token
        assert stats.kv_cache_bytes == 4 * 40 * token  # 20 + 20 of 200
        pages = 3 * 4096
        assert stats.kv_cache_bytes <= buffer_bytes(part) <= stats.kv_cache_bytes + pages
    assert stats.full_kv_cache_bytes == full.kv_cache_bytes == 4 * 239 * token


def moved(tiny, monkeypatch, place, new, **options):
    open_devices(monkeypatch, LazyDevice)
    prompts = prompts_of(tiny, [200] * 4)
    _, stats = run(tiny, prompts, H2OConfig(heavy_ratio=0.1), new=new, cache=place,
                   gpu_batch_size=4, num_gpu_batches=1, **options)
    return {link: nbytes for link, (nbytes, _) in stats.links.items()}


def test_a_step_writes_back_only_changed_slots(tiny_model, monkeypatch):
    tiny = tiny_model("llama")
    head_bytes, slots = 2 * 8 * 4, 3 * 4 * 2  # key and value of a head; layers, sequences, heads
    few, many = (moved(tiny, monkeypatch, HOST, new) for new in (3, 8))
    # A key, a value and the number of their slot, for each head.
    assert many["gpu->cpu"] - few["gpu->cpu"] == 5 * slots * (head_bytes + 8)
    # Beside the cache, weights that live on the device do not move.
    assert many["cpu->gpu"] - few["cpu->gpu"] == 5 * slots * 40 * head_bytes
    few, many = (moved(tiny, monkeypatch, Placement(0, 0, 100), new)["cpu->disk"]
                 for new in (3, 3 + 32))
    page = 4096
    whole = -(-4 * 2 * 40 * head_bytes // page) * page
    assert many - few == 2 * 3 * whole  # every 16 tokens, in one chunk per layer


def test_host_attention_transfers_no_cache(tiny_model, monkeypatch):
    tiny = tiny_model("llama")
    few, many = (moved(tiny, monkeypatch, HOST, new, cpu_cache_compute=True) for new in (3, 8))
    rows = 5 * 3 * 4  # steps, layers, sequences
    assert many["gpu->cpu"] - few["gpu->cpu"] == rows * (6 + 2 + 2) * 8 * 4
    assert many["cpu->gpu"] - few["cpu->gpu"] == rows * 6 * 8 * 4


# Refusals


@pytest.mark.parametrize("options, words", [
    ({"h2o": H2OConfig(heavy_ratio=[0.1, 0.2])}, "3 decoder layers"),
    ({"cache_bits": 5}, "16, 8 or 4"), ({"key_bits": 2, "value_bits": 4}, "key_bits"),
    ({"key_bits": 8}, "use 16 for both"), ({"cache_bits": 4, "value_bits": 16}, "use 16 for both"),
    ({"cache_bits": 4, "key_bits": 8, "attn_sparsity": 0.5}, "attn_sparsity"),
    ({"h2o": H2OConfig(heavy_ratio=0.1, simulate=True), "cache_bits": 4}, "exact cache")])
def test_unsupported_options_are_errors(tiny_model, options, words):
    refused(lambda: LLM(str(tiny_model("llama").folder), **options), match=words)
