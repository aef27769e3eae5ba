"""Sampling, scoring, and how requests are split into batches, blocks and chunks."""

import math
import random
from collections import Counter

import pytest
import torch
from helpers.error_cases import refused
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.sampling import SamplingParams, mix_seed
from flexgen_h2o.engine.blocks import BlockQueue, BlockSize, Request
from flexgen_h2o.engine.sampling import GenerationRules, GenerationSampler, Sampler
from flexgen_h2o.engine.scoring import DecodeScorer, PrefillScorer
from flexgen_h2o.errors import NonFiniteLogits, UserError

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.0, 0.0, -3.0])
NONE = float("-inf")
few = settings(max_examples=examples(60))


def request(key=0, prompt=(1,), generated=(), seed=0):
    return Request(key, list(prompt), list(generated), seed=mix_seed(seed, key))


def sampler(eos=(), **options):
    return Sampler(SamplingParams(**{"do_sample": True, "top_k": 0} | options), tuple(eos))


def draw(logits, count, seed=0, **options):
    """Return how often each token comes out of `count` draws, 100 at a time."""
    choose, many = sampler(**options), [request(key, seed=seed) for key in range(100)]
    return Counter(token for _ in range(count // 100)
                   for token in choose(logits.repeat(100, 1), many))


# Sampling


@pytest.mark.parametrize(("options", "allowed"), [
    ({}, {0, 1, 2, 3, 4, 5}), ({"temperature": 2.5}, {0, 1, 2, 3, 4, 5}), ({"top_k": 3}, {0, 2, 3}),
    ({"top_p": 0.7}, {0, 3}),  # 0.53 alone is not enough, 0.53 + 0.20 is
    ({"min_p": 0.2}, {0, 2, 3}),  # relative to the likeliest: exp(-1.5) = 0.22, exp(-2) = 0.14
    ({"temperature": 0.5, "top_k": 4, "top_p": 0.97}, {0, 2, 3}),
    ({"temperature": 3.0, "top_p": 0.7}, {0, 2, 3, 4}),  # the temperature applies first
])
@pytest.mark.parametrize("distance", [1, 100])  # between tokens: in one block of noise, in several
def test_frequencies_equal_the_softmax_of_allowed_tokens(options, allowed, distance):
    count = 4000
    logits = torch.full((distance * (len(LOGITS) - 1) + 1,), NONE)
    logits[::distance] = LOGITS
    counts = Counter({token // distance: number for token, number in
                      draw(logits, count, seed=3, **options).items()})
    assert set(counts) <= allowed
    left = torch.full_like(LOGITS, NONE)
    kept = sorted(allowed)
    left[kept] = LOGITS[kept] / options.get("temperature", 1.0)
    expected = {token: count * p for token, p in enumerate(left.softmax(-1).tolist()) if p > 0}
    square = sum((counts[token] - n) ** 2 / n for token, n in expected.items())
    # Chi-square: with 5 degrees of freedom 20.5 is passed once in a thousand seeds.
    assert square < 20.5, (counts, expected)


@few
@given(st.data())
def test_a_filtered_token_is_never_drawn(data):
    vocab = data.draw(st.integers(2, 40))
    logits = torch.tensor(data.draw(st.lists(
        st.floats(-30, 30, width=32), min_size=vocab, max_size=vocab, unique=True)))
    top_k = data.draw(st.integers(1, vocab))
    top_p = data.draw(st.floats(0.05, 1.0))
    min_p = data.draw(st.floats(0.01, 1.0))
    choose, seed = sampler(top_k=top_k, top_p=top_p, min_p=min_p), data.draw(st.integers(0, 99))
    ranks = logits.argsort(descending=True)
    probabilities = torch.zeros(vocab, dtype=torch.float64)
    probabilities[ranks[:top_k]] = logits[ranks[:top_k]].double().softmax(-1)
    before = probabilities[ranks].cumsum(0) - probabilities[ranks]
    slack = 1e-5  # of float32 sums
    for token in choose(logits.repeat(20, 1), [request(key, seed=seed) for key in range(20)]):
        rank = ranks.tolist().index(token)
        assert rank < top_k
        assert rank == 0 or before[rank] <= top_p + slack
        assert probabilities[token] >= min_p * probabilities.max() - slack


def test_logit_bias_applies_first():
    assert set(draw(LOGITS, 200, logit_bias={5: 100.0, 0: -100})) == {5}
    assert sampler(do_sample=False, logit_bias={3: 1.5})(LOGITS[None], [request()]) == [3]
    # A penalty divides the biased logit: 2 + 2 over 3 is less than the 2 of the other token.
    assert sampler(do_sample=False, logit_bias={0: 2, 3: 1}, repetition_penalty=3.0)(
        LOGITS[None], [request(prompt=(0,))]) == [3]


@pytest.mark.parametrize(("options", "words"), [
    ({"stop_token_ids": 3}, "stop_token_ids must be a list"),
    ({"stop_token_ids": [-1]}, "each of stop_token_ids must be at least 0"),
    ({"logit_bias": [3]}, "logit_bias must be a mapping"),
    ({"logit_bias": {"3": 1}}, "each token of logit_bias must be an integer"),
    ({"logit_bias": {3: math.inf}}, "logit_bias of token 3 must be a finite number"),
    ({"skip_special_tokens": 1}, "skip_special_tokens must be true or false")])
def test_wrong_token_options_raise(options, words):
    refused(lambda: SamplingParams(**options), match=words)


@pytest.mark.parametrize("impossible", [(0,), (5,), (0, 1, 4, 5), (3, 4, 5), (0, 1, 2, 3, 4)])
def test_a_token_of_probability_0_is_never_drawn(impossible):
    logits = LOGITS.clone()
    logits[list(impossible)] = NONE
    assert not draw(logits, 1000).keys() & {*impossible}


def test_rounding_errors_of_logits_rarely_change_tokens():
    logits = 2 * torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    rows = [request(key) for key in range(500)]
    tokens, others = (sampler()(row.expand(len(rows), -1), rows) for row in (
        logits, logits + 1e-6 * torch.randn(50_000, generator=torch.Generator().manual_seed(1))))
    assert sum(a != b for a, b in zip(tokens, others, strict=True)) <= 1
    assert len({*tokens}) > 200


@few
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=12, unique=True), st.randoms())
def test_draws_depend_only_on_the_seed_of_a_request(keys, rng):
    """Neither the row of a request nor its neighbours matter."""
    alone = {key: sampler() for key in keys}
    together = sampler()
    for step in range(4):
        order = rng.sample(keys, len(keys))
        rows = {key: torch.randn(50, generator=torch.Generator().manual_seed(key + step))
                for key in keys}
        got = together(torch.stack([rows[key] for key in order]), list(map(request, order)))
        assert got == [alone[key](rows[key][None], [request(key)])[0] for key in order]


