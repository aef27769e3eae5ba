"""The engine end to end on tiny random models: the same tokens whatever the policy."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import (
    PLACES,
    make_prompts,
    prompts_of,
    token_ids,
    tokens,
    transformers_tokens,
)
from helpers.tiny_tokenizers import with_words

from flexgen_h2o import LLM, Placement, Policy, SamplingParams
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.engine import runner
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import ops
from flexgen_h2o.metrics.trace import Trace

NEW = 8


def test_calls_in_the_same_workspace(tiny_model, tmp_path, device):
    """Smaller blocks after larger ones, scoring in between, an early end with loads under way."""
    tiny = tiny_model("llama")
    policy = Policy(gpu_batch_size=3, num_gpu_batches=2, weights=Placement(0, 0, 100),
                    cache=Placement(0, 0, 100), activations=Placement(30, 30, 40))
    calls = [prompts_of(tiny, lengths, seed) for seed, lengths in enumerate(
        [[12, 9, 18, 4, 4], [5], [20, 1, 1, 1, 1, 1, 1], [7, 8]])]
    with torch.inference_mode(), LLM(str(tiny.folder), policy=policy, dtype="float32",
                                     offload_dir=str(tmp_path)) as llm:
        for prompts in calls:
            expected = transformers_tokens(tiny, prompts, NEW)
            got = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
            assert token_ids(got) == expected
            stops = [one[2] for one in expected]
            got = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=stops)
            assert all(out.token_ids[-1] in stops for out in got)
            scores = llm.loglikelihood(list(zip(prompts, expected, strict=True)))
            assert [len(one) for one in scores] == [NEW] * len(prompts)
    assert list(tmp_path.iterdir()) == []


def test_outputs_come_block_by_block(tiny_model, tmp_path):
    """They equal the outputs of `generate`, with other calls in between, and may be dropped."""
    tiny = tiny_model("llama")
    prompts = make_prompts(100, [5, 30, 3, 17, 9])
    policy = Policy(gpu_batch_size=1, num_gpu_batches=2, cache=Placement(0, 0, 100))
    options = {"max_new_tokens": 5, "eos_token_id": -1}
    with LLM(str(tiny.folder), dtype="float32", policy=policy, offload_dir=str(tmp_path)) as llm:
        expected = llm.generate(prompts, **options)
        blocks = llm.generate_in_blocks(prompts, **options)
        results = next(blocks)
        assert list(results) == [1, 3] and llm.stats.generated_tokens == 10
        # Others within and after it, of other sizes, from another thread too.
        with ThreadPoolExecutor() as pool:
            assert pool.submit(llm.generate, prompts[:1], **options).result() == expected[:1]
        assert llm.stats.num_prompts == 1
        inner = llm.generate_in_blocks([prompts[2], prompts[1]] * 2, **options)
        for block in blocks:
            assert not results.keys() & block.keys()
            results |= block
            assert llm.stats.num_prompts == len(results)
            assert all(out.token_ids == expected[2 - key % 2].token_ids
                       for key, out in next(inner, {}).items())
        assert results == dict(enumerate(expected))
        del inner
        assert llm.generate(prompts, **options) == expected
        assert list(llm.generate_in_blocks([], **options)) == []
        refused(lambda: llm.generate_in_blocks([[5], []]), match="prompt 1 is empty")
        refused(lambda: llm.encode([5] * 300), match="prompt 0 has 300 tokens")
        left = llm.generate_in_blocks(prompts, **options)
        next(left)
    refused(lambda: next(left), match="has been closed")
    assert list(tmp_path.iterdir()) == []


def test_a_sequence_ends_at_eos_and_a_block_when_all_have(tiny_model):
    tiny = tiny_model("opt")
    prompts = prompts_of(tiny, [5, 9, 7])
    free = transformers_tokens(tiny, prompts, NEW)
    eos = [one[3] for one in free]
    expected = [one[: next(i for i, token in enumerate(one) if token in eos) + 1] for one in free]
    policy = Policy(gpu_batch_size=2, num_gpu_batches=2)
    with LLM(str(tiny.folder), policy=policy, dtype="float32") as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=eos)
        assert token_ids(outputs) == expected
        assert {out.finish_reason for out in outputs} == {"stop"}
        assert llm.stats.generated_tokens == sum(map(len, expected))
        assert len(llm.stats.step_seconds) == max(map(len, expected)) - 1
        used = sum(map(len, expected)) - len(expected)
        assert llm.stats.decode_slots - llm.stats.idle_slots == used
        again = llm.generate(prompts, max_new_tokens=4, eos_token_id=-1)
        assert token_ids(again) == [one[:4] for one in free]
        assert {out.finish_reason for out in again} == {"length"}


def test_prompts_have_sampling_parameters_of_their_own(tiny_model):
    tiny = tiny_model("llama")
    prompts = make_prompts(100, [5, 30, 3, 17, 9, 5])
    kinds = [{}, {"do_sample": True, "seed": 3}, {"presence_penalty": 2.0, "logprobs": 2},
             {"do_sample": True, "seed": 4, "logprobs": 0}, {"repetition_penalty": 3.0}, {}]
    own_params = [SamplingParams(max_new_tokens=2 + 5 * key % 13, eos_token_id=-1, **kind)
            for key, kind in enumerate(kinds)]
    with LLM(str(tiny.folder), dtype="float32", policy=Policy(gpu_batch_size=2)) as llm:
        together = llm.generate(prompts, own_params)
        for prompt, params, out in zip(prompts, own_params, together, strict=True):
            [alone] = llm.generate([prompt], [params])
            assert (alone.token_ids, alone.finish_reason) == (out.token_ids, "length")
            assert len(out.token_ids) == params.max_new_tokens
            assert (out.log_probs is None) == (params.logprobs is None)
        scored = llm.loglikelihood([(prompts[3], together[3].token_ids)])[0]
        assert [one.log_prob for one in together[3].log_probs] == pytest.approx(scored, abs=1e-4)
        for wrong in (own_params[:2], 5, [*own_params[:5], {}]):
            with pytest.raises(UserError, match="one for each of the 6 prompts"):
                llm.generate(prompts, wrong)
        with pytest.raises(UserError, match="give sampling_params or seed, not both"):
            llm.generate(prompts, own_params, seed=1)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("key", ["opt", "qwen3_moe"])
def test_dummy_weights_are_the_same_on_every_placement(tiny_model, tmp_path, key, bits):
    folder, prompts = tiny_model(key).folder, make_prompts(96, [6, 3])
    runs = [tokens(folder, prompts, new=3, path="_DUMMY_", weights=weights, weight_bits=bits,
                   seed=7, offload_dir=str(tmp_path)) for weights in PLACES]
    assert all(run == runs[0] for run in runs)
    assert list(tmp_path.iterdir()) == []


def test_weights_on_disk_are_read_beside_compute(tiny_model, tmp_path):
    trace = Trace()
    tiny = tiny_model("opt")
    policy = Policy(weights=Placement(0, 0, 100), gpu_batch_size=4, num_gpu_batches=2)
    with LLM(str(tiny.folder), policy=policy, dtype="float32", trace=trace,
             offload_dir=str(tmp_path)) as llm:
        llm.generate(make_prompts(96, [120] * 8), max_new_tokens=2, eos_token_id=-1)
        moved, _ = llm.stats.links["disk->cpu"]
        assert moved > 0
    spans = trace.spans()
    reads = [s for s in spans if s[1] == "disk->cpu"]
    computes = [s for s in spans if s[1] == "compute"]
    assert any(r[2] < c[3] and c[2] < r[3] for r in reads for c in computes)


def test_stats_count_a_call(tiny_model):
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


@pytest.fixture(scope="module")
def opt_llm(tiny_model):
    with LLM(str(tiny_model("opt").folder), dtype="float32") as llm:
        yield llm


@pytest.mark.parametrize("prompts, options, words", [
    ([[]], {}, "prompt 0 is empty"), ([[3], [4, 10**6]], {}, "prompt 1: token id 1000000"),
    ([[5] * 300], {}, "prompt 0 has 300 tokens, more than"),
    ([[5] * 250], {"max_new_tokens": 50}, "generate at most 7"), (["text"], {}, "no tokenizer"),
    ([[5]], {"max_tokens": 5}, "no option 'max_tokens'"),
    ("text", {}, "put the one prompt in a list"),
    ([[1.5]], {}, "prompt 0 must be text or a sequence"),
    (None, {}, "prompts must be a list, got None"),
    ([[5]], {"stop_strings": "a\ud800"}, r"stop_strings is not text in UTF-8.*'\\ud800'")])
def test_bad_requests(opt_llm, prompts, options, words):
    refused(lambda: opt_llm.generate(prompts, **options), match=words)


def test_bad_pairs_and_a_closed_llm(tiny_model):
    llm = LLM(str(tiny_model("opt").folder), dtype="float32")
    for pair in ("ab", ([5],), ([5], [6.5]), ([5], [])):
        with pytest.raises(UserError, match="pair 0"):
            llm.loglikelihood([pair])
    refused(lambda: llm.loglikelihood(7), match="pairs must be a list, got 7")
    refused(lambda: llm.probe([([5], [6])], 7), match="attend must be a function, got 7")
    with llm.stream(max_tokens=9) as stream, pytest.raises(UserError, match="must be a Streamer"):
        stream.generate([5], streamer=7)
    llm.close()
    for closed, work in (("LLM", lambda: llm.generate([[5]])), ("LLM", llm.__enter__),
                         ("stream", lambda: stream.generate([5])), ("stream", stream.__enter__)):
        with pytest.raises(UserError, match=f"this {closed} has (been closed|ended)"):
            work()


@pytest.mark.parametrize("options, words", [
    ({"model": 5}, "model must be text or a path, got 5"),
    ({"model": "a\ud800"}, "model is not text in UTF-8"),
    ({"weight_cache": True}, "weight_cache must be text or a path"),
    ({"policy": 5}, "policy must be a Policy, got 5"),
    ({"h2o": {"heavy_ratio": 0.1}},
     r"h2o must be an H2OConfig, got {'heavy_ratio': 0.1}: write H2OConfig\(heavy_ratio=0.1\)"),
    ({"trace": torch.zeros(2, 2)}, "trace must be a Trace, got tensor"),
    ({"seed": "a"}, "seed must be an integer, got 'a'"), ({"seed": -1}, "seed must be at least 0"),
    ({"attn_sparsity": "all"}, "attn_sparsity must be a finite number"),
    ({"progress": "no"}, "progress must be true or false"),
    ({"dtype": torch.float32}, "dtype must be text"), ({"texts": "one"}, "texts must be a list"),
    ({"wieght_bits": 4}, "LLM has no option 'wieght_bits': did you mean weight_bits?"),
    ({"options": {}}, r"LLM has no option 'options': see help\(LLM\)")])
def test_arguments_of_wrong_types(tiny_model, options, words):
    arguments = {"model": str(tiny_model("opt").folder), "dtype": "float32"} | options
    refused(lambda: LLM(**arguments), match=words)


def test_paths_need_not_be_text(tiny_model, tmp_path):
    policy = Policy(weights=Placement(0, 0, 100), cache=Placement(0, 0, 100))
    with LLM(Path(tiny_model("opt").folder), dtype="float32", offload_dir=tmp_path,
             weight_cache=tmp_path / "weights", weight_bits=4, policy=policy) as llm:
        assert len(llm.generate([[5]], max_new_tokens=2, eos_token_id=-1)[0].token_ids) == 2
        assert list((tmp_path / "weights").iterdir())


# Threads


@pytest.mark.parametrize("place", [Placement(100, 0, 0), Placement(0, 0, 100)])
def test_calls_of_several_threads_take_turns(tiny_model, tmp_path, place):
    tiny = tiny_model("opt")
    prompts = make_prompts(96, [5, 3, 9, 7])
    expected = transformers_tokens(tiny, prompts, NEW)
    policy = Policy(gpu_batch_size=1, weights=place, cache=place)
    begin = threading.Barrier(4)

    def work(number):
        begin.wait()
        prompt = prompts[number]
        if number % 2:
            with llm.stream(max_tokens=60) as stream:
                return stream.generate(prompt, max_new_tokens=NEW, eos_token_id=-1).token_ids
        first, again = (llm.generate([prompt], max_new_tokens=NEW, eos_token_id=-1)
                        for _ in range(2))
        assert first == again
        return first[0].token_ids

    with LLM(str(tiny.folder), dtype="float32", policy=policy, offload_dir=str(tmp_path)) as llm, \
            ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == expected
    assert list(tmp_path.iterdir()) == []


def test_calls_within_calls_are_errors_and_close_waits(tiny_model):
    """From the streamer of a stream, or from `attend`."""
    tiny, pair = tiny_model("opt"), ([5, 6], [7, 8])
    calls, threads = [], []

    class Meddling:
        def put(self, value):
            for call in (lambda: llm.generate([[5]]), lambda: llm.score([pair]), stream.close,
                         lambda: stream.generate([5]), llm.stream, llm.close):
                with pytest.raises(UserError, match="within another call on the same LLM"):
                    call()
                calls.append(call)

        def end(self):
            pass

    def attend(layer, pair, q, k, v):
        refused(lambda: llm.loglikelihood([pair]), match="score is called from within another call")
        if not threads:
            threads.append(threading.Thread(target=llm.close))
            threads[0].start()
        return ops.prefill_attention(q, k, v, [len(q)])

    llm = LLM(str(tiny.folder), dtype="float32")
    with llm.stream(max_tokens=20) as stream:
        out = stream.generate([5, 6], streamer=Meddling(), max_new_tokens=3, eos_token_id=-1)
    assert [out.token_ids] == transformers_tokens(tiny, [[5, 6]], new=3) and len(calls) == 4 * 6
    usual = llm.loglikelihood([pair])
    assert llm.probe([pair], attend)[0] == pytest.approx(usual[0])
    threads[0].join()
    refused(lambda: llm.generate([[5]]), match="has been closed")


# Texts


def test_text_that_utf8_cannot_hold(tiny_model, tmp_path):
    model = with_words(tiny_model("llama").folder, tmp_path / "model")
    bad = "w1 \udcff"
    with LLM(model, dtype="float32") as llm, llm.stream(max_tokens=9) as stream:
        for work, words in ((lambda: llm.generate(["w1", bad]), "prompt 1"),
                            (lambda: llm.loglikelihood([("w1", " w2"), (bad, " w2")]), "pair 1"),
                            (lambda: llm.loglikelihood([("w1", bad)]), "pair 0"),
                            (lambda: stream.generate(bad), "prompt 0"),
                            (lambda: stream.loglikelihood(bad), "prompt 0")):
            with pytest.raises(UserError, match=rf"{words} is not text .*'\\udcff'") as caught:
                work()
            assert "\n" not in str(caught.value)
            str(caught.value).encode()
        assert stream.generate("w1", max_new_tokens=2, eos_token_id=-1).text is not None


def test_a_far_too_long_text_is_an_error_at_once(tiny_model, tmp_path, monkeypatch):
    """Before anything is planned or loaded, from the first tokens of the text."""
    from transformers import PreTrainedTokenizerFast

    call, seen = PreTrainedTokenizerFast.__call__, []

    def counting(self, text, **options):
        seen.append(len(text))
        return call(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counting)
    model = with_words(tiny_model("llama").folder, tmp_path / "model")
    text = "w12 " * 2_500_000
    about = r"prompt 1 has about 2\d{6} tokens, more than the model's 256 positions: shorten it"
    with pytest.raises(UserError, match=about):
        LLM(model, dtype="float32", texts=["w1", text], workload=Workload(
            prompt_len=3_000_000, gen_len=1, gpu_batch_size=1, num_gpu_batches=1))
    with LLM(model, dtype="float32", texts=["w1"]) as llm:
        refused(lambda: llm.generate(["w1", text]), match=about)
        with pytest.raises(UserError, match=about.replace("prompt", "pair")):
            llm.loglikelihood([("w1", " w2"), (text, "w2")])
        with llm.stream(max_tokens=20) as stream:
            stream.loglikelihood("w1 w2")
            with pytest.raises(UserError, match="about 2.* more than the 18 that are left of max_"):
                stream.generate(text)
        assert 1000 < max(seen) < 10_000
        # Blanks are no words, and a word without end is one token.
        for one in (" " * 50_000 + "w1 w2", "w3" * 50_000):
            llm.generate([one], max_new_tokens=1)


@pytest.mark.parametrize("name, text", [
    ("tokenizer.json", "{}"), ("generation_config.json", "{"), ("generation_config.json", "[]"),
    ("generation_config.json", '{"eos_token_id": [true]}')])
def test_damaged_files_are_errors_before_the_run(tiny_model, tmp_path, monkeypatch, name, text):
    """Also if the call says which tokens end a text."""
    shutil.copytree(tiny_model("opt").folder, tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    monkeypatch.setattr(runner.Runner, "run_block", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(UserError, match="can't be|is not JSON") as caught, \
            LLM(str(tmp_path / "model"), dtype="float32") as llm:
        llm.generate([[5]], max_new_tokens=2, eos_token_id=-1)
    assert "\n" not in str(caught.value)
