"""The block schedule: every dependency before its use, each step once, two layer steps live."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.engine.schedule import MOVES, Kind, LayerStep, num_layer_steps, schedule


@dataclass
class ScheduleCase:
    """The steps of a run, and the place of each among them."""

    passes: int
    layers: int
    batches: int
    overlap: bool = True
    attend_early_from: int | None = None
    sep: bool = False
    keeps: bool = False
    no_ops: frozenset[Kind] = frozenset()
    steps: list[LayerStep] = field(init=False)

    def __post_init__(self):
        self.steps = list(schedule(self.passes, self.layers, self.batches, overlap=self.overlap,
                                   attend_early_from=self.attend_early_from, sep_layer=self.sep,
                                   keep_cache=self.keeps, no_ops=self.no_ops))
        self.place = {step: index for index, step in enumerate(self.steps)}
        self.computes = [step for step in self.steps if step.kind is Kind.COMPUTE]
        self.layer_steps = num_layer_steps(self.layers, self.sep)

    def attends(self, layer):
        """Whether a layer step attends: a decoder layer, or the first half of one."""
        return 1 <= layer <= self.layers if not self.sep else (
            1 <= layer <= 2 * self.layers and layer % 2 == 1)

    def attention(self, compute):
        """Return the early attention of a compute, which need not be there."""
        return LayerStep(Kind.ATTEND, compute.forward_pass, compute.layer, compute.batch)


SIZES = dict(passes=st.integers(1, 4), layers=st.integers(1, 4), batches=st.integers(1, 4),
             overlap=st.booleans(), attend_early_from=st.none() | st.integers(0, 4),
             sep=st.booleans(), keeps=st.booleans())
runs = st.builds(ScheduleCase, **SIZES)


@given(runs)
def test_every_step_comes_once_and_computes_in_order(run):
    assert max(Counter(run.steps).values()) == 1
    assert run.computes == [LayerStep(Kind.COMPUTE, i, j, k) for i in range(run.passes)
                            for j in range(run.layer_steps) for k in range(run.batches)]
    attentions = run.passes * run.layers * run.batches
    counts = Counter(step.kind for step in run.steps)
    assert counts[Kind.LOAD_CACHE] == attentions
    unread = 0 if run.keeps else run.layers * run.batches  # what the last forward pass adds
    assert counts[Kind.STORE_CACHE] == attentions - unread
    hidden = run.passes * (run.layer_steps - 1) * run.batches
    assert counts[Kind.LOAD_HIDDEN] == counts[Kind.STORE_HIDDEN] == hidden
    assert counts[Kind.LOAD_WEIGHTS] == counts[Kind.RELEASE_WEIGHTS] == run.passes * run.layer_steps
    early = run.attend_early_from is not None and run.overlap and run.batches > 1
    assert [step for step in run.steps if step.kind is Kind.ATTEND] == [
        run.attention(step) for step in run.computes
        if early and step.forward_pass >= run.attend_early_from and run.attends(step.layer)]


@given(no_ops=st.sets(st.sampled_from(sorted(MOVES, key=lambda kind: kind.value)), min_size=3)
       | st.just(MOVES), options=st.fixed_dictionaries(SIZES))
def test_no_ops_are_left_out(no_ops, options):
    assert ScheduleCase(**options, no_ops=no_ops).steps == [
        step for step in ScheduleCase(**options).steps if step.kind not in no_ops]


@given(runs)
def test_dependencies_come_before_their_uses(run):
    place, last = run.place, run.layer_steps - 1
    for step, index in place.items():
        i, j, k = step.forward_pass, step.layer, step.batch
        if step.kind is Kind.COMPUTE:
            # The step that reads what is loaded.
            first = place.get(run.attention(step), index)
            assert first <= index
            assert place[LayerStep(Kind.LOAD_WEIGHTS, i, j, None)] < first
            assert place[LayerStep(Kind.RELEASE_WEIGHTS, i, j, None)] > index
            if run.attends(j):
                assert place[LayerStep(Kind.LOAD_CACHE, i, j, k)] < first
                stored = place.get(LayerStep(Kind.STORE_CACHE, i, j, k))
                assert stored is None and i == run.passes - 1 and not run.keeps or stored > first
            if j > 0:
                assert place[LayerStep(Kind.LOAD_HIDDEN, i, j, k)] < first
            if j < last:
                assert place[LayerStep(Kind.STORE_HIDDEN, i, j, k)] > index
        if step.kind is Kind.LOAD_CACHE and i > 0:
            assert place[LayerStep(Kind.STORE_CACHE, i - 1, j, k)] < index
        if step.kind is Kind.LOAD_HIDDEN:
            assert place[LayerStep(Kind.STORE_HIDDEN, i, j - 1, k)] < index


@given(runs)
def test_at_most_two_weights_and_three_buffers_are_live(run):
    """A load of cache or hidden states takes the buffer of the third last, as an embedding does."""
    weights, most = set(), 0
    for step in run.steps:
        if step.kind is Kind.LOAD_WEIGHTS:
            weights.add((step.forward_pass, step.layer))
        elif step.kind is Kind.RELEASE_WEIGHTS:
            weights.remove((step.forward_pass, step.layer))
        most = max(most, len(weights))
    assert most == (2 if run.overlap else 1) and not weights
    for load, store in ((Kind.LOAD_CACHE, Kind.STORE_CACHE),
                        (Kind.LOAD_HIDDEN, Kind.STORE_HIDDEN)):
        stored = {(s.forward_pass, s.layer, s.batch) for s in run.steps if s.kind is store}
        live = set()
        for step in run.steps:
            key = (step.forward_pass, step.layer, step.batch)
            embeds = step.kind is Kind.COMPUTE and step.layer == 0 and load is Kind.LOAD_HIDDEN
            if step.kind is load or embeds:
                live.add(key)
            assert len(live) <= 3
            if step.kind is store or (
                    step.kind in (Kind.ATTEND, Kind.COMPUTE) and key not in stored):
                live.discard(key)


@given(runs)
def test_overlap_loads_weights_and_caches_ahead(run):
    """Weights one layer step ahead, a cache two computes ahead of its first use."""
    for i in range(run.passes):
        for j in range(1, run.layer_steps):
            loaded = run.place[LayerStep(Kind.LOAD_WEIGHTS, i, j, None)]
            before = run.place[LayerStep(Kind.COMPUTE, i, j - 1, 0)]
            assert (loaded < before) == run.overlap
    firsts = [run.place.get(run.attention(step), run.place[step]) for step in run.computes]
    for number, step in enumerate(run.computes):
        if number > 1 and run.attends(step.layer):
            load = LayerStep(Kind.LOAD_CACHE, step.forward_pass, step.layer, step.batch)
            assert (run.place[load] < firsts[number - 2]) == run.overlap


@given(runs)
def test_attention_starts_before_the_previous_compute(run):
    for number, step in enumerate(run.computes):
        started = run.place.get(run.attention(step))
        if started is not None:
            before = run.computes[number - 1]
            assert started < run.place[before] and before.batch != step.batch
            # And no earlier: a single one waits beside the one that computes.
            assert started > run.place[run.computes[number - 2]]


@pytest.mark.parametrize("sep, last", [(False, 2), (True, 3)])
def test_layer_steps_of_a_pass(sep, last):
    layers = {step.layer for step in ScheduleCase(1, 1, 1, sep=sep).steps}
    assert layers == set(range(last + 1)) and num_layer_steps(1, sep) == last + 1


def test_steps_follow_the_zig_zag_of_the_paper():
    shown = [(s.kind.name, s.forward_pass, s.layer, s.batch) for s in ScheduleCase(1, 1, 2).steps]
    assert shown[:7] == [
        ("LOAD_WEIGHTS", 0, 0, None), ("LOAD_WEIGHTS", 0, 1, None), ("LOAD_CACHE", 0, 1, 0),
        ("COMPUTE", 0, 0, 0), ("STORE_HIDDEN", 0, 0, 0), ("LOAD_HIDDEN", 0, 1, 0),
        ("LOAD_CACHE", 0, 1, 1),
    ]
