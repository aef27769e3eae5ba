"""Layers in halves: the CPU attends while a GPU computes, and attention and MLP as two layers."""

import itertools
import math
import threading
from functools import partial

import pytest
from helpers import generation
from helpers.error_cases import refused
from helpers.fakes import LazyDevice, PoisonedDevice
from helpers.generation import make_prompts, token_ids, transformers_tokens
from helpers.internals import (
    before_early_attention,
    before_token_layers,
    open_devices,
    staging_bytes,
    weights_of,
)

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.cache import tiers, token_attention
from flexgen_h2o.metrics.trace import Trace
from flexgen_h2o.models import family
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.storage.device import PAGE, round_up

NEW = 7
tokens = partial(generation.tokens, new=NEW)
LENGTHS = [14, 9, 7, 11, 1, 10, 5]
MIXED = Placement(30, 40, 30)
HOST = Placement(0, 100, 0)
AWAY = {"weights": Placement(20, 30, 50), "activations": Placement(30, 30, 40)}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A fake GPU, and a cache on disk that is written back every four tokens."""
    open_devices(monkeypatch, LazyDevice)
    monkeypatch.setattr(tiers, "WRITE_BACK_TOKENS", 4)


def prompts_of(tiny, lengths=LENGTHS):
    return make_prompts(tiny.model.config.vocab_size, lengths)


# Attention on the CPU beside a GPU


def test_attention_sinks_are_copied_to_the_host_once(tiny_model, monkeypatch):
    """A copy at each step would have the host wait for the GPU."""
    tiny, used = tiny_model("gpt_oss"), []
    prompts, decode = prompts_of(tiny), token_attention.ops.decode_attention
    expected = tokens(tiny, prompts)

    def noting(*args, **options):
        used.append(options["sinks"])
        return decode(*args, **options)

    monkeypatch.setattr(token_attention.ops, "decode_attention", noting)
    assert tokens(tiny, prompts, cache=HOST, cpu_cache_compute=True, **AWAY) == expected
    layers = tiny.model.config.num_hidden_layers
    assert len(used) > 2 * layers and len({id(sinks) for sinks in used}) == layers


def test_cpu_attention_overlaps_other_batches(tiny_model, monkeypatch):
    """A kernel that only returns when the next batch has been given its first half, too."""
    tiny = tiny_model("llama")  # 3 layers
    jobs, late = 3 * 2, []
    started = [threading.Event() for _ in range(jobs * (NEW - 1))]
    running = itertools.count()
    starts = itertools.count()
    decode, start = token_attention.ops.decode_attention, token_attention.HostAttention.start

    def patient(*args, **options):
        number = next(running)  # one thread, one after the other
        followed = number % jobs < jobs - 1  # by another of the forward pass
        if followed and not late and not started[number + 1].wait(20):
            late.append(number)
        return decode(*args, **options)

    def noted(*args):
        actual = start(*args)
        started[next(starts)].set()
        return actual

    monkeypatch.setattr(token_attention.ops, "decode_attention", patient)
    monkeypatch.setattr(token_attention.HostAttention, "start", noted)
    prompts = prompts_of(tiny, [9, 5, 4, 2])
    got = tokens(tiny, prompts, gpu_batch_size=2, cache=HOST, cpu_cache_compute=True)
    assert not late and next(starts) == len(started)
    assert got == transformers_tokens(tiny, prompts, NEW)


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_engine_works_after_an_error_in_cpu_attention(tiny_model, monkeypatch, error):
    """The error of a kernel, or an interrupt with the attention of two batches under way."""
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny, [9, 5, 4, 2])
    decode, calls = token_attention.ops.decode_attention, itertools.count()

    def fail(*args, **options):
        if next(calls) == 9:
            raise error
        return decode(*args, **options)

    def interrupt(attentions):
        if next(calls) == 7:
            assert attentions == 2, "this batch's attention and the next one's"
            raise error

    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, cpu_cache_compute=True,
                    cache=HOST if error is ArithmeticError else MIXED)
    with LLM(str(tiny.folder), policy=policy, dtype="float32") as llm:
        with monkeypatch.context() as patch, pytest.raises(error):
            if error is ArithmeticError:
                patch.setattr(token_attention.ops, "decode_attention", fail)
            else:
                before_token_layers(patch, interrupt)
            llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        got = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
    assert token_ids(got) == transformers_tokens(tiny, prompts, NEW)


def test_trace_has_the_attention_of_the_cpu(tiny_model):
    trace = Trace()
    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, cache=HOST, cpu_cache_compute=True)
    with LLM(str(tiny_model("llama").folder), policy=policy, dtype="float32", trace=trace) as llm:
        llm.generate([[5, 6]] * 4, max_new_tokens=4, eos_token_id=-1)
    spans = trace.spans()
    attended = [span for span in spans if span[1] == "cpu attention"]
    assert len(attended) == 3 * 2 * 3  # steps, batches, layers
    assert all(end > start for _, _, start, end, _ in attended)
    assert sum(name.startswith("attention of layer") for name, *_ in spans) == len(attended)


def test_attention_starts_early_only_beside_other_batches(tiny_model, monkeypatch):
    def refuse():
        raise AssertionError("started early")

    tiny = tiny_model("llama")
    prompts = prompts_of(tiny, [9, 5, 4, 2])
    before_early_attention(monkeypatch, refuse)
    for device, options in ((PoisonedDevice, {}), (LazyDevice, {"num_gpu_batches": 1}),
                            (LazyDevice, {"overlap": False}),
                            (LazyDevice, {"cache": Placement(50, 0, 50)})):
        open_devices(monkeypatch, device)
        options = {"gpu_batch_size": 2, "cache": HOST, "cpu_cache_compute": True} | options
        assert tokens(tiny, prompts, **options) == transformers_tokens(tiny, prompts, NEW)
    open_devices(monkeypatch, LazyDevice)
    with pytest.raises(AssertionError, match="early"):
        tokens(tiny, prompts, gpu_batch_size=2, cache=HOST, cpu_cache_compute=True)


# Attention and MLP as two layers


def test_two_layers_take_smaller_buffers_for_the_same_bytes(tiny_model):
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


def test_parallel_residuals_cannot_be_two_layers(tiny_model):
    refused(lambda: LLM(str(tiny_model("neox").folder), policy=Policy(sep_layer=True)),
            match="same input.*leave --sep-layer off")
