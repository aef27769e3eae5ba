"""The engine end to end on tiny random models: the same tokens whatever the policy."""

import itertools
import random

import pytest
import torch
from fakes import LazyDevice, PoisonedDevice

import flexgen_h2o.llm as llm_module
from flexgen_h2o import LLM, Placement, Policy, runtime
from flexgen_h2o.errors import UserError
from flexgen_h2o.trace import Trace

NEW = 20  # more than the tail of a cache on disk


def make_prompts(vocab, lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


def transformers_tokens(tiny, prompts, new=NEW, **options):
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
        found = tiny.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                                    **options)
        out.append(found[0, len(prompt):].tolist())
    return out


def tokens_of(folder, prompts, *, new=NEW, offload_dir=None, sampling=None, **policy):
    sampling = {"eos_token_id": -1} | (sampling or {})
    with LLM(str(folder), policy=Policy(**policy), dtype="float32", offload_dir=offload_dir) as llm:
        outputs = llm.generate(prompts, max_new_tokens=new, **sampling)
    return [out.token_ids for out in outputs]


PLACES = [Placement(100, 0, 0), Placement(0, 100, 0), Placement(0, 0, 100),
          Placement(40, 30, 30)]
FAMILIES = ["opt", "llama", "neox"]


@pytest.fixture(params=["poisoned", "lazy"])
def device(request, monkeypatch):
    kind = {"poisoned": PoisonedDevice, "lazy": LazyDevice}[request.param]
    monkeypatch.setattr(llm_module, "open_device", lambda name: kind())
    return request.param


@pytest.mark.parametrize("key", FAMILIES)
@pytest.mark.parametrize("overlap", [True, False])
def test_the_same_tokens_for_every_placement(tiny_model, tmp_path, device, key, overlap):
    """Every placement of each kind with every one of the other kinds; pads; a partial block."""
    tiny = tiny_model(key)
    prompts = make_prompts(tiny.model.config.vocab_size, [9, 4, 1, 7, 12])
    expected = transformers_tokens(tiny, prompts)
    for i, j in itertools.product(range(4), repeat=2):
        weights, cache, activations = PLACES[i], PLACES[j], PLACES[(i + j) % 4]
        got = tokens_of(tiny.folder, prompts, weights=weights, cache=cache,
                        activations=activations, gpu_batch_size=2, num_gpu_batches=2,
                        overlap=overlap, offload_dir=str(tmp_path / "offload"))
        assert got == expected, (weights, cache, activations)
    assert not (tmp_path / "offload").exists() or not list((tmp_path / "offload").iterdir())


@pytest.mark.parametrize("split", [(1, 1), (1, 5), (3, 1), (2, 3), (8, 2)])
def test_the_same_tokens_for_every_batch_split(tiny_model, tmp_path, split):
    tiny = tiny_model("llama")
    prompts = make_prompts(tiny.model.config.vocab_size, [3, 11, 6, 6, 2, 30, 1])
    got = tokens_of(tiny.folder, prompts, gpu_batch_size=split[0], num_gpu_batches=split[1],
                    weights=Placement(50, 0, 50), cache=Placement(50, 0, 50),
                    offload_dir=str(tmp_path))
    assert got == transformers_tokens(tiny, prompts)


def test_call_after_call_in_the_same_room(tiny_model, tmp_path, device):
    """Smaller blocks after larger ones, scoring in between, an early end with loads under way."""
    tiny = tiny_model("llama")
    vocab = tiny.model.config.vocab_size
    policy = Policy(gpu_batch_size=3, num_gpu_batches=2, weights=Placement(0, 0, 100),
                    cache=Placement(30, 30, 40), activations=Placement(30, 30, 40))
    calls = [make_prompts(vocab, lengths, seed) for seed, lengths in enumerate(
        [[12, 9, 30, 4, 4], [5], [2, 3], [40, 1, 1, 1, 1, 1, 1], [7, 8]])]
    with torch.inference_mode(), LLM(str(tiny.folder), policy=policy, dtype="float32",
                                     offload_dir=str(tmp_path)) as llm:
        for prompts in calls:
            expected = transformers_tokens(tiny, prompts)
            got = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
            assert [out.token_ids for out in got] == expected
            stops = [tokens[2] for tokens in expected]
            got = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=stops)
            assert all(out.token_ids[-1] in stops for out in got)
            scores = llm.loglikelihood(list(zip(prompts, expected, strict=True)))
            assert [len(one) for one in scores] == [NEW] * len(prompts)
    assert list(tmp_path.iterdir()) == []


