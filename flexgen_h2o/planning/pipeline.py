"""Pipeline parallelism in the cost model: layers of each rank, and predicted times. No torch.

Every rank has the same hardware. The transfer of hidden states between ranks is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from flexgen_h2o.config.parallel import Stage, balance_layers, num_batch_groups
from flexgen_h2o.errors import InsufficientMemory, UserError
from flexgen_h2o.planning.cost import Estimate, Phase, estimate, placement_shares, unit_costs
from flexgen_h2o.planning.hardware import Hardware
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.planning.search import PlanCandidate, PlanRequest, predict, search
from flexgen_h2o.storage.free_memory import MemoryLimits


@dataclass(frozen=True)
class PipelineCandidate:
    """A pipelined run that fits.

    `bounds` are the layer bounds of the ranks (see `Stage.for_rank`).
    """

    candidate: PlanCandidate
    bounds: tuple[int, ...]


def rank_runs(run: PlannedRun, bounds: Sequence[int]) -> list[PlannedRun]:
    """Return the run of each rank, from a run of the whole model."""
    ranks = len(bounds) - 1
    groups = num_batch_groups(ranks, fetched=run.policy.fetches(run.has_gpu))
    return [run.of_stage(Stage.for_rank(rank, bounds), groups) for rank in range(ranks)]


def layer_seconds(hardware: Hardware, run: PlannedRun, ranks: int) -> list[float]:
    """Return the seconds of a block in each decoder layer, if `ranks` ranks run it.

    The first layer includes the embedding, the last one the head.
    """
    layers = run.model.num_layers
    run = replace(run,
                  groups=min(num_batch_groups(ranks, fetched=True), run.workload.num_gpu_batches))
    shares, steps = placement_shares(run), run.workload.gen_len - 1
    embedding, inner, head = (
        float(prefill.elapsed(shares) + steps * step.elapsed(shares))
        for prefill, step in zip(*unit_costs(hardware, run), strict=True))
    seconds = [inner / layers] * layers
    seconds[0] += embedding
    seconds[-1] += head
    return seconds


def estimate_pipeline(bounds: Sequence[int], hardware: Hardware, run: PlannedRun) -> Estimate:
    """Predict the times of a block of a pipelined run.

    A decode step takes as long as the busiest rank, and at least as long as a group takes through
    all ranks. The prefill also fills the pipeline.
    """
    runs = rank_runs(run, bounds)
    estimates, groups = [estimate(hardware, rank_run) for rank_run in runs], runs[0].groups
    phases = []
    for name in ("prefill", "step"):
        rank_phases = [getattr(forecast, name) for forecast in estimates]
        slowest = max(rank_phases, key=lambda phase: phase.seconds)
        busy, through = slowest.seconds, sum(phase.seconds for phase in rank_phases) / groups
        seconds = (busy + through - busy / groups if name == "prefill"
                   else max(busy, through))
        phases.append(Phase(seconds, slowest.resources))
    prefill, step = phases
    return Estimate(prefill, step, steps=estimates[0].steps, generated=estimates[0].generated)


def predict_pipeline(hardware: Hardware, run: PlannedRun, ranks: int, limits: MemoryLimits,
                     prompts: int | None) -> PipelineCandidate:
    """Predict a run over `ranks` ranks.

    Layers are balanced by time, or by number if that does not fit.

    Raises `UserError` if a rank has too little memory either way, or there are fewer layers than
    ranks.
    """
    if ranks > run.model.num_layers:
        raise UserError(f"{run.model.name} has {run.model.num_layers} layers, too few for "
                        f"{ranks} ranks")
    times = layer_seconds(hardware, run, ranks)
    splits = [balance_layers(seconds, ranks) for seconds in (times, [1.0] * len(times))]
    bounds = next((split for split in splits if not any(
        MemoryPlan(rank_run).shortfalls(limits) for rank_run in rank_runs(run, split))), splits[0])
    for rank_run in rank_runs(run, bounds):
        MemoryPlan(rank_run).check(limits)
    candidate = predict(hardware, run, prompts, partial(estimate_pipeline, bounds))
    return PipelineCandidate(candidate, tuple(bounds))


def search_pipeline(hardware: Hardware, request: PlanRequest, ranks: int, limits: MemoryLimits
                    ) -> list[PipelineCandidate]:
    """Search runs over `ranks` ranks, the fastest first.

    The policy is searched for one rank with the most layers, an embedding and a head.

    Raises `UserError` if nothing fits; the message names the memory that is missing.
    """
    layers = math.ceil(request.model.num_layers / ranks)
    one_rank = replace(request, model=request.model.slice_layers(0, layers), groups=ranks)
    predictions = []
    for prediction in search(hardware, one_rank, limits):
        run = replace(prediction.run, model=request.model, groups=1)
        with suppress(InsufficientMemory):  # balanced ranks may have more layers than it
            predictions.append(predict_pipeline(hardware, run, ranks, limits, request.prompts))
    if not predictions:
        raise UserError("no policy was found that fits on all ranks: give --percent and batch "
                        "sizes")
    return sorted(predictions, key=lambda prediction: -prediction.candidate.tokens_per_second)