def test_seeds_and_keys_give_independent_streams():
    flat = torch.zeros(200, 1000)
    rows = [sampler()(flat, [request(key, seed=seed) for key in range(200)]) for seed in range(3)]
    rows.append([sampler()(flat[:1], [request(seed=seed)])[0] for seed in range(200)])
    for row in rows:
        # Of 200 draws among 1000 tokens about 181 differ.
        assert 160 < len(set(row)) < 198
        assert sum(a == b for a, b in zip(row, row[1:], strict=False)) < 5
    assert rows[0] != rows[1] != rows[2]


def test_greedy_takes_the_first_of_equal_tokens():
    choose = Sampler(SamplingParams(), ())
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 2.0]])
    assert choose(logits, [request(0), request(1)]) == [1, 0]
    assert choose(logits.bfloat16(), [request(0), request(1)]) == [1, 0]


def test_min_new_tokens_masks_end_tokens():
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    choose = Sampler(SamplingParams(min_new_tokens=2), (1, 2))
    assert choose(logits.repeat(4, 1), [request(n, generated=[0] * n) for n in range(4)]) == [
        3, 3, 1, 1]
    assert logits[0, 1] == 9.0, "the caller's logits are not changed"


def test_repetition_penalties_are_per_request():
    choose = Sampler(SamplingParams(repetition_penalty=10.0), ())
    logits = torch.tensor([5.0, 4.0, 3.0]).repeat(3, 1)
    requests = [request(0, [2]), request(1, [0]), request(2, [2, 2, 2])]
    requests[2].generated = [0, 1]
    assert choose(logits, requests) == [0, 1, 0]
    pairs = Sampler(SamplingParams(no_repeat_ngram_size=2), ())
    assert pairs(logits[:2], [request(0, [1, 0, 1]), request(1, [1, 2, 1])]) == [1, 0]


