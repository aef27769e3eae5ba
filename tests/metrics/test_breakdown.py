"""Where the time went: against a grid of whole seconds, and on a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.metrics import report
from flexgen_h2o.metrics.report import phases
from flexgen_h2o.metrics.trace import (
    COMPUTE,
    PHASES,
    WAITING,
    Trace,
    difference,
    intersection,
    seconds,
    union,
)

TRACKS = (COMPUTE, "cpu->gpu", "disk->cpu", "cpu attention")
HORIZON = 60

interval = st.tuples(st.integers(0, 45), st.integers(0, 15)).map(lambda p: (p[0], p[0] + p[1]))
intervals = st.lists(interval, max_size=8)


def cells(pairs) -> set[int]:
    """The whole seconds that intervals cover."""
    return {t for start, end in pairs for t in range(start, end)}


def ordered(pairs) -> bool:
    return all(a <= b for a, b in pairs) and all(
        one[1] < other[0] for one, other in zip(pairs, pairs[1:], strict=False))


@given(intervals, intervals)
def test_interval_set_operations(one, other):
    a, b = union(one), union(other)
    assert ordered(a) and cells(a) == cells(one)
    for result, expected in ((a, cells(one)), (difference(a, b), cells(one) - cells(other)),
                             (intersection(a, b), cells(one) & cells(other))):
        assert cells(result) == expected and seconds(result) == len(expected)
        assert result == sorted(result)


span = st.tuples(st.sampled_from([*TRACKS, WAITING]), interval, st.integers(0, 9))
edges = st.lists(st.integers(0, HORIZON), min_size=3, max_size=9, unique=True).map(sorted)


@given(st.lists(span, max_size=25), edges)
def test_a_breakdown_counts_every_second(drawn, cuts):
    """Blocks one after the other: prefill up to one edge, decode up to the next, and a gap."""
    spans = [("a span", track, *times, nbytes) for track, times, nbytes in drawn]
    windows = {"prefill": [], "decode": []}
    for number in range(len(cuts) - 1):
        if number % 3 < 2:
            name = ("prefill", "decode")[number % 3]
            windows[name].append((cuts[number], cuts[number + 1]))
            spans.append((name, PHASES, cuts[number], cuts[number + 1], 0))
    busy = {track: cells(times for other, times, _ in drawn if other == track)
            for track in (*TRACKS, WAITING)}
    busy[COMPUTE] -= busy.pop(WAITING)
    assert [phase.name for phase in phases(spans)] == ["prefill", "decode"]
    for phase in phases(spans):
        window = cells(windows[phase.name])
        assert (phase.wall, phase.idle) == (len(window), len(window - set().union(*busy.values())))
        assert set(phase.tracks) == {track for track in TRACKS if busy[track] & window}
        for track, time in phase.tracks.items():
            others = set().union(*(busy[other] for other in TRACKS if other != track))
            assert time.busy == len(busy[track] & window)
            assert time.alone == len((busy[track] - others) & window)
            assert time.nbytes == pytest.approx(sum(
                nbytes * len(cells([times]) & window) / (times[1] - times[0])
                for other, times, nbytes in drawn if other == track and times[0] < times[1]))


GB = 10**9
RUN = [
    ("disk->cpu", "disk->cpu", 0.0, 10.0, 9 * GB),  # while the model was loaded
    ("prefill", PHASES, 10.0, 14.0, 0),
    ("decode", PHASES, 14.0, 24.0, 0), ("layer 1 batch 0", COMPUTE, 10.0, 13.0, 0),
    ("layer 2 batch 0", COMPUTE, 13.5, 18.0, 0), ("wait", WAITING, 14.0, 17.0, 0),
    ("cpu->gpu", "cpu->gpu", 12.0, 22.0, 20 * GB)]


def test_the_table_shows_each_phases_bottleneck():
    *_, transfers, _, last = report.breakdown_table(RUN).splitlines()
    assert transfers.split() == ["cpu->gpu", "8.000", "80.0", "%", "7.000", "16.000", "2"]
    assert "prefill compute (87.5 %), decode cpu->gpu (80.0 %)" in last
    lines = report.breakdown_table([
        ("prefill", PHASES, 0.0, 4.0, 0), ("decode", PHASES, 4.0, 4.0, 0),
        ("layer 1 batch 0", COMPUTE, 1.0, 2.0, 0)]).splitlines()
    assert lines[-1] == "bound by: prefill idle (75.0 %)"
    assert not any("decode" in line for line in lines), "no time, no shares"
    assert "\n" not in report.breakdown_table(RUN[:1]) == report.breakdown_table([])


def test_run_records_phases_and_waits(tiny_model, tmp_path):
    trace = Trace()
    policy = Policy(weights=Placement(0, 0, 100), cache=Placement(0, 0, 100), gpu_batch_size=2)
    with LLM(str(tiny_model("opt").folder), policy=policy, dtype="float32", trace=trace,
             offload_dir=str(tmp_path)) as llm:
        llm.generate([[5, 6, 7, 8]] * 6, max_new_tokens=5, eos_token_id=-1)
        stats = llm.stats
    spans = trace.spans()
    assert [s[0] for s in spans if s[1] == PHASES] == ["prefill", "decode"] * 3
    prefill, decode = phases(spans)
    assert (prefill.wall, decode.wall) == pytest.approx(
        (stats.prefill_seconds, stats.decode_seconds))
    computes, waits = ([s[2:4] for s in spans if s[1] == track] for track in (COMPUTE, WAITING))
    assert waits and all(any(a <= start and end <= b for a, b in computes)
                         for start, end in waits)
    moved = sum(phase.tracks["disk->cpu"].nbytes for phase in (prefill, decode))
    assert 0 < moved <= stats.links["disk->cpu"][0]
