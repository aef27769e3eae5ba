"""The cost of recall by the planner's model against measurements."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import selection
from helpers.planning_cases import FREE
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.cache_layout import CacheOptions, IndexLayout
from flexgen_h2o.kernels.reference.recall import contiguous_runs
from flexgen_h2o.planning.cache_cost import (
    RecalledTokens,
    disk_read_ratio,
    fit_recall_rates,
    missing_groups,
    read_shares,
    recall_seconds,
)
from flexgen_h2o.planning.hardware import HostAttentionRates, RecallRates

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
EARLIER = Path(__file__).with_name("data") / "recall_attention.csv"
"""Attention with recall by earlier kernels on a Zen 4."""
FIT = Path(__file__).with_name("data") / "recall_disk_fit.csv"
"""The rows that the default `RecallRates` are fitted to, of another text than `RESULTS`."""
RECALL, PLAIN = RecallRates(), CacheOptions()
HEADS, DIM = 32, 128
"""Sequences times KV heads, and numbers of a key, in the rows of attention."""


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def attention(path: Path) -> tuple[HostAttentionRates, dict[tuple[RecalledTokens, int], float]]:
    """Rates of the full cache in a file of rows, and seconds by tokens and bits of the index."""
    times = {}
    for row in rows(path):
        if row["operation"] == "recall":
            slots = int(re.search(r"(\d+) slots", row["shape"])[1])
            times[slots, row["contestant"]] = float(row["ms"]) / 1e3
    few, many = sorted({slots for slots, _ in times})
    token = 2 * DIM * 2
    fast = HEADS * (many - few) * token / (times[many, "full cache"] - times[few, "full cache"])
    rates = HostAttentionRates({16: fast}, times[few, "full cache"] / HEADS - few * token / fast)
    seconds_by_case = {}
    for (slots, contestant), seconds in times.items():
        if contestant != "full cache":
            share, bits = map(int, re.findall(r"\d+", contestant))
            tokens = RecalledTokens(share / 100 * slots, slots, HEADS, HEADS * token)
            seconds_by_case[tokens, bits] = seconds
    assert len(seconds_by_case) == 8
    return rates, seconds_by_case


def check(rates: HostAttentionRates, recall: RecallRates,
          times: dict[tuple[RecalledTokens, int], float], bound: float) -> None:
    for (tokens, bits), seconds in times.items():
        predicted = recall_seconds(rates, recall, tokens, index=IndexLayout(DIM, bits), cache=PLAIN)
        assert 1 / bound < predicted / seconds < bound, (tokens, bits)


@pytest.mark.parametrize(("path", "bound"), [
    (RESULTS / "epyc-avx2/kernels_attention.csv", 1.1),
    (RESULTS / "xeon-avx512/kernels_attention.csv", 1.3),  # of earlier kernels, and in no fit
    (EARLIER, 1.35),  # in no fit
])
def test_default_rates_predict_measured_attention(path, bound):
    """By the default rates."""
    rates, times = attention(path)
    check(rates, RECALL, times, bound)


@given(st.floats(0.2, 9), st.floats(0.2, 9), st.floats(0.2, 9))
def test_a_fit_finds_the_rates(index_cost, gather_cost, call_overhead):
    rates = HostAttentionRates({16: 3e10}, 2e-6)
    right = RecallRates(index_cost, gather_cost, call_overhead)
    cases = [RecalledTokens(chosen, cached, 32, 32 * 512)
             for cached, chosen in ((1024, 256), (4096, 200), (4096, 1024))]
    index = IndexLayout(DIM, 4)
    times = [(tokens, recall_seconds(rates, right, tokens, index=index, cache=PLAIN))
             for tokens in cases]
    fit = fit_recall_rates(rates, times, index=index)
    for name in ("index_cost", "gather_cost", "call_overhead"):
        assert getattr(fit, name) == pytest.approx(getattr(right, name), rel=1e-3)
    assert (fit.miss_factor, fit.fetch_overhead) == (RECALL.miss_factor, RECALL.fetch_overhead)


@pytest.mark.parametrize(("path", "prompt_len", "bound"), [
    (FIT, "4096", 1.15), (FIT, "2048", 1.15), (RESULTS / "epyc-zen4/recall_disk.csv", "4096", 1.15),
    (RESULTS / "epyc-zen4/recall_disk.csv", "2048", 1.31)])  # in no fit
def test_a_disk_reads_as_much_as_was_measured(path, prompt_len, bound):
    """In the steps after the first, which reads all; smollm2's tokens have 256 bytes in a head."""
    count = 0
    for row in rows(path):
        if row["prompt_len"] != prompt_len or row["cache"] == "full":
            continue
        if row["overlap"] == "True":  # then some steps have prefetches
            continue
        steps = int(row["gen_len"]) - 1
        cached = int(row["prompt_len"])
        chosen = int(re.search(r"\d+", row["cache"])[0]) / 100 * cached
        held = float(row["fast_set"] or 2 * chosen / cached) * cached
        groups, length = missing_groups(RECALL, RecalledTokens(chosen, cached, 3, 3 * 256, held))
        later, _ = read_shares(groups, length)
        predicted = (1 + (steps - 1) * later) / steps
        measured = float(row["disk_read_mb_per_step"]) / float(row["kv_cache_mb"])
        assert 1 / bound < predicted / measured < bound, row["cache"]
        count += 1
    assert count >= 4


@settings(max_examples=examples(20))
@given(st.floats(0.02, 6), st.sampled_from([1, 125, 400]), st.integers(0, 2**32))
def test_scattered_groups_are_read_as_the_engine_does(groups, length, seed):
    """Groups of one record or of several; gaps of up to 1,000 records are read, too."""
    gap, count = 1000, 4_000_000 if selection.every_case else 1_000_000
    selected = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < groups / gap
    records = (selected.nonzero() + torch.arange(length)).flatten().unique()
    runs = [run for _, run in contiguous_runs(records.tolist(), gap=gap - 1, max_pages=2 * count)]
    nbytes, requests = read_shares(groups, (length - 1) / gap)
    assert sum(map(len, runs)) / count == pytest.approx(nbytes, rel=0.1, abs=0.03)
    assert len(runs) * gap / count == pytest.approx(requests, rel=0.1, abs=0.03)


@given(st.floats(0.01, 1), st.integers(64, 10**6), st.sampled_from([128, 256, 512]))
def test_selecting_more_costs_more_up_to_everything(share, cached, token):
    few, many = (RecalledTokens(part * cached, cached, 8, 8 * token, share * cached / 2)
                 for part in (share / 2, share))
    less, more = (disk_read_ratio(RECALL, tokens) for tokens in (few, many))
    assert less < more <= 1
    assert disk_read_ratio(RECALL, replace(many, held=cached)) == 0
    rates = HostAttentionRates(FREE.decode_attention | {16: 1e10}, 1e-6)
    less, more = (recall_seconds(rates, RECALL, tokens, index=IndexLayout(DIM, 4), cache=PLAIN)
                  for tokens in (few, many))
    assert 0 < less < more