def test_presence_and_frequency_penalties_count_new_tokens():
    """As in OpenAI's API: not the prompt, once or for each time."""
    logits = torch.tensor([5.0, 4.0, 3.5, 0.0]).repeat(3, 1)
    requests = [request(0, [0, 0, 0]), request(1, generated=[0]), request(2, generated=[0, 1, 0])]
    for options, chosen in [({"presence_penalty": 1.2}, [0, 1, 0]),
                            ({"frequency_penalty": 0.8}, [0, 0, 2]),
                            ({"presence_penalty": -2, "frequency_penalty": 2.0}, [0, 0, 1])]:
        assert Sampler(SamplingParams(**options), ())(logits, requests) == chosen
    assert logits[2, 0] == 5.0, "the caller's logits are not changed"


@few
@given(st.data())
def test_requests_with_other_parameters_share_a_batch(data):
    """Each goes on as it does alone, with log-probabilities of the model's own logits."""
    chance = st.sampled_from([{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.5}])
    kinds = st.builds(
        lambda chance, **others: SamplingParams(**chance, **others), chance,
        top_k=st.sampled_from([0, 3]), max_new_tokens=st.integers(1, 4),
        presence_penalty=st.sampled_from([0.0, 1.5]), logprobs=st.sampled_from([None, 0, 2]))
    kept = data.draw(st.lists(kinds, min_size=1, max_size=4))
    chosen = data.draw(st.lists(st.sampled_from(kept), min_size=1, max_size=6))
    logits = [torch.randn(len(chosen), 9, generator=torch.Generator().manual_seed(step))
              for step in range(4)]

    def run(keys):
        samplers = {params: Sampler(params, (0,)) for params in chosen}
        rules = {key: GenerationRules(samplers[chosen[key]], chosen[key].max_new_tokens, (0,),
                            top=chosen[key].logprobs) for key in keys}
        batch = batch_of([request(key, seed=3) for key in keys], new=3)
        keys = [one.key for one in batch.requests]
        for step in range(4):
            GenerationSampler(rules)(batch, step, 0, logits[step][keys])
        return {one.key: one for one in batch.requests}

    together = run(range(len(chosen)))
    for key, params in enumerate(chosen):
        assert run([key])[key] == together[key]
        log_probs = together[key].log_probs
        if params.logprobs is None:
            assert log_probs == []
            continue
        assert [one.token_id for one in log_probs] == together[key].generated
        for step, one in enumerate(log_probs):
            known = logits[step][key].log_softmax(-1)
            assert one.log_prob == pytest.approx(known[one.token_id].item(), abs=1e-5)
            likeliest = known.argsort(descending=True)[: params.logprobs].tolist()
            assert [token for token, _ in one.top] == likeliest
            assert [value for _, value in one.top] == pytest.approx(
                known[likeliest].tolist(), abs=1e-5)


NAN, INF = float("nan"), float("inf")
WARPED = [{"do_sample": False}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1},
          {"temperature": 0.3, "repetition_penalty": 2.0}, {"min_new_tokens": 3}]


