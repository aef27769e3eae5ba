"""The actions of a pipeline's ranks, executed together: no deadlock, in order, and no idling.

Messages behave as badly as MPI allows: a send ends when its receive has been posted, and the number
of messages in flight is limited.
"""

import math
from collections import Counter, defaultdict

import pytest
from helpers.error_cases import refused
from hypothesis import example, given
from hypothesis import strategies as st

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.limits import CACHE_BUFFERS, HIDDEN_BUFFERS
from flexgen_h2o.config.parallel import Stage, split_batches
from flexgen_h2o.engine.schedule import Action, Op, num_units, schedule

HIDDEN, TOKENS = "hidden", "tokens"


@st.composite
def pipelines(draw):
    """(passes, bounds, batches, options of `schedule`)"""
    bounds = [0, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(
        lambda counts: [sum(counts[: n + 1]) for n in range(len(counts))]))]
    return draw(st.integers(1, 4)), bounds, draw(st.integers(1, 6)), {
        "overlap": draw(st.booleans()), "attend_early_from": draw(st.none() | st.integers(0, 4)),
        "sep_layer": draw(st.booleans()), "keep_cache": draw(st.booleans()),
        "groups": draw(st.integers(1, 6))}


def actions_of_ranks(passes, bounds, batches, options):
    return [list(schedule(passes, bounds[-1], batches, stage=Stage.for_rank(rank, bounds),
                          **options)) for rank in range(len(bounds) - 1)]


class Simulation:
    """Executes the ranks' actions; a compute takes one unit of time, all else none."""

    def __init__(self, ranks, bounds, sep_layer, window):
        self.ranks, self.window = ranks, window
        self.first = [Stage.for_rank(rank, bounds).units(sep_layer)[0]
                      for rank in range(len(ranks))]
        self.sent, self.asked = defaultdict(list), defaultdict(list)  # (what, time) by channel
        self.taken = Counter()
        self.clocks = [0] * len(ranks)
        self.computed: dict[Action, int] = {}
        places = [0] * len(ranks)
        while True:
            before = list(places)
            for rank, actions in enumerate(ranks):
                while places[rank] < len(actions) and self._do(rank, actions[places[rank]]):
                    places[rank] += 1
            if places == before:
                break
        left = {rank: actions[place:][:1] for rank, (place, actions) in enumerate(
            zip(places, ranks, strict=True)) if place < len(actions)}
        assert not left, f"deadlock at {left}"
        for channel, sent in self.sent.items():
            assert self.taken[channel] == len(sent) == len(self.asked[channel])

    def _do(self, rank, action):
        """Execute an action, unless it has to wait for another rank."""
        what, last = (action.forward_pass, action.batch), len(self.ranks) - 1
        into, out, tokens = (HIDDEN, rank - 1), (HIDDEN, rank), (TOKENS, rank)
        if action.op is Op.RECEIVE_HIDDEN:
            self.asked[into].append((what, self.clocks[rank]))
        elif action.op is Op.RECEIVE_TOKENS:
            self.asked[tokens].append((what, self.clocks[rank]))
        elif action.op is Op.SEND_HIDDEN:
            oldest = len(self.sent[out]) - self.window
            if oldest >= 0 and oldest >= len(self.asked[out]):
                return False  # the limit of messages in flight
            if oldest >= 0:
                self.clocks[rank] = max(self.clocks[rank], self.asked[out][oldest][1])
            self.sent[out].append((what, self.clocks[rank]))
        elif action.op is Op.SEND_TOKENS:
            for other in range(last):
                channel = (TOKENS, other)
                assert len(self.asked[channel]) > len(self.sent[channel]), "it would wait"
                self.sent[channel].append((what, self.clocks[rank]))
        elif action.op is Op.TAKE_TOKENS:
            return self._take(rank, tokens, what)
        elif action.op is Op.COMPUTE:
            if rank > 0 and action.unit == self.first[rank] and not self._take(rank, into, what):
                return False
            self._check_known(rank, action)
            self.clocks[rank] += 1
            assert action not in self.computed
            self.computed[action] = rank
        return True

    def _take(self, rank, channel, what):
        number = self.taken[channel]
        if number >= len(self.sent[channel]):
            return False
        (asked, asked_at), (sent, sent_at) = self.asked[channel][number], self.sent[channel][number]
        assert asked == sent == what
        self.clocks[rank] = max(self.clocks[rank], asked_at, sent_at)
        self.taken[channel] += 1
        return True

    def _check_known(self, rank, action):
        """All tokens of a batch so far are known where it is computed."""
        known = self.taken[TOKENS, rank] if rank < len(self.ranks) - 1 else math.inf
        batches = len({own.batch for own in self.ranks[rank] if own.batch is not None})
        assert not action.forward_pass or (
            known >= (action.forward_pass - 1) * batches + action.batch + 1)


