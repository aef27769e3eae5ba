"""Which tokens stay cached, against the definition in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flexgen_h2o.cache.budget import Budget, budget, cached, kept, slots
from flexgen_h2o.cache.eviction import EMPTY, Eviction
from flexgen_h2o.config import SCORES, H2OConfig


def definition(rows: np.ndarray, prompt_len: int, size: Budget | None, h2o: H2OConfig
               ) -> list[list[int]]:
    """Positions that one KV head caches: after the cut, and after each new token.

    rows is float32 [tokens, tokens]: the attention of each query to each key.
    """
    tokens, history = [], []
    for query, row in enumerate(rows):
        tokens.append((query, np.float32(0)))
        decay = np.float32(h2o.decay if h2o.score == "decay" else 1)
        tokens = [(p, score * decay + row[p]) for p, score in tokens]
        if query < prompt_len - 1:
            continue
        if size is not None and (h2o.evict_generated or query < prompt_len):
            excess = max(0, len(tokens) - size.total)
            others = [t for t in tokens if size.sinks <= t[0] <= query - size.recent]
            seen = {p: np.float32(query + 1 - p if h2o.score == "mean" else 1) for p, _ in others}
            others.sort(key=lambda t: (t[1] / seen[t[0]], t[0]))  # the lowest, the oldest first
            tokens = [t for t in tokens if t not in others[:excess]]
        history.append([p for p, _ in tokens])
    return history


@dataclass
class Cache:
    """A batch of sequences in one layer, in fixed slots, as a KV cache drives the policy.

    rows is float32 [sequences, kv_heads, tokens, tokens]; those of a sequence begin at 0.
    """

    h2o: H2OConfig
    layer: int
    prompts: Sequence[int]
    new: int
    rows: torch.Tensor

    def __post_init__(self) -> None:
        self.eviction = Eviction(self.h2o)
        self.sizes = [budget(self.h2o, self.layer, n) for n in self.prompts]
        self.kept = [kept(self.h2o, self.layer, n) for n in self.prompts]
        most = max(slots(self.h2o, self.layer, n, self.new) for n in self.prompts)
        shape = (len(self.prompts), self.rows.shape[1], most)
        self.mass = torch.zeros(shape)
        self.positions = torch.full(shape, EMPTY, dtype=torch.int32)

    def prefill(self) -> None:
        for s, length in enumerate(self.prompts):
            mass = torch.zeros(self.rows.shape[1], length)
            for query in range(length):
                mass = mass * self.eviction.decay + self.rows[s, :, query, :length]
            index = torch.arange(length).expand(len(mass), -1)
            if self.kept[s] < length:
                index = self.eviction.select(mass, self.sizes[s])
            self.mass[s, :, : self.kept[s]] = mass.gather(1, index)
            self.positions[s, :, : self.kept[s]] = index

    def append(self, number: int) -> None:
        """Attend with new token `number` (from 1) of every sequence, then give it a slot."""
        query = torch.tensor(self.prompts) + number - 1
        filled = self.positions != EMPTY
        rows = torch.stack([r[:, q] for r, q in zip(self.rows, query, strict=True)])
        seen = rows.gather(2, self.positions.long().where(filled, 0)).where(filled, 0)
        self.mass = self.mass * self.eviction.decay + seen
        recent = torch.tensor([size.recent if size else 1 for size in self.sizes])
        victims = self.eviction.victims(self.mass, self.positions, tokens=query + 1,
                                        recent=recent, sinks=self.h2o.sink_tokens)
        assert victims.dtype == torch.int64 and (victims >= 0).all()
        for s, length in enumerate(self.prompts):
            before = cached(self.h2o, self.layer, length, number - 1)
            grows = cached(self.h2o, self.layer, length, number) > before
            for head in range(len(self.rows[s])):
                slot = before if grows else victims[s, head]
                self.positions[s, head, slot] = query[s]
                self.mass[s, head, slot] = self.rows[s, head, query[s], query[s]]

    def held(self) -> list[list[list[int]]]:
        """Positions by sequence and KV head, ascending."""
        return [[sorted(p for p in head if p != EMPTY) for head in heads]
                for heads in self.positions.tolist()]


def hold_to_definition(h2o: H2OConfig, prompts: Sequence[int], new: int, *, layers: int = 1,
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
            size = by_hand(h2o, layer, length)
            expected.append([definition(rows[s, head, : length + new], length, size, h2o)
                             for head in range(heads)])
            hold_counts(h2o, layer, length, list(map(len, expected[s][0])))
        cache.prefill()
        for number in range(new + 1):
            if number > 0:
                cache.append(number)
            assert cache.held() == [[history[number] for history in e] for e in expected]


def by_hand(h2o: H2OConfig, layer: int, prompt_len: int) -> Budget | None:
    """The budget, from what is documented of `H2OConfig`."""
    heavy, recent = (share[layer] if isinstance(share, tuple) else share
                     for share in (h2o.heavy_ratio, h2o.recent_ratio))
    if heavy is None and recent is None and h2o.heavy_tokens is h2o.recent_tokens is None:
        return None
    if h2o.recent_tokens is None and recent is None:
        if heavy == 1:
            return None
        recent, recent_tokens = heavy, h2o.heavy_tokens
    else:
        recent_tokens = h2o.recent_tokens
    if heavy == recent == 1:
        return None

    def count(ratio, tokens):
        # As it is typed, in decimals.
        return tokens or 0 if ratio is None else max(1, int(Fraction(str(ratio)) * prompt_len))

    return Budget(count(heavy, h2o.heavy_tokens), count(recent, recent_tokens), h2o.sink_tokens)


def hold_counts(h2o: H2OConfig, layer: int, prompt_len: int, counts: list[int]) -> None:
    """counts are of the tokens that the definition caches, after the cut and each new token."""
    assert kept(h2o, layer, prompt_len) == counts[0]
    assert [cached(h2o, layer, prompt_len, n) for n in range(len(counts))] == counts
    assert [slots(h2o, layer, prompt_len, n) for n in range(len(counts))] == [
        max(counts[: n + 1]) for n in range(len(counts))]


LAYERS = 2
ratio = st.integers(1, 20).map(lambda n: n / 20)
ratios = st.one_of(ratio, st.lists(ratio, min_size=LAYERS, max_size=LAYERS))
size = st.one_of(
    st.fixed_dictionaries({"heavy_ratio": ratios}),
    st.fixed_dictionaries({"recent_ratio": ratios}),
    st.fixed_dictionaries({"heavy_ratio": ratios, "recent_ratio": ratios}),
    st.fixed_dictionaries({"heavy_ratio": ratios, "recent_tokens": st.integers(1, 6)}),
    st.fixed_dictionaries({"heavy_tokens": st.integers(0, 8), "recent_ratio": ratios}),
    st.fixed_dictionaries({"heavy_tokens": st.integers(0, 8), "recent_tokens": st.integers(1, 8)}),
    st.fixed_dictionaries({"heavy_tokens": st.integers(1, 8)}),
    st.fixed_dictionaries({"recent_tokens": st.integers(1, 8)}),
)
option = st.fixed_dictionaries({
    "score": st.sampled_from(SCORES), "decay": st.sampled_from([0.5, 0.98, 1.0]),
    "sink_tokens": st.integers(0, 5), "evict_generated": st.sampled_from([True, True, False]),
})


@given(sizes=size, options=option, prompts=st.lists(st.integers(1, 24), min_size=1, max_size=3),
       new=st.integers(0, 16), levels=st.sampled_from([1, 2, 3, None]), seed=st.integers(0, 999))
@example(sizes={"recent_tokens": 1}, options={}, prompts=[9, 1], new=5, levels=2, seed=0)
@example(sizes={"heavy_tokens": 3, "recent_tokens": 2}, options={"sink_tokens": 4},
         prompts=[1, 7, 20], new=14, levels=2, seed=0)
@example(sizes={"heavy_tokens": 40, "recent_tokens": 2}, options={}, prompts=[12], new=9, levels=2,
         seed=0)
@example(sizes={"heavy_ratio": [1, 0.1], "recent_ratio": 1}, options={}, prompts=[10, 3], new=9,
         levels=2, seed=0)
def test_whole_sequences(sizes, options, prompts, new, levels, seed):
    h2o = H2OConfig(**sizes, **options)
    hold_to_definition(h2o, prompts, new, layers=LAYERS, levels=levels, seed=seed)


@pytest.mark.parametrize("evict_generated", [True, False])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("sizes", [
    {"heavy_ratio": 0.1}, {"heavy_ratio": 0.1, "sink_tokens": 2}, {"recent_ratio": 0.3},
    {"recent_tokens": 6, "sink_tokens": 4}, {"recent_tokens": 1},
    {"heavy_tokens": 1, "recent_tokens": 1}, {"heavy_ratio": (0.4, 0.1, 1)},
], ids=str)
def test_long_sequences(sizes, score, evict_generated):
    h2o = H2OConfig(**sizes, score=score, evict_generated=evict_generated)
    for levels in (2, None):
        hold_to_definition(h2o, [60, 1, 7, 33], 40, layers=3, levels=levels)


def test_full_cache_counts():
    for h2o in (None, H2OConfig(), H2OConfig(heavy_ratio=1.0, sink_tokens=3)):
        assert budget(h2o, 0, 7) is None
        assert (kept(h2o, 0, 7), cached(h2o, 0, 7, 5), slots(h2o, 0, 7, 5)) == (7, 12, 12)


def test_simulation_needs_the_full_cache():
    h2o = H2OConfig(heavy_tokens=2, simulate=True)
    assert (kept(h2o, 0, 7), cached(h2o, 0, 7, 5), slots(h2o, 0, 7, 5)) == (4, 4, 12)


@given(st.integers(1, 1000), st.integers(1, 10_000))
def test_a_ratio_is_read_as_typed(thousandths, prompt_len):
    found = budget(H2OConfig(recent_ratio=thousandths / 1000), 0, prompt_len)
    assert found == Budget(0, max(1, thousandths * prompt_len // 1000))


@pytest.mark.parametrize(("share", "prompt_len", "count"), [
    (0.1, 30, 3), (0.29, 100, 29), (0.1, 512, 51), (1 / 3, 30, 10), (0.001, 5, 1), (1, 9, 9),
])
def test_ratio_examples(share, prompt_len, count):
    h2o = H2OConfig(heavy_ratio=share, recent_tokens=2, sink_tokens=1)
    assert budget(h2o, 0, prompt_len) == Budget(count, 2, 1)
    assert budget(h2o, 0, prompt_len).total == count + 3


@pytest.mark.parametrize(("values", "expected"), [
    ({"heavy_ratio": 0.2}, Budget(2, 2)),
    ({"heavy_ratio": 0.2, "recent_ratio": 0.5}, Budget(2, 5)),
    ({"heavy_ratio": 1, "recent_tokens": 4}, Budget(10, 4)),
    ({"heavy_tokens": 3}, Budget(3, 3)),
    ({"heavy_tokens": 3, "recent_ratio": 1}, Budget(3, 10)),
    ({"recent_tokens": 3, "sink_tokens": 4}, Budget(0, 3, 4)),
])
def test_sizes_left_out(values, expected):
    assert budget(H2OConfig(**values), 0, 10) == expected


def test_select_by_example():
    mass = torch.tensor([[9.0, 1, 5, 5, 5, 2, 0, 0]])
    select = Eviction(H2OConfig(heavy_tokens=2)).select
    assert select(mass, Budget(2, 2)).tolist() == [[0, 4, 6, 7]]  # 4: the newest of the fives
    assert select(mass, Budget(2, 2, 1)).tolist() == [[0, 3, 4, 6, 7]]
    assert select(mass, Budget(0, 1)).tolist() == [[7]]
    mean = Eviction(H2OConfig(heavy_tokens=1, score="mean"))
    assert mean.select(mass, Budget(1, 2)).tolist() == [[4, 6, 7]]  # 5/4 over 9/8
    for whole in (Budget(4, 4), Budget(1, 1, 9)):
        assert select(mass, whole).tolist() == [list(range(8))]


def test_victims_by_example():
    mass = torch.tensor([[[3.0, 2, 2, 4, 0]], [[0.0, 2, 1, 0, 0]]])
    positions = torch.tensor([[[0, 7, 3, 5, 8]], [[0, 1, 2, EMPTY, EMPTY]]], dtype=torch.int32)
    ask = {"tokens": torch.tensor([10, 4]), "recent": torch.tensor([2, 1])}
    plain = Eviction(H2OConfig(heavy_tokens=2))
    # Of the twos the older; the free slots of the second sequence hold the lowest score, but none.
    assert plain.victims(mass, positions, sinks=0, **ask).tolist() == [[2], [0]]
    assert plain.victims(mass, positions, sinks=1, **ask).tolist() == [[2], [2]]
    mean = Eviction(H2OConfig(heavy_tokens=2, score="mean"))
    assert mean.victims(mass, positions, sinks=0, **ask).tolist() == [[2], [0]]
    assert mean.victims(mass, positions, sinks=4, **ask).tolist()[0] == [1]  # 2/3 under 4/5


def test_victims_where_nothing_can_go():
    positions = torch.tensor([[[0, 1, EMPTY]]], dtype=torch.int32)
    for score in SCORES:
        found = Eviction(H2OConfig(heavy_tokens=2, score=score)).victims(
            torch.zeros(1, 1, 3), positions, tokens=torch.tensor([2]), recent=torch.tensor([5]),
            sinks=4)
        assert 0 <= found.item() < 3


def test_decay_is_only_of_its_score():
    assert [Eviction(H2OConfig(heavy_tokens=1, score=score, decay=0.5)).decay
            for score in SCORES] == [1.0, 1.0, 0.5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("score", SCORES)
def test_a_gpu_chooses_the_same(score):
    generator = torch.Generator().manual_seed(0)
    eviction = Eviction(H2OConfig(heavy_tokens=1, score=score))
    for levels in (3, 10_000):
        mass = torch.randint(levels, (4, 8, 700), generator=generator).float()
        positions = torch.stack([torch.randperm(900, generator=generator)[:700]
                                 for _ in range(32)]).view(4, 8, 700).int()
        size = Budget(100, 90, 4)
        ask = {"tokens": torch.full((4,), 901), "recent": torch.tensor([1, 9, 99, 500])}
        on_gpu = {name: value.cuda() for name, value in ask.items()}
        assert torch.equal(eviction.select(mass[0].cuda(), size).cpu(),
                           eviction.select(mass[0], size))
        assert torch.equal(
            eviction.victims(mass.cuda(), positions.cuda(), sinks=4, **on_gpu).cpu(),
            eviction.victims(mass, positions, sinks=4, **ask))
