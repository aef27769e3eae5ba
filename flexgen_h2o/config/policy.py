"""All that decides speed and never results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.config.placement import PLACED, Placement
from flexgen_h2o.config.validation import check_bool, check_int, check_number
from flexgen_h2o.errors import UserError

if TYPE_CHECKING:
    from flexgen_h2o.config.cache_layout import CacheOptions

OFFLOAD_DIR = "~/.cache/flexgen_h2o/offload"
DUMMY = "_DUMMY_"  # in place of a path: random weights


@dataclass(frozen=True)
class Policy:
    """All that decides speed and never results.

    `gpu_batch_size` sequences are computed together; a block is `num_gpu_batches` of them, which
    share every load of a layer's weights. `overlap` lets transfers run beside compute;
    `cpu_cache_compute` attends on the CPU where the cache lives there; `pin_weight` page-locks
    host weights when there is a GPU. `prefill_chunk` tokens of a prompt go through the whole
    network at once (None: all): fewer need less memory. `sep_layer` schedules attention and MLP as
    two layers, so that only half a layer's weights are fetched at a time. `experts` places the
    experts of a mixture, and `weights` all else then; None: `weights` is of both, and experts get
    what the rest leaves of the fastest memory. `expert_slots` is how many experts that rest
    elsewhere have room in fast memory (None: two layers' of a decode step); with
    `cpu_expert_compute` those in host memory beside a GPU compute on the CPU. By
    `expert_choices` the experts that are chosen most often rest in the fastest memory; without
    them each layer has as many there.
    `fetch_chosen`, of a cache on disk that is recalled, reads in a decode step the tokens alone
    that it chooses and that memory has not, in place of whole layers; memory holds `fast_set` of
    all tokens then (a share; None: twice what a step attends to). With a GPU it is the cache in
    host memory of which its own memory holds so many tokens. When `refill_share` of a
    block's sequences have ended, the others go on in a block with the next ones (1: a block goes on
    until all have ended). Raises `UserError` for a value of a wrong type or range.
    """

    gpu_batch_size: int = 4
    num_gpu_batches: int = 1
    weights: Placement = Placement(100, 0, 0)
    cache: Placement = Placement(100, 0, 0)
    activations: Placement = Placement(100, 0, 0)
    overlap: bool = True
    cpu_cache_compute: bool = False
    pin_weight: bool = True
    prefill_chunk: int | None = None
    sep_layer: bool = False
    refill_share: float = 0.5
    experts: Placement | None = None
    expert_slots: int | None = None
    cpu_expert_compute: bool = False
    expert_choices: ExpertChoices | None = None
    fetch_chosen: bool = False
    fast_set: float | None = None

    def __post_init__(self) -> None:
        check_int("gpu_batch_size", self.gpu_batch_size, low=1)
        check_int("num_gpu_batches", self.num_gpu_batches, low=1)
        if self.prefill_chunk is not None:
            check_int("prefill_chunk", self.prefill_chunk, low=1)
        if self.expert_slots is not None:
            check_int("expert_slots", self.expert_slots, low=1)
        if not isinstance(self.experts, Placement | None):
            raise UserError(f"experts must be a Placement or None, got {self.experts!r}")
        if not isinstance(self.expert_choices, ExpertChoices | None):
            raise UserError("expert_choices must be ExpertChoices or None, got "
                            f"{self.expert_choices!r}")
        for kind in PLACED:
            if not isinstance(getattr(self, kind), Placement):
                raise UserError(f"{kind} must be a Placement, got {getattr(self, kind)!r}")
        for name in ("overlap", "cpu_cache_compute", "pin_weight", "sep_layer",
                     "cpu_expert_compute", "fetch_chosen"):
            check_bool(name, getattr(self, name))
        check_number("refill_share", self.refill_share, above=0, high=1)
        if self.fast_set is not None:
            check_number("fast_set", self.fast_set, above=0, high=1)

    def check_device(self, *, has_gpu: bool) -> None:
        """Raise `UserError` for what a run can't do with a GPU, or without one."""
        if not self.fetch_chosen:
            return
        if has_gpu and self.cpu_cache_compute:
            raise UserError("fetch_chosen has no effect beside cpu_cache_compute, by which the CPU "
                            "attends where the cache is: leave one of them out")
        if has_gpu and self.cache.cpu == 0:
            raise UserError("fetch_chosen has no effect with a GPU on a cache of which none is in "
                            "host memory: leave it out")
        if not has_gpu and self.cache.disk == 0:
            raise UserError("fetch_chosen has no effect on a cache in memory: leave it out")

    def fetches(self, has_gpu: bool) -> bool:
        """True if any weights have to be brought to compute memory."""
        placed = [self.weights] if self.experts is None else [self.weights, self.experts]
        return any(each.disk > 0 or has_gpu and each.cpu > 0 for each in placed)

    def shards_weights(self, *, has_gpu: bool, mixture: bool) -> bool:
        """Return True if matrices are streamed from disk in row shards, not layer by layer.

        Several batches share the load of a whole layer, and a GPU needs whole layers for its
        copies. Halves of layers (`sep_layer`) and expert slots save memory in another way.
        """
        return self.num_gpu_batches == 1 and not (self.sep_layer or has_gpu or mixture)


def check_fetch_chosen(policy: Policy, cache: CacheOptions) -> None:
    """Raise `UserError` where `fetch_chosen` or `fast_set` would do nothing."""
    if not policy.fetch_chosen:
        if policy.fast_set is not None:
            raise UserError("fast_set has no effect without fetch_chosen: leave it out")
        return
    idle = {"without recall": not cache.recalls,
            "in a simulation, whose cache is in memory": cache.simulated,
            "on a cache in memory": policy.cache.gpu == 100}
    for reason, given in idle.items():
        if given:
            raise UserError(f"fetch_chosen has no effect {reason}: leave it out")


def format_percent(policy: Policy) -> str:
    """The six numbers of ``--percent`` for a policy's placements."""
    placements = [getattr(policy, kind) for kind in PLACED]
    return " ".join(f"{share:g}" for p in placements for share in (p.gpu, p.cpu))


# Lengths and batch sizes of the largest block of a run.


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

    def cut(self, longest: int | None) -> Workload:
        """With prompts of at most `longest` tokens; None: as it is."""
        return self if longest is None else replace(
            self, prompt_len=min(self.prompt_len, longest))
