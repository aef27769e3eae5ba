"""Layers in halves: the CPU attends while a GPU computes, and attention and MLP as two layers."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
from helpers.fakes import LazyDevice, PoisonedDevice
from helpers.internals import (
    before_early_attention,
    before_token_layers,
    open_devices,
    staging_bytes,
    weights_of,
)
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from llm.test_llm import make_prompts, transformers_tokens

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.cache import decode_attention, kv_cache
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.trace import Trace
from flexgen_h2o.models import family
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.storage.tiers import PAGE, round_up

NEW = 20  # more than the write-back log of a cache on disk
LENGTHS = [60, 41, 7, 23, 1, 30, 12]
FAMILIES = ["opt", "opt_350m_style", "llama", "neox", "neox_sequential"]
MIXED = Placement(30, 40, 30)
HOST = Placement(0, 100, 0)
AWAY = {"weights": Placement(20, 30, 50), "activations": Placement(30, 30, 40)}


def use(monkeypatch, device):
    open_devices(monkeypatch, device)


@pytest.fixture
def gpu(monkeypatch):
    use(monkeypatch, LazyDevice)


def prompts_of(tiny, lengths=LENGTHS):
    return make_prompts(tiny.model.config.vocab_size, lengths)


def tokens(tiny, prompts, *, h2o=None, bits=16, weight_bits=16, eos=-1, new=NEW, **policy):
    policy = Policy(**{"gpu_batch_size": 3, "num_gpu_batches": 2} | policy)
    with LLM(str(tiny.folder), policy=policy, h2o=h2o and H2OConfig(**h2o), cache_bits=bits,
             weight_bits=weight_bits, weight_cache=None, dtype="float32", progress=False) as llm:
        outputs = llm.generate(prompts, max_new_tokens=new, eos_token_id=eos)
        return [out.token_ids for out in outputs]


# Attention on the CPU beside a GPU


@pytest.mark.parametrize(("key", "h2o"), [
    *((key, None) for key in FAMILIES), ("opt", {"heavy_tokens": 0, "recent_ratio": 0.2}),
    ("opt_350m_style", {"heavy_ratio": 0.1}), ("llama", {"heavy_ratio": [1, 0.1, 0.2]}),
    ("neox", {"heavy_ratio": 0.1, "positions": "rolling"}),
    ("neox_sequential", {"heavy_ratio": 0.1})])
def test_the_same_tokens_wherever_attention_runs(tiny_model, gpu, key, h2o):
    tiny = tiny_model(key)
    prompts = prompts_of(tiny)
    expected = tokens(tiny, prompts, h2o=h2o)
    if h2o is None:
        assert expected == transformers_tokens(tiny, prompts, NEW)
    for options in ({"cache": HOST}, {"cache": MIXED, **AWAY},
                    {"cache": HOST, "prefill_chunk": 16, "activations": Placement(0, 0, 100)}):
        got = tokens(tiny, prompts, h2o=h2o, cpu_cache_compute=True, **options)
        assert got == expected, options


def test_learned_logits_come_to_the_host_once(tiny_model, gpu, monkeypatch):
    """They are a model's; a copy at each step would have the host wait for the GPU."""
    tiny, used = tiny_model("gpt_oss"), []
    prompts, decode = prompts_of(tiny), kv_cache.ops.decode_attention
    expected = tokens(tiny, prompts)

    def noting(*args, **options):
        used.append(options["sinks"])
        return decode(*args, **options)

    monkeypatch.setattr(kv_cache.ops, "decode_attention", noting)
    assert tokens(tiny, prompts, cache=HOST, cpu_cache_compute=True, **AWAY) == expected
    layers = tiny.model.config.num_hidden_layers
    assert len(used) > 2 * layers and len({id(sinks) for sinks in used}) == layers


@pytest.mark.parametrize("size, batches", [
    (1, 4), (2, 3), (7, 2), *(pytest.param(*split, marks=pytest.mark.full)
                              for split in ((3, 1), (2, 4)))])
def test_the_same_tokens_for_every_batch_split(tiny_model, gpu, size, batches):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    expected = transformers_tokens(tiny, prompts, NEW)
    for cache, overlap in itertools.product((HOST, MIXED), (True, False)):
        got = tokens(tiny, prompts, gpu_batch_size=size, num_gpu_batches=batches, cache=cache,
                     cpu_cache_compute=True, overlap=overlap, activations=MIXED)
        assert got == expected, (cache, overlap)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("h2o", [None, {"heavy_ratio": 0.1}])
def test_a_compressed_cache_gives_the_same(tiny_model, gpu, bits, h2o):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    expected = tokens(tiny, prompts, h2o=h2o, bits=bits)
    for cache in (HOST, MIXED):
        got = tokens(tiny, prompts, h2o=h2o, bits=bits, cache=cache, cpu_cache_compute=True)
        assert got == expected, cache