@given(pipelines(), st.integers(1, 3))
def test_ranks_compute_everything_once_without_deadlock(pipeline, window):
    passes, bounds, batches, options = pipeline
    ranks = actions_of_ranks(*pipeline)
    done = Simulation(ranks, bounds, options["sep_layer"], window)
    units = num_units(bounds[-1], options["sep_layer"])
    assert set(done.computed) == {Action(Op.COMPUTE, i, j, k) for i in range(passes)
                                  for j in range(units) for k in range(batches)}
    places = {action: place for place, action in enumerate(done.computed)}
    for action in done.computed:
        if action.unit:
            before = Action(Op.COMPUTE, action.forward_pass, action.unit - 1, action.batch)
            assert places[before] < places[action]


@given(pipelines())
@example((1, [0, 1, 3], 3, {"overlap": True, "attend_early_from": 0, "sep_layer": False,
                            "keep_cache": False, "groups": 1}))
def test_each_rank_loads_what_its_computes_need(pipeline):
    """One rank's actions in their order: buffers, weights and caches as on one rank alone."""
    passes, bounds, batches, options = pipeline
    for rank, actions in enumerate(actions_of_ranks(*pipeline)):
        units = Stage.for_rank(rank, bounds).units(options["sep_layer"])
        weights, cache, stored, hidden, started = set(), {}, {}, {}, set()
        for action in actions:
            key, where = (action.unit, action.batch), (action.forward_pass, action.batch)
            assert action.unit in units
            if action.op is Op.LOAD_WEIGHTS:
                assert action.unit not in weights
                weights.add(action.unit)
                assert len(weights) <= (2 if options["overlap"] else 1)
            elif action.op is Op.RELEASE_WEIGHTS:
                weights.remove(action.unit)
            elif action.op is Op.LOAD_CACHE:
                assert stored.get(key, action.forward_pass - 1) == action.forward_pass - 1
                cache[key] = action.forward_pass
                assert len(cache) <= CACHE_BUFFERS
            elif action.op is Op.STORE_CACHE:
                assert key in started
                started.discard(key)
                cache.pop(key)
                stored[key] = action.forward_pass
            elif action.op is Op.LOAD_HIDDEN:
                assert where not in hidden
                hidden[where] = action.unit
                assert len(hidden) <= HIDDEN_BUFFERS
            elif action.op in (Op.STORE_HIDDEN, Op.SEND_HIDDEN):
                assert hidden.pop(where) == action.unit
            elif action.op in (Op.ATTEND, Op.COMPUTE):
                assert action.unit in weights
                if action.unit == units[0] and action.op is Op.COMPUTE:
                    hidden[where] = action.unit  # embedded or received
                assert hidden[where] == action.unit
                if key in cache:
                    assert cache[key] == action.forward_pass
                    started.add(key)
                    if action.forward_pass == passes - 1 and not options["keep_cache"]:
                        cache.pop(key)
                if action.op is Op.COMPUTE and action.unit == units[-1] == units.stop - 1 and (
                        Stage.for_rank(rank, bounds).is_last_stage):
                    hidden.pop(where)
        assert not weights and not hidden
        attended = Counter(action.op for action in actions)[Op.LOAD_CACHE]
        assert attended == passes * batches * (bounds[rank + 1] - bounds[rank])


@pytest.mark.parametrize("ranks, batches, groups, idle", [
    (2, 2, 2, 1), (2, 4, 4, 1), (3, 3, 3, 2), (3, 6, 6, 2), (4, 8, 4, 6), (2, 4, 2, 2)])
def test_ranks_idle_only_at_the_start_and_the_end(ranks, batches, groups, idle):
    """The ranks of most units compute without a pause but for the first batches' way to
    them: `idle` units of a group's time on one unit."""
    bounds = [2 * rank for rank in range(ranks + 1)]
    actions = actions_of_ranks(6, bounds, batches, {"groups": groups})
    done = Simulation(actions, bounds, False, window=batches)
    # The first and the last rank have a unit more each: embedding and head.
    most = 6 * batches * 3
    assert most <= max(done.clocks) <= most + 3 * idle


def test_groups_of_batches_have_equal_sizes():
    for batches in range(1, 20):
        for wanted in range(1, 8):
            groups = split_batches(batches, wanted)
            assert [batch for group in groups for batch in group] == list(range(batches))
            assert len(groups) == min(batches, wanted)
            assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_a_stage_takes_its_ratios_by_layer():
    h2o = H2OConfig(heavy_ratio=(1, 0.5, 0.25), prompt_chunk=8)
    first, second = (Stage.for_rank(rank, (0, 1, 3)) for rank in (0, 1))
    assert second.h2o(h2o) == H2OConfig(heavy_ratio=(0.5, 0.25), prompt_chunk=8)
    assert first.h2o(h2o).is_full  # and says nothing of chunks, which have no effect on it
    assert second.h2o(None) is None
    assert first.h2o(H2OConfig(heavy_ratio=0.5)) == H2OConfig(heavy_ratio=0.5)


@pytest.mark.parametrize("bounds", [(0,), (1, 2), (0, 2, 2), (0, 3, 1)])
def test_wrong_bounds_raise(bounds):
    refused(lambda: Stage.for_rank(0, bounds), match="must begin at 0 and ascend")
