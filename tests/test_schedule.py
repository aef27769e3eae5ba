"""The block schedule: every dependency before its use, each step once, two layers live."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.engine.schedule import Kind, Step, schedule

SIZES = dict(sweeps=st.integers(1, 4), layers=st.integers(1, 4), batches=st.integers(1, 4),
             overlap=st.booleans())


def steps_of(sweeps, layers, batches, overlap):
    return list(schedule(sweeps, layers, batches, overlap=overlap))


@given(**SIZES)
def test_every_step_comes_once_and_computes_come_in_order(sweeps, layers, batches, overlap):
    steps = steps_of(sweeps, layers, batches, overlap)
    assert max(Counter(steps).values()) == 1
    computes = [s for s in steps if s.kind is Kind.COMPUTE]
    assert computes == [Step(Kind.COMPUTE, i, j, k) for i in range(sweeps)
                        for j in range(layers + 2) for k in range(batches)]
    per_layer = sweeps * layers * batches
    counts = Counter(s.kind for s in steps)
    assert counts[Kind.LOAD_CACHE] == per_layer
    assert counts[Kind.STORE_CACHE] == per_layer - layers * batches  # nobody reads the last
    assert counts[Kind.LOAD_HIDDEN] == counts[Kind.STORE_HIDDEN] == per_layer + sweeps * batches
    assert counts[Kind.LOAD_WEIGHTS] == counts[Kind.RELEASE_WEIGHTS] == sweeps * (layers + 2)


@given(**SIZES)
def test_dependencies_come_before_their_uses(sweeps, layers, batches, overlap):
    steps = steps_of(sweeps, layers, batches, overlap)
    place = {step: index for index, step in enumerate(steps)}
    for step, index in place.items():
        i, j, k = step.sweep, step.layer, step.batch
        if step.kind is Kind.COMPUTE:
            assert place[Step(Kind.LOAD_WEIGHTS, i, j, None)] < index
            assert place[Step(Kind.RELEASE_WEIGHTS, i, j, None)] > index
            if 1 <= j <= layers:
                assert place[Step(Kind.LOAD_CACHE, i, j, k)] < index
                assert i == sweeps - 1 or place[Step(Kind.STORE_CACHE, i, j, k)] > index
            if j > 0:
                assert place[Step(Kind.LOAD_HIDDEN, i, j, k)] < index
            if j <= layers:
                assert place[Step(Kind.STORE_HIDDEN, i, j, k)] > index
        if step.kind is Kind.LOAD_CACHE and i > 0:
            assert place[Step(Kind.STORE_CACHE, i - 1, j, k)] < index
        if step.kind is Kind.LOAD_HIDDEN:
            assert place[Step(Kind.STORE_HIDDEN, i, j - 1, k)] < index


@given(**SIZES)
def test_at_most_two_layers_of_weights_are_live(sweeps, layers, batches, overlap):
    live, most = set(), 0
    for step in steps_of(sweeps, layers, batches, overlap):
        if step.kind is Kind.LOAD_WEIGHTS:
            live.add((step.sweep, step.layer))
        elif step.kind is Kind.RELEASE_WEIGHTS:
            live.remove((step.sweep, step.layer))
        most = max(most, len(live))
    assert most == (2 if overlap else 1) and not live


@given(**SIZES)
def test_overlap_issues_loads_before_the_compute_that_precedes_their_use(
        sweeps, layers, batches, overlap):
    steps = steps_of(sweeps, layers, batches, overlap)
    place = {step: index for index, step in enumerate(steps)}
    for i in range(sweeps):
        for j in range(1, layers + 2):
            loaded = place[Step(Kind.LOAD_WEIGHTS, i, j, None)]
            assert (loaded < place[Step(Kind.COMPUTE, i, j - 1, 0)]) == overlap


def test_the_zig_zag_is_the_papers():
    shown = [(s.kind.name, s.sweep, s.layer, s.batch) for s in steps_of(1, 1, 2, True)]
    assert shown[:6] == [
        ("LOAD_WEIGHTS", 0, 0, None), ("LOAD_WEIGHTS", 0, 1, None), ("COMPUTE", 0, 0, 0),
        ("STORE_HIDDEN", 0, 0, 0), ("LOAD_CACHE", 0, 1, 0), ("LOAD_HIDDEN", 0, 1, 0),
    ]