@pytest.mark.parametrize("options", WARPED)
@pytest.mark.parametrize(("place", "value", "shown"), [
    (0, NAN, "nan"), (5, NAN, "nan"), (3, INF, "inf"), (slice(None), INF, "inf"),
    (slice(None), NONE, "-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nonfinite_logits_raise(options, place, value, shown, dtype):
    logits = LOGITS.repeat(3, 1)
    logits[1, place] = value
    requests = [request(4), request(7), request(2)]
    choose = sampler(eos=[4], **options)
    with pytest.raises(NonFiniteLogits) as caught:
        choose(logits.to(dtype), requests)
    assert caught.value.key == 7
    assert str(caught.value).startswith(f"the model's logits of prompt 7 are not finite ({shown})")
    assert "\n" not in str(caught.value)
    requests[1].finish_reason = "stop"  # the logits of an ended request are ignored
    assert len(choose(logits.to(dtype), requests)) == 3
    for consumer in (PrefillScorer({7: [1, 2]}), DecodeScorer({7: [1, 2]})):
        batch = batch_of([request(7, [0, 1])])
        with pytest.raises(UserError, match="logits of prompt 7 are not finite"):
            consumer(batch, 0, 0, logits[1:2])


@pytest.mark.parametrize("options", WARPED)
def test_no_allowed_token_raises(monkeypatch, options):
    waits = []
    for name in ("tolist", "item", "__bool__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name,
                            lambda tensor, real=real: (waits.append(1), real(tensor))[1])
    logits = torch.tensor([[1.0, NONE, 0.5, NONE]])
    assert sampler(eos=[0], **options)(logits, [request()])[0] in (0, 2)
    assert len(waits) == 1, "the device is waited for once, with the token"
    with pytest.raises(UserError, match="prompt 3: the sampling options leave no token"):
        sampler(eos=[0, 2], **{**options, "min_new_tokens": 3})(logits, [request(3)])


def test_an_impossible_continuation_scores_minus_infinity():
    consumer = DecodeScorer({7: [1]})
    consumer(batch_of([request(7)]), 0, 0, torch.tensor([[0.0, NONE, 2.0]]))
    assert consumer.scores[7].log_probs == [NONE]


# Where the logits go


def one_hot(*tokens, vocab=8):
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


def make_blocks(requests, new, **size):
    """The blocks in which requests come if all of each end with it."""
    queue, blocks = BlockQueue(requests, new, BlockSize(**size)), []
    while queue.left:
        blocks.append(queue.next())
        for batch in blocks[-1]:
            for one in batch.requests:
                one.finish_reason = "length"
    for one in requests:
        one.finish_reason = ""
    return blocks


def batch_of(requests, new=3, chunk=None):
    """One batch, alone in its block."""
    [[batch]] = make_blocks(requests, new, gpu_batch_size=len(requests), num_gpu_batches=1,
                            prefill_chunk=chunk)
    return batch


def test_generation_ends_at_eos_or_the_length():
    consumer = GenerationSampler(dict.fromkeys(
        range(3), GenerationRules(Sampler(SamplingParams(), (7,)), 3, (7,))))
    batch = batch_of([request(key) for key in range(3)])
    consumer(batch, 0, 0, one_hot(1, 7))  # the head may come in chunks
    consumer(batch, 0, 2, one_hot(2))
    consumer(batch, 1, 0, one_hot(3, 4, 7))
    assert not batch.finished
    consumer(batch, 2, 0, one_hot(7, 5, 6))
    assert [r.generated for r in batch.requests] == [[1, 3, 7], [7], [2, 7]]
    assert [r.finish_reason for r in batch.requests] == ["stop"] * 3
    assert batch.finished
    assert batch.inputs(2)[0] == [7, 7, 7], "who has ended repeats its last token"
    batch = batch_of([request()])
    for token in range(3):
        consumer(batch, token, 0, one_hot(token))
    assert (batch.requests[0].generated, batch.requests[0].finish_reason) == ([0, 1, 2], "length")


def texts_to_score(data):
    """Draw texts, and the length of the context of each."""
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1,
                               max_size=6))
    rng = random.Random(data.draw(st.integers(0, 999)))
    texts = [[rng.randrange(VOCAB) for _ in range(c + t)] for c, t in sizes]
    return texts, [context for context, _ in sizes]


VOCAB = 11


@few
@given(st.data())
def test_prefill_scorer_selects_the_predicting_rows(data):
    texts, contexts = texts_to_score(data)
    continuations = {key: text[contexts[key]:] for key, text in enumerate(texts)}
    batch = batch_of([Request(key, text[:-1]) for key, text in enumerate(texts)],
                     chunk=data.draw(st.sampled_from([None, 1, 2, 3, 50])))
    consumer = PrefillScorer(continuations)
    generator = torch.Generator().manual_seed(1)
    # As if a model had made them: logits for each position of each text.
    logits = [torch.randn(len(text), VOCAB, generator=generator) for text in texts]
    for forward_pass in range(batch.layout.prefill_passes):
        assert not batch.finished
        rows = [logits[batch.requests[span.sequence].key][span.start : span.end]
                for span in batch.layout.spans(forward_pass)]
        wanted = torch.cat(rows)[consumer.rows(batch, forward_pass)]
        some_rows = data.draw(st.integers(1, 12))
        for row in range(0, len(wanted), some_rows):
            consumer(batch, forward_pass, row, wanted[row : row + some_rows])
    for key, (text, context) in enumerate(zip(texts, contexts, strict=True)):
        expected = [logits[key][context - 1 + i].log_softmax(-1)[target].item()
                    for i, target in enumerate(text[context:])]
        assert consumer.scores[key].log_probs == pytest.approx(expected)
    assert batch.finished


@few
@given(st.data())
def test_decode_scorer_feeds_the_continuation(data):
    texts, contexts = texts_to_score(data)
    continuations = {key: text[contexts[key]:] for key, text in enumerate(texts)}
    requests = [Request(key, text[: contexts[key]]) for key, text in enumerate(texts)]
    new = max(map(len, continuations.values())) - 1
    batch = batch_of(requests, new, chunk=data.draw(st.sampled_from([None, 2])))
    heard: dict[tuple[int, int], float] = {}

    def on_logits(places, logits):
        assert len(places) == len(logits) and heard.keys().isdisjoint(places)
        heard.update({(key, place): row.log_softmax(-1)[continuations[key][place]].item()
                      for (key, place), row in zip(places, logits, strict=True)})

    consumer = DecodeScorer(continuations, on_logits)
    expected = {key: [] for key in continuations}
    first = batch.layout.prefill_passes - 1
    assert all(len(consumer.rows(batch, forward_pass)) == 0 for forward_pass in range(first))
    for step in range(new + 1):
        logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(step))
        for request_, row in zip(batch.requests, logits, strict=True):
            tail = continuations[request_.key]
            if step < len(tail):
                expected[request_.key].append(row.log_softmax(-1)[tail[step]].item())
        assert len(consumer.rows(batch, first + step)) == len(batch)
        consumer(batch, first + step, 0, logits[:2])
        consumer(batch, first + step, 2, logits[2:])
    assert batch.finished
    assert {r.key: r.generated for r in requests} == continuations
    for key, values in expected.items():
        assert consumer.scores[key].log_probs == pytest.approx(values)
    assert heard == pytest.approx({(key, place): value for key, values in expected.items()
                                   for place, value in enumerate(values)})


