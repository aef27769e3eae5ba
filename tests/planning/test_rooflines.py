"""Rooflines: never above the cost model, and bytes or FLOPs by hand."""

from dataclasses import replace

import pytest
from helpers.planning_cases import BITS, CPU, GPU, ON_DISK, OPT, machine, planned, roofline
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.planning.cost import interpolate
from flexgen_h2o.planning.roofline import bytes_per_weight, ideal_hardware, ideal_plan
from flexgen_h2o.planning.search import predict

shares = st.tuples(st.integers(0, 50), st.integers(0, 50))


@given(st.booleans(), shares, shares, st.tuples(st.integers(1, 300), st.integers(1, 3)),
       st.tuples(st.integers(1, 600), st.integers(1, 40)),
       st.tuples(st.sampled_from(BITS), st.sampled_from(BITS)),
       st.sampled_from([None, H2OConfig(heavy_ratio=0.1)]), st.booleans(), st.booleans(),
       st.none() | st.integers(1, 500))
def test_nothing_is_predicted_to_beat_the_roofline(gpu, weights, cache, batch, lengths, bits, h2o,
                                                   overlap, host, prompts):
    run = planned(weights, cache, batch=batch, lengths=lengths, gpu=gpu, bits=bits, h2o=h2o,
                  overlap=overlap, cpu_cache_compute=gpu and host)
    hardware = replace(GPU if gpu else CPU, interference=0.2, read_interference=0.4)
    best, predicted = ideal_plan(hardware, run, prompts), predict(hardware, run, prompts)
    assert best.sequences == predicted.sequences
    for phase in ("prefill_seconds", "decode_seconds"):
        assert 0 <= getattr(best, phase) <= getattr(predicted, phase) * (1 + 1e-9)
    assert best.prefill_seconds > 0


@given(st.sampled_from(BITS), st.floats(1, 5000), st.booleans())
def test_products_take_their_bytes_or_their_flops(bits, rows, mxfp4):
    compute = ideal_hardware(CPU, mxfp4).compute
    bandwidth = CPU.compute.decode_attention[16]
    bandwidth = max(bandwidth, *(bytes_per_weight(width) / CPU.compute.linear[width][1] * 1e9
                                 for width in BITS))
    size = 4.25 / 8 if mxfp4 and bits == 4 else bytes_per_weight(bits)
    seconds = max(size / bandwidth, 2 * rows / 1.2e12)
    assert interpolate(compute.linear[bits], rows) == pytest.approx(1e9 * seconds, rel=1e-6)
    assert {*compute.decode_attention.values()} == {bandwidth}
    assert [*compute.prefill_attention.values()] == pytest.approx([1.2e12] * 2)


def test_rounded_activations_have_rates_of_their_own():
    """Products of 64 rows in an eighth of the time, in a run that rounds, and nowhere else."""
    faster = {4: {rows: seconds / 8 for rows, seconds in CPU.compute.linear[4].items()}}
    hardware = replace(CPU, compute=replace(CPU.compute, rounded_linear=faster))
    run = planned(batch=(64, 1), gpu=False, bits=(4, 16))
    rounding = replace(run, weights=replace(run.weights, activation_bits=8))
    plain, quick = predict(hardware, run), predict(hardware, rounding)
    assert quick.prefill_seconds < plain.prefill_seconds / 2
    assert quick.decode_seconds < plain.decode_seconds
    # On CPU it was not measured.
    assert predict(CPU, rounding).prefill_seconds == predict(CPU, run).prefill_seconds
    assert ideal_plan(hardware, run).prefill_seconds <= plain.prefill_seconds
    ideal = ideal_plan(hardware, rounding).prefill_seconds
    assert ideal <= quick.prefill_seconds < ideal_plan(hardware, run).prefill_seconds


def test_weights_on_disk_are_read_at_the_rate_of_the_disk():
    hardware = machine(roofline(1e6, 1e6), gpu=False, read=2e9)
    best = ideal_plan(hardware, planned(weights=ON_DISK, gpu=False, overlap=False))
    nbytes = 2 * OPT.num_layers * OPT.layer_parameters()
    head = 2 * OPT.vocab_size * OPT.embed_dim
    assert best.estimate.step.seconds == pytest.approx((nbytes + head) / 2e9, rel=1e-2)
