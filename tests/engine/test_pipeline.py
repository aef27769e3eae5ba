"""A model over the ranks of a pipeline: the same tokens as on one.

Ranks are threads of this process here, with real messages of gloo between them.
"""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import make_prompts, token_ids
from helpers.internals import plan_with, stage_of, weights_of
from helpers.selection import full, full_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.config.parallel import TorchrunEnv, balance_layers
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.distributed.pipeline import Pipeline
from flexgen_h2o.errors import InsufficientMemory, UserError

NEW = 6
LENGTHS = [14, 11, 7, 9, 1, 8, 6, 2, 5]
DISK = Placement(20, 30, 50)
RISING = ExpertChoices(tuple(tuple(range(6 * layer, 6 * layer + 6)) for layer in range(3)), 2)


class Store:
    """A store of this process, with a connection for each that asks."""

    def __init__(self):
        self.master = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def connect(self):
        return TCPStore("127.0.0.1", self.master.port, None, False)


def in_ranks(count, work, **options):
    """Run `work(pipeline)` on each rank in a thread. Return the result of rank 0."""
    store = Store()

    def rank(number):
        with Pipeline(store.connect, number, count, **options) as pipeline:
            return work(pipeline)

    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(rank, range(count), timeout=120))
    return results[0]


def tokens(folder, prompts, params=None, *, ranks=1, bounds=None, **options):
    """Tokens of each prompt, by one or several ranks."""
    options = {"dtype": "float32", "device": "cpu", "progress": False, "weight_cache": None,
               **options}
    params = params or SamplingParams(max_new_tokens=NEW, eos_token_id=-1)

    def work(pipeline):
        with LLM(str(folder), **options, **({} if pipeline is None else {
                "pipeline": pipeline, "bounds": bounds})) as llm:
            if pipeline is not None and pipeline.rank:
                return llm.follow()
            return [(out.token_ids, out.finish_reason, out.log_probs)
                    for out in llm.generate(prompts, params)]

    return work(None) if ranks == 1 else in_ranks(ranks, work)


def prompts_of(tiny, lengths=LENGTHS):
    return make_prompts(tiny.model.config.vocab_size, lengths)


def small(**policy):
    return Policy(**{"gpu_batch_size": 2, "num_gpu_batches": 3} | policy)


CASES = {
    "plain": {},
    "h2o": {"h2o": H2OConfig(heavy_ratio=0.2)},
    "ratios by layer": {"h2o": H2OConfig(heavy_ratio=(1, 0.1, 0.3))},
    "compressed cache": {"cache_bits": 4, "h2o": H2OConfig(heavy_tokens=3)},
    "8 and 4 bits": {"key_bits": 8, "value_bits": 4},
    "weights on disk": {"policy": small(weights=DISK, activations=Placement(0, 50, 50))},
    "cache on disk": {"policy": small(cache=DISK, weights=Placement(0, 0, 100))},
    "no overlap": {"policy": small(overlap=False, weights=DISK, num_gpu_batches=2)},
    "halves": {"policy": small(sep_layer=True, weights=DISK)},
    "chunks": {"policy": small(prefill_chunk=4)},
    "one batch": {"policy": small(num_gpu_batches=1, gpu_batch_size=9)},
    "quantized": {"weight_bits": 4, "policy": small(weights=DISK)}}
COVERED = ("plain", "8 and 4 bits", "one batch")
"""Cases whose parts other cases have, too."""


@pytest.mark.parametrize("case", [
    *(case for case in CASES if case not in COVERED), *full(*COVERED)])
def test_two_ranks_give_the_same_tokens(tiny_model, case):
    key = "neox_sequential" if case == "halves" else "llama"
    options = {"policy": small(), **CASES[case]}
    tiny = tiny_model(key)
    expected = tokens(tiny.folder, prompts_of(tiny), **options)
    assert tokens(tiny.folder, prompts_of(tiny), ranks=2, **options) == expected


@pytest.mark.parametrize("key, ranks, policy", [
    ("opt", 3, {"weights": DISK}), ("neox_partial", 2, {"weights": DISK}),
    ("qwen2_moe", 2, {"experts": Placement(50, 0, 50), "expert_choices": RISING}),
    ("qwen3_moe_dense", 2, {"experts": Placement(0, 0, 100), "num_gpu_batches": 5}),
    ("qwen3_5", 4, {"cache": DISK, "refill_share": 0.3}),
    ("gemma4", 3, {"cache": DISK, "prefill_chunk": 8}),
    *full_cases(("opt_350m_style", 2, {"weights": DISK}), ("opt_untied", 2, {"weights": DISK}),
                ("llama_untied_bias", 3, {"weights": DISK}), ("neox", 3, {"weights": DISK}),
                ("qwen2_moe", 2, {"experts": DISK, "expert_slots": 4}),
                ("mixtral", 3, {"prefill_chunk": 8}))])