# Batches, blocks, forward passes, chunks

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)
chunks = st.sampled_from([None, 1, 7, 16, 100])


@few
@given(lengths, st.integers(1, 9), st.integers(1, 5), chunks)
def test_blocks_hold_every_request_once(lengths, size, batches, chunk):
    requests = [request(key, [0] * n) for key, n in enumerate(lengths)]
    blocks = make_blocks(requests, 5, gpu_batch_size=size, num_gpu_batches=batches,
                         prefill_chunk=chunk)
    flat = [batch for block in blocks for batch in block]
    ordered = [r for batch in flat for r in batch.requests]
    assert sorted(r.key for r in ordered) == list(range(len(lengths)))
    assert [len(batch) for batch in flat[:-1]] == [size] * (len(flat) - 1)
    assert 1 <= len(flat[-1]) <= size and len(flat) == math.ceil(len(lengths) / size)
    assert [len(block) for block in blocks[:-1]] == [batches] * (len(blocks) - 1)
    assert 1 <= len(blocks[-1]) <= batches
    assert all(batch.index == i for block in blocks for i, batch in enumerate(block))
    # The longest first, and equals in their order: as little padding as there can be.
    assert [(-len(r.prompt), r.key) for r in ordered] == sorted(
        (-n, key) for key, n in enumerate(lengths))
    for block in blocks:
        assert len({batch.layout.prefill_passes for batch in block}) == 1


