"""Next tokens, log-probabilities, and how requests are cut into batches, blocks and chunks."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config import SamplingParams
from flexgen_h2o.engine.batching import Batch, Request, make_blocks
from flexgen_h2o.engine.sampling import Sampler
from flexgen_h2o.engine.scoring import Generation, Scoring

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.0, 0.0, -3.0])
NONE = float("-inf")
few = settings(max_examples=60, deadline=None, derandomize=True)


def request(key=0, prompt=(1,)):
    return Request(key, list(prompt))


def sampler(eos=(), **options):
    return Sampler(SamplingParams(**{"do_sample": True, "top_k": 0} | options), tuple(eos))


def draw(logits, count, **options):
    """How often each token comes out of `count` draws of one request."""
    choose, one = sampler(**options), [request()]
    return Counter(choose(logits[None], one, 0)[0] for _ in range(count))


# Sampling


@pytest.mark.parametrize(("options", "allowed"), [
    ({}, {0, 1, 2, 3, 4, 5}),
    ({"temperature": 2.5}, {0, 1, 2, 3, 4, 5}),
    ({"top_k": 3}, {0, 2, 3}),
    ({"top_p": 0.7}, {0, 3}),  # 0.53 alone is not enough, 0.53 + 0.20 is
    ({"min_p": 0.2}, {0, 2, 3}),  # relative to the likeliest: exp(-1.5) = 0.22, exp(-2) = 0.14
    ({"temperature": 0.5, "top_k": 4, "top_p": 0.97}, {0, 2, 3}),
])
def test_frequencies_are_those_of_the_softmax_over_what_is_left(options, allowed):
    count = 4000
    found = draw(LOGITS, count, seed=3, **options)
    assert set(found) <= allowed
    left = torch.full_like(LOGITS, NONE)
    kept = sorted(allowed)
    left[kept] = LOGITS[kept] / options.get("temperature", 1.0)
    expected = {token: count * p for token, p in enumerate(left.softmax(-1).tolist()) if p > 0}
    square = sum((found[token] - n) ** 2 / n for token, n in expected.items())
    # Chi-square: with 5 degrees of freedom 20.5 is passed once in a thousand seeds.
    assert square < 20.5, (found, expected)


def test_top_p_and_temperature_apply_in_the_order_of_transformers():
    """The temperature first: at 3 the likeliest two tokens no longer hold 0.7."""
    assert set(draw(LOGITS, 500, top_p=0.7)) == {0, 3}
    assert len(set(draw(LOGITS, 500, top_p=0.7, temperature=3.0))) > 2


@few
@given(st.data())
def test_a_removed_token_is_never_drawn(data):
    vocab = data.draw(st.integers(2, 40))
    logits = torch.tensor(data.draw(st.lists(
        st.floats(-30, 30, width=32), min_size=vocab, max_size=vocab, unique=True)))
    top_k = data.draw(st.integers(1, vocab))
    top_p = data.draw(st.floats(0.05, 1.0))
    min_p = data.draw(st.floats(0.01, 1.0))
    choose = sampler(top_k=top_k, top_p=top_p, min_p=min_p, seed=data.draw(st.integers(0, 99)))
    ranks = logits.argsort(descending=True)
    probabilities = torch.zeros(vocab, dtype=torch.float64)
    probabilities[ranks[:top_k]] = logits[ranks[:top_k]].double().softmax(-1)
    before = probabilities[ranks].cumsum(0) - probabilities[ranks]
    slack = 1e-5  # of float32 sums
    for token in choose(logits.repeat(20, 1), [request(key) for key in range(20)], 0):
        rank = ranks.tolist().index(token)
        assert rank < top_k
        assert rank == 0 or before[rank] <= top_p + slack
        assert probabilities[token] >= min_p * probabilities.max() - slack


@pytest.mark.parametrize("point", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("impossible", [(0,), (5,), (0, 1, 4, 5), (3, 4, 5), (0, 1, 2, 3, 4)])
def test_a_token_of_probability_0_is_never_drawn(monkeypatch, point, impossible):
    """At both ends of the vocabulary too, whatever the draw: 0, or as close to 1 as they get."""
    choose = sampler()
    monkeypatch.setattr(choose, "_draw", lambda key: point)
    logits = LOGITS.clone()
    logits[list(impossible)] = NONE
    assert choose(logits[None], [request()], 0)[0] not in impossible


@few
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=12, unique=True), st.randoms())
def test_what_a_request_draws_depends_on_its_key_alone(keys, rng):
    """Not on its row, nor on who is beside it."""
    alone = {key: sampler(seed=5) for key in keys}
    together = sampler(seed=5)
    for step in range(4):
        order = rng.sample(keys, len(keys))
        rows = {key: torch.randn(50, generator=torch.Generator().manual_seed(key + step))
                for key in keys}
        got = together(torch.stack([rows[key] for key in order]), list(map(request, order)), step)
        assert got == [alone[key](rows[key][None], [request(key)], step)[0] for key in order]


def test_seeds_and_keys_give_streams_of_their_own():
    flat = torch.zeros(200, 1000)
    rows = [sampler(seed=seed)(flat, [request(key) for key in range(200)], 0) for seed in range(3)]
    rows.append([sampler(seed=seed)(flat[:1], [request()], 0)[0] for seed in range(200)])
    for row in rows:
        # Of 200 draws among 1000 tokens about 181 differ.
        assert 160 < len(set(row)) < 198
        assert sum(a == b for a, b in zip(row, row[1:], strict=False)) < 5
    assert rows[0] != rows[1] != rows[2]


def test_greedy_takes_the_likeliest_and_of_equals_the_first():
    choose = Sampler(SamplingParams(), ())
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 2.0]])
    assert choose(logits, [request(0), request(1)], 0) == [1, 0]
    assert choose(logits.bfloat16(), [request(0), request(1)], 0) == [1, 0]


def test_end_tokens_stay_away_until_min_new_tokens():
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    choose = Sampler(SamplingParams(min_new_tokens=2), (1, 2))
    assert [choose(logits, [request()], n)[0] for n in range(4)] == [3, 3, 1, 1]
    assert logits[0, 1] == 9.0, "the caller's logits are not changed"


def test_penalties_look_at_each_request_without_its_neighbours():
    choose = Sampler(SamplingParams(repetition_penalty=10.0), ())
    logits = torch.tensor([5.0, 4.0, 3.0]).repeat(3, 1)
    requests = [request(0, [2]), request(1, [0]), request(2, [2, 2, 2])]
    requests[2].generated = [0, 1]
    assert choose(logits, requests, 2) == [0, 1, 0]
    pairs = Sampler(SamplingParams(no_repeat_ngram_size=2), ())
    assert pairs(logits[:2], [request(0, [1, 0, 1]), request(1, [1, 2, 1])], 0) == [1, 0]


# Where the logits go


def one_hot(*tokens, vocab=8):
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


def test_generation_extends_each_request_until_eos_or_the_length():
    sink = Generation(Sampler(SamplingParams(), (7,)), (7,), max_new_tokens=3)
    batch = Batch(0, [request(key) for key in range(3)])
    sink(batch, 0, 0, one_hot(1, 7))  # the head may come in pieces
    sink(batch, 0, 2, one_hot(2))
    sink(batch, 1, 0, one_hot(3, 4, 7))
    assert not batch.finished
    sink(batch, 2, 0, one_hot(7, 5, 6))
    assert [r.generated for r in batch.requests] == [[1, 3, 7], [7], [2, 7]]
    assert [r.finish_reason for r in batch.requests] == ["stop"] * 3
    assert batch.finished
    assert batch.inputs(2)[0] == [7, 7, 7], "who has ended repeats its last token"
    batch = Batch(0, [request()])
    for token in range(3):
        sink(batch, token, 0, one_hot(token))
    assert (batch.requests[0].generated, batch.requests[0].finish_reason) == ([0, 1, 2], "length")


@few
@given(st.data())
def test_scoring_finds_the_rows_that_predict_each_continuation(data):
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1,
                               max_size=6))
    vocab, rng = 11, random.Random(data.draw(st.integers(0, 999)))
    texts = [[rng.randrange(vocab) for _ in range(c + t)] for c, t in sizes]
    continuations = {key: text[sizes[key][0]:] for key, text in enumerate(texts)}
    requests = [Request(key, text[:-1]) for key, text in enumerate(texts)]
    rng.shuffle(requests)
    batch, sink = Batch(0, requests), Scoring(continuations)
    # As if a model had made them: the logits of each row of the packed prompts.
    logits = torch.randn(batch.rows(0), vocab, generator=torch.Generator().manual_seed(1))
    wanted = logits[sink.rows(batch)]
    piece = data.draw(st.integers(1, len(wanted)))
    for row in range(0, len(wanted), piece):
        sink(batch, 0, row, wanted[row : row + piece])
    start = 0
    for request_ in requests:
        context, key = sizes[request_.key][0], request_.key
        expected = [logits[start + context - 1 + i].log_softmax(-1)[target].item()
                    for i, target in enumerate(continuations[key])]
        assert sink.log_probs[key] == pytest.approx(expected)
        start += len(request_.prompt)
    assert batch.finished


# Batches, blocks, chunks

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@few
@given(lengths, st.integers(1, 9), st.integers(1, 5))
def test_blocks_hold_every_request_once(lengths, size, batches):
    requests = [request(key, [0] * n) for key, n in enumerate(lengths)]
    blocks = make_blocks(requests, size, batches)
    flat = [batch for block in blocks for batch in block]
    found = [r for batch in flat for r in batch.requests]
    assert sorted(r.key for r in found) == list(range(len(lengths)))
    assert [len(batch) for batch in flat[:-1]] == [size] * (len(flat) - 1)
    assert 1 <= len(flat[-1]) <= size and len(flat) == math.ceil(len(lengths) / size)
    assert [len(block) for block in blocks[:-1]] == [batches] * (len(blocks) - 1)
    assert 1 <= len(blocks[-1]) <= batches
    assert all(batch.index == i for block in blocks for i, batch in enumerate(block))
    # The longest first, and equals in their order: as little padding as there can be.
    assert [(-len(r.prompt), r.key) for r in found] == sorted(
        (-n, key) for key, n in enumerate(lengths))


def test_no_requests_are_no_blocks():
    assert make_blocks([], 4, 2) == []


@few
@given(lengths)
def test_a_batch_pads_in_the_cache_and_packs_its_rows(lengths):
    batch = Batch(0, [request(k, range(100 * k, 100 * k + n)) for k, n in enumerate(lengths)])
    assert batch.padded == max(lengths)
    assert [pad + n for pad, n in zip(batch.pads, lengths, strict=True)] == (
        [batch.padded] * len(lengths))
    ids, positions = batch.inputs(0)
    assert len(ids) == len(positions) == batch.rows(0) == sum(lengths)
    assert [(i // 100, i % 100) for i in ids] == [
        (key, p) for key, n in enumerate(lengths) for p in range(n)]
    assert positions == [i % 100 for i in ids]
    for r in batch.requests:
        r.generated = [r.key, r.key + 7]
    ids, positions = batch.inputs(2)
    assert ids == [r.key + 7 for r in batch.requests]
    assert positions == [n + 1 for n in lengths]
    assert batch.rows(2) == len(lengths)


@few
@given(lengths, st.integers(1, 80), st.integers(0, 3))
def test_chunks_cover_all_rows_once_and_cut_between_sequences(lengths, most, token):
    batch = Batch(0, [request(key, [0] * n) for key, n in enumerate(lengths)])
    rows = lengths if token == 0 else [1] * len(lengths)
    chunks = list(batch.chunks(token, most))
    first = row = 0
    for chunk in chunks:
        assert (chunk.first, chunk.row) == (first, row)
        assert chunk.last > chunk.first
        held = sum(rows[chunk.first : chunk.last])
        assert chunk.end == chunk.row + held
        assert held <= most or chunk.last == chunk.first + 1
        first, row = chunk.last, chunk.end
    assert (first, row) == (len(lengths), batch.rows(token))
    # As few as can be, in this order: no chunk could have taken in the next one's first sequence.
    for chunk, after in zip(chunks, chunks[1:], strict=False):
        assert chunk.end - chunk.row + rows[after.first] > most
