"""Percentages to places: exact to one tensor, even over the layers."""

from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.config.placement import (
    TIERS,
    Placement,
    assign,
    compute_tiers,
    fill,
    place_first,
    split,
)


@st.composite
def placements(draw):
    gpu = draw(st.integers(0, 100))
    cpu = draw(st.integers(0, 100 - gpu))
    return Placement(gpu, cpu, 100 - gpu - cpu)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), placements())
def test_each_tier_is_right_to_within_the_largest_tensor(sizes, placement):
    tiers = assign([(str(i), size) for i, size in enumerate(sizes)], placement)
    for tier, fraction in zip(TIERS, placement.fractions(), strict=True):
        # Over every stretch from the start, so that no layer carries much more than another.
        for end in range(1, len(sizes) + 1):
            got = sum(sizes[i] for i in range(end) if tiers[str(i)] == tier)
            assert abs(got - fraction * sum(sizes[:end])) <= max(sizes[:end]) + 1e-6
        if fraction == 0:
            assert tier not in tiers.values()


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), placements())
def test_first_items_are_on_the_fastest_tier(sizes, placement):
    tiers = list(fill(list(enumerate(sizes)), placement).values())
    assert tiers == sorted(tiers, key=TIERS.index) and len(tiers) == len(sizes)
    for tier, fraction in zip(TIERS, placement.fractions(), strict=True):
        got = sum(size for size, own_tier in zip(sizes, tiers, strict=True) if own_tier == tier)
        assert abs(got - fraction * sum(sizes)) <= max(sizes) + 1e-6
        if fraction == 0:
            assert tier not in tiers


@given(st.integers(1, 10**12), st.integers(1, 10**12), placements(), st.booleans())
def test_reserved_bytes_keep_the_shares(nbytes, others, placement, has_gpu):
    total, tiers = nbytes + others, compute_tiers(has_gpu)
    tier, rest = place_first(nbytes, total, placement, tiers)
    room = [name for name in tiers if getattr(placement, name) / 100 * total >= nbytes]
    assert tier == (room[0] if room else None)
    for name in TIERS:
        held = getattr(rest, name) / 100 * (others if tier else total) + nbytes * (name == tier)
        assert abs(held - getattr(placement, name) / 100 * total) <= 1e-6 * total


@given(st.integers(1, 200), placements())
def test_split_gives_every_sequence_a_tier(count, placement):
    parts = split(count, placement)
    assert sum(parts) == count and min(parts) >= 0
    for part, fraction in zip(parts, placement.fractions(), strict=True):
        assert abs(part - fraction * count) < 1