@few
@given(st.data(), lengths, st.integers(1, 5), st.integers(1, 3), chunks, st.booleans())
def test_sequences_continue_beside_new_ones(data, lengths, size, batches, chunk, shares):
    """Each block says where they were; none is wider than the queue has said."""
    new = {key: length % 5 + 1 for key, length in enumerate(lengths)}
    requests = [request(key, [0] * n) for key, n in enumerate(lengths)]
    queue = BlockQueue(requests, new, BlockSize(size, batches, chunk, shares))
    most, rows, block, waiting = queue.batches(), queue.rows(), [], len(requests)
    while queue.left:
        before, block = block, queue.next()
        flat = [one for batch in block for one in batch.requests]
        continued = [one for batch in before for one in batch.requests if not one.finish_reason]
        assert flat[: len(continued)] == continued
        waiting -= len(flat) - len(continued)
        assert len(flat) == size * batches or waiting == 0
        assert [len(batch) for batch in block[:-1]] == [most[0]] * (len(block) - 1)
        assert 0 < len(block[-1]) <= most[0] and len(block) <= most[1]
        layout = block[0].layout
        assert (layout.prefill_passes == 0) == (flat == continued)
        for batch in block:
            assert max(len(batch), *map(batch.rows, range(layout.prefill_passes + 1))) <= rows
            for sequence, one in enumerate(batch.requests):
                was = batch.layout.origin(sequence)
                if was is not None:
                    assert before[was.batch].requests[was.sequence] is one
                    assert batch.layout.tokens(sequence, 1) == (
                        len(one.prompt) + len(one.generated))
                assert layout.new >= new[one.key] - max(0, len(one.generated) - 1)
        steps = data.draw(st.integers(1, layout.new))
        for one in flat:
            one.generated += [0] * (steps + (one not in continued))
            one.generated = one.generated[: new[one.key] + 1]
            if len(one.generated) > new[one.key]:
                one.finish_reason = "length"
        if not any(one.finish_reason for one in flat):
            flat[data.draw(st.integers(0, len(flat) - 1))].finish_reason = "stop"
    assert waiting == 0 and all(one.finish_reason for one in requests)


