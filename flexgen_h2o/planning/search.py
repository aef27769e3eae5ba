"""The search for a policy: batch sizes, placements, bits and where attention runs. No torch.

As in FlexGen (arXiv 2303.06865, section 4.3): for each batch shape a linear programme finds the
shares of weights, cache and activations on the tiers. What it finds is rounded to whole percents
and sequences, and held to the exact memory plan; nothing that does not fit is ever proposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.experts import FEWEST_SLOTS
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.weight_layout import WEIGHT_BITS, WeightOptions
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.planning.cost import Estimate, estimate
from flexgen_h2o.planning.hardware import BILLION, ComputeRates, Hardware, HostAttentionRates
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.placement_solver import PlacementSolver
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.storage.free_memory import MemoryLimits

GPU_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
NUM_GPU_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)

TIE_RATIO = 0.98
"""A rate within this of the best is as good, for no prediction is more exact: `_TIES` decide."""

_PATIENCE = 2  # a size that helps no more, twice in a row, ends the search in its direction
_WORTH = 1.003
_SHOWN, _MOST = 3, 48  # choices that are made even if they are slow, and in all
_FEW, _NEAR = 2, 0.9  # options that are looked at in any case; what the others' rate has to reach


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The request to the search.

    Attributes
    ----------
    model : ModelConfig
    prompt_len, gen_len : int
        Tokens of the longest prompt, and to generate.
    itemsize : int
        Bytes of an element that is not quantized.
    prompts : int or None
        How many there are; None: as many as a block takes.
    policy : Policy
        What it says of overlap, prefill_chunk and pin_weight stays; cpu_cache_compute only if on.
    gpu_batch_size, num_gpu_batches : int or None
        Kept if given.
    weights, caches : tuple of options
        Among which to choose.
    written_bits : set of int
        Bits of weights that have to be written to disk to be there (see `memory_plan`).
    goal : str
        "throughput": most generated tokens per second of all prompts. "latency": the least time of
        a block, which is of one sequence unless batch sizes are given.
    groups : int
        Into which the batches of a block are cut, each of which loads the weights anew.
    """

    model: ModelConfig
    prompt_len: int
    gen_len: int
    itemsize: int
    prompts: int | None = None
    policy: Policy = Policy()
    gpu_batch_size: int | None = None
    num_gpu_batches: int | None = None
    weights: tuple[WeightOptions, ...] = (WeightOptions(),)
    caches: tuple[CacheOptions, ...] = (CacheOptions(),)
    written_bits: frozenset[int | str] = frozenset()
    goal: str = "throughput"
    groups: int = 1

    @property
    def most(self) -> float:
        """Sequences that a block may have."""
        return math.inf if self.prompts is None else self.prompts

    def sizes(self) -> list[int]:
        """Sequences of a GPU batch to try, ascending."""
        if self.gpu_batch_size is not None or self.goal == "latency":
            return [min(self.gpu_batch_size or 1, self.most)]
        sizes = {size for size in GPU_BATCH_SIZES if size <= self.most}
        return sorted(sizes | {min(self.most, GPU_BATCH_SIZES[-1])})

    def counts(self, size: int) -> list[int]:
        """GPU batches of a block to try for a size, ascending."""
        most = math.inf if self.prompts is None else math.ceil(self.prompts / size)
        if self.num_gpu_batches is not None or self.goal == "latency":
            return [min(self.num_gpu_batches or 1, most)]
        wanted = {count * self.groups for count in NUM_GPU_BATCHES}
        counts = {count for count in wanted if count <= most}
        return sorted(counts | {min(most, max(wanted))})


