"""The policy search: batch sizes, placements, bits, pipeline stages, host attention. No torch.

For each batch shape, a linear program finds the placement shares (FlexGen, arXiv 2303.06865,
section 4.3). Its solution is rounded to whole percents and sequences and checked against the exact
memory plan: a policy that does not fit is never proposed.

In pipeline parallelism every rank has the same hardware, and the transfer of hidden states between
ranks is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.layers import MIN_EXPERT_SLOTS
from flexgen_h2o.config.parallel import Stage, balance_layers, num_batch_groups
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.errors import InsufficientMemory, UserError
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.planning.cost import Estimate, Phase, estimate, placement_shares, unit_costs
from flexgen_h2o.planning.hardware import Hardware
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.placement_solver import PlacementSolver
from flexgen_h2o.planning.planned_run import DraftModel, PlannedRun
from flexgen_h2o.storage.free_memory import MemoryLimits

GPU_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
NUM_GPU_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)

TIE_RATIO = 0.98
"""Throughputs within this ratio of the best are ties, as no prediction is more exact. `_TIES`
decides among them."""

_PATIENCE = 2  # sizes in a row without gain after which no larger one is tried
_MIN_GAIN = 1.003
_MIN_CANDIDATES, _MAX_CANDIDATES = 4, 48  # the former are returned however slow they are
_FEW_OPTIONS = 2  # so few options are all searched in full
_PRUNE_RATIO = 0.9  # of the best option's throughput, which an option must reach to be searched


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Input of the policy search."""

    model: ModelConfig
    # Tokens of the longest prompt, and tokens to generate.
    prompt_len: int
    gen_len: int
    itemsize: int  # bytes of an element that is not quantized
    prompts: int | None = None  # number of prompts; None: one block of them
    policy: Policy = Policy()
    """Fixed settings: overlap, prefill_chunk and pin_weight, and cpu_cache_compute if it is on."""
    # Fixed if given.
    gpu_batch_size: int | None = None
    num_gpu_batches: int | None = None
    weights: tuple[WeightOptions, ...] = (WeightOptions(),)  # weight formats to choose from
    caches: tuple[CacheOptions, ...] = (CacheOptions(),)  # cache formats to choose from
    written_bits: frozenset[int | str] = frozenset()
    """Weight bits that are written to disk for this run (`PlannedRun.writes_weights`)."""
    goal: str = "throughput"
    """Either "throughput", the most generated tokens per second over all prompts, or "latency", the
    least time of a block, which has one sequence unless batch sizes are given."""
    groups: int = 1
    """Groups of a block's batches in a pipeline, each of which loads the weights again."""
    draft: DraftModel | None = None  # the policy's draft model
    batch_invariant: bool = False  # see `PlannedRun`

    @property
    def max_sequences(self) -> float:
        """Largest number of sequences in a block."""
        return math.inf if self.prompts is None else self.prompts

    def sizes(self) -> list[int]:
        """Return the GPU batch sizes to try, ascending."""
        if self.gpu_batch_size is not None or self.goal == "latency":
            return [int(min(self.gpu_batch_size or 1, self.max_sequences))]
        sizes = {size for size in GPU_BATCH_SIZES if size <= self.max_sequences}
        return sorted(sizes | {int(min(self.max_sequences, GPU_BATCH_SIZES[-1]))})

    def counts(self, size: int) -> list[int]:
        """Return the numbers of GPU batches to try for a batch size, ascending."""
        max_batches = math.inf if self.prompts is None else math.ceil(self.prompts / size)
        if self.num_gpu_batches is not None or self.goal == "latency":
            return [int(min(self.num_gpu_batches or 1, max_batches))]
        block_sizes = {count * self.groups for count in NUM_GPU_BATCHES}
        counts = {count for count in block_sizes if count <= max_batches}
        return sorted(counts | {int(min(max_batches, max(block_sizes)))})


@dataclass(frozen=True)
class PlanCandidate:
    """A run that fits, with its predicted times."""

    run: PlannedRun
    estimate: Estimate  # estimate of one block
    sequences: int  # sequences of all blocks
    # Of all blocks.
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of prefill and decode."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens / (prefill + decode) seconds, including the last partial block."""
        return self.sequences * self.run.workload.gen_len / self.seconds


