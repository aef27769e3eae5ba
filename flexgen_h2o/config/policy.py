"""The offloading policy of a run: everything that affects speed and never results. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.config.placement import PLACED, Placement
from flexgen_h2o.config.validation import Count, Fraction, Text, check_choice, check_fields
from flexgen_h2o.errors import UserError

if TYPE_CHECKING:
    from flexgen_h2o.config.cache_layout import CacheOptions

OFFLOAD_DIR = "~/.cache/flexgen_h2o/offload"
DUMMY = "_DUMMY_"  # in place of a path: random weights

SPECULATIVE_METHODS = ("ngram", "draft", "mtp")


@dataclass(frozen=True)
class Policy:
    """The offloading policy, as in FlexGen: everything that affects speed and never results.

    `H2OConfig` has the eviction policy. A block is `num_gpu_batches` GPU batches of
    `gpu_batch_size` sequences, which share each load of a layer's weights.

    Parameters
    ----------
    gpu_batch_size, num_gpu_batches : int
    weights, cache, activations : Placement
        Percentages on gpu, cpu and disk.
    overlap : bool
        Overlap transfers with compute.
    cpu_cache_compute : bool
        Attend on the CPU to the part of the cache in host memory.
    pin_weight : bool
        Pin weights in host memory (with a GPU).
    prefill_chunk : int, optional
        Tokens of a prompt per forward pass; fewer need less memory. None: all.
    sep_layer : bool
        Schedule attention and MLP as two layers, so that weight buffers hold half a layer.
    refill_share : float
        When this fraction of a block's sequences has finished, the others continue in a block with
        the next requests. 1: wait for all.
    experts : Placement, optional
        Placement of a mixture's experts; `weights` then covers all other weights. None: `weights`
        covers both, and experts get the fastest memory that the others leave.
    expert_slots : int, optional
        Slots in fast memory for experts that are not resident there. With experts on disk, they
        are added to the slots for the share of `experts` in memory. None: the experts that a decode
        step chooses in two layers.
    cpu_expert_compute : bool
        Compute experts in host memory on the CPU (with a GPU).
    expert_choices : ExpertChoices, optional
        Counts, by which the most frequently selected experts are placed in the fastest memory
        first. None: every layer has the same number of experts there.
    selective_fetch : bool
        With recall and a cache on disk (with a GPU: in host memory), read only the selected tokens
        that are not in the hot set, instead of whole layers.
    hot_set : float, optional
        Size of the hot set as a fraction of all tokens. None: twice the tokens that a step attends
        to.
    speculate : str, optional
        Method of speculative decoding, on a CPU. "ngram": draft tokens from the text so far (prompt
        lookup). "draft": draft them by `draft_model`. "mtp": draft them by the model's own layer
        for multi-token prediction, which stays in memory. `LLM` then computes batches of one
        sequence, and as many sequences in a block.
    num_speculative_tokens : int
        Maximum number of drafted tokens per decode step.
    draft_model : str, optional
        Name or folder of a small model with the same tokenizer, which stays in memory. It implies
        `speculate` "draft".

    Raises
    ------
    UserError
        A value is of a wrong type or out of range.
    """

    gpu_batch_size: Count = 4
    num_gpu_batches: Count = 1
    weights: Placement = Placement(100, 0, 0)
    cache: Placement = Placement(100, 0, 0)
    activations: Placement = Placement(100, 0, 0)
    overlap: bool = True
    cpu_cache_compute: bool = False
    pin_weight: bool = True
    prefill_chunk: Count | None = None
    sep_layer: bool = False
    refill_share: Fraction = 0.5
    experts: Placement | None = None
    expert_slots: Count | None = None
    cpu_expert_compute: bool = False
    expert_choices: ExpertChoices | None = None
    selective_fetch: bool = False
    hot_set: Fraction | None = None
    speculate: str | None = None
    num_speculative_tokens: Count = 8
    draft_model: Text | None = None

    def __post_init__(self) -> None:
        if self.speculate is not None:
            check_choice("speculate", self.speculate, SPECULATIVE_METHODS)
        check_fields(self)
        object.__setattr__(self, "speculate", speculative_method(self.speculate, self.draft_model))

    @property
    def draft_tokens(self) -> int:
        """Maximum number of drafted tokens per decode step; 0 without speculation."""
        return 0 if self.speculate is None else self.num_speculative_tokens

    def check_device(self, *, has_gpu: bool) -> None:
        """Raise `UserError` for options that this device does not support."""
        if has_gpu and self.speculate is not None:
            raise UserError("speculate works on a CPU only: compute there, or leave it out")
        if not self.selective_fetch:
            return
        if has_gpu and self.cpu_cache_compute:
            raise UserError("selective_fetch has no effect with cpu_cache_compute, which attends "
                            "on the CPU instead: leave one of them out")
        if has_gpu and self.cache.cpu == 0:
            raise UserError("selective_fetch has no effect with a GPU if no part of the cache is "
                            "in host memory: leave it out")
        if not has_gpu and self.cache.disk == 0:
            raise UserError("selective_fetch has no effect on a cache in memory: leave it out")

    def fetches(self, has_gpu: bool) -> bool:
        """Return whether some weights are not resident in compute memory."""
        placed = [self.weights] if self.experts is None else [self.weights, self.experts]
        return any(placement.disk > 0 or has_gpu and placement.cpu > 0 for placement in placed)

    def shards_weights(self, *, has_gpu: bool, mixture: bool) -> bool:
        """Return True if matrices are streamed from disk in row shards, not layer by layer.

        Several batches share the load of a whole layer, and a GPU needs whole layers for its
        copies. Halves of layers (`sep_layer`) and expert slots save memory in another way.
        """
        return self.num_gpu_batches == 1 and not (self.sep_layer or has_gpu or mixture)


def check_selective_fetch(policy: Policy, cache: CacheOptions) -> None:
    """Raise `UserError` if `selective_fetch` or `hot_set` has no effect."""
    if not policy.selective_fetch:
        if policy.hot_set is not None:
            raise UserError("hot_set has no effect without selective_fetch: leave it out")
        return
    idle = {"without recall": not cache.recalls,
            "in a simulation, whose cache is in memory": cache.simulated,
            "on a cache in memory": policy.cache.gpu == 100}
    for reason, no_effect in idle.items():
        if no_effect:
            raise UserError(f"selective_fetch has no effect {reason}: leave it out")


def speculative_policy(policy: Policy, cache: CacheOptions) -> Policy:
    """Return the policy for speculative decoding: each batch has one sequence.

    Sequences accept different numbers of drafted tokens, and the tokens of a batch are appended
    together.

    Raises
    ------
    UserError
        Drafted tokens cannot be taken back from this cache.
    """
    for reason, given in {"with selective_fetch": policy.selective_fetch,
                          "in a simulation": cache.simulated}.items():
        if given:
            raise UserError(f"speculate does not work {reason}: leave one of them out")
    return replace(policy, gpu_batch_size=1,
                   num_gpu_batches=policy.gpu_batch_size * policy.num_gpu_batches)


def speculative_method(speculate: str | None, draft_model: str | None) -> str | None:
    """Return the method of speculative decoding; a draft model alone implies it.

    Raises
    ------
    UserError
        The method lacks its draft model, or does not use it.
    """
    if draft_model is not None and speculate not in (None, "draft"):
        raise UserError(f"draft_model has no effect with speculate {speculate}: leave one of them "
                        "out")
    if draft_model is None and speculate == "draft":
        raise UserError("speculate draft needs a draft_model: give its name")
    return speculate if draft_model is None else "draft"


def format_percent(policy: Policy) -> str:
    """Return the placements of a policy as the six numbers of ``--percent``."""
    placements = [getattr(policy, kind) for kind in PLACED]
    return " ".join(f"{share:g}" for p in placements for share in (p.gpu, p.cpu))


@dataclass(frozen=True)
class Workload:
    """The largest block of a run: lengths in tokens, batches in sequences."""

    prompt_len: Count
    gen_len: Count
    gpu_batch_size: Count
    num_gpu_batches: Count

    def __post_init__(self) -> None:
        check_fields(self)

    def cut(self, longest: int | None) -> Workload:
        """Return the workload with prompts of at most `longest` tokens; None: no limit."""
        return self if longest is None else replace(
            self, prompt_len=min(self.prompt_len, longest))