def test_prompts_longer_than_a_chunk_of_rows(tiny_model, monkeypatch):
    from flexgen_h2o.engine import executor

    monkeypatch.setitem(executor.CHUNK_ROWS, "cpu", 8)
    monkeypatch.setattr(executor, "HEAD_ROWS", 2)
    tiny = tiny_model("opt")
    prompts = make_prompts(tiny.model.config.vocab_size, [5, 3, 20, 8, 1])
    assert tokens_of(tiny.folder, prompts, gpu_batch_size=5) == transformers_tokens(tiny, prompts)


def test_a_sequence_ends_at_eos_and_a_block_when_all_have(tiny_model):
    tiny = tiny_model("opt")
    prompts = make_prompts(tiny.model.config.vocab_size, [5, 9, 7])
    free = transformers_tokens(tiny, prompts)
    eos = [tokens[3] for tokens in free]
    expected = []
    for tokens in free:
        end = next(i for i, t in enumerate(tokens) if t in eos)
        expected.append(tokens[: end + 1])
    policy = Policy(gpu_batch_size=2, num_gpu_batches=2)
    with LLM(str(tiny.folder), policy=policy, dtype="float32") as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=eos)
        assert [out.token_ids for out in outputs] == expected
        assert {out.finish_reason for out in outputs} == {"stop"}
        assert llm.stats.generated_tokens == sum(map(len, expected))
        assert len(llm.stats.step_seconds) == max(map(len, expected)) - 1
        again = llm.generate(prompts, max_new_tokens=4, eos_token_id=-1)
        assert [out.token_ids for out in again] == [tokens[:4] for tokens in free]
        assert {out.finish_reason for out in again} == {"length"}


@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2},
    {"do_sample": True, "temperature": 0.7, "top_k": 1},
])
def test_deterministic_options_give_transformers_tokens(tiny_model, options):
    tiny = tiny_model("llama")
    prompts = make_prompts(tiny.model.config.vocab_size, [5, 9, 2])
    got = tokens_of(tiny.folder, prompts, sampling=options, gpu_batch_size=3)
    assert got == transformers_tokens(tiny, prompts, **options)


def test_sampling_depends_on_the_seed_and_not_on_the_batch_split(tiny_model):
    tiny = tiny_model("neox")
    prompts = make_prompts(tiny.model.config.vocab_size, [5, 9, 2, 5, 5])
    options = {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.9}
    runs = {
        (seed, size): tokens_of(tiny.folder, prompts, gpu_batch_size=size, num_gpu_batches=2,
                                sampling=options | {"seed": seed})
        for seed in (1, 2) for size in (1, 2, 5)
    }
    for seed in (1, 2):
        assert runs[seed, 1] == runs[seed, 2] == runs[seed, 5]
    assert runs[1, 1] != runs[2, 1]


def test_min_new_tokens_keeps_eos_away(tiny_model):
    tiny = tiny_model("opt")
    prompts = make_prompts(tiny.model.config.vocab_size, [5])
    eos = transformers_tokens(tiny, prompts)[0][0]
    options = {"eos_token_id": eos, "min_new_tokens": 6}
    got = tokens_of(tiny.folder, prompts, sampling=options)
    assert len(got[0]) >= 6 and eos not in got[0][:6]
    assert got == transformers_tokens(tiny, prompts, **options)


