"""Speculative decoding: drafts change no token, and which tokens are drafted."""

import random
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import make_prompts, token_ids
from helpers.internals import before_blocks, cache_of, junk_after_tokens, states_of
from helpers.selection import examples, full
from helpers.tiny_tokenizers import with_bytes, with_words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.engine import captured_step, executor, generation
from flexgen_h2o.engine.blocks import Request
from flexgen_h2o.engine.decoder import DecoderLayers
from flexgen_h2o.engine.draft_model import new_drafter
from flexgen_h2o.engine.speculation import LOSS_SHARE, NGRAM_SIZES, DraftAutotune, NgramDrafter
from flexgen_h2o.errors import UserError

pytestmark = pytest.mark.usefixtures("on_cpu")

LENGTHS = [9, 17, 2, 23, 5]
NEW = [26, 7, 15, 1, 21]
DISK = Placement(0, 0, 100)
CACHES = {
    "full, 4 bits": {"cache_bits": 4},
    "h2o": {"h2o": H2OConfig(heavy_ratio=0.15)},
    "rolling, sinks, 8 and 4 bits": {
        "h2o": H2OConfig(heavy_tokens=4, recent_tokens=5, sink_tokens=1, positions="rolling"),
        "key_bits": 8, "value_bits": 4},
    "recall": {"h2o": H2OConfig(heavy_ratio=0.15, recall=True)},
    "of the text, by layer": {"h2o": H2OConfig(heavy_ratio=(0.1, 1.0, 0.2), budget_of="text")}}
TIERS = {
    "memory": Policy(num_gpu_batches=2),
    "one batch, weights on disk": Policy(gpu_batch_size=1, weights=DISK),
    "cache on disk": Policy(gpu_batch_size=3, cache=DISK, refill_share=1.0),
    "all on disk": Policy(gpu_batch_size=2, weights=DISK, cache=DISK, activations=DISK),
    "no overlap, chunks": Policy(gpu_batch_size=2, cache=DISK, weights=DISK, overlap=False,
                                 prefill_chunk=8)}
MODELS = ["llama", "mistral_window", "olmoe", *full("gemma2", "neox", "gpt_oss")]


class Guess:
    """Drafts the expected tokens; each is wrong with probability `wrong`."""

    def __init__(self, expected: list[list[int]], wrong: float):
        self._expected, self._wrong, self._random = expected, wrong, random.Random(0)

    def draft(self, request, most):
        coming = self._expected[request.key][len(request.generated):][:most]
        return [token if self._random.random() >= self._wrong else 3 for token in coming]

    def begin(self, *_):
        pass

    read_hidden = forget = close = begin


DRAFTERS = {"right": 0.0, "wrong": 1.0, "mixed": 0.3, "ngram": None}
"""How often a `Guess` is wrong; None: the engine's own drafts."""


def speculative(policy: Policy, **changes) -> Policy:
    return Policy(**vars(policy) | {"speculate": "ngram", "num_speculative_tokens": 5} | changes)


@pytest.fixture
def draft_with(monkeypatch):
    """Let runs draft with this drafter, and never pause."""
    def set_drafter(drafter):
        monkeypatch.setattr(generation, "new_drafter", lambda runner, max_tokens: drafter)

    monkeypatch.setattr(DraftAutotune, "length", lambda self, sequences: 99)
    return set_drafter


@pytest.fixture(scope="module")
def drafter_of_llama(tiny_model):
    """A model, and a drafter with it for texts of up to 40 tokens."""
    tiny = tiny_model("llama")
    with LLM(str(tiny.folder), dtype="float32", policy=Policy(draft_model=str(tiny.folder))) as llm:
        yield tiny.model, new_drafter(llm._engine.runner, max_tokens=40)


