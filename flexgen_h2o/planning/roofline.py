"""The roofline of a run: its least possible time on this machine. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from flexgen_h2o.config.policy import Workload
from flexgen_h2o.config.weight_layout import WEIGHT_BITS, WeightOptions
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.planning.hardware import BILLION, ComputeRates, Hardware, HostAttentionRates
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.planning.search import PlanCandidate, predict

_SIDE = 1 << 15  # rows and columns of a matrix for which padding is negligible
_DIGITS = 2  # of mean lengths: those that are close share a prediction


def bytes_per_weight(bits: int, mxfp4: bool = False) -> float:
    """Return the bytes of an element of a large matrix at rest, with its part of the group scales.

    With `mxfp4`, 4 bits are MXFP4.
    """
    shape = (_SIDE, _SIDE)
    options = WeightOptions(bits, mxfp4=frozenset({shape} if mxfp4 and bits == 4 else ()))
    return options.matrix_bytes(shape, 2) / _SIDE**2


def ideal_hardware(hardware: Hardware, mxfp4: bool = False) -> Hardware:
    """Return a machine that runs everything at the best rates of `hardware`.

    Memory is read at the bandwidth of the fastest matmul or attention, and matmuls and attention
    run at the highest measured FLOP/s. Nothing else takes time, and transfers do not interfere with
    compute. Links keep their rates. Recall reads selected tokens at the sequential rate. With
    `mxfp4`, a 4-bit matmul reads no more bytes than one in MXFP4.
    """
    compute = hardware.compute
    timed, rounded = _matmul_points(compute.linear), _matmul_points(compute.rounded_linear)
    host = hardware.host_attention
    bandwidth = max(*(bytes_per_weight(bits) / seconds for bits, _, seconds in timed + rounded),
                    *compute.decode_attention.values())
    flops = max(*(2 * rows / seconds for _, rows, seconds in timed),
                *compute.prefill_attention.values())
    read = {bits: bytes_per_weight(bits, mxfp4) / bandwidth for bits in WEIGHT_BITS}
    linear = {bits: _roofline_table(read[bits], flops) for bits in WEIGHT_BITS}
    whole = max((2 * rows / seconds for _, rows, seconds in rounded), default=flops)
    rounded_linear = {bits: _roofline_table(read[bits], whole) for bits in compute.rounded_linear}
    return replace(
        hardware, interference=0.0, read_interference=0.0, fetch_seconds=0.0,
        fetch_head_seconds=0.0,
        recall=replace(hardware.recall, index_cost=1, gather_cost=1),
        compute=ComputeRates(linear=linear, rounded_linear=rounded_linear,
                             prefill_attention=dict.fromkeys(compute.prefill_attention, flops),
                             decode_attention=dict.fromkeys(compute.decode_attention, bandwidth),
                             head_seconds=0.0, elementwise=0.0, layer_seconds=0.0,
                             logit_seconds=0.0),
        host_attention=host and HostAttentionRates(
            dict.fromkeys(host.decode_attention, max(host.decode_attention.values())), 0.0))


def _matmul_points(tables: Mapping[int, Mapping[int, float]]) -> list[tuple[int, int, float]]:
    """Return (bits, rows, seconds per weight element) of every measured matmul."""
    return [(bits, rows, seconds / BILLION) for bits, by_rows in tables.items()
            for rows, seconds in by_rows.items()]


def _roofline_table(read: float, flops: float) -> dict[Any, float]:
    """Return the seconds of matmuls with a billion weights, by rows.

    They are constant while memory-bound, at `read` seconds per weight, and proportional to rows
    while compute-bound.
    """
    turn = max(1.0, flops * read / 2)
    return {1: BILLION * max(read, 2 / flops), turn: BILLION * 2 * turn / flops}


def ideal_plan(hardware: Hardware, run: PlannedRun, prompts: int | None = None) -> PlanCandidate:
    """Return the roofline of a run with its placements and batch sizes, fully overlapped.

    `hardware`: measured in the run's dtype. `prompts`: see `predict`.
    """
    best = ideal_hardware(hardware, mxfp4=bool(run.weights.mxfp4))
    return predict(best, replace(run, policy=replace(run.policy, overlap=True)), prompts)


class DecodeRoofline:
    """Roofline of decode steps, for the mean lengths of the sequences that have finished so far.

    `hardware`: measured in the run's dtype. `run`: the workload is the largest block.
    """

    def __init__(self, hardware: Hardware, run: PlannedRun):
        self._full = run.workload
        self._finished = self._prompt_tokens = self._generated_tokens = 0

        @lru_cache(256)
        def step_seconds(load: Workload) -> float:
            return ideal_plan(hardware, replace(run, workload=load)).estimate.step.seconds

        self._step_seconds = step_seconds

    def seconds(self, stats: RunStats) -> float | None:
        """Return the least seconds of a block's decode steps; None if no length is known.

        Rows of sequences that had ended do not count.
        """
        self._finished += stats.num_prompts
        self._prompt_tokens += stats.prompt_tokens
        self._generated_tokens += stats.generated_tokens
        steps = len(stats.step_seconds)
        if not self._finished or not steps:
            return None
        rows = max((stats.decode_slots - stats.idle_slots) // steps, 1)
        batches = min(-(-rows // self._full.gpu_batch_size), self._full.num_gpu_batches)
        prompt_len, gen_len = (int(float(f"{total / self._finished:.{_DIGITS}g}")) for total in (
            self._prompt_tokens, self._generated_tokens))
        load = Workload(max(prompt_len, 1), max(gen_len, 2), max(rows // batches, 1), batches)
        return steps * self._step_seconds(load)