@pytest.mark.parametrize("key", FAMILIES)
def test_loglikelihood_equals_transformers(tiny_model, key):
    tiny = tiny_model(key)
    tokens = make_prompts(tiny.model.config.vocab_size, [9, 5, 14, 3])
    pairs = [(t[:cut], t[cut:]) for t, cut in zip(tokens, [3, 1, 12, 2], strict=True)]
    with LLM(str(tiny.folder), policy=Policy(gpu_batch_size=3), dtype="float32") as llm:
        got = llm.loglikelihood(pairs)
    for (context, continuation), values in zip(pairs, got, strict=True):
        with torch.no_grad():
            logits = tiny.model(torch.tensor([context + continuation])).logits[0]
        expected = [logits[len(context) + i - 1].log_softmax(-1)[t].item()
                    for i, t in enumerate(continuation)]
        assert values == pytest.approx(expected, abs=1e-4)


def test_dummy_weights_are_the_same_on_every_placement(tmp_path):
    prompts = make_prompts(500, [6, 3])
    runs = []
    for weights in PLACES:
        with LLM("facebook/opt-125m", path="_DUMMY_", policy=Policy(weights=weights), seed=7,
                 offload_dir=str(tmp_path)) as llm:
            runs.append([out.token_ids for out in llm.generate(prompts, max_new_tokens=3)])
    assert all(run == runs[0] for run in runs)
    assert list(tmp_path.iterdir()) == []


def test_weights_on_disk_are_read_beside_compute(tiny_model, tmp_path):
    trace = Trace()
    tiny = tiny_model("opt")
    policy = Policy(weights=Placement(0, 0, 100), gpu_batch_size=4, num_gpu_batches=2)
    with LLM(str(tiny.folder), policy=policy, dtype="float32", trace=trace,
             offload_dir=str(tmp_path)) as llm:
        llm.generate(make_prompts(96, [200] * 8), max_new_tokens=2, eos_token_id=-1)
        moved, _ = llm.stats.links["disk->cpu"]
        assert moved > 0
    spans = trace.spans()
    reads = [s for s in spans if s[1] == "disk->cpu"]
    computes = [s for s in spans if s[1] == "compute"]
    assert any(r[2] < c[3] and c[2] < r[3] for r in reads for c in computes)


def test_stats_count_what_was_done(tiny_model):
    tiny = tiny_model("opt")
    with LLM(str(tiny.folder), policy=Policy(gpu_batch_size=2), dtype="float32") as llm:
        llm.generate(make_prompts(96, [5, 6, 7]), max_new_tokens=4, eos_token_id=-1)
        stats = llm.stats
        assert (stats.num_prompts, stats.prompt_tokens, stats.generated_tokens) == (3, 18, 12)
        assert len(stats.step_seconds) == 2 * 3 and stats.prefill_seconds > 0
        assert stats.decode_seconds == pytest.approx(sum(stats.step_seconds))
        config = llm.model_config
        assert stats.kv_cache_bytes == 2 * 10 * config.kv_bytes_per_token(4)
        llm.generate(make_prompts(96, [5, 6, 7]), max_new_tokens=10, cut_gen_len=4, eos_token_id=-1)
        assert llm.stats.projected and llm.stats.generated_tokens == 30
        assert llm.generate([], max_new_tokens=3) == [] and llm.stats.num_prompts == 0


@pytest.mark.parametrize("prompts, options, words", [
    ([[]], {}, "prompt 0 is empty"),
    ([[3], [4, 10**6]], {}, "prompt 1: token id 1000000"),
    ([[5] * 300], {}, "prompt 0 has 300 tokens, more than"),
    ([[5] * 250], {"max_new_tokens": 50}, "generate at most 7"),
    (["text"], {}, "no tokenizer"),
    ([[5]], {"max_tokens": 5}, "no option 'max_tokens'"),
    ([[5]], {"max_new_tokens": 0}, "at least 1"),
    ("text", {}, "put the one prompt in a list"),
    ([5, 6], {}, "prompt 0 must be text or a sequence"),
    ([[1.5]], {}, "prompt 0 must be text or a sequence"),
    ([[5]], {"cut_gen_len": 0}, "at least 1"),
])
def test_bad_requests_are_one_line(tiny_model, prompts, options, words):
    with LLM(str(tiny_model("opt").folder), dtype="float32") as llm, \
            pytest.raises(UserError, match=words) as caught:
        llm.generate(prompts, **options)
    assert "\n" not in str(caught.value)


