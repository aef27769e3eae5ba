"""Request sessions: whenever requests come, each gets the tokens that it gets alone."""

import threading

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import PLACES, make_prompts
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import LLM, H2OConfig, Policy, SamplingParams
from flexgen_h2o.engine import generation
from flexgen_h2o.errors import NonFiniteLogits, PromptError, UserError

CACHES = {
    "full": {},
    "h2o": {"h2o": H2OConfig(heavy_ratio=0.15)},
    "of the text, 4 bits": {"h2o": H2OConfig(heavy_ratio=0.15, budget_of="text"), "cache_bits": 4},
    "rolling, some evict": {"h2o": H2OConfig(heavy_tokens=8, recent_tokens=7, positions="rolling")},
    "prompts only": {"h2o": H2OConfig(heavy_ratio=0.15, evict_generated=False)},
    "recall": {"h2o": H2OConfig(heavy_ratio=0.15, recall=True)}}
PROMPTS = make_prompts(96, [13, 4, 1, 9, 6, 16, 2, 8])
PARAMS = [SamplingParams(max_new_tokens=new, eos_token_id=-1, do_sample=key % 3 == 0, seed=key,
                         presence_penalty=key % 2, logprobs=2 if key == 5 else None)
          for key, new in enumerate([2, 9, 5, 1, 20, 4, 11, 7])]
ONE_TOKEN = 1e-9  # seconds, after which a block ends with its next token
ENDLESS = 1e9

EVENTS = st.lists(st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(0, 2)),
    st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
    st.tuples(st.just("step"), st.just(0), st.just(0))), max_size=25)


def alone(folder: str, **options) -> list:
    """Return the output of each prompt, computed alone."""
    policy = Policy(gpu_batch_size=1, refill_share=1)
    with LLM(folder, dtype="float32", policy=policy, **options) as llm:
        return llm.generate(PROMPTS, PARAMS)


def drained(session) -> dict:
    """Return the outputs of all requests that are left."""
    outputs = {}
    while session.unfinished:
        outputs |= session.step()
    return outputs


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_do_not_depend_on_when_requests_come(tiny_model, tmp_path, cache):
    folder = str(tiny_model("llama").folder)
    expected = alone(folder, **CACHES[cache])
    place = PLACES[list(CACHES).index(cache) % len(PLACES)]
    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, cache=place, refill_share=0.5,
                    prefill_chunk=5)
    with LLM(folder, dtype="float32", policy=policy, offload_dir=str(tmp_path),
             **CACHES[cache]) as llm:

        @settings(max_examples=examples(40))
        @given(EVENTS, st.sampled_from([ONE_TOKEN, ENDLESS]))
        def check(events, block_seconds):
            with llm.open_session(max_model_len=32, block_seconds=block_seconds) as session:
                numbers, outputs, aborted = {}, {}, set()
                for event, number, priority in events:
                    if event == "add":
                        key = session.add(PROMPTS[number], PARAMS[number], priority=priority)
                        numbers[key] = number
                    elif event == "abort":
                        aborted |= ({number} & set(numbers)) - set(outputs)
                        session.abort(number)
                    else:
                        outputs |= session.step()
                outputs |= drained(session)
                assert set(outputs) == set(numbers) - aborted
                for key, output in outputs.items():
                    assert output.token_ids == expected[numbers[key]].token_ids
                    assert bool(output.log_probs) == bool(PARAMS[numbers[key]].logprobs)

        check()


def test_tokens_are_counted_as_they_come(tiny_model):
    with (LLM(str(tiny_model("llama").folder), dtype="float32") as llm,
          llm.open_session(max_model_len=32, block_seconds=ONE_TOKEN) as session):
        session.add([1, 2], max_new_tokens=3, eos_token_id=-1)
        key = session.add([3], max_new_tokens=9, eos_token_id=-1)
        session.step()
        assert (session.generated_tokens, session.stats.num_prompts) == (2, 0)
        session.abort(key)
        drained(session)
        assert session.generated_tokens == 4 and session.stats.generated_tokens == 3
        session.step()
        assert session.stats is None


def test_higher_priority_goes_before_a_full_block(tiny_model):
    """The sequence that made room for it is recomputed, and reports each token once."""
    folder = str(tiny_model("llama").folder)
    policy = Policy(gpu_batch_size=2)
    with (LLM(folder, dtype="float32", policy=policy) as llm,
          llm.open_session(max_model_len=64, block_seconds=ONE_TOKEN) as session):
        options = {"max_new_tokens": 12, "eos_token_id": -1}
        first, second = (session.add(prompt, **options) for prompt in PROMPTS[:2])
        for _ in range(3):
            assert session.step() == {}
        urgent = session.add(PROMPTS[2], max_new_tokens=1, priority=1)
        assert set(session.step()) == {urgent}
        outputs = drained(session)
        assert list(outputs) == [first, second]  # the older one kept its place
        assert session.generated_tokens == 12 + 12 + 1
        assert [outputs[first].token_ids, outputs[second].token_ids] == [
            output.token_ids for output in llm.generate(PROMPTS[:2], **options)]