def test_families_give_the_same_tokens(tiny_model, key, ranks, policy):
    """A rank has the experts of its own layers; it may have recurrent layers only."""
    tiny = tiny_model(key)
    options = {"policy": small(**policy), "h2o": H2OConfig(heavy_ratio=0.2)}
    expected = tokens(tiny.folder, prompts_of(tiny), **options)
    assert tokens(tiny.folder, prompts_of(tiny), ranks=ranks, **options) == expected


@pytest.mark.parametrize("key, logprobs", [("llama", 3), ("olmoe", None)])
def test_samples_and_log_probs_equal_those_of_one_rank(tiny_model, key, logprobs):
    """Texts end early, so that blocks do, and sequences go on in the next ones.

    The sums of a mixture's experts depend on the batch, in their last bits.
    """
    tiny = tiny_model(key)
    prompts = prompts_of(tiny, [5, 9, 3, 12, 7, 4, 8, 2, 6, 11, 3])
    params = [SamplingParams(
        max_new_tokens=3 + 3 * (number % 4), do_sample=number % 2 == 0, seed=number, top_k=0,
        eos_token_id=tuple(range(0, 95, 5)), logprobs=logprobs if number % 3 == 0 else None)
        for number in range(len(prompts))]
    options = {"policy": small(gpu_batch_size=1)}
    expected = tokens(tiny.folder, prompts, params, **options)
    assert len({reason for _, reason, _ in expected}) == 2
    for ranks, batches in ((2, 4), (3, 2)):
        actual = tokens(tiny.folder, prompts, params, ranks=ranks,
                       policy=small(gpu_batch_size=1, num_gpu_batches=batches))
        assert actual == expected


def test_sent_bytes_are_counted(tiny_model):
    tiny = tiny_model("opt")

    def work(pipeline):
        with LLM(str(tiny.folder), pipeline=pipeline, device="cpu", dtype="float32",
                 policy=small(gpu_batch_size=1, num_gpu_batches=2), progress=False) as llm:
            if pipeline.rank:
                return llm.follow()
            sent = []
            for _ in range(2):
                llm.generate([[5, 6, 7], [8, 9]], max_new_tokens=4, eos_token_id=-1)
                sent.append(llm.stats.sent_bytes)
            return sent, llm.model_config.hidden_size

    (first, again), hidden = in_ranks(2, work)
    # Of each call the float32 states of the prompts, and of all new tokens but the last.
    assert first == again == 4 * hidden * (5 + 2 * 3)


def test_a_pipeline_without_a_launcher_raises(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="can't reach the others .*RANK.*check that torchrun has"):
        Pipeline.join(TorchrunEnv())


def test_the_first_rank_decides_the_bounds(tiny_model):
    tiny = tiny_model("llama")
    layers = {}

    def work(pipeline):
        bounds = (0, 2, 3) if pipeline.rank == 0 else (0, 1, 3)
        with LLM(str(tiny.folder), pipeline=pipeline, bounds=bounds, device="cpu",
                 progress=False) as llm:
            layers[pipeline.rank] = len(stage_of(llm))
            if pipeline.rank:
                llm.follow()

    in_ranks(2, work)
    assert layers == {0: 2, 1: 1}


def test_each_rank_places_its_popular_experts_first(tiny_model):
    tiny, tiers = tiny_model("qwen2_moe"), {}

    def work(pipeline):
        with LLM(str(tiny.folder), pipeline=pipeline, bounds=(0, 2, 3), device="cpu",
                 progress=False, policy=small(experts=Placement(50, 50, 0),
                                              expert_choices=RISING)) as llm:
            tiers[pipeline.rank] = {
                key: weights_of(llm).tiers[next(iter(unit.specs.values())).name]
                for key, unit in weights_of(llm).experts.items()}
            if pipeline.rank:
                llm.follow()

    in_ranks(2, work)
    for rank, first, last in ((0, 0, 2), (1, 2, 3)):
        ranked = [tiers[rank][key] for key in RISING.slice_layers(first, last).ranked]
        half = 3 * (last - first)
        assert ranked == ["gpu"] * half + ["cpu"] * half


