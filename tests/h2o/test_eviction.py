"""Budgets, and the tokens that stay cached, against the definition in plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from flexgen_h2o.config.h2o import FUSED_SCORES, H2OConfig
from flexgen_h2o.h2o.budget import Budget, budget, num_cached, num_slots
from flexgen_h2o.h2o.eviction import EMPTY, Cut, Eviction, eviction_of
from flexgen_h2o.h2o.policies import policy_named


@dataclass
class Definition:
    """H2O in plain Python: the position and score of each token that one KV head caches."""

    prompt_len: int
    size: Budget | None
    h2o: H2OConfig
    tokens: list[tuple[int, np.float32]] = field(default_factory=list)
    queries: int = 0

    @property
    def held(self) -> list[int]:
        return [p for p, _ in self.tokens]

    def step(self, row: np.ndarray) -> None:
        """Attend from the next token; row is its attention, in float32, by position."""
        h2o, size, query = self.h2o, self.size, self.queries
        self.queries += 1
        decay = np.float32(h2o.decay if h2o.score == "decay" else 1)
        self.tokens = [(p, score * decay + row[p])
                       for p, score in [*self.tokens, (query, np.float32(0))]]
        if query < self.prompt_len - 1 or size is None:
            return
        if h2o.evict_generated or query < self.prompt_len:
            excess = max(0, len(self.tokens) - size.total)
            others = [t for t in self.tokens if size.sinks <= t[0] <= query - size.recent]
            seen = {p: np.float32(query + 1 - p if h2o.score == "mean" else 1) for p in self.held}
            others.sort(key=lambda t: (t[1] / seen[t[0]], t[0]))  # the lowest, the oldest first
            self.tokens = [t for t in self.tokens if t not in others[:excess]]


def definition(rows: np.ndarray, prompt_len: int, size: Budget | None, h2o: H2OConfig
               ) -> list[list[int]]:
    """Positions that one KV head caches: after the cut, and after each new token.

    rows is float32 [tokens, tokens]: the attention of each query to each key.
    """
    head, history = Definition(prompt_len, size, h2o), []
    for row in rows:
        head.step(row)
        history.append(head.held)
    return history[prompt_len - 1 :]


@dataclass
class Cache:
    """A batch of sequences in one layer, in fixed slots, as a KV cache drives the policy.

    rows is float32 [sequences, kv_heads, tokens, tokens]. The tokens of a sequence begin at 0.
    """

    h2o: H2OConfig
    layer: int
    prompts: Sequence[int]
    new: int
    rows: torch.Tensor

    def __post_init__(self) -> None:
        self.eviction = eviction_of(self.h2o)
        sizes = [budget(self.h2o, self.layer, n) for n in self.prompts]
        self.cuts = [Cut(n, size.heavy, size.recent) if size else Cut(n, n, 0)
                     for n, size in zip(self.prompts, sizes, strict=True)]
        most = max(num_slots(self.h2o, self.layer, n, self.new) for n in self.prompts)
        shape = (len(self.prompts), self.rows.shape[1], most)
        self.scores = torch.zeros(shape)
        self.positions = torch.full(shape, EMPTY, dtype=torch.int32)

    def prefill(self) -> None:
        for s, cut in enumerate(self.cuts):
            scores = torch.zeros(self.rows.shape[1], cut.length)
            for query in range(cut.length):
                scores = scores * self.eviction.decay + self.rows[s, :, query, : cut.length]
            index = self.eviction.select(scores, cut)
            count = num_cached(self.h2o, self.layer, cut.length, 0)
            assert index.dtype == torch.int64 and index.shape == (len(scores), count)
            assert self.eviction.num_cached(cut) == count
            self.scores[s, :, :count] = scores.gather(1, index)
            self.positions[s, :, :count] = index

    def append(self, number: int) -> None:
        """Attend with new token `number` (from 1) of every sequence, then give it a slot."""
        query = torch.tensor(self.prompts) + number - 1
        filled = self.positions != EMPTY
        rows = torch.stack([r[:, q] for r, q in zip(self.rows, query, strict=True)])
        seen = rows.gather(2, self.positions.long().where(filled, 0)).where(filled, 0)
        self.scores = self.scores * self.eviction.decay + seen
        recent = torch.tensor([cut.recent or 1 for cut in self.cuts])
        victims = self.eviction.victims(self.scores, self.positions, tokens=query + 1,
                                        recent=recent)
        assert victims.dtype == torch.int64 and (victims >= 0).all()
        for s, length in enumerate(self.prompts):
            before = num_cached(self.h2o, self.layer, length, number - 1)
            grows = num_cached(self.h2o, self.layer, length, number) > before
            for head in range(len(self.rows[s])):
                slot = before if grows else victims[s, head]
                self.positions[s, head, slot] = query[s]
                self.scores[s, head, slot] = self.rows[s, head, query[s], query[s]]

    def held(self) -> list[list[list[int]]]:
        """Positions by sequence and KV head, ascending."""
        return [[sorted(p for p in head if p != EMPTY) for head in heads]
                for heads in self.positions.tolist()]


def check_definition(h2o: H2OConfig, prompts: Sequence[int], new: int, *, layers: int = 1,
                       heads: int = 2, levels: int | None = 3, seed: int = 0) -> None:
    """Run whole sequences; attention is one of `levels` small integers, or any float."""
    rng = np.random.default_rng(seed)
    shape = (len(prompts), heads, max(prompts) + new, max(prompts) + new)
    for layer in range(layers):
        rows = rng.random(shape) if levels is None else rng.integers(levels, size=shape)
        rows = np.tril(rows).astype(np.float32)  # causal
        cache = Cache(h2o, layer, prompts, new, torch.from_numpy(rows))
        expected = []
        for s, length in enumerate(prompts):
            size = budget(h2o, layer, length)
            expected.append([definition(rows[s, head, : length + new], length, size, h2o)
                             for head in range(heads)])
            check_counts(h2o, layer, length, list(map(len, expected[s][0])))
        cache.prefill()
        for number in range(new + 1):
            if number > 0:
                cache.append(number)
            assert cache.held() == [[history[number] for history in e] for e in expected]


def check_counts(h2o: H2OConfig, layer: int, prompt_len: int, counts: list[int]) -> None:
    """`counts` are the tokens that the definition caches, after the cut and each new token."""
    assert num_cached(h2o, layer, prompt_len, 0) == counts[0]
    assert [num_cached(h2o, layer, prompt_len, n) for n in range(len(counts))] == counts
    assert [num_slots(h2o, layer, prompt_len, n) for n in range(len(counts))] == [
        max(counts[: n + 1]) for n in range(len(counts))]


LAYERS = 2
ratio = st.integers(1, 20).map(lambda n: n / 20)
ratios = st.one_of(ratio, st.lists(ratio, min_size=LAYERS, max_size=LAYERS))
size = st.one_of(
    st.fixed_dictionaries({"heavy_ratio": ratios}), st.fixed_dictionaries({"recent_ratio": ratios}),
    st.fixed_dictionaries({"heavy_ratio": ratios, "recent_ratio": ratios}),
    st.fixed_dictionaries({"heavy_ratio": ratios, "recent_tokens": st.integers(1, 6)}),
    st.fixed_dictionaries({"heavy_tokens": st.integers(0, 8), "recent_ratio": ratios}),
    st.fixed_dictionaries({"heavy_tokens": st.integers(0, 8), "recent_tokens": st.integers(1, 8)}),
    st.fixed_dictionaries({"heavy_tokens": st.integers(1, 8)}),
    st.fixed_dictionaries({"recent_tokens": st.integers(1, 8)}))
option = st.fixed_dictionaries({
    "score": st.sampled_from(FUSED_SCORES), "decay": st.sampled_from([0.5, 0.98, 1.0]),
    "sink_tokens": st.integers(0, 5), "evict_generated": st.sampled_from([True, True, False])})


@given(sizes=size, options=option, prompts=st.lists(st.integers(1, 24), min_size=1, max_size=3),
       new=st.integers(0, 16), levels=st.sampled_from([1, 2, 3, None]), seed=st.integers(0, 999))
@example(sizes={"recent_tokens": 1}, options={}, prompts=[9, 1], new=5, levels=2, seed=0)
@example(sizes={"heavy_tokens": 3, "recent_tokens": 2}, options={"sink_tokens": 4},
         prompts=[1, 7, 20], new=14, levels=2, seed=0)
@example(sizes={"heavy_tokens": 40, "recent_tokens": 2}, options={}, prompts=[12], new=9, levels=2,
         seed=0)
@example(sizes={"heavy_ratio": [1, 0.1], "recent_ratio": 1}, options={}, prompts=[10, 3], new=9,
         levels=2, seed=0)
@example(sizes={"heavy_ratio": 0.1}, options={"sink_tokens": 2, "score": "mean"},
         prompts=[60, 1, 7, 33], new=40, levels=None, seed=0)
def test_sequences_equal_the_definition(sizes, options, prompts, new, levels, seed):
    h2o = H2OConfig(**sizes, **options)
    check_definition(h2o, prompts, new, layers=LAYERS, levels=levels, seed=seed)


def test_victims_where_nothing_can_be_evicted():
    positions = torch.tensor([[[0, 1, EMPTY]]], dtype=torch.int32)
    for score in ("sum", "mean"):
        actual = Eviction(policy_named(score), sinks=4).victims(
            torch.zeros(1, 1, 3), positions, tokens=torch.tensor([2]), recent=torch.tensor([5]))
        assert 0 <= actual.item() < 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("score", ["sum", "mean"])
def test_gpu_selects_the_same_tokens(score):
    generator = torch.Generator().manual_seed(0)
    eviction = Eviction(policy_named(score), sinks=4)
    for levels in (3, 10_000):
        scores = torch.randint(levels, (4, 8, 700), generator=generator).float()
        positions = torch.stack([torch.randperm(900, generator=generator)[:700]
                                 for _ in range(32)]).view(4, 8, 700).int()
        ask = {"tokens": torch.full((4,), 901), "recent": torch.tensor([1, 9, 99, 500])}
        on_gpu = {name: value.cuda() for name, value in ask.items()}
        cut = Cut(700, 100, 90)
        assert torch.equal(eviction.select(scores[0].cuda(), cut).cpu(),
                           eviction.select(scores[0], cut))
        assert torch.equal(eviction.victims(scores.cuda(), positions.cuda(), **on_gpu).cpu(),
                           eviction.victims(scores, positions, **ask))


# Budgets


def test_simulation_needs_the_full_cache():
    h2o = H2OConfig(heavy_tokens=2, simulate=True)
    assert (num_cached(h2o, 0, 7, 0), num_cached(h2o, 0, 7, 5),
            num_slots(h2o, 0, 7, 5)) == (4, 4, 12)


@given(st.integers(1, 1000), st.integers(1, 10_000))
def test_a_ratio_is_read_as_typed(thousandths, prompt_len):
    actual = budget(H2OConfig(recent_ratio=thousandths / 1000), 0, prompt_len)
    assert actual == Budget(0, max(1, thousandths * prompt_len // 1000))


@pytest.mark.parametrize(("values", "expected"), [
    ({"heavy_ratio": 0.2}, Budget(2, 2)), ({"heavy_ratio": 0.2, "recent_ratio": 0.5}, Budget(2, 5)),
    ({"heavy_ratio": 1, "recent_tokens": 4}, Budget(10, 4)), ({"heavy_tokens": 3}, Budget(3, 3)),
    ({"heavy_tokens": 3, "recent_ratio": 1}, Budget(3, 10)),
    ({"recent_tokens": 3, "sink_tokens": 4}, Budget(0, 3, 4)),
    ({"heavy_ratio": 0.01, "recent_ratio": 1 / 3}, Budget(1, 3)),
    ({"heavy_ratio": [0.2, 1], "recent_ratio": [1, 0.5]}, Budget(10, 5)),
    ({"heavy_ratio": [0.2, 1]}, None), ({"heavy_ratio": 1, "recent_ratio": 1}, None),
    ({"heavy_tokens": 0, "recent_ratio": 0.5}, Budget(0, 5))])
def test_budget_of_a_layer(values, expected):
    assert budget(H2OConfig(**values), 1, 10) == expected
    assert expected is None or expected.total == sum(
        (expected.heavy, expected.recent, expected.sinks))


@given(st.data())
def test_text_budget_grows_by_at_most_a_token_a_step(data):
    """Step by step: a new token is cached, and one is evicted if the budget is exceeded."""
    share = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)
    h2o = H2OConfig(heavy_ratio=data.draw(st.none() | share), recent_ratio=data.draw(share),
                    sink_tokens=data.draw(st.integers(0, 4)), budget_of="text")
    assume(not h2o.is_full)
    prompt_len = data.draw(st.integers(1, 100))
    held = min(prompt_len, budget(h2o, 0, prompt_len).total)
    for new in range(60):
        if new:
            held = min(held + 1, budget(h2o, 0, prompt_len, new).total)
        assert num_cached(h2o, 0, prompt_len, new) == held
        assert num_slots(h2o, 0, prompt_len, new) == held


def test_ratios_of_the_prompt_and_of_the_text():
    for base, total in (("prompt", 20), ("text", 30)):
        h2o = H2OConfig(heavy_ratio=0.1, budget_of=base)
        assert budget(h2o, 0, 100).total == 20
        assert budget(h2o, 0, 100, 50).total == num_cached(h2o, 0, 100, 59) == total
