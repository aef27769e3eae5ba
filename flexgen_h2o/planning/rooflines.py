"""The roofline of a run: the least time by the rates that were measured on a machine. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flexgen_h2o.config.formats import WEIGHT_BITS, WeightOptions
from flexgen_h2o.planning.hardware import Compute, Hardware, HostAttentionRates
from flexgen_h2o.planning.hardware_file import BILLION
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.planning.search import Choice, judge

_SIDE = 1 << 15  # of a matrix so large that the ends of its groups do not count


def bytes_of_a_weight(bits: int, mxfp4: bool = False) -> float:
    """Bytes of a number of a large matrix at rest, with those of its group's scale; 4 bits may be
    those of MXFP4."""
    shape = (_SIDE, _SIDE)
    options = WeightOptions(bits, mxfp4=frozenset({shape} if mxfp4 and bits == 4 else ()))
    return options.matrix_bytes(shape, 2) / _SIDE**2


def ideal(hardware: Hardware, mxfp4: bool = False) -> Hardware:
    """A machine that does everything at the best rates of this one.

    Memory is read as fast as in any measured product or attention, products and attention have the
    FLOP/s of the fastest of them, nothing else takes time, and transfers do not disturb compute.
    Links keep their rates. What recall chooses costs no more than what is read in order. With
    `mxfp4` no product of 4 bits reads more than one in MXFP4 does.
    """
    compute = hardware.compute
    timed, rounded = _timed(compute.linear), _timed(compute.rounded_linear)
    host = hardware.host_attention
    bandwidth = max(*(bytes_of_a_weight(bits) / seconds for bits, _, seconds in timed + rounded),
                    *compute.decode_attention.values())
    flops = max(*(2 * rows / seconds for _, rows, seconds in timed),
                *compute.prefill_attention.values())
    read = {bits: bytes_of_a_weight(bits, mxfp4) / bandwidth for bits in WEIGHT_BITS}
    linear = {bits: _least(read[bits], flops) for bits in WEIGHT_BITS}
    whole = max((2 * rows / seconds for _, rows, seconds in rounded), default=flops)
    rounded_linear = {bits: _least(read[bits], whole) for bits in compute.rounded_linear}
    return replace(
        hardware, interference=0.0, read_interference=0.0, fetch_seconds=0.0,
        fetch_head_seconds=0.0,
        recall=replace(hardware.recall, index_work=1, apart=1),
        compute=Compute(linear=linear, rounded_linear=rounded_linear,
                        prefill_attention=dict.fromkeys(compute.prefill_attention, flops),
                        decode_attention=dict.fromkeys(compute.decode_attention, bandwidth),
                        head_seconds=0.0, elementwise=0.0, layer_seconds=0.0, logit_seconds=0.0),
        host_attention=host and HostAttentionRates(
            dict.fromkeys(host.decode_attention, max(host.decode_attention.values())), 0.0))


def _timed(tables: Mapping[int, Mapping[int, float]]) -> list[tuple[int, int, float]]:
    """(bits, rows, seconds of a weight) of every product."""
    return [(bits, rows, seconds / BILLION) for bits, by_rows in tables.items()
            for rows, seconds in by_rows.items()]


def _least(read: float, flops: float) -> dict[int | float, float]:
    """Seconds of products with a billion weights, each of which takes `read` to read: up to so many
    rows those of reading, beyond of their FLOPs."""
    turn = max(1.0, flops * read / 2)
    return {1: BILLION * max(read, 2 / flops), turn: BILLION * 2 * turn / flops}


def roofline(hardware: Hardware, run: PlannedRun, prompts: int | None = None) -> Choice:
    """The least seconds of a run with its placements and batches, all of its transfers overlapped.

    Parameters
    ----------
    hardware : Hardware
        As it was measured, in the run's dtype.
    run : PlannedRun
    prompts : int or None
        See `search.judge`.
    """
    best = ideal(hardware, mxfp4=bool(run.weights.mxfp4))
    return judge(best, replace(run, policy=replace(run.policy, overlap=True)), prompts)