def predict(hardware: Hardware, run: PlannedRun, prompts: int | None = None,
            estimate: Callable[[Hardware, PlannedRun], Estimate] = estimate) -> PlanCandidate:
    """Predict the seconds of a run for `prompts` prompts (None: one block).

    `estimate` predicts one block.
    """
    load, full_block = run.workload, estimate(hardware, run)
    block = load.gpu_batch_size * load.num_gpu_batches
    blocks, last_prompts = (1, 0) if prompts is None else divmod(prompts, block)
    estimates = [full_block] * blocks
    if last_prompts:
        count = math.ceil(last_prompts / load.gpu_batch_size)
        partial = replace(load, gpu_batch_size=math.ceil(last_prompts / count),
                          num_gpu_batches=count)
        estimates.append(estimate(hardware, replace(
            run, workload=partial, groups=min(run.groups, count))))
    return PlanCandidate(
        run, full_block, blocks * block + last_prompts,
        prefill_seconds=sum(forecast.prefill.seconds for forecast in estimates),
        decode_seconds=sum(forecast.steps * forecast.step.seconds for forecast in estimates))


def search(hardware: Hardware, request: PlanRequest, limits: MemoryLimits) -> list[PlanCandidate]:
    """Search runs that fit and differ in batch shape, formats or place of attention, the best
    first.

    Raises `UserError` if nothing fits; the message names the memory that is missing.
    """
    solvers = [solver for run in _prune_options(hardware, request, limits)
               for solver in _candidate_solvers(hardware, request, run, limits)]
    solvers.sort(key=lambda solver: solver.amortized_seconds)
    candidates: list[PlanCandidate] = []
    least = math.inf
    for solver in solvers:
        # Twice the ratio of a tie, because estimate and prediction may each be off by it.
        near = solver.amortized_seconds <= least / TIE_RATIO**2
        if len(candidates) == _MAX_CANDIDATES or len(candidates) >= _MIN_CANDIDATES and not near:
            break
        run = _drop_unused_features(solver.best(), request)
        if run is None or any(run == candidate.run for candidate in candidates):
            continue
        prompts = request.prompts if request.goal == "throughput" else None
        candidates.append(predict(hardware, run, prompts))
        least = min(least, candidates[-1].seconds / candidates[-1].sequences)
    if not candidates:
        _raise_nothing_fits(hardware, request, limits)
    return _rank_candidates(candidates)


def _options(hardware: Hardware, request: PlanRequest) -> Iterator[PlannedRun]:
    """Yield runs of one sequence for each combination of formats and place of attention."""
    on_host = [True] if request.policy.cpu_cache_compute else [False]
    if hardware.has_gpu and hardware.host_attention is not None and not on_host[0]:
        on_host.append(True)
    load = Workload(request.prompt_len, request.gen_len, 1, 1)
    for weights in request.weights:
        for cache in request.caches:
            for host in on_host:
                policy = replace(request.policy, cpu_cache_compute=host)
                yield PlannedRun(request.model, policy, load, request.itemsize, hardware.has_gpu,
                                 weights.weight_bits in request.written_bits, cache, weights,
                                 draft=request.draft,
                                 batch_invariant=request.batch_invariant)


def _prune_options(hardware: Hardware, request: PlanRequest, limits: MemoryLimits
                   ) -> list[PlannedRun]:
    """Return the options that stay promising after a coarse search, if there are many."""
    runs = list(_options(hardware, request))
    if len(runs) <= _FEW_OPTIONS:
        return runs
    least = [min((solver.amortized_seconds
                  for solver in _candidate_solvers(hardware, request, run, limits, stride=3)),
                 default=math.inf) for run in runs]
    return [run for run, seconds in zip(runs, least, strict=True)
            if seconds <= min(least) / _PRUNE_RATIO]


def _candidate_solvers(hardware: Hardware, request: PlanRequest, run: PlannedRun,
                       limits: MemoryLimits, stride: int = 1) -> list[PlacementSolver]:
    """Return placement solvers of batch shapes that may fit, until larger ones stop helping.

    Only each `stride`-th batch size and count is tried.
    """
    solvers: list[PlacementSolver] = []
    sizes = _EarlyStop()
    for size in request.sizes()[::stride]:
        counts = _EarlyStop()
        for count in request.counts(size)[::stride]:
            shaped = _with_batch_shape(request, run, size, count)
            solver = _solve_placement(hardware, shaped, limits)
            if solver.seconds == math.inf:
                break
            solvers.append(solver)
            if not counts.update(solver.amortized_seconds):
                break
        if not sizes.update(counts.least):
            break
    return solvers