@few
@given(lengths, chunks)
def test_inputs_of_each_forward_pass(lengths, chunk):
    batch = batch_of([request(k, range(100 * k, 100 * k + n)) for k, n in enumerate(lengths)],
                     chunk=chunk)
    passes = batch.layout.prefill_passes
    assert passes == (1 if chunk is None else math.ceil(max(lengths) / chunk))
    seen = {r.key: [] for r in batch.requests}
    for forward_pass in range(passes):
        ids, positions = batch.inputs(forward_pass)
        assert len(ids) == len(positions) == batch.rows(forward_pass)
        assert positions == [i % 100 for i in ids]
        assert chunk is None or len(ids) <= chunk * len(lengths)
        keys = [i // 100 for i in ids]
        assert keys == sorted(keys, key=lambda k: (-lengths[k], k))
        for i in ids:
            seen[i // 100].append(i % 100)
        ended = [r.key for r in batch.requests if len(seen[r.key]) == lengths[r.key]]
        assert (len(ended) == len(lengths)) == (forward_pass == passes - 1), "all end in the last"
        last = GenerationSampler({}).rows(batch, forward_pass).tolist()
        assert [ids[row] % 100 for row in last] == (
            [lengths[r.key] - 1 for r in batch.requests] if forward_pass == passes - 1 else [])
    assert all(positions_seen == list(range(lengths[key])) for key, positions_seen in seen.items())
    for r in batch.requests:
        r.generated = [r.key, r.key + 7]
    ids, positions = batch.inputs(passes + 1)
    assert ids == [r.key + 7 for r in batch.requests]
    assert positions == [lengths[r.key] + 1 for r in batch.requests]
    assert batch.rows(passes + 1) == len(lengths)


@few
@given(lengths, st.integers(1, 80), chunks)
def test_chunks_cover_all_rows_once(lengths, most, chunk):
    batch = batch_of([request(key, [0] * n) for key, n in enumerate(lengths)], chunk=chunk)
    for forward_pass in range(batch.layout.prefill_passes):
        parts = list(batch.chunks(forward_pass, most))
        spans = [span for part in parts for span in part.spans]
        assert spans == [span for span in batch.layout.spans(forward_pass) if len(span)]
        row = 0
        for part in parts:
            held = sum(map(len, part.spans))
            assert (part.row, part.end) == (row, row + held)
            assert 0 < held <= most or len(part.spans) == 1
            row = part.end
        assert row == batch.rows(forward_pass)
        # As few as can be, in this order: none could have taken in the next one's first span.
        for part, after in zip(parts, parts[1:], strict=False):
            assert part.end - part.row + len(after.spans[0]) > most


@settings(max_examples=examples(40))
@given(kinds=st.lists(st.integers(0, 3), min_size=1, max_size=9), size=st.integers(1, 5),
       chunk=st.sampled_from([None, 1, 2, 3]))
def test_equal_prompts_are_adjacent_and_computed_once(kinds, size, chunk):
    prompts = [[7], [7, 8], [8, 7], [1, 2, 3, 4, 5]]
    requests = [Request(key, prompts[kind]) for key, kind in enumerate(kinds)]
    blocks = make_blocks(requests, 2, gpu_batch_size=size, num_gpu_batches=2, prefill_chunk=chunk,
                         share_prompts=True)
    ordered = [request for block in blocks for batch in block for request in batch.requests]
    assert sorted(request.key for request in ordered) == list(range(len(kinds)))
    seen = [request.prompt for request in ordered]
    assert sum(a != b for a, b in zip(seen, seen[1:], strict=False)) == len(set(kinds)) - 1
    for batch in (batch for block in blocks for batch in block):
        unique = {tuple(request.prompt) for request in batch.requests}
        fed: dict[int, list[int]] = {lead: [] for lead in batch.duplicates}
        for forward_pass in range(batch.layout.prefill_passes):
            ids, _ = batch.inputs(forward_pass)
            spans = list(batch.spans(forward_pass))
            assert batch.rows(forward_pass) == len(ids) == sum(map(len, spans))
            for span in spans:
                fed[span.sequence] += ids[: len(span)]
                ids = ids[len(span):]
        assert len(fed) == len(unique)
        assert all(fed[lead] == batch.requests[place].prompt
                   for lead, places in batch.duplicates.items() for place in places)
        forward_pass = batch.layout.prefill_passes - 1
        ids, _ = batch.inputs(forward_pass)
        assert [ids[row] for row in GenerationSampler({}).rows(batch, forward_pass)] == [
            request.prompt[-1] for request in batch.requests]


def test_integers_are_taken_as_numbers():
    logits, requests = torch.tensor([[0.0, 4.0, 3.0]]), [Request(0, [1], seed=1)]
    tokens = [Sampler(SamplingParams(do_sample=True, temperature=kind(2), top_p=kind(1),
                                     repetition_penalty=kind(3)), ())(logits, requests)
              for kind in (int, float)]
    assert tokens[0] == tokens[1]
