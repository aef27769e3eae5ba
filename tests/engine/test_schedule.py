"""The block schedule: every dependency before its use, each action once, two units live."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.engine.schedule import MOVES, Action, Op, num_units, schedule


@dataclass
class ScheduleCase:
    """The actions of a run, and the place of each among them."""

    passes: int
    layers: int
    batches: int
    overlap: bool = True
    attend_early_from: int | None = None
    sep: bool = False
    keeps: bool = False
    no_ops: frozenset[Op] = frozenset()
    actions: list[Action] = field(init=False)

    def __post_init__(self):
        self.actions = list(schedule(self.passes, self.layers, self.batches, overlap=self.overlap,
                                     attend_early_from=self.attend_early_from, sep_layer=self.sep,
                                     keep_cache=self.keeps, no_ops=self.no_ops))
        self.place = {action: index for index, action in enumerate(self.actions)}
        self.computes = [action for action in self.actions if action.op is Op.COMPUTE]
        self.units = num_units(self.layers, self.sep)

    def attends(self, layer):
        """Whether a unit attends: a decoder layer, or the first half of one."""
        return 1 <= layer <= self.layers if not self.sep else (
            1 <= layer <= 2 * self.layers and layer % 2 == 1)

    def attention(self, compute):
        """Return the early attention of a compute, which need not be there."""
        return Action(Op.ATTEND, compute.forward_pass, compute.unit, compute.batch)


SIZES = dict(passes=st.integers(1, 4), layers=st.integers(1, 4), batches=st.integers(1, 4),
             overlap=st.booleans(), attend_early_from=st.none() | st.integers(0, 4),
             sep=st.booleans(), keeps=st.booleans())
runs = st.builds(ScheduleCase, **SIZES)


@given(runs)
def test_every_action_comes_once_and_computes_in_order(run):
    assert max(Counter(run.actions).values()) == 1
    assert run.computes == [Action(Op.COMPUTE, i, j, k) for i in range(run.passes)
                            for j in range(run.units) for k in range(run.batches)]
    attentions = run.passes * run.layers * run.batches
    counts = Counter(action.op for action in run.actions)
    assert counts[Op.LOAD_CACHE] == attentions
    unread = 0 if run.keeps else run.layers * run.batches  # added by the last forward pass
    assert counts[Op.STORE_CACHE] == attentions - unread
    hidden = run.passes * (run.units - 1) * run.batches
    assert counts[Op.LOAD_HIDDEN] == counts[Op.STORE_HIDDEN] == hidden
    assert counts[Op.LOAD_WEIGHTS] == counts[Op.RELEASE_WEIGHTS] == run.passes * run.units
    early = run.attend_early_from is not None and run.overlap and run.batches > 1
    assert [action for action in run.actions if action.op is Op.ATTEND] == [
        run.attention(action) for action in run.computes
        if early and action.forward_pass >= run.attend_early_from and run.attends(action.unit)]


@given(no_ops=st.sets(st.sampled_from(sorted(MOVES, key=lambda kind: kind.value)), min_size=3)
       | st.just(MOVES), options=st.fixed_dictionaries(SIZES))
def test_no_ops_are_left_out(no_ops, options):
    assert ScheduleCase(**options, no_ops=no_ops).actions == [
        action for action in ScheduleCase(**options).actions if action.op not in no_ops]


@given(runs)
def test_dependencies_come_before_their_uses(run):
    place, last = run.place, run.units - 1
    for action, index in place.items():
        i, j, k = action.forward_pass, action.unit, action.batch
        if action.op is Op.COMPUTE:
            # The action that uses the loaded data.
            first = place.get(run.attention(action), index)
            assert first <= index
            assert place[Action(Op.LOAD_WEIGHTS, i, j, None)] < first
            assert place[Action(Op.RELEASE_WEIGHTS, i, j, None)] > index
            if run.attends(j):
                assert place[Action(Op.LOAD_CACHE, i, j, k)] < first
                stored = place.get(Action(Op.STORE_CACHE, i, j, k))
                assert stored is None and i == run.passes - 1 and not run.keeps or stored > first
            if j > 0:
                assert place[Action(Op.LOAD_HIDDEN, i, j, k)] < first
            if j < last:
                assert place[Action(Op.STORE_HIDDEN, i, j, k)] > index
        if action.op is Op.LOAD_CACHE and i > 0:
            assert place[Action(Op.STORE_CACHE, i - 1, j, k)] < index
        if action.op is Op.LOAD_HIDDEN:
            assert place[Action(Op.STORE_HIDDEN, i, j - 1, k)] < index


@given(runs)
def test_at_most_two_weights_and_three_buffers_are_live(run):
    """A load of cache or hidden states takes the buffer of the third last, as an embedding does."""
    weights, most = set(), 0
    for action in run.actions:
        if action.op is Op.LOAD_WEIGHTS:
            weights.add((action.forward_pass, action.unit))
        elif action.op is Op.RELEASE_WEIGHTS:
            weights.remove((action.forward_pass, action.unit))
        most = max(most, len(weights))
    assert most == (2 if run.overlap else 1) and not weights
    for load, store in ((Op.LOAD_CACHE, Op.STORE_CACHE), (Op.LOAD_HIDDEN, Op.STORE_HIDDEN)):
        stored = {(s.forward_pass, s.unit, s.batch) for s in run.actions if s.op is store}
        live = set()
        for action in run.actions:
            key = (action.forward_pass, action.unit, action.batch)
            embeds = action.op is Op.COMPUTE and action.unit == 0 and load is Op.LOAD_HIDDEN
            if action.op is load or embeds:
                live.add(key)
            assert len(live) <= 3
            if action.op is store or (
                    action.op in (Op.ATTEND, Op.COMPUTE) and key not in stored):
                live.discard(key)


@given(runs)
def test_overlap_loads_weights_and_caches_ahead(run):
    """Weights one unit ahead, a cache two computes ahead of its first use."""
    for i in range(run.passes):
        for j in range(1, run.units):
            loaded = run.place[Action(Op.LOAD_WEIGHTS, i, j, None)]
            before = run.place[Action(Op.COMPUTE, i, j - 1, 0)]
            assert (loaded < before) == run.overlap
    firsts = [run.place.get(run.attention(action), run.place[action]) for action in run.computes]
    for number, action in enumerate(run.computes):
        if number > 1 and run.attends(action.unit):
            load = Action(Op.LOAD_CACHE, action.forward_pass, action.unit, action.batch)
            assert (run.place[load] < firsts[number - 2]) == run.overlap


@given(runs)
def test_attention_starts_before_the_previous_compute(run):
    for number, action in enumerate(run.computes):
        started = run.place.get(run.attention(action))
        if started is not None:
            before = run.computes[number - 1]
            assert started < run.place[before] and before.batch != action.batch
            # And no earlier: a single one waits beside the one that computes.
            assert started > run.place[run.computes[number - 2]]


@pytest.mark.parametrize("sep, last", [(False, 2), (True, 3)])
def test_units_of_a_pass(sep, last):
    layers = {action.unit for action in ScheduleCase(1, 1, 1, sep=sep).actions}
    assert layers == set(range(last + 1)) and num_units(1, sep) == last + 1


def test_actions_follow_the_zig_zag_of_the_paper():
    shown = [(s.op.name, s.forward_pass, s.unit, s.batch) for s in ScheduleCase(1, 1, 2).actions]
    assert shown[:7] == [("LOAD_WEIGHTS", 0, 0, None), ("LOAD_WEIGHTS", 0, 1, None),
                         ("LOAD_CACHE", 0, 1, 0), ("COMPUTE", 0, 0, 0), ("STORE_HIDDEN", 0, 0, 0),
                         ("LOAD_HIDDEN", 0, 1, 0), ("LOAD_CACHE", 0, 1, 1)]