@dataclass(frozen=True)
class Choice:
    """A run that fits, and how long it takes.

    `sequences` are those of the block or of all prompts, `prefill` and `decode` the seconds of all.
    """

    run: PlannedRun
    estimate: Estimate
    sequences: int
    prefill: float
    decode: float

    @property
    def seconds(self) -> float:
        """Prefill and decode."""
        return self.prefill + self.decode

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens / (prefill + decode) seconds, the last partial block too."""
        return self.sequences * self.run.workload.gen_len / self.seconds


def predict(hardware: Hardware, run: PlannedRun, prompts: int | None = None,
          estimate: Callable[[Hardware, PlannedRun], Estimate] = estimate) -> Choice:
    """Seconds of a run for so many prompts (None: a block of them), by an `estimate` of a block."""
    load, whole = run.workload, estimate(hardware, run)
    block = load.gpu_batch_size * load.num_gpu_batches
    blocks, rest = (1, 0) if prompts is None else divmod(prompts, block)
    estimates = [whole] * blocks
    if rest:
        count = math.ceil(rest / load.gpu_batch_size)
        partial = replace(load, gpu_batch_size=math.ceil(rest / count), num_gpu_batches=count)
        estimates.append(estimate(hardware, replace(
            run, workload=partial, groups=min(run.groups, count))))
    return Choice(run, whole, blocks * block + rest,
                  prefill=sum(each.prefill.seconds for each in estimates),
                  decode=sum(each.steps * each.step.seconds for each in estimates))


def search(hardware: Hardware, request: PlanRequest, limits: MemoryLimits) -> list[Choice]:
    """Runs that fit, the best first: no two of the same batch sizes, bits and place of attention.

    Raises
    ------
    UserError
        Nothing fits; it says what is missing.
    """
    found = [placing for run in _likely(hardware, request, limits)
             for placing in _promising(hardware, request, run, limits)]
    found.sort(key=lambda placing: placing.seconds_per_sequence)
    choices: list[Choice] = []
    least = math.inf
    for placing in found:
        near = placing.seconds_per_sequence <= least / TIE_RATIO**2
        if len(choices) == _MOST or len(choices) > _SHOWN and not near:
            break
        run = _stripped(placing.best(), request)
        if run is None or any(run == choice.run for choice in choices):
            continue
        prompts = request.prompts if request.goal == "throughput" else None
        choices.append(predict(hardware, run, prompts))
        least = min(least, choices[-1].seconds / choices[-1].sequences)
    if not choices:
        _refuse(hardware, request, limits)
    return _ranked(choices)


def _options(hardware: Hardware, request: PlanRequest) -> Iterator[PlannedRun]:
    """Runs that differ in bits and in where attention runs; of one sequence, placed nowhere yet."""
    on_host = [True] if request.policy.cpu_cache_compute else [False]
    if hardware.has_gpu and hardware.host_attention is not None and not on_host[0]:
        on_host.append(True)
    load = Workload(request.prompt_len, request.gen_len, 1, 1)
    for weights in request.weights:
        for cache in request.caches:
            for host in on_host:
                policy = replace(request.policy, cpu_cache_compute=host)
                yield PlannedRun(request.model, policy, load, request.itemsize, hardware.has_gpu,
                                 weights.weight_bits in request.written_bits, cache, weights)


def _likely(hardware: Hardware, request: PlanRequest, limits: MemoryLimits) -> list[PlannedRun]:
    """The options that a look at a few batch shapes does not rule out, if there are many."""
    runs = list(_options(hardware, request))
    if len(runs) <= _FEW:
        return runs
    least = [min((placing.seconds_per_sequence
                  for placing in _promising(hardware, request, run, limits, every=3)),
                 default=math.inf) for run in runs]
    return [run for run, seconds in zip(runs, least, strict=True)
            if seconds <= min(least) / _NEAR]


def _promising(hardware: Hardware, request: PlanRequest, run: PlannedRun, limits: MemoryLimits,
               every: int = 1) -> list[PlacementSolver]:
    """Batch shapes that may fit; none much larger than those that help or fit.

    `every` third, say, of the sizes and counts is looked at.
    """
    found: list[PlacementSolver] = []
    sizes = _Growth()
    for size in request.sizes()[::every]:
        counts = _Growth()
        for count in request.counts(size)[::every]:
            placing = _placing(hardware, _shaped(request, run, size, count), limits)
            if placing.seconds == math.inf:
                break
            found.append(placing)
            if not counts.helps(placing.seconds_per_sequence):
                break
        if not sizes.helps(counts.least):
            break
    return found


def _placing(hardware: Hardware, run: PlannedRun, limits: MemoryLimits) -> PlacementSolver:
    """The placements of a run. Where none fits, a mixture goes with fewer slots than it would have:
    in a larger block an expert comes once for more sequences."""
    placing, experts = PlacementSolver(hardware, run, limits), run.model.experts
    if placing.seconds < math.inf or experts is None or run.policy.expert_slots is not None:
        return placing
    slots, found = experts.slots(run.sequences, run.num_experts), [placing]
    while slots > FEWEST_SLOTS:
        slots = max(slots // 2, FEWEST_SLOTS)
        fewer = replace(run, policy=replace(run.policy, expert_slots=slots))
        found.append(PlacementSolver(hardware, fewer, limits))
    return min(found, key=lambda each: each.seconds)


class _Growth:
    """True to go on growing a size: not when it no longer fits or helps."""

    def __init__(self) -> None:
        self.least = math.inf
        self._idle = 0

    def helps(self, seconds: float) -> bool:
        """Note the next size's seconds per sequence."""
        self._idle = 0 if seconds * _WORTH < self.least else self._idle + 1
        self.least = min(self.least, seconds)
        return seconds < math.inf and self._idle < _PATIENCE


def _shaped(request: PlanRequest, run: PlannedRun, size: int, count: int) -> PlannedRun:
    """The run with these batch sizes; those that were given stay in the policy as they are."""
    policy = replace(run.policy, gpu_batch_size=request.gpu_batch_size or size,
                     num_gpu_batches=request.num_gpu_batches or count)
    load = replace(run.workload, gpu_batch_size=size, num_gpu_batches=count)
    return replace(run, policy=policy, workload=load, groups=min(request.groups, count))


