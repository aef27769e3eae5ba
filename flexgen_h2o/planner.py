"""The memory plan: what a run will need on each tier, against what is free. No torch.

The plan is made before anything is allocated. A run that cannot fit stops with the sum, the limit
and a ``--percent`` that would fit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from flexgen_h2o.cache.budget import budget, slots
from flexgen_h2o.config import PLACED, TIERS, H2OConfig, Placement, Policy, check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.report import GB
from flexgen_h2o.storage.placement import split
from flexgen_h2o.storage.quantization import GroupLayout

if TYPE_CHECKING:
    from flexgen_h2o.models.spec import ModelConfig

STEP = 5
"""Percent that the search for a placement moves at a time."""

WEIGHT_BUFFERS = 2
STAGING_BUFFERS = 3
TAIL_TOKENS = 16
"""What the engine holds beside the data: `engine.weights`, `cache.parts`, `engine.hidden`."""

CHUNK_ROWS = {False: 2048, True: 16384}
"""Rows of a prefill that go through a layer together, by whether there is a GPU (as `Executor`)."""

WEIGHT_ROWS = ("weights", "embeddings", "weight buffers")
"""The rows of the plan that are in place once the model is loaded."""

SCORE_BLOCK = 8 << 20
SCORE_ROWS = 16
CONVERTED = 4 << 20
"""As `kernels.ops`: bytes of attention weights that a scoring prefill has at a time, and the fewest
queries; bytes of cached keys and values that decode has in float32 at a time on a CPU."""

LOGIT_ROWS = 512
RESERVE = 128 << 20
"""Bytes for thread stacks, the libraries' own workspaces and the allocators' slack."""

_NAMES = {"gpu": "device memory", "cpu": "host memory", "disk": "disk space"}


@dataclass(frozen=True)
class Workload:
    """The largest block of a run: lengths in tokens, batches in sequences."""

    prompt_len: int
    gen_len: int
    gpu_batch_size: int
    num_gpu_batches: int

    def __post_init__(self) -> None:
        for name in ("prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches"):
            check_int(name, getattr(self, name), low=1)


@dataclass(frozen=True)
class CacheOptions:
    """What stays cached (`h2o` None: all) and in how many bits: 16 (the run's dtype), 8 or 4."""

    h2o: H2OConfig | None = None
    bits: int = 16

    @property
    def evicts(self) -> bool:
        """Whether any token ever goes, if only behind the mask of a simulation."""
        return self.h2o is not None and not self.h2o.is_full

    @property
    def simulated(self) -> bool:
        """Whether eviction masks a full cache."""
        return self.evicts and self.h2o.simulate

    def record_bytes(self, model: ModelConfig, itemsize: int) -> int:
        """Bytes at rest of one token's key and value in one layer, all KV heads together."""
        # A simulation is exact: it keeps float32.
        vector = model.head_dim * (4 if self.simulated else itemsize)
        if self.bits != 16:
            vector = GroupLayout(length=model.head_dim, bits=self.bits).nbytes
        return 2 * model.num_kv_heads * vector

    def layer_slots(self, model: ModelConfig, workload: Workload) -> list[int]:
        """The most slots that a sequence uses in each decoder layer."""
        # The last token that is generated is never cached.
        return [slots(self.h2o, layer, workload.prompt_len, workload.gen_len - 1)
                for layer in range(model.num_layers)]


FULL_CACHE = CacheOptions()


@dataclass(frozen=True)
class MemoryLimits:
    """Free bytes of each tier. `gpu_bytes` None: no GPU, the tier gpu is host memory."""

    gpu_bytes: int | None
    cpu_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class PlanRow:
    """Bytes that one kind of data takes on each tier."""

    name: str
    gpu: int = 0
    cpu: int = 0
    disk: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """The rows of a plan and what they were made from. Make one with `memory_plan`."""

    model: ModelConfig
    policy: Policy
    workload: Workload
    itemsize: int
    has_gpu: bool
    writes_weights: bool
    cache: CacheOptions
    rows: tuple[PlanRow, ...] = ()

    @property
    def sweep_rows(self) -> int:
        """Tokens of the longest prompt that go through the network together."""
        prompt = self.workload.prompt_len
        return min(prompt, self.policy.prefill_chunk or prompt)

    @property
    def gathers_prompts(self) -> bool:
        """Whether prompts come in pieces to a cache that cannot hold them as they are."""
        own = self.cache.evicts or self.cache.bits != 16
        return own and not self.cache.simulated and self.sweep_rows < self.workload.prompt_len

    @property
    def attends_on_host(self) -> bool:
        """Whether the cache in host memory is used there, beside a GPU."""
        return self.has_gpu and self.policy.cpu_cache_compute

    def total(self, tier: str) -> int:
        """Bytes of all rows on a tier."""
        return sum(getattr(row, tier) for row in self.rows)

    def shortfalls(self, limits: MemoryLimits) -> tuple[str, ...]:
        """The tiers that need more than is free."""
        free = _by_tier(limits)
        return tuple(t for t in TIERS if free[t] is not None and self.total(t) > free[t])

    def check(self, limits: MemoryLimits, *, loaded: bool = False) -> None:
        """Raise `UserError` with sums, limits and a placement that fits, unless this one does.

        `loaded`: the weights and their buffers are in place already, so that `limits`, measured
        since, leave them out; what they take is counted as free again.
        """
        if loaded:
            limits = self._before_loading(limits)
        short = self.shortfalls(limits)
        if not short:
            return
        free = _by_tier(limits)
        sums = "; ".join(
            f"{_NAMES[tier]}: needs {_gb(self.total(tier))} ({self._parts(tier)}), "
            f"{_gb(free[tier])} free"
            for tier in short
        )
        fitting = self.suggest(limits)
        if fitting is None:
            advice = ("no --percent would fit: lower --gpu-batch-size, --num-gpu-batches or "
                      "--gen-len, or take a smaller model")
        else:
            advice = f"--percent {percent_text(fitting)} would fit"
        raise UserError(f"the run does not fit. {sums}. {advice}")

    def _before_loading(self, limits: MemoryLimits) -> MemoryLimits:
        held = {tier: sum(getattr(row, tier) for row in self.rows if row.name in WEIGHT_ROWS)
                for tier in TIERS}
        gpu = None if limits.gpu_bytes is None else limits.gpu_bytes + held["gpu"]
        return MemoryLimits(gpu, limits.cpu_bytes + held["cpu"], limits.disk_bytes + held["disk"])

    def _parts(self, tier: str) -> str:
        """The rows of a tier in words, the largest first."""
        rows = sorted(self.rows, key=lambda row: -getattr(row, tier))
        return ", ".join(f"{row.name} {_gb(getattr(row, tier))}" for row in rows[:3]
                         if getattr(row, tier))

    def suggest(self, limits: MemoryLimits) -> Policy | None:
        """A policy that fits: weights go to slower tiers first, then the cache, then activations.

        The search starts at this plan's placement, and again with all on the fastest tier, so
        that it also finds what must come back from a full disk. None if neither way fits.
        """
        everything = Placement(100, 0, 0)
        fastest = replace(self.policy, **dict.fromkeys(PLACED, everything))
        for start in (self.policy, fastest):
            for policy in self._offloading(start, limits):
                if not self._with(policy).shortfalls(limits):
                    return policy
        return None

    def _with(self, policy: Policy) -> MemoryPlan:
        return memory_plan(self.model, policy, self.workload, itemsize=self.itemsize,
                           has_gpu=self.has_gpu, writes_weights=self.writes_weights,
                           cache=self.cache)

    def _offloading(self, policy: Policy, limits: MemoryLimits) -> Iterator[Policy]:
        """`policy`, then ever more of it moved away from the first tier that is short."""
        moved: Policy | None = policy
        while moved is not None:
            yield moved
            short = self._with(moved).shortfalls(limits)
            # No slower tier is below the disk.
            moved = None if "disk" in short or not short else _move(moved, short[0], self.has_gpu)

    def table(self, limits: MemoryLimits | None = None) -> str:
        """The plan as text: GB of each row on each tier, the sums, and what is free."""
        tiers = TIERS if self.has_gpu else TIERS[1:]
        lines = [("memory plan (GB)", *(_NAMES[tier] for tier in tiers))]
        for row in self.rows:
            lines.append((row.name, *(f"{getattr(row, tier) / GB:.3f}" for tier in tiers)))
        lines.append(("sum", *(f"{self.total(tier) / GB:.3f}" for tier in tiers)))
        if limits is not None:
            free = _by_tier(limits)
            lines.append(("free", *("-" if free[t] is None else f"{free[t] / GB:.3f}"
                                    for t in tiers)))
        return "\n".join(f"{first:<18}" + "".join(f"{cell:>15}" for cell in rest)
                         for first, *rest in lines)


def memory_plan(
    model: ModelConfig,
    policy: Policy,
    workload: Workload,
    *,
    itemsize: int,
    has_gpu: bool = False,
    writes_weights: bool = False,
    cache: CacheOptions = FULL_CACHE,
) -> MemoryPlan:
    """Sum what a run takes on each tier.

    Parameters
    ----------
    model : ModelConfig
        Its sizes.
    policy : Policy
        Its placements; the batch sizes are the workload's.
    workload : Workload
        The largest block.
    itemsize : int
        Bytes of an element of weights, cache and activations.
    has_gpu : bool
        Compute memory is apart from host memory. If not, both count as host memory and nothing
        is staged between them.
    writes_weights : bool
        Weights on disk have to be written there (dummy weights); otherwise they are read from
        the checkpoint's own bytes and take no free space.
    cache : CacheOptions
        What stays cached, and in how many bits.
    """
    plan = MemoryPlan(model, policy, workload, itemsize, has_gpu, writes_weights, cache)
    rows = (*_weight_rows(plan), *_cache_rows(plan), *_activation_rows(plan), _workspace(plan))
    if not has_gpu:
        rows = tuple(PlanRow(row.name, 0, row.gpu + row.cpu, row.disk) for row in rows)
    return replace(plan, rows=rows)


def _weight_rows(plan: MemoryPlan) -> Iterator[PlanRow]:
    """Decoder layers, embeddings and head as placed, and two buffers for what is fetched."""
    model, fractions = plan.model, plan.policy.weights.fractions()
    layer = model.layer_parameters() * plan.itemsize
    layers = model.num_layers * layer
    embeddings = (model.embed_parameters() + model.head_parameters()) * plan.itemsize
    for name, nbytes in (("weights", layers), ("embeddings", embeddings)):
        gpu, cpu, disk = (int(nbytes * fraction) for fraction in fractions)
        yield PlanRow(name, gpu, cpu, disk if plan.writes_weights else 0)
    away = fractions[2] + (fractions[1] if plan.has_gpu else 0)
    buffers = 0
    if away > 0:
        # Placement is by whole tensors: a layer may hold one more of them than its share, and the
        # head's matrix (a tied one too) is there or it is not.
        tensor = model.hidden_size * model.ffn_size * plan.itemsize
        head = model.vocab_size * model.embed_dim * plan.itemsize
        buffers = WEIGHT_BUFFERS * max(min(layer, int(layer * away) + tensor), head)
    yield PlanRow("weight buffers", buffers, buffers if plan.has_gpu else 0)


def _cache_rows(plan: MemoryPlan) -> Iterator[PlanRow]:
    """Keys and values by sequences, their staging, gathered prompts, and eviction's own data."""
    model, load, options = plan.model, plan.workload, plan.cache
    held = options.layer_slots(model, load)
    record = options.record_bytes(model, plan.itemsize)
    placed = split(load.gpu_batch_size, plan.policy.cache)
    # A simulation has its full cache where it computes.
    cached = (load.gpu_batch_size, 0, 0) if options.simulated else placed
    token = record * sum(held) * load.num_gpu_batches
    yield PlanRow("cache", *(count * token for count in cached))
    here, host = _staging(plan, cached, record=record, most=max(held),
                          staged_host=not plan.attends_on_host)
    if plan.gathers_prompts:
        plain = 2 * model.kv_size * plan.itemsize
        more = _staging(plan, placed, record=plain, most=load.prompt_len)
        here, host = here + more[0], host + more[1]
    yield PlanRow("cache buffers", here, host)
    yield _prompt_cache(plan, placed)
    yield _bookkeeping(plan, held, on_host=cached[1] if plan.attends_on_host else 0)


def _staging(plan: MemoryPlan, counts: tuple[int, int, int], *, record: int, most: int,
             staged_host: bool = True) -> tuple[int, int]:
    """Bytes in compute and host memory to fetch and store what is placed elsewhere.

    `counts` are the sequences of a batch on (gpu, cpu, disk), `most` the slots of the largest
    layer. `staged_host`: host memory beside a GPU is fetched, too.
    """
    _, cpu, disk = counts
    model = plan.model
    fetched = disk + (cpu if plan.has_gpu and staged_host else 0)
    staging = STAGING_BUFFERS * fetched * most * record
    # A tail holds the newest records of each layer, and the slot of each KV head.
    tail = TAIL_TOKENS * model.num_layers * (record + 8 * model.num_kv_heads)
    tails = disk * plan.workload.num_gpu_batches * tail
    return staging, tails + (staging if plan.has_gpu else 0)


def _prompt_cache(plan: MemoryPlan, placed: tuple[int, int, int]) -> PlanRow:
    """Whole prompts, and the scores of their tokens, until they can be cut or compressed."""
    if not plan.gathers_prompts:
        return PlanRow("prompt cache")
    model, load, h2o = plan.model, plan.workload, plan.cache.h2o
    prompts = load.num_gpu_batches * load.prompt_len
    gpu, cpu, disk = (count * prompts * model.kv_bytes_per_token(plan.itemsize)
                      for count in placed)
    if plan.cache.evicts and h2o.scored:
        gpu += load.gpu_batch_size * prompts * model.num_kv_heads * 4 * len(_evicting(plan))
    return PlanRow("prompt cache", gpu, cpu, disk)


def _bookkeeping(plan: MemoryPlan, held: Sequence[int], *, on_host: int) -> PlanRow:
    """A score and a position of each slot and KV head, and its rank if positions roll.

    They are where attention runs, whatever the cache's tier: for `on_host` sequences of a batch
    in host memory.
    """
    model, load = plan.model, plan.workload
    layers = _evicting(plan)
    rolls = bool(layers) and plan.cache.h2o.positions == "rolling"
    slot = model.num_kv_heads * (12 if rolls else 8)
    sequence = slot * sum(held[layer] for layer in layers) * load.num_gpu_batches
    return PlanRow("cache bookkeeping", (load.gpu_batch_size - on_host) * sequence,
                   on_host * sequence)


def _evicting(plan: MemoryPlan) -> list[int]:
    """The decoder layers that ever drop a token."""
    h2o, prompt = plan.cache.h2o, plan.workload.prompt_len
    return [layer for layer in range(plan.model.num_layers)
            if budget(h2o, layer, prompt) is not None]


def _activation_rows(plan: MemoryPlan) -> Iterator[PlanRow]:
    """The hidden states of a block between layers, and the working buffers if any are away."""
    load, placement = plan.workload, plan.policy.activations
    rows = load.gpu_batch_size * plan.sweep_rows
    batch = rows * plan.model.hidden_size * plan.itemsize
    total = batch * load.num_gpu_batches
    yield PlanRow("activations", *(int(total * share) for share in placement.fractions()))
    away = placement.disk > 0 or (plan.has_gpu and placement.cpu > 0)
    working = STAGING_BUFFERS * batch if away else 0
    yield PlanRow("activation buffers", working, working if placement.disk > 0 else 0)


def _workspace(plan: MemoryPlan) -> PlanRow:
    """Temporaries of the widest step: a chunk of prefill in a layer, or the logits."""
    model, load = plan.model, plan.workload
    # Chunks are cut between sequences: one that is longer is a chunk of its own.
    chunk = max(CHUNK_ROWS[plan.has_gpu], plan.sweep_rows)
    rows = min(load.gpu_batch_size * plan.sweep_rows, chunk)
    # Beside the layer's own scratch, attention makes its output and copies of what it reads.
    attention = rows * (2 * model.q_size + 2 * model.kv_size)
    layer = (model.scratch_elements(rows) + attention) * plan.itemsize
    # Logits in the run's dtype, and up to three float32 copies while sampling.
    logits = min(load.gpu_batch_size, LOGIT_ROWS) * model.vocab_size * (plan.itemsize + 3 * 4)
    return PlanRow("workspace", layer + logits + _own_attention(plan) + RESERVE)


def _own_attention(plan: MemoryPlan) -> int:
    """Temporaries of attention where PyTorch's does not do: it scores, converts or reads pieces."""
    model, load, cache = plan.model, plan.workload, plan.cache
    converts = cache.evicts or cache.bits != 16
    if not converts and plan.sweep_rows == load.prompt_len:
        return 0
    token = 2 * model.kv_size * 4  # key and value in float32
    # A simulation takes all queries at once.
    rows = plan.sweep_rows if cache.simulated else SCORE_ROWS
    block = max(SCORE_BLOCK, rows * model.num_heads * load.prompt_len * 4)
    prefill = load.prompt_len * token + block
    sequence = max(cache.layer_slots(model, load)) * token
    group = load.gpu_batch_size * sequence if plan.has_gpu else max(CONVERTED, sequence)
    # Twice: what is masked or rotated is one more copy.
    return max(prefill, 2 * group if converts else 0)


def _move(policy: Policy, tier: str, has_gpu: bool) -> Policy | None:
    """Move `STEP` percent of the first kind that has any from `tier` to the next slower one."""
    # Without a GPU both memory tiers are host memory, and the next slower one is the disk.
    sources = {"gpu": ("gpu",), "cpu": ("cpu",) if has_gpu else ("cpu", "gpu")}[tier]
    target = "cpu" if tier == "gpu" else "disk"
    for kind in PLACED:
        placement = getattr(policy, kind)
        for source in sources:
            share = getattr(placement, source)
            if share > 0:
                step = min(STEP, share)
                changed = {source: share - step, target: getattr(placement, target) + step}
                return replace(policy, **{kind: replace(placement, **changed)})
    return None


def percent_text(policy: Policy) -> str:
    """The six numbers of ``--percent`` for a policy's placements."""
    placements = [getattr(policy, kind) for kind in PLACED]
    return " ".join(f"{share:g}" for p in placements for share in (p.gpu, p.cpu))


def _by_tier(limits: MemoryLimits) -> dict[str, int | None]:
    return dict(zip(TIERS, (limits.gpu_bytes, limits.cpu_bytes, limits.disk_bytes), strict=True))


def _gb(nbytes: int | None) -> str:
    return f"{(nbytes or 0) / GB:.1f} GB"


def free_memory(offload_dir: str | os.PathLike, device_free: int | None) -> MemoryLimits:
    """What is free now: host memory within the cgroup's limit, and disk under `offload_dir`.

    Parameters
    ----------
    offload_dir : path
        Need not exist yet: the nearest folder above that does counts.
    device_free : int or None
        Free bytes of the GPU, None without one.
    """
    cgroup = cgroup_free()
    available = psutil.virtual_memory().available
    folder = Path(offload_dir).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return MemoryLimits(
        gpu_bytes=device_free,
        cpu_bytes=available if cgroup is None else min(available, cgroup),
        disk_bytes=shutil.disk_usage(folder).free,
    )


def cgroup_free(
    mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Bytes that the memory cgroups of this process, v1 or v2, still allow; None without a limit.

    A group's inactive page cache counts as free: the kernel drops it before it refuses memory.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = mount / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.strip("/")
        # A limit anywhere above counts. In a container the path may be the host's: then only the
        # root of the mount is there, and it is the container's own group.
        for group in (folder, *folder.parents):
            if group == root or root in group.parents:
                found.append(_group_free(group, *names))
    return min((free for free in found if free is not None), default=None)


def _group_free(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Bytes left in one cgroup; None when it has no limit (v2 says max, v1 nearly 2**63)."""
    try:
        most = int((group / limit).read_text())
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most >= 1 << 60:
        return None
    return max(0, most - used + int(stat.get(reclaimable, 0)))