def test_bad_pairs_and_a_closed_llm_are_one_line(tiny_model):
    llm = LLM(str(tiny_model("opt").folder), dtype="float32")
    for pair in ("ab", ([5],), ([5], [6.5]), ([5], [])):
        with pytest.raises(UserError, match="pair 0"):
            llm.loglikelihood([pair])
    llm.close()
    with pytest.raises(UserError, match="closed"):
        llm.generate([[5]])


@pytest.mark.parametrize("name, text", [
    ("tokenizer.json", "{}"), ("generation_config.json", "{"), ("generation_config.json", "[]"),
    ("generation_config.json", '{"eos_token_id": "x"}'),
    ("generation_config.json", '{"eos_token_id": [true]}'),
    ("generation_config.json", f'{{"eos_token_id": {10**400}}}'),
    ("generation_config.json", "[" * 100_000),
])
def test_damaged_small_files_show_before_the_work(tiny_model, tmp_path, monkeypatch, name, text):
    """Also where the call says which tokens end a text."""
    import shutil

    shutil.copytree(tiny_model("opt").folder, tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    monkeypatch.setattr(runtime.Runtime, "run", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(UserError, match="can't be") as caught, \
            LLM(str(tmp_path / "model"), dtype="float32") as llm:
        llm.generate([[5]], max_new_tokens=2, eos_token_id=-1)
    assert "\n" not in str(caught.value)


def test_a_disk_error_ends_the_run_and_leaves_nothing(tiny_model, tmp_path, monkeypatch):
    import errno
    import os

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    policy = Policy(cache=Placement(0, 0, 100), weights=Placement(0, 0, 100))
    with LLM(str(tiny_model("opt").folder), policy=policy, dtype="float32",
             offload_dir=str(tmp_path)) as llm:
        monkeypatch.setattr(os, "pwritev", fail)
        with pytest.raises(UserError, match="is full"):
            llm.generate([[5, 6, 7]], max_new_tokens=NEW)
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == []
        assert len(llm.generate([[5, 6, 7]], max_new_tokens=3, eos_token_id=-1)[0].token_ids) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_read_error_ends_one_run_and_not_the_next(tiny_model, tmp_path, monkeypatch):
    from flexgen_h2o.storage.disk import Disk

    def fail(*_):
        raise UserError("reading failed")

    tiny = tiny_model("opt")
    prompts = make_prompts(96, [5])
    with LLM(str(tiny.folder), policy=Policy(weights=Placement(0, 0, 100)), dtype="float32",
             offload_dir=str(tmp_path)) as llm:
        monkeypatch.setattr(Disk, "_read_piece", fail)
        with pytest.raises(UserError, match="reading failed"):
            llm.generate(prompts, max_new_tokens=NEW)
        monkeypatch.undo()
        got = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
    assert [out.token_ids for out in got] == transformers_tokens(tiny, prompts)


def test_an_interrupt_leaves_nothing(tiny_model, tmp_path, monkeypatch):
    from flexgen_h2o.engine.executor import Executor

    def interrupt(*_):
        raise KeyboardInterrupt

    policy = Policy(cache=Placement(0, 0, 100), weights=Placement(0, 0, 100))
    monkeypatch.setattr(Executor, "_head", interrupt)
    with pytest.raises(KeyboardInterrupt), LLM(
            str(tiny_model("opt").folder), policy=policy, dtype="float32",
            offload_dir=str(tmp_path)) as llm:
        llm.generate([[5, 6, 7]], max_new_tokens=3)
    assert list(tmp_path.iterdir()) == []