def padded(folder: Path, target: Path, vocab_size: int) -> Path:
    """Copy a model, with a vocabulary that ends with unused tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    model.save_pretrained(target)
    return target


def repetitive_prompts() -> list[list[int]]:
    """Texts in which n-grams come again."""
    return [(prompt * 3)[: length + 2] for prompt, length in zip(
        make_prompts(90, [max(1, length // 2) for length in LENGTHS]), LENGTHS, strict=True)]


def sampling(do_sample: bool) -> list[SamplingParams]:
    options = {"do_sample": True, "temperature": 0.6, "presence_penalty": 0.4} if do_sample else {
        "repetition_penalty": 1.05}
    return [SamplingParams(max_new_tokens=new, eos_token_id=-1, seed=number + 7, logprobs=2,
                           min_new_tokens=1, **options) for number, new in enumerate(NEW)]


def generate(folder, tmp_path, do_sample: bool, policy: Policy, **options):
    with LLM(str(folder), dtype="float32", offload_dir=str(tmp_path), policy=policy,
             weight_cache=None, **options) as llm:
        return llm.generate(repetitive_prompts(), sampling(do_sample)), llm.stats


_plain: dict[tuple, list] = {}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tier", ["memory", "all on disk", "no overlap, chunks",
                                  *full("one batch, weights on disk", "cache on disk")])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_do_not_depend_on_drafts(tiny_model, tmp_path, draft_with, model, cache, tier,
                                        drafter):
    folder, do_sample = tiny_model(model).folder, len(model + cache + tier) % 2 == 0
    key = model, cache, do_sample
    if key not in _plain:
        _plain[key], _ = generate(folder, tmp_path, do_sample, Policy(gpu_batch_size=1),
                                  **CACHES[cache])
    plain = _plain[key]
    draft_with(NgramDrafter() if DRAFTERS[drafter] is None else
               Guess(token_ids(plain), DRAFTERS[drafter]))
    outputs, stats = generate(folder, tmp_path, do_sample, speculative(TIERS[tier]),
                              **CACHES[cache])
    assert token_ids(outputs) == token_ids(plain)
    for out, other in zip(outputs, plain, strict=True):
        torch.testing.assert_close(*(torch.tensor([place.log_prob for place in output.log_probs])
                                     for output in (out, other)), rtol=0, atol=0.05)
    if drafter == "right":
        assert stats.acceptance_rate == 1 and stats.tokens_per_step > 3
    elif drafter == "wrong":
        assert stats.accepted_tokens < 0.2 * stats.draft_tokens
    assert stats.generated_tokens == sum(NEW)


@pytest.mark.parametrize("tier", ["memory", "cache on disk", "no overlap, chunks"])
@pytest.mark.parametrize("cache", [name for name in CACHES if "h2o" in CACHES[name]])
def test_rejected_tokens_leave_no_trace(tiny_model, tmp_path, monkeypatch, draft_with, cache, tier):
    """Of drafted tokens that are nonsense: the same scores, positions and slots, bit by bit."""
    draft_with(None)
    runs = []
    for junk in (0, 3):
        junk_after_tokens(monkeypatch, junk)
        with LLM(str(tiny_model("llama").folder), dtype="float32", offload_dir=str(tmp_path),
                 policy=speculative(TIERS[tier], refill_share=1.0), **CACHES[cache]) as llm:
            outputs = llm.generate(repetitive_prompts()[1:2] * 3, max_new_tokens=24)
            runs.append((token_ids(outputs), states_of(cache_of(llm))))
    (expected, states), (tokens, others) = runs
    assert tokens == expected
    for state, other in zip(states, others, strict=True):
        assert torch.equal(state, other)


@pytest.mark.parametrize("cache", ["full, 4 bits", "h2o", "recall"])
def test_captured_steps_beside_verified_ones(tiny_model, tmp_path, monkeypatch, draft_with, cache):
    """Steps without drafts are replayed, in float32 here."""
    monkeypatch.setattr(captured_step, "capture_obstacle", lambda *_, **__: None)
    folder = tiny_model("llama").folder
    plain, _ = generate(folder, tmp_path, False, Policy(), **CACHES[cache])
    guess, drafts = Guess(token_ids(plain), 0.4), []

    class Sometimes(Guess):
        def draft(self, request, most):
            drafts.append(guess.draft(request, most if len(drafts) % 3 else 0))
            return drafts[-1]

    draft_with(Sometimes([], 0))
    outputs, stats = generate(folder, tmp_path, False, speculative(Policy()), **CACHES[cache])
    assert token_ids(outputs) == token_ids(plain)
    assert stats.accepted_tokens > 0 and [] in drafts


def test_a_sequence_ends_within_its_drafts(tiny_model, tmp_path, draft_with):
    """At a stop string, an end token and the maximum; the rest of the drafts is dropped."""
    folder = with_words(tiny_model("llama").folder, tmp_path / "m")
    prompts, shown = repetitive_prompts()[:3], []
    with LLM(folder, dtype="float32") as llm:
        free = llm.generate(prompts, max_new_tokens=20, eos_token_id=-1)
        stop = " ".join(free[0].text.split()[4:6])
        options = {"max_new_tokens": 12, "stop_strings": stop, "eos_token_id": free[1].token_ids[6]}
        plain = llm.generate(prompts, **options)
    draft_with(Guess(token_ids(free), 0.0))
    with LLM(folder, dtype="float32", policy=speculative(Policy())) as llm:
        outputs = llm.generate(prompts, on_text=lambda *piece: shown.append(piece), **options)
        assert llm.stats.accepted_tokens < llm.stats.draft_tokens
    for index, (out, other) in enumerate(zip(outputs, plain, strict=True)):
        assert (out.token_ids, out.text, out.finish_reason) == (
            other.token_ids, other.text, other.finish_reason)
        pieces = [(text, last) for key, text, last in shown if key == index]
        assert "".join(text for text, _ in pieces) == out.text and len(pieces) == len(out.token_ids)
        assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "stop" in [out.finish_reason for out in outputs]


@pytest.mark.parametrize("draft", ["llama", "mistral"])
@pytest.mark.parametrize(("cache", "tier"), [
    ("full, 4 bits", "memory"), ("h2o", "all on disk"), ("recall", "no overlap, chunks"),
    ("rolling, sinks, 8 and 4 bits", "one batch, weights on disk"),
    ("of the text, by layer", "cache on disk")])
def test_tokens_do_not_depend_on_the_draft_model(tiny_model, tmp_path, monkeypatch, cache, tier,
                                                 draft):
    """Of the same model, whose drafts are often accepted, or of another one."""
    monkeypatch.setattr(DraftAutotune, "length", lambda self, sequences: 99)
    folder, do_sample = tiny_model("llama").folder, len(cache + tier + draft) % 2 == 0
    plain, _ = generate(folder, tmp_path, do_sample, Policy(gpu_batch_size=1), **CACHES[cache])
    outputs, stats = generate(
        folder, tmp_path, do_sample, speculative(
            TIERS[tier], speculate=None, draft_model=str(tiny_model(draft).folder)),
        **CACHES[cache])
    assert token_ids(outputs) == token_ids(plain)
    assert stats.draft_tokens > 50 and (stats.accepted_tokens > 0 or draft == "mistral")


def test_a_draft_model_that_is_right_is_always_accepted(tiny_model, tmp_path, monkeypatch):
    """Also in a second run, and with a larger vocabulary, whose extra tokens are never drafted."""
    monkeypatch.setattr(DraftAutotune, "length", lambda self, sequences: 99)
    folder, options = tiny_model("llama").folder, {"max_new_tokens": 30, "eos_token_id": -1}
    with LLM(str(folder), dtype="float32") as llm:
        plain = token_ids(llm.generate(repetitive_prompts(), **options))
    draft = with_words(padded(folder, tmp_path / "padded", 128), tmp_path / "draft")
    target = with_words(folder, tmp_path / "target")
    with LLM(target, dtype="float32", policy=speculative(Policy(), speculate=None,
                                                         draft_model=draft)) as llm:
        for _ in range(2):
            assert token_ids(llm.generate(repetitive_prompts(), **options)) == plain
            assert llm.stats.acceptance_rate == 1


@pytest.mark.parametrize("method", [{"speculate": "ngram"}, {"draft_model": "llama"}])
def test_sessions_draft_too(tiny_model, monkeypatch, method):
    monkeypatch.setattr(DraftAutotune, "length", lambda self, sequences: 99)
    folder = str(tiny_model("llama").folder)
    with LLM(folder, dtype="float32") as llm:
        plain = llm.generate(repetitive_prompts(), sampling(False))
    method = dict.fromkeys(method, folder) if "draft_model" in method else method
    policy, outputs, drafted = Policy(gpu_batch_size=2, **method), {}, 0
    with (LLM(folder, dtype="float32", policy=policy) as llm,
          llm.open_session(max_model_len=64) as session):
        for prompt, params in zip(repetitive_prompts(), sampling(False), strict=True):
            session.add(prompt, params)
        while session.unfinished:
            outputs |= session.step()
            drafted += session.stats.draft_tokens
    assert drafted > 0 and [outputs[key].token_ids for key in range(len(plain))] == [
        out.token_ids for out in plain]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(1, 3),
                          st.integers(0, 9), st.booleans()), min_size=1, max_size=6),
       st.randoms(use_true_random=False))
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_draft_model_continues_any_text(drafter_of_llama, steps, random):
    """Texts of two requests that grow, go back and begin again, of at most 40 tokens."""
    model, drafter = drafter_of_llama
    texts = {0: [1], 1: [2]}
    for key, kept, added, most, ends in steps:
        texts[key] = (texts[key][: kept + 1] + random.choices(range(120), k=added))[:41]
        if ends:
            drafter.forget(Request(key, []))
        expected = list(texts[key])
        with torch.inference_mode():
            drafts = drafter.draft(Request(key, texts[key][:1], texts[key][1:]), most)
            while len(expected) < min(len(texts[key]) + most, 41):
                expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
        assert texts[key] + drafts == expected


def test_a_block_that_ran_out_of_memory_starts_again(tiny_model, tmp_path, monkeypatch, draft_with):
    folder = tiny_model("llama").folder
    plain, _ = generate(folder, tmp_path, True, Policy(), **CACHES["h2o"])
    failed = []

    def fail_once():
        if len(failed) < 2:
            failed.append(None)
            raise MemoryError

    before_blocks(monkeypatch, fail_once)
    draft_with(NgramDrafter())
    outputs, _ = generate(folder, tmp_path, True, speculative(Policy()), **CACHES["h2o"])
    assert token_ids(outputs) == token_ids(plain)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 9))
def test_drafts_follow_the_last_longest_ngram(text, prompt, most):
    prompt = min(prompt, len(text))
    request, drafter = Request(0, text[:prompt]), NgramDrafter()
    for token in [*text[prompt:], None]:
        drafts = drafter.draft(request, most)
        history = request.history
        sizes = [size for size in NGRAM_SIZES
                 if any(history[i : i + size] == history[-size:]
                        for i in range(len(history) - size))]
        if not sizes:
            assert drafts == []
        else:
            size, longer = sizes[0], list(history)
            end = max(i + size for i in range(len(history) - size)
                      if history[i : i + size] == history[-size:])
            for place in range(most):  # a text that repeats itself goes on
                longer.append(longer[end + place])
            assert drafts == longer[len(history):]
        request.generated.append(token)


def test_a_forgotten_request_may_begin_again():
    drafter = NgramDrafter()
    assert drafter.draft(Request(0, [1, 2, 1, 2, 1, 2]), 3) == [1, 2, 1]
    drafter.forget(Request(0, []))
    assert drafter.draft(Request(0, [5, 6]), 3) == []


class Steps:
    """Decode steps of one sequence by a clock: one takes a second, and more with drafts.

    `extra` are the seconds of drafts of each length.
    """

    def __init__(self, extra, most=8, prompt=None):
        self.autotune, self.extra, self.seconds, self.tokens = DraftAutotune(most), extra, 0.0, 0
        if prompt is not None:
            self.autotune.record_prefill(1.0 + (prompt - 1) * extra(1), sequences=1, rows=prompt)

    def run(self, count: int, accepted, drafted=lambda step, length: length) -> list[int]:
        """Run `count` steps; return the length of the drafts of each."""
        lengths = []
        for step in range(count):
            lengths.append(drafted(step, self.autotune.length(1)))
            kept = int(accepted(step) * lengths[-1])
            seconds = 1.0 + (self.extra(lengths[-1]) if lengths[-1] else 0.0)
            self.autotune.record(seconds, sequences=1, drafted=lengths[-1], accepted=kept)
            self.seconds, self.tokens = self.seconds + seconds, self.tokens + 1 + kept
        return lengths

    @property
    def most_lost(self) -> float:
        """The seconds that steps without drafts take for the tokens, and 3 % more."""
        return (1 + LOSS_SHARE) * self.tokens


def test_drafts_that_do_not_pay_are_rare_and_tried_again():
    steps = Steps(lambda length: 0.5 * length)
    assert sum(length > 0 for length in steps.run(400, lambda _: 0)) > 3
    assert steps.seconds < steps.most_lost
    assert steps.run(200, lambda _: 1)[-50:] == [8] * 50
    steps = Steps(lambda length: 1.5 * length)
    assert steps.run(400, lambda _: 1)[-50:].count(0) > 40
    assert steps.seconds < steps.most_lost


@pytest.mark.parametrize("accepted", [0, 1])
def test_drafts_that_cost_nothing_are_always_verified(accepted):
    steps = Steps(lambda length: 0.001 * length, prompt=64)
    assert steps.run(20, lambda _: accepted)[-14:] == [8] * 14


@given(st.lists(st.floats(0, 2), min_size=8, max_size=8), st.integers(2, 600),
       st.none() | st.integers(1, 600), st.randoms(use_true_random=False))
def test_drafts_cost_three_percent_of_the_time(costs, count, prompt, random):
    """At most, beside one step that turns out to cost more than it should."""
    extra = dict(enumerate(accumulate(costs), 1))
    steps = Steps(extra.get, prompt=prompt)
    chance = random.random()
    for _ in range(4):  # parts of a text
        share = random.choice([0, 0, random.random(), 1])
        steps.run(count // 4, lambda _: share * random.random() if share < 1 else 1,  # noqa: B023
                  lambda _, length: length if random.random() < chance else min(length, 1))
        assert steps.seconds <= steps.most_lost + extra[8]


def test_steps_of_other_blocks_and_sequences_are_not_compared():
    steps = Steps(lambda length: 0.1 * length, prompt=64)
    assert steps.run(100, lambda _: 1)[-1] == 8
    steps.autotune.begin()
    assert steps.run(3, lambda _: 1) == [0, 8, 8]
    assert steps.autotune.length(2) == 0
    steps.autotune.record(4.0, sequences=2, drafted=0, accepted=0)
    assert steps.autotune.length(2) > 0
    assert steps.run(3, lambda _: 1) == [0, 8, 8]


def test_a_slow_step_ends_drafting_for_a_while_only():
    steps = Steps(lambda length: 0.1 * length, prompt=64)
    assert steps.run(100, lambda _: 1)[-1] == 8
    steps.autotune.record(1e6, sequences=1, drafted=8, accepted=0)
    lengths = steps.run(500, lambda _: 1)
    assert lengths[0] == 0 and lengths[-1] == 8


@pytest.mark.parametrize("row_seconds", [0.0, 0.4, 1.0])
def test_a_run_costs_three_percent_more_at_most(tiny_model, monkeypatch, row_seconds):
    """By a clock of the rows that are computed, with drafts that are all wrong."""
    now = [0.0]
    embed = DecoderLayers.embed

    def timed(self, step):
        rows = self._batches[step.batch].rows(step.forward_pass)
        now[0] += 1.0 + row_seconds * (rows - 1)
        embed(self, step)

    monkeypatch.setattr(DecoderLayers, "embed", timed)
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(generation, "new_drafter",
                        lambda runner, max_tokens: Guess([[3] * 200], 1.0))
    with LLM(str(tiny_model("llama").folder), policy=speculative(Policy())) as llm:
        llm.generate([[1, 2]], max_new_tokens=200, eos_token_id=-1)
        stats = llm.stats
    assert stats.draft_tokens > 0
    assert stats.decode_seconds <= (1 + LOSS_SHARE) * 199 + 1


@pytest.mark.parametrize(("options", "word"), [
    ({"policy": Policy(speculate="ngram", cache=DISK, selective_fetch=True),
      "h2o": H2OConfig(heavy_ratio=0.1, recall=True)}, "selective_fetch"),
    ({"policy": Policy(speculate="ngram"), "h2o": H2OConfig(heavy_ratio=0.1, simulate=True)},
     "simulation"), ({"policy": Policy(draft_model="missing")}, "missing")])
def test_unsupported_combinations_are_errors(tiny_model, options, word):
    refused(lambda: LLM(str(tiny_model("llama").folder), **options), match=word)
    with (LLM(str(tiny_model("llama").folder), policy=Policy(speculate="ngram")) as llm,
          pytest.raises(UserError, match="speculate")):
        llm.stream(max_tokens=40)


@pytest.mark.parametrize(("draft", "word"), [
    ("opt", "tokenizer"), ("mistral_window", "windows"), ("words", "tokenizer")])
def test_unsupported_draft_models_are_errors(tiny_model, tmp_path, draft, word):
    folder, other = tiny_model("llama").folder, tmp_path / draft
    if draft == "words":
        folder = with_words(folder, tmp_path / "llama")
        with_bytes(tiny_model("llama").folder, other)
    else:
        other = tiny_model(draft).folder
    refused(lambda: LLM(str(folder), policy=Policy(draft_model=str(other))), match=word)


@pytest.mark.parametrize(("make", "options", "word"), [
    (Policy, {"speculate": "oracle"}, "speculate"),
    (Policy, {"num_speculative_tokens": 0}, "num_speculative_tokens"),
    (Policy, {"draft_model": 7}, "draft_model"), (Policy, {"speculate": "draft"}, "speculate"),
    (Policy, {"speculate": "ngram", "draft_model": "opt"}, "speculate"),
    (RunConfig, {"speculate": "ngram", "pipeline_parallel": 2}, "--pipeline-parallel"),
    (RunConfig, {"speculate": "ngram", "selective_fetch": True, "recall": True, "hh_ratio": 0.1,
                 "percent": (100, 0, 0, 0)}, "selective_fetch"),
    (RunConfig, {"num_speculative_tokens": 4}, "--speculate"),
    (RunConfig, {"speculate": "oracle"}, "--speculate"),
    (RunConfig, {"speculate": "ngram", "draft_model": "opt"}, "draft_model"),
    (RunConfig, {"draft_model": "opt", "pipeline_parallel": 2}, "--pipeline-parallel")])
def test_invalid_options_are_errors(make, options, word):
    refused(lambda: make(**options), match=word)


def test_a_block_has_as_many_sequences():
    config = RunConfig(speculate="ngram", gpu_batch_size=4, num_gpu_batches=2)
    policy = config.policy()
    assert (policy.gpu_batch_size, policy.num_gpu_batches, policy.draft_tokens) == (1, 8, 8)
    assert RunConfig(speculate="ngram").policy().num_gpu_batches == 1
    assert RunConfig(draft_model="opt", gpu_batch_size=4).policy().num_gpu_batches == 4