def _stripped(run: PlannedRun | None, request: PlanRequest) -> PlannedRun | None:
    """The run without attention on the CPU if nothing of the cache is there, and without reads of
    what is chosen if nothing of it is where that is done."""
    if run is None:
        return None
    policy, asked = run.policy, request.policy
    on_host = policy.cpu_cache_compute and (policy.cache.cpu > 0 or asked.cpu_cache_compute)
    fetches = policy.fetch_chosen and (
        not on_host and policy.cache.cpu > 0 if run.has_gpu else policy.cache.disk > 0)
    return replace(run, policy=replace(
        policy, cpu_cache_compute=on_host, fetch_chosen=fetches,
        fast_set=policy.fast_set if fetches else None))


_TIES: tuple[tuple[str, Callable[[PlannedRun], int]], ...] = (
    # A file's own codes count as 16 bits: nothing is rounded.
    ("keeps more bits", lambda run: -(run.weights.bits + run.cache.bits)),
    ("attends where all else is computed", lambda run: run.policy.cpu_cache_compute),
    ("has a smaller block",
     lambda run: run.workload.gpu_batch_size * run.workload.num_gpu_batches),
    # What a batch takes beside products and bytes is predicted too low for a cache on disk.
    ("cuts a block into fewer batches", lambda run: run.workload.num_gpu_batches),
)
"""Order of preference among rates that tie, the most important first; less is better."""


def _ranked(choices: list[Choice]) -> list[Choice]:
    """The best first: of those as good as the fastest the one that `_TIES` prefer."""
    choices.sort(key=lambda choice: -choice.tokens_per_second)
    alike = [c for c in choices
             if c.tokens_per_second >= TIE_RATIO * choices[0].tokens_per_second]
    best = min(alike, key=lambda choice: [of(choice.run) for _, of in _TIES])
    return [best, *(choice for choice in choices if choice is not best)]


def tie_break_reason(choice: Choice, other: Choice) -> str | None:
    """Why a choice is preferred to one that is faster and ties; None if it is not faster."""
    if other.tokens_per_second <= choice.tokens_per_second:
        return None
    return next(words for words, of in _TIES if of(choice.run) < of(other.run))


def _refuse(hardware: Hardware, request: PlanRequest, limits: MemoryLimits) -> NoReturn:
    """Raise `UserError` with what the smallest run would take."""
    *_, run = _options(hardware, request)
    size = request.sizes()[0]
    run = _shaped(request, run, size, request.counts(size)[0])
    away = replace(run.policy, weights=Placement(0, 0, 100), cache=Placement(0, 0, 100))
    MemoryPlan(replace(run, policy=away)).check(limits)
    raise UserError("no policy was found that fits: give --percent and batch sizes")


# The roofline of a run: the least time by the rates that were measured on a machine. No torch.


_SIDE = 1 << 15  # of a matrix so large that the ends of its groups do not count


def bytes_per_weight(bits: int, mxfp4: bool = False) -> float:
    """Bytes of a number of a large matrix at rest, with those of its group's scale; 4 bits may be
    those of MXFP4."""
    shape = (_SIDE, _SIDE)
    options = WeightOptions(bits, mxfp4=frozenset({shape} if mxfp4 and bits == 4 else ()))
    return options.matrix_bytes(shape, 2) / _SIDE**2


def ideal_hardware(hardware: Hardware, mxfp4: bool = False) -> Hardware:
    """A machine that does everything at the best rates of this one.

    Memory is read as fast as in any measured product or attention, products and attention have the
    FLOP/s of the fastest of them, nothing else takes time, and transfers do not disturb compute.
    Links keep their rates. What recall chooses costs no more than what is read in order. With
    `mxfp4` no product of 4 bits reads more than one in MXFP4 does.
    """
    compute = hardware.compute
    timed, rounded = _timed(compute.linear), _timed(compute.rounded_linear)
    host = hardware.host_attention
    bandwidth = max(*(bytes_per_weight(bits) / seconds for bits, _, seconds in timed + rounded),
                    *compute.decode_attention.values())
    flops = max(*(2 * rows / seconds for _, rows, seconds in timed),
                *compute.prefill_attention.values())
    read = {bits: bytes_per_weight(bits, mxfp4) / bandwidth for bits in WEIGHT_BITS}
    linear = {bits: _least(read[bits], flops) for bits in WEIGHT_BITS}
    whole = max((2 * rows / seconds for _, rows, seconds in rounded), default=flops)
    rounded_linear = {bits: _least(read[bits], whole) for bits in compute.rounded_linear}
    return replace(
        hardware, interference=0.0, read_interference=0.0, fetch_seconds=0.0,
        fetch_head_seconds=0.0,
        recall=replace(hardware.recall, index_work=1, apart=1),
        compute=ComputeRates(linear=linear, rounded_linear=rounded_linear,
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
        See `search.predict`.
    """
    best = ideal_hardware(hardware, mxfp4=bool(run.weights.mxfp4))
    return predict(best, replace(run, policy=replace(run.policy, overlap=True)), prompts)
