"""The block schedule: every dependency before its use, each step once, two layer steps live."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.engine.schedule import MOVES, Kind, LayerStep, num_layer_steps, schedule

SIZES = dict(passes=st.integers(1, 4), layers=st.integers(1, 4), batches=st.integers(1, 4),
             overlap=st.booleans(), split_from=st.none() | st.integers(0, 4), sep=st.booleans(),
             keeps=st.booleans())


def steps_of(passes, layers, batches, overlap, split_from=None, sep=False, keeps=False, **more):
    return list(schedule(passes, layers, batches, overlap=overlap, split_from=split_from,
                         sep_layer=sep, keep_cache=keeps, **more))


def attends(layer, layers, sep):
    """Whether a layer step attends: a decoder layer, or the first half of one."""
    return 1 <= layer <= layers if not sep else 1 <= layer <= 2 * layers and layer % 2 == 1


def split_passes(passes, batches, overlap, split_from):
    """Forward passes whose attention starts early."""
    if split_from is None or not overlap or batches == 1:
        return []
    return list(range(split_from, passes))


@given(**SIZES)
def test_every_step_comes_once_and_computes_come_in_order(passes, layers, batches, overlap,
                                                          split_from, sep, keeps):
    steps = steps_of(passes, layers, batches, overlap, split_from, sep, keeps)
    assert max(Counter(steps).values()) == 1
    computes = [s for s in steps if s.kind is Kind.COMPUTE]
    layer_steps = num_layer_steps(layers, sep)
    assert computes == [LayerStep(Kind.COMPUTE, i, j, k) for i in range(passes)
                        for j in range(layer_steps) for k in range(batches)]
    attentions = passes * layers * batches
    counts = Counter(s.kind for s in steps)
    assert counts[Kind.LOAD_CACHE] == attentions
    unread = 0 if keeps else layers * batches  # what the last forward pass adds
    assert counts[Kind.STORE_CACHE] == attentions - unread
    hidden = passes * (layer_steps - 1) * batches
    assert counts[Kind.LOAD_HIDDEN] == counts[Kind.STORE_HIDDEN] == hidden
    assert counts[Kind.LOAD_WEIGHTS] == counts[Kind.RELEASE_WEIGHTS] == passes * layer_steps
    early = split_passes(passes, batches, overlap, split_from)
    assert [s for s in steps if s.kind is Kind.ATTEND] == [
        LayerStep(Kind.ATTEND, s.forward_pass, s.layer, s.batch) for s in computes
        if s.forward_pass in early and attends(s.layer, layers, sep)]


@given(no_ops=st.sets(st.sampled_from(sorted(MOVES, key=lambda kind: kind.value)), min_size=3)
       | st.just(MOVES), **SIZES)
def test_no_ops_are_left_out(passes, layers, batches, overlap, split_from, sep, keeps, no_ops):
    whole = steps_of(passes, layers, batches, overlap, split_from, sep, keeps)
    assert steps_of(passes, layers, batches, overlap, split_from, sep, keeps, no_ops=no_ops) == [
        step for step in whole if step.kind not in no_ops]


@given(**SIZES)
def test_dependencies_come_before_their_uses(passes, layers, batches, overlap, split_from,
                                             sep, keeps):
    steps = steps_of(passes, layers, batches, overlap, split_from, sep, keeps)
    place = {step: index for index, step in enumerate(steps)}
    last = num_layer_steps(layers, sep) - 1
    for step, index in place.items():
        i, j, k = step.forward_pass, step.layer, step.batch
        if step.kind is Kind.COMPUTE:
            # The step that reads what is loaded.
            first = place.get(LayerStep(Kind.ATTEND, i, j, k), index)
            assert first <= index
            assert place[LayerStep(Kind.LOAD_WEIGHTS, i, j, None)] < first
            assert place[LayerStep(Kind.RELEASE_WEIGHTS, i, j, None)] > index
            if attends(j, layers, sep):
                assert place[LayerStep(Kind.LOAD_CACHE, i, j, k)] < first
                stored = place.get(LayerStep(Kind.STORE_CACHE, i, j, k))
                assert stored is None and i == passes - 1 and not keeps or stored > first
            if j > 0:
                assert place[LayerStep(Kind.LOAD_HIDDEN, i, j, k)] < first
            if j < last:
                assert place[LayerStep(Kind.STORE_HIDDEN, i, j, k)] > index
        if step.kind is Kind.LOAD_CACHE and i > 0:
            assert place[LayerStep(Kind.STORE_CACHE, i - 1, j, k)] < index
        if step.kind is Kind.LOAD_HIDDEN:
            assert place[LayerStep(Kind.STORE_HIDDEN, i, j - 1, k)] < index


@given(**SIZES)
def test_weights_of_at_most_two_layer_steps_are_live(passes, layers, batches, overlap, split_from,
                                                     sep, keeps):
    live, most = set(), 0
    for step in steps_of(passes, layers, batches, overlap, split_from, sep, keeps):
        if step.kind is Kind.LOAD_WEIGHTS:
            live.add((step.forward_pass, step.layer))
        elif step.kind is Kind.RELEASE_WEIGHTS:
            live.remove((step.forward_pass, step.layer))
        most = max(most, len(live))
    assert most == (2 if overlap else 1) and not live


@given(**SIZES)
def test_the_buffers_of_three_in_turn_are_free_again(passes, layers, batches, overlap, split_from,
                                                     sep, keeps):
    """A load of cache or hidden states takes the buffer of the third last, as an embedding does:
    what is loaded, in use or not yet stored never is more than three."""
    steps = steps_of(passes, layers, batches, overlap, split_from, sep, keeps)
    for load, store in ((Kind.LOAD_CACHE, Kind.STORE_CACHE),
                        (Kind.LOAD_HIDDEN, Kind.STORE_HIDDEN)):
        stored = {(s.forward_pass, s.layer, s.batch) for s in steps if s.kind is store}
        live = set()
        for step in steps:
            key = (step.forward_pass, step.layer, step.batch)
            embeds = step.kind is Kind.COMPUTE and step.layer == 0 and load is Kind.LOAD_HIDDEN
            if step.kind is load or embeds:
                live.add(key)
            assert len(live) <= 3
            if step.kind is store or (
                    step.kind in (Kind.ATTEND, Kind.COMPUTE) and key not in stored):
                live.discard(key)


@given(**SIZES)
def test_overlap_issues_weights_a_layer_step_ahead(passes, layers, batches, overlap, split_from,
                                                   sep, keeps):
    steps = steps_of(passes, layers, batches, overlap, split_from, sep, keeps)
    place = {step: index for index, step in enumerate(steps)}
    for i in range(passes):
        for j in range(1, num_layer_steps(layers, sep)):
            loaded = place[LayerStep(Kind.LOAD_WEIGHTS, i, j, None)]
            assert (loaded < place[LayerStep(Kind.COMPUTE, i, j - 1, 0)]) == overlap


@given(**SIZES)
def test_overlap_issues_cache_loads_two_computes_ahead(passes, layers, batches, overlap,
                                                       split_from, sep, keeps):
    """Of the first step of each compute: where attention starts early, that is."""
    steps = steps_of(passes, layers, batches, overlap, split_from, sep, keeps)
    place = {step: index for index, step in enumerate(steps)}
    firsts = [place.get(LayerStep(Kind.ATTEND, s.forward_pass, s.layer, s.batch), place[s])
              for s in steps if s.kind is Kind.COMPUTE]
    computes = [s for s in steps if s.kind is Kind.COMPUTE]
    for number, compute in enumerate(computes):
        if number < 2 or not attends(compute.layer, layers, sep):
            continue
        load = LayerStep(Kind.LOAD_CACHE, compute.forward_pass, compute.layer, compute.batch)
        assert (place[load] < firsts[number - 2]) == overlap


@given(**SIZES)
def test_attention_starts_before_the_compute_of_the_batch_before(passes, layers, batches, overlap,
                                                                 split_from, sep, keeps):
    steps = steps_of(passes, layers, batches, overlap, split_from, sep, keeps)
    place = {step: index for index, step in enumerate(steps)}
    computes = [s for s in steps if s.kind is Kind.COMPUTE]
    for before, compute in zip(computes, computes[1:], strict=False):
        started = place.get(LayerStep(Kind.ATTEND, compute.forward_pass, compute.layer,
                                      compute.batch))
        if started is not None:
            assert started < place[before] and before.batch != compute.batch
            # And no earlier: a single one waits beside the one that computes.
            earlier = computes[computes.index(before) - 1]
            assert started > place[earlier]


@pytest.mark.parametrize("sep, last", [(False, 2), (True, 3)])
def test_layer_steps_of_a_pass(sep, last):
    layers = {s.layer for s in steps_of(1, 1, 1, True, sep=sep)}
    assert layers == set(range(last + 1)) and num_layer_steps(1, sep) == last + 1


def test_the_zig_zag_is_the_papers():
    shown = [(s.kind.name, s.forward_pass, s.layer, s.batch) for s in steps_of(1, 1, 2, True)]
    assert shown[:7] == [
        ("LOAD_WEIGHTS", 0, 0, None), ("LOAD_WEIGHTS", 0, 1, None), ("LOAD_CACHE", 0, 1, 0),
        ("COMPUTE", 0, 0, 0), ("STORE_HIDDEN", 0, 0, 0), ("LOAD_HIDDEN", 0, 1, 0),
        ("LOAD_CACHE", 0, 1, 1),
    ]