def test_batches_that_end_early_wait_for_nothing(tiny_model, gpu):
    tiny = tiny_model("opt")
    prompts = prompts_of(tiny)
    free = transformers_tokens(tiny, prompts, NEW)
    # The first batch ends, then the last, then the middle one; longest prompts come first.
    eos = [free[0][3], free[1][2], free[2][9], free[3][5]]
    ended = []
    for row in free:
        end = next((i for i, token in enumerate(row) if token in eos), NEW - 1)
        ended.append(row[: end + 1])
    assert len({len(row) for row in ended}) > 2
    for size, batches in ((1, 4), (2, 4), (3, 2)):
        got = tokens(tiny, prompts, eos=eos, gpu_batch_size=size, num_gpu_batches=batches,
                     cache=MIXED, cpu_cache_compute=True, activations=MIXED)
        assert got == ended, (size, batches)


def test_the_cpu_attends_while_other_batches_compute(tiny_model, gpu, monkeypatch):
    """A kernel that only returns when the next batch has been given its first half, too."""
    tiny = tiny_model("llama")  # 3 layers
    jobs, late = 3 * 2, []
    started = [threading.Event() for _ in range(jobs * (NEW - 1))]
    running = itertools.count()
    starts = itertools.count()
    decode, start = kv_cache.ops.decode_attention, decode_attention.HostAttentionQueue.start

    def patient(*args, **options):
        number = next(running)  # one thread, one after the other
        followed = number % jobs < jobs - 1  # by another of the forward pass
        if followed and not late and not started[number + 1].wait(20):
            late.append(number)
        return decode(*args, **options)

    def noted(*args):
        found = start(*args)
        started[next(starts)].set()
        return found

    monkeypatch.setattr(kv_cache.ops, "decode_attention", patient)
    monkeypatch.setattr(decode_attention.HostAttentionQueue, "start", noted)
    prompts = prompts_of(tiny, [9, 5, 4, 2])
    got = tokens(tiny, prompts, gpu_batch_size=2, cache=HOST, cpu_cache_compute=True)
    assert not late and next(starts) == len(started)
    assert got == transformers_tokens(tiny, prompts, NEW)


def test_an_error_of_the_cpu_ends_one_run_and_not_the_next(tiny_model, gpu, monkeypatch):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny, [9, 5, 4, 2])
    decode, calls = kv_cache.ops.decode_attention, itertools.count()

    def failing(*args, **options):
        if next(calls) == 9:
            raise ArithmeticError("something of attention")
        return decode(*args, **options)

    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, cache=HOST, cpu_cache_compute=True)
    with LLM(str(tiny.folder), policy=policy, dtype="float32") as llm:
        monkeypatch.setattr(kv_cache.ops, "decode_attention", failing)
        with pytest.raises(ArithmeticError, match="attention"):
            llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        monkeypatch.undo()
        use(monkeypatch, LazyDevice)
        got = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
    assert [out.token_ids for out in got] == transformers_tokens(tiny, prompts, NEW)


def test_an_interrupt_with_attention_under_way_leaves_an_engine_that_works(tiny_model, gpu,
                                                                           monkeypatch):
    tiny = tiny_model("opt")
    prompts = prompts_of(tiny, [9, 5, 4, 2])
    calls = itertools.count()

    def interrupted(attentions):
        if next(calls) == 7:
            assert attentions == 2, "this batch's attention and the next one's"
            raise KeyboardInterrupt

    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, cache=MIXED, cpu_cache_compute=True)
    with LLM(str(tiny.folder), policy=policy, dtype="float32") as llm:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            before_token_layers(patch, interrupted)
            llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        got = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
    assert [out.token_ids for out in got] == transformers_tokens(tiny, prompts, NEW)


def test_a_trace_shows_the_cpus_attention(tiny_model, gpu):
    trace = Trace()
    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, cache=HOST, cpu_cache_compute=True)
    with LLM(str(tiny_model("llama").folder), policy=policy, dtype="float32", trace=trace) as llm:
        llm.generate([[5, 6]] * 4, max_new_tokens=4, eos_token_id=-1)
    spans = trace.spans()
    attended = [span for span in spans if span[1] == "cpu attention"]
    assert len(attended) == 3 * 2 * 3  # steps, batches, layers
    assert all(end > start for _, _, start, end, _ in attended)
    assert sum(name.startswith("attention of layer") for name, *_ in spans) == len(attended)


def test_with_one_batch_or_no_gpu_attention_does_not_start_early(tiny_model, monkeypatch):
    def refuse():
        raise AssertionError("started early")

    tiny = tiny_model("llama")
    prompts = prompts_of(tiny, [9, 5, 4, 2])
    before_early_attention(monkeypatch, refuse)
    for device, options in ((PoisonedDevice, {}), (LazyDevice, {"num_gpu_batches": 1}),
                            (LazyDevice, {"overlap": False}),
                            (LazyDevice, {"cache": Placement(50, 0, 50)})):
        use(monkeypatch, device)
        options = {"gpu_batch_size": 2, "cache": HOST, "cpu_cache_compute": True} | options
        assert tokens(tiny, prompts, **options) == transformers_tokens(tiny, prompts, NEW)
    use(monkeypatch, LazyDevice)
    with pytest.raises(AssertionError, match="early"):
        tokens(tiny, prompts, gpu_batch_size=2, cache=HOST, cpu_cache_compute=True)