def test_requests_join_from_another_thread(tiny_model):
    folder = str(tiny_model("llama").folder)
    with (LLM(folder, dtype="float32", policy=Policy(gpu_batch_size=4)) as llm,
          llm.open_session(max_model_len=64, block_seconds=ENDLESS) as session):
        first = session.add(PROMPTS[0], max_new_tokens=30, eos_token_id=-1)
        joined, seen = [], []

        def join() -> None:
            joined.append(session.add(PROMPTS[1], max_new_tokens=2, eos_token_id=-1))
            session.interrupt()

        def report(request) -> None:
            seen.append(request.key)
            if len(seen) == 3:
                thread = threading.Thread(target=join)
                thread.start()
                thread.join()

        session._sampler._on_token = report
        assert session.step() == {}
        assert len(seen) < 5
        assert list(session.step()) == joined
        assert list(drained(session)) == [first]


def test_a_session_streams_text_and_keeps_prompts():
    with LLM("smollm2-135m") as llm, llm.open_session(max_model_len=64) as session:
        texts = []
        key = session.add("The capital of France is", max_new_tokens=8, eos_token_id=-1,
                          on_text=lambda text, last: texts.append((text, last)))
        output = drained(session)[key]
        assert output.prompt == "The capital of France is"
        assert "".join(text for text, _ in texts) == output.text
        assert [last for _, last in texts] == [False] * 7 + [True]


def test_a_failed_request_leaves_the_others(tiny_model, monkeypatch):
    folder = str(tiny_model("llama").folder)
    with (LLM(folder, dtype="float32", policy=Policy(gpu_batch_size=4)) as llm,
          llm.open_session(max_model_len=64, block_seconds=ENDLESS) as session):
        keys = [session.add(prompt, max_new_tokens=4, eos_token_id=-1) for prompt in PROMPTS[:3]]
        reduce = session._sampler.reduce

        def failing(batch, forward_pass, row, logits):
            if forward_pass == 2 and any(request.key == keys[1] for request in batch.requests):
                raise NonFiniteLogits("not finite", keys[1])
            return reduce(batch, forward_pass, row, logits)

        monkeypatch.setattr(session._sampler, "reduce", failing)
        with pytest.raises(PromptError) as error:
            session.step()
        assert error.value.key == keys[1]
        outputs = drained(session)
        expected = llm.generate([PROMPTS[0], PROMPTS[2]], max_new_tokens=4, eos_token_id=-1)
        assert [outputs[key].token_ids for key in (keys[0], keys[2])] == [
            output.token_ids for output in expected]


@pytest.mark.parametrize("free", [1, 0])
def test_a_block_that_lacks_memory_is_halved(tiny_model, monkeypatch, free):
    """If one sequence alone does not fit, its request fails, and the session goes on."""
    folder = str(tiny_model("llama").folder)
    with (LLM(folder, dtype="float32", policy=Policy(gpu_batch_size=4)) as llm,
          llm.open_session(max_model_len=64, block_seconds=ENDLESS) as session):
        first, second = (session.add(prompt, max_new_tokens=4, eos_token_id=-1)
                         for prompt in PROMPTS[:2])
        compute = generation.GenerationRun.compute_block

        def failing(run):
            block = run.queue.next()
            if sum(map(len, block)) > free:
                raise torch.OutOfMemoryError("out of memory")
            run.queue.requeue()
            return compute(run)

        with monkeypatch.context() as patch:
            patch.setattr(generation.GenerationRun, "compute_block", failing)
            if not free:
                with pytest.raises(PromptError, match="one sequence alone"):
                    session.step()
        outputs = drained(session)
        assert set(outputs) == ({first, second} if free else {second})


def test_a_session_refuses_requests_beyond_its_capacity(tiny_model):
    folder = str(tiny_model("llama").folder)
    with LLM(folder, dtype="float32") as llm:
        session = llm.open_session(max_model_len=16)
        for prompt, options in (([], {}), ([999], {}), (PROMPTS[5], {}),
                                (PROMPTS[0], {"max_new_tokens": 4}), ([5], {"unknown": 1}),
                                ([5], {"on_text": print, "max_new_tokens": 1})):
            with pytest.raises(UserError):
                session.add(prompt, **options)
        assert session.step() == {} and not session.unfinished
        session.close()
        for call in (session.step, lambda: session.add([5], max_new_tokens=1)):
            with pytest.raises(UserError, match="closed"):
                call()
        open_session = llm.open_session(max_model_len=16)
    refused(lambda: open_session.step(), match="closed")
    with LLM(folder, dtype="float32", memory_limit=10**9) as llm, pytest.raises(UserError):
        llm.open_session(max_model_len=10**9)
