"""The least time that the decode steps of a server's blocks could take. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flexgen_h2o.config.policy import Workload
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.planning.hardware import Hardware
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.planning.search import ideal_plan

_DIGITS = 2  # of mean lengths: those that are close share a prediction


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