# Attention and MLP as two layers


@pytest.mark.parametrize(("key", "device"), [
    ("opt", PoisonedDevice), ("opt_350m_style", LazyDevice), ("llama", PoisonedDevice),
    ("llama", LazyDevice), ("neox_sequential", PoisonedDevice)])
def test_two_layers_give_the_same_tokens(tiny_model, monkeypatch, key, device):
    use(monkeypatch, device)
    tiny = tiny_model(key)
    prompts = prompts_of(tiny)
    expected = transformers_tokens(tiny, prompts, NEW)
    for options in ({"weights": Placement(0, 100, 0)},
                    {**AWAY, "cache": MIXED, "cpu_cache_compute": True},
                    {**AWAY, "cache": MIXED, "overlap": False, "prefill_chunk": 16},
                    {"cache": HOST, "cpu_cache_compute": True, "num_gpu_batches": 3}):
        assert tokens(tiny, prompts, sep_layer=True, **options) == expected, options


@pytest.mark.parametrize("weight_bits, bits", [(16, 4), (8, 16), (4, 8)])
def test_two_layers_with_eviction_and_quantization(tiny_model, gpu, weight_bits, bits):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    options = {"h2o": {"heavy_ratio": 0.1, "positions": "rolling"}, "bits": bits,
               "weight_bits": weight_bits}
    expected = tokens(tiny, prompts, **options)
    for place in ({}, {**AWAY, "cache": MIXED, "cpu_cache_compute": True}):
        assert tokens(tiny, prompts, sep_layer=True, **options, **place) == expected, place


def test_two_layers_take_smaller_buffers_and_move_the_same_bytes(tiny_model, gpu):
    tiny = tiny_model("llama")
    layer = family(llama := from_transformers(tiny.config, "tiny")).weights(llama).layers[0]
    larger = sum(round_up(2 * math.prod(spec.shape), 64) for name, spec in layer.items()
                 if name in ("ln2", "gate", "up", "down"))
    largest, moved = [], []
    for sep_layer in (False, True):
        policy = Policy(weights=HOST, sep_layer=sep_layer)
        # Converted, and so packed with no gaps.
        with LLM(str(tiny.folder), policy=policy, dtype="bfloat16") as llm:
            llm.generate([[5, 6]], max_new_tokens=3, eos_token_id=-1)
            moved.append(llm.stats.links["cpu->gpu"][0])
            fetched = [unit.fetched_bytes for unit in weights_of(llm).units]
            largest.append(max(fetched[1:-1]))
            assert staging_bytes(llm) == 2 * [max(fetched)]
    assert moved[0] == moved[1]
    assert largest[1] == round_up(larger, PAGE) < 0.7 * largest[0]


PLACES = [Placement(100, 0, 0), HOST, Placement(0, 0, 100), MIXED]


@settings(max_examples=examples(20))
@given(data=st.data())
def test_any_policy_gives_the_same_tokens(tiny_model, data):
    """Lengths, batches, placements and switches at random, beside a pretend GPU."""
    key = data.draw(st.sampled_from(["opt", "llama", "neox_sequential"]))
    tiny = tiny_model(key)
    prompts = prompts_of(tiny, data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6)))
    h2o = data.draw(st.sampled_from([None, {"heavy_tokens": 3, "recent_tokens": 4}]))
    bits = data.draw(st.sampled_from([16, 8]))
    policy = {"gpu_batch_size": data.draw(st.integers(1, 3)),
              "num_gpu_batches": data.draw(st.integers(1, 4)),
              "prefill_chunk": data.draw(st.sampled_from([None, 4]))}
    policy |= {name: data.draw(st.booleans())
               for name in ("overlap", "cpu_cache_compute", "sep_layer")}
    policy |= {name: data.draw(st.sampled_from(PLACES))
               for name in ("weights", "cache", "activations")}
    with pytest.MonkeyPatch.context() as patch:
        use(patch, LazyDevice)
        expected = tokens(tiny, prompts, h2o=h2o, bits=bits)
        end = expected[0][NEW // 3]
        ended = [row[: row.index(end) + 1] if end in row else row for row in expected]
        assert tokens(tiny, prompts, h2o=h2o, bits=bits, eos=end, **policy) == ended


def test_halves_of_a_parallel_residual_are_refused(tiny_model):
    with pytest.raises(UserError, match="same input.*leave --sep-layer off") as caught:
        LLM(str(tiny_model("neox").folder), policy=Policy(sep_layer=True))
    assert "\n" not in str(caught.value)
