"""H2O in transformers' generate, against `LLM`, its simulation and plain generate.

Runs on transformers 4.57 too (`make test-transformers-4`).
"""

import copy
import gc
import pickle
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import transformers
from helpers import generation
from helpers.error_cases import refused
from helpers.generation import bits_of, make_prompts, prompts_of, transformers_tokens
from helpers.internals import slots_of
from helpers.programs import program
from helpers.selection import examples, full, full_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from flexgen_h2o import LLM, H2OConfig
from flexgen_h2o.engine import loading
from flexgen_h2o.errors import UserError
from flexgen_h2o.integrations.transformers import H2OCache, enable_h2o
from flexgen_h2o.integrations.transformers.cache import CACHE_NAME, NAME
from flexgen_h2o.integrations.transformers.forward_pass import PassTracker, Rotations

NEW = 14

VARIANTS = {
    "ratio": {"heavy_ratio": 0.1}, **generation.VARIANTS,
    "in chunks": {"heavy_ratio": 0.1, "prompt_chunk": 7},
    "prompt only, in chunks": {"heavy_ratio": 0.1, "prompt_chunk": 7, "evict_generated": False}}


def batch_of(prompts, side="left"):
    """Padded `input_ids` and `attention_mask`."""
    most = max(map(len, prompts))
    ids, mask = (torch.zeros(len(prompts), most, dtype=torch.long) for _ in range(2))
    for row, prompt in enumerate(prompts):
        columns = slice(most - len(prompt), most) if side == "left" else slice(0, len(prompt))
        ids[row, columns], mask[row, columns] = torch.tensor(prompt), 1
    return {"input_ids": ids, "attention_mask": mask}


def cached(cache):
    """The cache by its name in the transformers that is installed."""
    return {CACHE_NAME: cache}