def _solve_placement(hardware: Hardware, run: PlannedRun, limits: MemoryLimits) -> PlacementSolver:
    """Return a placement solver of a run.

    If nothing fits, a mixture is tried with fewer expert slots: in a larger block, a load of an
    expert is shared by more sequences.
    """
    solver, experts = PlacementSolver(hardware, run, limits), run.model.experts
    if solver.seconds < math.inf or experts is None or run.policy.expert_slots is not None:
        return solver
    slots, solvers = experts.slots(run.sequences, run.num_experts), [solver]
    while slots > MIN_EXPERT_SLOTS:
        slots = max(slots // 2, MIN_EXPERT_SLOTS)
        fewer = replace(run, policy=replace(run.policy, expert_slots=slots))
        solvers.append(PlacementSolver(hardware, fewer, limits))
    return min(solvers, key=lambda candidate: candidate.seconds)


class _EarlyStop:
    """Early stopping of a search over growing batch shapes."""

    def __init__(self) -> None:
        self.least = math.inf
        self._idle = 0

    def update(self, seconds: float) -> bool:
        """Record the amortized seconds of the next size; return whether to try a larger one."""
        self._idle = 0 if seconds * _MIN_GAIN < self.least else self._idle + 1
        self.least = min(self.least, seconds)
        return seconds < math.inf and self._idle < _PATIENCE


def _with_batch_shape(request: PlanRequest, run: PlannedRun, size: int, count: int) -> PlannedRun:
    """Return the run with a batch shape; the policy keeps batch sizes that were given."""
    policy = replace(run.policy, gpu_batch_size=request.gpu_batch_size or size,
                     num_gpu_batches=request.num_gpu_batches or count)
    load = replace(run.workload, gpu_batch_size=size, num_gpu_batches=count)
    return replace(run, policy=policy, workload=load, groups=min(request.groups, count))


def _drop_unused_features(run: PlannedRun | None, request: PlanRequest) -> PlannedRun | None:
    """Return the run without host attention and selective fetch where the cache needs neither."""
    if run is None:
        return None
    policy, requested = run.policy, request.policy
    on_host = policy.cpu_cache_compute and (policy.cache.cpu > 0 or requested.cpu_cache_compute)
    fetches = policy.selective_fetch and (
        not on_host and policy.cache.cpu > 0 if run.has_gpu else policy.cache.disk > 0)
    return replace(run, policy=replace(
        policy, cpu_cache_compute=on_host, selective_fetch=fetches,
        hot_set=policy.hot_set if fetches else None))


_TIES: tuple[tuple[str, Callable[[PlannedRun], int]], ...] = (
    # Weights in a checkpoint's own quantization count as 16 bits: they lose nothing.
    ("keeps more bits", lambda run: -(run.weights.bits + run.cache.bits)),
    ("attends where all else is computed", lambda run: run.policy.cpu_cache_compute),
    ("has a smaller block",
     lambda run: run.workload.gpu_batch_size * run.workload.num_gpu_batches),
    # The model underestimates the per-batch overhead of a cache on disk.
    ("cuts a block into fewer batches", lambda run: run.workload.num_gpu_batches),
)
"""Tie-breakers among throughputs within `TIE_RATIO`, most important first; the lower value wins."""


def _rank_candidates(candidates: list[PlanCandidate]) -> list[PlanCandidate]:
    """Sort by throughput, and put the tie that `_TIES` prefers first."""
    candidates.sort(key=lambda candidate: -candidate.tokens_per_second)
    equal = [c for c in candidates
             if c.tokens_per_second >= TIE_RATIO * candidates[0].tokens_per_second]
    best = min(equal, key=lambda candidate: [cost_of(candidate.run) for _, cost_of in _TIES])
    return [best, *(candidate for candidate in candidates if candidate is not best)]


def tie_break_reason(candidate: PlanCandidate, other: PlanCandidate) -> str | None:
    """Return why `candidate` is preferred to a faster `other`; None if `other` is not faster."""
    if other.tokens_per_second <= candidate.tokens_per_second:
        return None
    return next(words for words, cost_of in _TIES if cost_of(candidate.run) < cost_of(other.run))


def _raise_nothing_fits(hardware: Hardware, request: PlanRequest, limits: MemoryLimits) -> NoReturn:
    """Raise `UserError` with the memory that the smallest run would take."""
    *_, run = _options(hardware, request)
    size = request.sizes()[0]
    run = _with_batch_shape(request, run, size, request.counts(size)[0])
    on_disk = replace(run.policy, weights=Placement(0, 0, 100), cache=Placement(0, 0, 100))
    MemoryPlan(replace(run, policy=on_disk)).check(limits)
    raise UserError("no policy was found that fits: give --percent and batch sizes")


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
