"""A pipeline over ranks by the cost model: which layers each rank has, and how long a block takes.

Every rank is a machine like the one that is planned for. What travels between them, hidden states
of batches, is left out unless the `Network` is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from flexgen_h2o.config.stage import Stage, balanced_bounds, num_groups
from flexgen_h2o.errors import TooLittleMemory, UserError
from flexgen_h2o.planning.cost import Estimate, Phase, estimate, layer_step_costs, placement_shares
from flexgen_h2o.planning.hardware import Hardware
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.planning.search import Choice, PlanRequest, predict, search
from flexgen_h2o.storage.free_memory import MemoryLimits


@dataclass(frozen=True)
class Network:
    """The way from each rank to the next: bytes per second, and seconds that a message takes beside
    them."""

    bytes_per_second: float
    latency: float = 0.0

    def seconds(self, messages: float, nbytes: float) -> float:
        """Seconds of so many messages, one after the other, of `nbytes` in all."""
        return messages * self.latency + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class PipelineChoice:
    """A run over ranks that fits: the choice for all of them, and the bounds of their layers
    (`Stage.of_rank`)."""

    choice: Choice
    bounds: tuple[int, ...]


def rank_runs(run: PlannedRun, bounds: Sequence[int]) -> list[PlannedRun]:
    """The part of each rank of a run of the whole model."""
    ranks = len(bounds) - 1
    groups = num_groups(ranks, fetched=run.policy.fetches(run.has_gpu))
    return [run.of_stage(Stage.of_rank(rank, bounds), groups) for rank in range(ranks)]


def layer_seconds(hardware: Hardware, run: PlannedRun, ranks: int) -> list[float]:
    """Seconds of a block on each decoder layer, in groups as so many ranks cut it; those of
    embedding and head are with the first and the last."""
    layers = run.model.num_layers
    run = replace(run, groups=min(num_groups(ranks, fetched=True), run.workload.num_gpu_batches))
    shares, steps = placement_shares(run), run.workload.gen_len - 1
    embedding, inner, head = (
        float(prefill.elapsed(shares) + steps * step.elapsed(shares))
        for prefill, step in zip(*layer_step_costs(hardware, run), strict=True))
    found = [inner / layers] * layers
    found[0] += embedding
    found[-1] += head
    return found


def estimate_pipeline(bounds: Sequence[int], hardware: Hardware, run: PlannedRun,
                   network: Network | None = None) -> Estimate:
    """Times of a block of a run over ranks.

    A forward pass takes as long as the rank that is busy the longest, and at least as long as a
    group takes through all ranks; the prefill fills the pipeline, too. A network carries a group
    while ranks compute others, so that a pass takes at least as long as all of its messages, and a
    group's way through the ranks is longer by them.
    """
    runs = rank_runs(run, bounds)
    found, groups = [estimate(hardware, each) for each in runs], runs[0].groups
    load, phases = run.workload, []
    for name, tokens in (("prefill", load.prompt_len), ("step", 1)):
        each = [getattr(one, name) for one in found]
        slowest = max(each, key=lambda phase: phase.seconds)
        sent = 0.0 if network is None else network.seconds(
            load.num_gpu_batches, load.gpu_batch_size * load.num_gpu_batches * tokens
            * run.model.hidden_size * run.itemsize)
        busy = max(slowest.seconds, sent)
        through = (sum(phase.seconds for phase in each) + (len(runs) - 1) * sent) / groups
        seconds = (busy + through - busy / groups if name == "prefill"
                   else max(busy, through))
        phases.append(Phase(seconds, slowest.resources))
    return Estimate(*phases, steps=found[0].steps, generated=found[0].generated)


def predict_pipeline(hardware: Hardware, run: PlannedRun, ranks: int, limits: MemoryLimits,
                prompts: int | None, network: Network | None = None) -> PipelineChoice:
    """A run over so many ranks with layers by their times, or if these do not fit, by their number.

    Raises `UserError` if a rank has too little memory either way, or no layer.
    """
    if ranks > run.model.num_layers:
        raise UserError(f"{run.model.name} has {run.model.num_layers} layers, too few for "
                        f"{ranks} ranks")
    times = layer_seconds(hardware, run, ranks)
    each = [balanced_bounds(seconds, ranks) for seconds in (times, [1.0] * len(times))]
    bounds = next((each for each in each if not any(
        MemoryPlan(part).shortfalls(limits) for part in rank_runs(run, each))), each[0])
    for part in rank_runs(run, bounds):
        MemoryPlan(part).check(limits)
    choice = predict(hardware, run, prompts, partial(estimate_pipeline, bounds, network=network))
    return PipelineChoice(choice, tuple(bounds))


def search_pipeline(hardware: Hardware, request: PlanRequest, ranks: int, limits: MemoryLimits,
                 network: Network | None = None) -> list[PipelineChoice]:
    """Runs over so many ranks, the best first.

    The policy is searched for one rank, of as many layers as any has, with embedding and head.

    Raises
    ------
    UserError
        Nothing fits; it says what is missing.
    """
    layers = math.ceil(request.model.num_layers / ranks)
    part = replace(request, model=request.model.part(0, layers), groups=ranks)
    found = []
    for each in search(hardware, part, limits):
        run = replace(each.run, model=request.model, groups=1)
        with suppress(TooLittleMemory):  # of a rank with more layers
            found.append(predict_pipeline(hardware, run, ranks, limits, request.prompts, network))
    if not found:
        raise UserError("no policy was found that fits on all ranks: give --percent and batch "
                        "sizes")
    return sorted(found, key=lambda each: -each.choice.tokens_per_second)