def test_a_call_ends_the_blocks_of_the_one_before(tiny_model):
    tiny = tiny_model("opt")
    prompts = prompts_of(tiny)

    def work(pipeline):
        with LLM(str(tiny.folder), pipeline=pipeline, device="cpu", dtype="float32",
                 policy=small(num_gpu_batches=2), progress=False) as llm:
            if pipeline.rank:
                refused(lambda: llm.generate(prompts), match="follows the first rank")
                return llm.follow()
            for call in (lambda: llm.score([([1], [2])]), llm.stream,
                         lambda: llm.fit_batch(prompt_len=1, gen_len=1, max_batch_size=2),
                         lambda: llm.probe([([1], [2])], lambda *_: None)):
                with pytest.raises(UserError, match="for one rank"):
                    call()
            left = llm.generate_in_blocks(prompts, max_new_tokens=4, eos_token_id=-1)
            first = next(left)
            again = llm.generate(prompts, max_new_tokens=4, eos_token_id=-1)
            refused(lambda: next(left), match="one call is run at a time")
            return [first, again]

    first, again = in_ranks(2, work)
    with LLM(str(tiny.folder), device="cpu", dtype="float32", progress=False) as llm:
        expected = token_ids(llm.generate(prompts, max_new_tokens=4, eos_token_id=-1))
    assert token_ids(again) == expected
    assert {key: out.token_ids for key, out in first.items()} == {
        key: expected[key] for key in first} and len(first) == 4


def test_too_little_memory_on_one_rank_raises_on_the_first(tiny_model, monkeypatch):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)

    def work(pipeline):
        with LLM(str(tiny.folder), pipeline=pipeline, device="cpu", dtype="float32",
                 progress=False) as llm:
            if pipeline.rank:
                plan_with(llm, lambda workload, limits: limits.capped(
                    cpu=0 if workload.prompt_len > 10 else None, gpu=None))
                return llm.follow()
            with pytest.raises(InsufficientMemory, match="rank 1: .*does not fit"):
                llm.generate(prompts, max_new_tokens=3)
            return llm.generate([[1, 2, 3]], max_new_tokens=3, eos_token_id=-1)

    (out,) = in_ranks(2, work)
    assert len(out.token_ids) == 3


def test_an_error_on_one_rank_ends_all_ranks(tiny_model):
    tiny = tiny_model("llama")
    errors = {}

    def gone(unit):
        raise UserError("the disk is gone")

    def work(pipeline):
        try:
            with pipeline, LLM(str(tiny.folder), pipeline=pipeline, device="cpu",
                               progress=False) as llm:
                if pipeline.rank == 0:
                    return llm.generate(prompts_of(tiny), max_new_tokens=4)
                if pipeline.rank == 2:
                    weights_of(llm).get = gone
                llm.follow()
        except UserError as error:
            errors[pipeline.rank] = str(error)

    in_ranks(3, work, rank_timeout=20)
    assert errors[2] == "the disk is gone"
    for rank in (0, 1):
        assert errors[rank].startswith("rank 2 (") and errors[rank].endswith(
            "has ended: the disk is gone")


def test_ranks_with_different_models_raise(tiny_model):
    models = [tiny_model("llama"), tiny_model("llama3_rope")]
    errors = []

    def work(pipeline):
        try:
            with LLM(str(models[pipeline.rank].folder), pipeline=pipeline, device="cpu",
                     progress=False):
                pass
        except UserError as error:
            errors.append(str(error))

    in_ranks(2, work)
    assert len(errors) == 2 and all("start all ranks with the same flags" in error
                                    for error in errors)


def test_wrong_pipelines_raise(tiny_model):
    folder = str(tiny_model("llama").folder)

    def work(pipeline):
        with pytest.raises(UserError, match="3 layers, too few for 4 ranks"):
            LLM(folder, pipeline=pipeline, device="cpu", progress=False)

    in_ranks(4, work)
    refused(lambda: LLM(folder, pipeline=2), match="pipeline must be a Pipeline, got 2")


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.integers(1, 9))
def test_balanced_layers_minimize_the_slowest_rank(seconds, ranks):
    ranks = min(ranks, len(seconds))
    bounds = balance_layers(seconds, ranks)

    def most(bounds):
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds))

    assert bounds[0] == 0 and bounds[-1] == len(seconds) and len(bounds) == ranks + 1
    assert all(a < b for a, b in itertools.pairwise(bounds))
    least = min(most((0, *inner, len(seconds))) for inner in itertools.combinations(
        range(1, len(seconds)), ranks - 1))
    assert most(bounds) == pytest.approx(least)


def test_messages_of_a_channel_keep_their_order():
    def work(pipeline):
        if pipeline.rank == 0:
            for number in range(50):
                pipeline.send(1, number % 2, torch.full((number + 1,), float(number)))
            return pipeline.all_gather(b"done")
        waiting = [pipeline.receive(0, number % 2, torch.empty(number + 1))
                   for number in range(50)]
        for number, message in reversed(list(enumerate(waiting))):
            assert (message.wait() == number).all()
        return pipeline.all_gather(b"")

    assert in_ranks(2, work) == [b"done", b""]
    assert not {"heartbeat", "messages"} & {thread.name for thread in threading.enumerate()}