def plain(model, prompts, *, new=NEW, **options):
    """Tokens of `generate` of a padded batch, whatever is enabled."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    batch = batch_of(prompts)
    out = model.generate(**batch, max_new_tokens=new, **options)
    return out[:, batch["input_ids"].shape[1]:].tolist()


def tokens(model, prompts, h2o, *, cache_bits=16, **options):
    with enable_h2o(model, h2o, **bits_of(cache_bits)):
        return plain(model, prompts, **options)


def llm_tokens(tiny, prompts, h2o, *, cache_bits=16):
    with LLM(str(tiny.folder), h2o=h2o, dtype="float32", progress=False,
             **bits_of(cache_bits)) as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        return [out.token_ids for out in outputs]


# The same tokens as LLM, and as the definition


ROLLING = {"heavy_ratio": 0.1, "positions": "rolling"}


@pytest.mark.parametrize("key, options", [
    ("opt", {"heavy_ratio": 0.1}), ("gpt_oss", {"heavy_ratio": 0.1}), ("neox_partial", ROLLING),
    ("qwen3", {"heavy_ratio": 0.1}),
    *full_cases(*((key, {"heavy_ratio": 0.1}) for key in (
        "opt_350m_style", "llama", "mistral", "neox", "neox_partial", "qwen2", "seed_oss",
        "phi3_longrope", "granite", "olmo2", "stablelm", "mixtral", "qwen3_moe_dense", "gemma2",
        "gemma3", "mistral_window"))),
    *full_cases(*((key, ROLLING) for key in ("llama", "mistral", "neox")))])
def test_tokens_equal_llm(tiny_model, key, options):
    tiny = tiny_model(key)
    prompts = prompts_of(tiny)
    expected = llm_tokens(tiny, prompts, H2OConfig(**options))
    assert tokens(tiny.model, prompts, H2OConfig(**options)) == expected
    if options is ROLLING:
        assert expected != llm_tokens(tiny, prompts, H2OConfig(heavy_ratio=0.1))
    assert expected != transformers_tokens(tiny, prompts, NEW), "nothing was evicted"


@pytest.mark.parametrize("positions", ["original", "rolling"])
@pytest.mark.parametrize("name", [
    "ratio", "decay", "caote", "sinks and window", "one layer full", "in chunks",
    *full("mean", "sinks and heavy", "prompt only", "crossed mid-run", "prompt only, in chunks")])
def test_variants_equal_llm_and_the_simulation(tiny_model, name, positions):
    tiny = tiny_model("llama")
    prompts, h2o = prompts_of(tiny), H2OConfig(**VARIANTS[name], positions=positions)
    expected = llm_tokens(tiny, prompts, h2o)
    assert tokens(tiny.model, prompts, h2o) == expected
    assert tokens(tiny.model, prompts, replace(h2o, simulate=True)) == expected


@pytest.mark.parametrize("bits", [4, (8, 4), *full(8)])
@pytest.mark.parametrize("key", ["opt", "llama"])
def test_quantized_caches_equal_those_of_llm(tiny_model, monkeypatch, key, bits):
    """`LLM` smooths keys by default, which the plugin does not."""
    monkeypatch.setattr(loading, "key_smoothing", lambda runner: ())
    tiny = tiny_model(key)
    prompts = prompts_of(tiny)
    rolling = "original" if key == "opt" else "rolling"
    for h2o in (H2OConfig(heavy_ratio=0.1), H2OConfig(heavy_ratio=0.1, prompt_chunk=7),
                H2OConfig(heavy_ratio=[1, 0.1, 0.1]),
                H2OConfig(heavy_ratio=0.1, positions=rolling)):
        expected = llm_tokens(tiny, prompts, h2o, cache_bits=bits)
        assert tokens(tiny.model, prompts, h2o, cache_bits=bits) == expected


@settings(max_examples=examples(15))
@given(data=st.data())
def test_any_budget_and_batch_equal_the_simulation(tiny_model, data):
    model = tiny_model(data.draw(st.sampled_from(["llama", "neox"]))).model
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    h2o = H2OConfig(heavy_tokens=data.draw(st.integers(0, 12)),
                    recent_tokens=data.draw(st.integers(1, 12)),
                    sink_tokens=data.draw(st.integers(0, 3)),
                    score=data.draw(st.sampled_from(["sum", "mean", "decay"])),
                    evict_generated=data.draw(st.booleans()),
                    positions=data.draw(st.sampled_from(["original", "rolling"])),
                    prompt_chunk=data.draw(st.sampled_from([None, 1, 6])))
    prompts = make_prompts(112, lengths, seed=sum(lengths))
    expected = tokens(model, prompts, replace(h2o, simulate=True), new=10)
    assert tokens(model, prompts, h2o, new=10) == expected


@pytest.mark.parametrize("key", ["gemma3", *full("mistral_window", "gpt_oss")])
def test_sliding_windows_of_the_model(tiny_model, key):
    tiny = tiny_model(key)
    prompts = prompts_of(tiny, [30, 7, 19])
    assert tokens(tiny.model, prompts, H2OConfig()) == plain(tiny.model, prompts)
    for options in ({"heavy_ratio": 0.1, "sink_tokens": 1}, {"heavy_tokens": 2, "prompt_chunk": 7},
                    {"heavy_ratio": 0.1, "evict_generated": False},
                    {"heavy_tokens": 2, "score": "caote"}):
        expected = tokens(tiny.model, prompts, H2OConfig(**options, simulate=True))
        assert tokens(tiny.model, prompts, H2OConfig(**options)) == expected


@pytest.mark.parametrize("key", ["opt", "llama", "neox"])
@pytest.mark.parametrize("options", [{}, {"heavy_tokens": 60}, {"heavy_ratio": 1.0}])
def test_a_large_budget_is_the_full_cache(tiny_model, key, options):
    tiny = tiny_model(key)
    prompts = prompts_of(tiny)
    assert tokens(tiny.model, prompts, H2OConfig(**options)) == plain(tiny.model, prompts)


@pytest.mark.parametrize("key", ["opt", "llama", "neox"])
@pytest.mark.parametrize("simulate", [False, True])
def test_right_padding_and_rows_without_tokens(tiny_model, key, simulate):
    """Forward passes by hand: a prompt padded on the right, then turns of different lengths."""
    tiny = tiny_model(key)
    h2o = H2OConfig(heavy_tokens=4, recent_tokens=4, simulate=simulate)
    turns = [prompts_of(tiny, lengths, seed=7) for lengths in ([30, 11], [1, 1], [0, 5], [1, 0])]

    def logits(rows):
        """Of every token of these texts, computed turn by turn."""
        cache, logits, masks = H2OCache(tiny.model.config, h2o), [[] for _ in rows], []
        lengths = [0] * len(rows)
        for new in ([turn[row] for row in rows] for turn in turns):
            if not any(new):
                continue
            batch = batch_of(new, side="right")
            masks.append(batch["attention_mask"])
            places = torch.tensor(lengths)[:, None] + torch.arange(masks[-1].shape[1])
            out = tiny.model(batch["input_ids"], attention_mask=torch.cat(masks, dim=1),
                             **cached(cache), position_ids=places).logits
            for row, (one, prompt) in enumerate(zip(out, new, strict=True)):
                logits[row].append(one[: len(prompt)])
                lengths[row] += len(prompt)
        return [torch.cat(one) for one in logits]

    with torch.no_grad(), enable_h2o(tiny.model, h2o):
        for row, expected in enumerate(logits([0, 1])):
            assert torch.allclose(logits([row])[0], expected, atol=1e-4)


@pytest.mark.full
def test_rolling_positions_exceed_the_trained_context(tiny_model):
    tiny = tiny_model("llama")  # 256 positions
    prompts = prompts_of(tiny, [40])
    h2o = H2OConfig(heavy_tokens=16, recent_tokens=16, positions="rolling")
    with LLM(str(tiny.folder), h2o=h2o, dtype="float32", progress=False) as llm:
        (expected,) = llm.generate(prompts, max_new_tokens=400, eos_token_id=-1)
    assert tokens(tiny.model, prompts, h2o, new=400) == [expected.token_ids]


@settings(max_examples=examples(40))
@given(positions=st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
       key=st.sampled_from(["llama", "neox"]))
def test_rotations_are_undone(tiny_model, positions, dtype, key):
    from transformers.models.llama.modeling_llama import rotate_half

    rotary = tiny_model(key).model.base_model.rotary_emb
    x = torch.randn(len(positions), 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    places = torch.tensor(positions)[None]
    cos, sin = (table[0, :, None] for table in rotary(x, places))
    width = cos.shape[-1]
    rotated = torch.cat((x[..., :width] * cos + rotate_half(x[..., :width]) * sin, x[..., width:]),
                        dim=-1)
    step = PassTracker().begin(0, 1, len(positions), None)
    (undone,) = Rotations(rotary).undo(step, places, rotated)
    assert undone.dtype == dtype and torch.equal(undone[..., width:], x[..., width:])
    assert torch.allclose(undone.float(), x.float(), rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_rolling_needs_rotary_embeddings(tiny_model):
    h2o = H2OConfig(heavy_ratio=0.1, positions="rolling")
    for make in (lambda: enable_h2o(tiny_model("opt").model, h2o),
                 lambda: H2OCache(tiny_model("llama").model.config, h2o)):
        with pytest.raises(UserError, match="a model with rotary embeddings, and a cache"):
            make()
    model = copy.deepcopy(tiny_model("llama").model)
    model.base_model.rotary_emb.rope_type = "dynamic"
    refused(lambda: enable_h2o(model, h2o), match="of type dynamic: their angles change")
    refused(lambda: enable_h2o(tiny_model("gemma3").model, h2o), match="does not work in Gemma 3")


# What generate can do


@pytest.mark.parametrize("key", ["llama", *full("opt")])
def test_beam_search_equals_the_simulation(tiny_model, key):
    tiny = tiny_model(key)
    prompts = prompts_of(tiny, [20, 12])
    beams = {"num_beams": 3, "new": 10}
    for options in ({"heavy_ratio": 0.1}, {"heavy_ratio": [1, 0.1, 0.1]},
                    {"heavy_ratio": 0.1, "evict_generated": False},
                    {"heavy_ratio": 0.1, "positions": "original" if key == "opt" else "rolling"}):
        expected = tokens(tiny.model, prompts, H2OConfig(simulate=True, **options), **beams)
        assert tokens(tiny.model, prompts, H2OConfig(**options), **beams) == expected
    assert expected != plain(tiny.model, prompts, **beams)
    assert tokens(tiny.model, prompts, H2OConfig(heavy_tokens=60), **beams) == plain(
        tiny.model, prompts, **beams)


@pytest.mark.parametrize("key", ["neox", "llama"])
@pytest.mark.parametrize("options", [{"heavy_tokens": 6, "recent_tokens": 6},
                                     {"heavy_ratio": 0.2},
                                     {"heavy_ratio": 0.2, "evict_generated": False},
                                     {"heavy_tokens": 5, "prompt_chunk": 4},
                                     {"heavy_tokens": 5, "prompt_chunk": 4, "positions": "rolling"},
                                     {"heavy_ratio": 0.2, "positions": "rolling",
                                      "evict_generated": False}, {}])
def test_a_cache_continues_in_the_next_call(tiny_model, key, options):
    tiny = tiny_model(key)
    text, second, third = prompts_of(tiny, [20, 9, 1])

    def turns(h2o):
        with enable_h2o(tiny.model, h2o) as enabled:
            cache, ids, sizes = enabled.new_cache(), [], []
            for turn in (text, second, third):
                ids += turn
                ids += plain(tiny.model, [ids], new=6, **cached(cache))[0]
                sizes.append(cache.nbytes())
        return ids, sizes

    ids, sizes = turns(H2OConfig(**options))
    assert ids == turns(H2OConfig(simulate=True, **options))[0]
    if options and options.get("evict_generated", True):
        assert len(set(sizes)) == 1
    with LLM(str(tiny.folder), h2o=H2OConfig(**options), dtype="float32") as llm:
        if "heavy_tokens" not in options or "prompt_chunk" not in options:
            return  # LLM.stream takes budgets in tokens, and always reads in chunks
        stream, expected = llm.stream(), []
        for turn in (text, second, third):
            expected += turn + stream.generate(turn, max_new_tokens=6, eos_token_id=-1).token_ids
        stream.close()
    assert ids == expected


def test_half_precision(tiny_model):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny, [50, 33])
    for dtype in (torch.bfloat16, torch.float16):
        model = copy.deepcopy(tiny.model).to(dtype)
        with enable_h2o(model, H2OConfig(heavy_ratio=0.1)) as enabled:
            cache = enabled.new_cache()
            assert [len(one) for one in plain(model, prompts, **cached(cache))] == [NEW, NEW]
            assert cache.nbytes() == 2 * 3 * 2 * 2 * 10 * 8 * 2  # 10 tokens, 2 bytes each number
        batch = batch_of(prompts)
        with torch.no_grad(), enable_h2o(model, H2OConfig(heavy_tokens=50)) as enabled:
            logits = model(**batch, **cached(enabled.new_cache())).logits
            expected = model(**batch).logits
            real = batch["attention_mask"].bool()
            assert logits.dtype == dtype
            assert torch.allclose(logits[real], expected[real], rtol=0.05, atol=0.05 * float(
                expected[real].abs().max()))


@pytest.mark.full
def test_models_offloaded_by_accelerate(tiny_model, tmp_path):
    tiny = tiny_model("llama")
    prompts, h2o = prompts_of(tiny), H2OConfig(heavy_ratio=0.1)
    places = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
              "model.layers.2": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        tiny.folder, dtype=torch.float32, device_map=places, offload_folder=str(tmp_path))
    assert any(parameter.is_meta for parameter in model.parameters()), "nothing is offloaded"
    assert tokens(model, prompts, h2o) == tokens(tiny.model, prompts, h2o)


# Memory


@pytest.mark.parametrize("simulate", [False, True])
def test_the_cache_takes_the_bytes_of_its_budget(tiny_model, simulate):
    tiny = tiny_model("llama")  # 3 layers, 2 KV heads of 8
    h2o = H2OConfig(heavy_tokens=6, recent_tokens=5, sink_tokens=2, simulate=simulate)
    token = 3 * 2 * 2 * 8 * 4
    for length, new in ((40, 5), (173, 10)):
        prompts = prompts_of(tiny, [length, 20])
        with enable_h2o(tiny.model, h2o) as enabled:
            cache = enabled.new_cache()
            assert cache.nbytes() == 0
            plain(tiny.model, prompts, new=new, **cached(cache))
        held = 2 * 13 if not simulate else length + 20 + 2 * (new - 1)
        assert cache.nbytes() == held * token
        assert cache.get_seq_length() == length + new - 1


def test_no_tensor_of_a_prompt_stays_alive(tiny_model):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny, [173])  # a size that nothing else here has, but for other tests

    def of_that_size():
        gc.collect()
        return {id(x): tuple(x.shape) for x in gc.get_objects()
                if issubclass(type(x), torch.Tensor) and x.dim() > 1 and 173 in x.shape}

    others = of_that_size()
    with torch.no_grad(), enable_h2o(tiny.model, H2OConfig(heavy_ratio=0.1)) as enabled:
        cache = enabled.new_cache()
        tiny.model(**batch_of(prompts), **cached(cache), logits_to_keep=1)
        assert {key: size for key, size in of_that_size().items() if key not in others} == {}
        for layer in cache.layers:
            held = slots_of(layer).untyped_storage().nbytes()
            assert held == layer.nbytes() == 2 * 2 * 34 * 8 * 4


def test_reset_and_selection_of_sequences(tiny_model):
    tiny = tiny_model("llama")
    prompts, h2o = prompts_of(tiny), H2OConfig(heavy_ratio=0.1)
    expected = tokens(tiny.model, prompts, h2o)
    with enable_h2o(tiny.model, h2o) as enabled:
        cache = enabled.new_cache()
        plain(tiny.model, prompts[1:], **cached(cache))
        cache.reset()
        assert (cache.nbytes(), cache.get_seq_length()) == (0, 0)
        assert plain(tiny.model, prompts, **cached(cache), new=7) == [
            one[:7] for one in expected]
        # Two of them continue, in another order.
        cache.batch_select_indices(torch.tensor([2, 0]))
        whole = [(prompts[row], expected[row][:7]) for row in (2, 0)]
        batch = batch_of([prompt for prompt, _ in whole])
        batch = {"input_ids": torch.cat((batch["input_ids"], torch.tensor(
            [new for _, new in whole])), dim=1), "attention_mask": torch.cat(
                (batch["attention_mask"], torch.ones(2, 7, dtype=torch.long)), dim=1)}
        out = tiny.model.generate(**batch, **cached(cache), max_new_tokens=7,
                                  do_sample=False, pad_token_id=0)
    assert out[:, -7:].tolist() == [expected[row][7:] for row in (2, 0)]


# The model is unchanged


def test_disabling_restores_the_model(tiny_model):
    tiny = tiny_model("llama")
    model, prompts = tiny.model, prompts_of(tiny)
    before, kind, attributes = plain(model, prompts), model.config._attn_implementation, set(
        vars(model))
    enabled = enable_h2o(model, H2OConfig(heavy_ratio=0.1))  # as a call, no context
    assert model.config._attn_implementation == NAME
    assert plain(model, prompts) != before
    with pytest.raises(UserError, match="enabled for this model already"):
        enable_h2o(model, H2OConfig(heavy_ratio=0.2))
    enabled.disable()
    enabled.disable()
    with pytest.raises(ZeroDivisionError), enable_h2o(model, H2OConfig(heavy_ratio=0.1)):
        raise ZeroDivisionError
    assert (model.config._attn_implementation, set(vars(model))) == (kind, attributes)
    assert plain(model, prompts) == before
    model.generate = generate = lambda *args, **options: None
    enable_h2o(model, H2OConfig(heavy_ratio=0.1)).disable()
    assert vars(model).pop("generate") is generate


@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), *full(copy.deepcopy)])
def test_copies_of_an_enabled_model_are_independent(tiny_model, again):
    prompts, h2o = prompts_of(tiny_model("llama")), H2OConfig(heavy_ratio=0.1)
    model = copy.deepcopy(tiny_model("llama").model)
    full, evicted = plain(model, prompts), tokens(model, prompts, h2o)
    with enable_h2o(model, h2o) as enabled:
        alone, both = again(model), again(enabled)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert plain(alone, prompts) == plain(both.model, prompts) == evicted != full
    both.disable()
    assert plain(both.model, prompts) == full
    # In a process that has enabled none yet, a pickle makes the attention known by itself.
    state = pickle.dumps(alone)
    AttentionInterface._global_mapping.pop(NAME)
    assert plain(pickle.loads(state), prompts) == evicted


@pytest.mark.parametrize("key", ["llama", *full("opt", "neox")])
def test_passes_without_an_h2o_cache_are_unchanged(tiny_model, key):
    tiny = tiny_model(key)
    batch = batch_of(prompts_of(tiny))
    real = batch["attention_mask"].bool()

    def passes(model):
        with torch.no_grad():
            first = model(**batch, **cached(DynamicCache())).logits[real]
            alone = model(batch["input_ids"], use_cache=False).logits
        model = copy.deepcopy(model).train()
        model.requires_grad_(True)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        return [first, alone, *(parameter.grad for parameter in model.parameters())]

    model = copy.deepcopy(tiny.model)
    model.config.attention_dropout = model.config.dropout = 0.0
    for module in model.modules():
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    expected = passes(model)
    with enable_h2o(model, H2OConfig(heavy_ratio=0.1)):
        results = passes(model)
    assert len(expected) > 20
    for a, b in zip(results, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


# What is refused


@pytest.mark.parametrize("options, words", [
    ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    ({"assistant_model": "itself"}, "assisted generation"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
    ({"cache_implementation": "static"}, "cache_implementation"),
    ({"prefill_chunk_size": 4}, "prompt_chunk"), ({"custom_generate": "a/b"}, "custom_generate"),
    ({"output_attentions": True}, "output_attentions"), ({"use_cache": False}, "use_cache=False"),
    (cached(DynamicCache()), "must be an H2OCache, got DynamicCache"),
    ({"generation_config": {"prompt_lookup_num_tokens": 3}}, "assisted generation")])
def test_unsupported_options_of_generate_raise(tiny_model, options, words):
    model = tiny_model("llama").model
    if "assistant_model" in options:
        options = {"assistant_model": model}
    if "generation_config" in options:
        config = copy.deepcopy(model.generation_config)
        config.update(**options["generation_config"])
        options = {"generation_config": config}
    with enable_h2o(model, H2OConfig(heavy_ratio=0.1)):
        refused(lambda: plain(model, prompts_of(tiny_model("llama")), **options), words)


@pytest.mark.parametrize("h2o, bits, message", [
    (H2OConfig(heavy_ratio=0.1, drop_positions=True), 16, "drop_positions"),
    (H2OConfig(heavy_ratio=[0.1, 0.2]), 16, "2 numbers but the model has 3"),
    (H2OConfig(heavy_ratio=0.1), 2, "cache_bits must be 16, 8 or 4, got 2"),
    (H2OConfig(heavy_ratio=0.1, simulate=True), 8, "leave cache_bits"),
    (None, 16, "must be an H2OConfig")])
def test_unsupported_options_of_enable_h2o_raise(tiny_model, h2o, bits, message):
    model = tiny_model("llama").model
    kind = model.config._attn_implementation
    refused(lambda: enable_h2o(model, h2o, cache_bits=bits), match=message)
    assert (model.config._attn_implementation, "generate" in vars(model)) == (kind, False)


def test_unsupported_models_raise():
    from transformers import AutoModel, GPT2Config, LlamaConfig

    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2))
    headless = AutoModel.from_config(LlamaConfig(num_attention_heads=2, hidden_size=16,
                                                 num_hidden_layers=1, vocab_size=9))
    for model, words in ((gpt2, "of type gpt2"), (headless, "that generates, got LlamaModel"),
                         (torch.nn.Linear(2, 2), "got Linear")):
        refused(lambda model=model: enable_h2o(model, H2OConfig(heavy_ratio=0.1)), words)


def test_unsupported_uses_of_a_cache_raise(tiny_model):
    tiny = tiny_model("llama")
    model, h2o = tiny.model, H2OConfig(heavy_ratio=0.1)
    batch = batch_of(prompts_of(tiny, [9, 5]))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        refused(lambda: model(**batch, **cached(H2OCache(model.config, h2o))), "under enable_h2o")
        with enable_h2o(model, h2o) as enabled:
            cache = enabled.new_cache()
            model(**batch, **cached(cache))
            every = torch.ones(2, 1, 9, 9, dtype=torch.bool)
            for call, words in (
                    (lambda: cache.crop(-1), "cannot"),
                    (lambda: cache.batch_repeat_interleave(2), "cannot"),
                    (lambda: model(ids[:1, :1], **cached(cache)), "2 sequences, but 1 came"),
                    (lambda: model(ids, attention_mask=mask * torch.tensor([[1], [0]]),
                                   **cached(enabled.new_cache())), "prompt 1 of the batch"),
                    (lambda: model(ids, attention_mask=every, **cached(enabled.new_cache())),
                     "that marks pads, got another")):
                refused(call, words)
            causal = every.tril() & mask[:, None, None].bool()
            first, second = (model(ids, attention_mask=given, **cached(enabled.new_cache()),
                                   position_ids=torch.arange(9)[None]).logits[mask.bool()]
                             for given in (causal, mask))
            assert torch.allclose(first, second, atol=1e-5)
    with torch.enable_grad(), enable_h2o(model, h2o) as enabled:
        embeddings = torch.zeros(1, 4, 48, requires_grad=True)
        refused(lambda: model(inputs_embeds=embeddings, **cached(enabled.new_cache())),
                "for inference")


def test_a_cache_is_unusable_after_a_failed_pass(tiny_model):
    model = tiny_model("llama").model
    ids = torch.tensor(prompts_of(tiny_model("llama"), [9]))
    with torch.no_grad(), enable_h2o(model, H2OConfig(heavy_ratio=0.1)) as enabled:
        cache = enabled.new_cache()
        hook = model.model.layers[1].register_forward_pre_hook(Mock(side_effect=ZeroDivisionError))
        with pytest.raises(ZeroDivisionError):
            model(ids, **cached(cache))
        hook.remove()
        refused(lambda: model(ids[:, :1], **cached(cache)), match="broke off")


def test_attention_sinks_need_an_h2o_cache(tiny_model):
    model = tiny_model("gpt_oss").model
    with enable_h2o(model, H2OConfig(heavy_ratio=0.1)), pytest.raises(UserError, match="sinks"):
        model(torch.tensor([[1, 2]]), use_cache=False)


@pytest.mark.full
@pytest.mark.skipif(transformers.__version__ < "5",
                    reason="transformers 4 cannot read the tokenizer that 5 has written")
@pytest.mark.filterwarnings("error:.past_key_values:FutureWarning")
def test_the_example_runs_on_a_real_model(capsys):
    assert program("examples/transformers_h2o.py").main(["--gen-len", "8"]) == 0
    full, small = (int(number.replace(",", "")) for number in re.findall(
        r"([\d,]+) (?:bytes|with H2O)", capsys.readouterr().out))
    assert 3 < full / small < 6
