"""Configuration of decoder layers: attention, mixture of experts. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add

from flexgen_h2o.config.validation import check_bool, check_int
from flexgen_h2o.errors import UserError


@dataclass(frozen=True)
class AttentionVariant:
    """The attention variant of a layer: scale, soft cap, window and sinks.

    A logit is ``q . k * scale``; a soft cap makes it ``softcap * tanh(logit / softcap)``.

    Raises `UserError` for a value of a wrong type or range.
    """

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    softcap: float = 0.0  # bound of the magnitude of logits (Gemma 2, arXiv 2408.00118); 0: no cap
    window: int | None = None
    """A query at position p sees the keys at positions above p - window, itself included: at least
    2. None: all before it."""
    sinks: bool = False
    """A learned logit of each query head joins the softmax's denominator, and no value goes with it
    (gpt-oss): the weight of that short name, [heads]."""

    def __post_init__(self) -> None:
        if self.scale is not None and not (math.isfinite(self.scale) and self.scale > 0):
            raise UserError(f"the scale of attention must be a number above 0, got {self.scale!r}")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise UserError(f"the soft cap of attention must be a number from 0 on (0: none), got "
                            f"{self.softcap!r}")
        if self.window is not None:
            check_int("the window of attention", self.window, ge=2)
        check_bool("sinks", self.sinks)

    def scale_for(self, head_dim: int) -> float:
        """Return the factor of q . k for heads of this width."""
        return head_dim ** -0.5 if self.scale is None else self.scale


DEFAULT_VARIANT = AttentionVariant()


@dataclass(frozen=True)
class KVHeads:
    """The key heads of a layer; its value heads are as many and as wide."""

    count: int
    dim: int  # elements of a key, and of a value


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Keys and values of all heads are linear maps of one latent per token. The queries
    absorb the maps of keys, and the output the maps of values: the cache has one KV head, whose key
    is the rotated key that all heads share and then the latent. The latent is also the value.
    """

    rank: int  # elements of the latent
    rope_dim: int  # elements of a head's queries and keys that rotate
    nope_dim: int  # the other elements of a head's queries and keys
    value_dim: int  # elements of a head's values
    query_rank: int = 0
    """Width of the latent of queries; 0: queries are projected from the hidden states."""
    interleaved: bool = True  # pairs of rotated elements are adjacent in a checkpoint's matrices

    @property
    def key_dim(self) -> int:
        """Elements of a cached key."""
        return self.rope_dim + self.rank

    @property
    def query_dim(self) -> int:
        """Elements of a head's query before its map of keys is absorbed."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class RecurrentConfig:
    """The gated DeltaNet (arXiv 2412.06464) that replaces attention in recurrent layers.

    The state of a sequence in a layer has a constant size: the last ``kernel - 1`` inputs of a
    causal convolution, and a matrix [key_dim, value_dim] of each value head.
    """

    # Each query and key head serves value_heads / key_heads consecutive value heads.
    key_heads: int
    value_heads: int
    # Widths of a key and of a value head.
    key_dim: int
    value_dim: int
    kernel: int  # width of the convolution

    @property
    def value_size(self) -> int:
        """Total width of the value heads."""
        return self.value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: query heads, key heads, then value heads."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def state_size(self) -> int:
        """Elements of the state of a sequence in a layer; they are float32."""
        return self.conv_size * (self.kernel - 1) + self.value_size * self.key_dim


MAX_EXPERT_LOADS = 16
"""Upper limit of the experts that are being loaded: enough to keep a disk busy. Each takes a slot
that could keep another expert."""

MIN_EXPERT_SLOTS = 4 * MAX_EXPERT_LOADS
"""Lower limit of the slots that a plan chooses: for experts that are computed, loaded, and
prefetched for the next layer. With half as many, compute and reads wait for each other."""

ExpertKey = tuple[int, int]
"""(decoder layer, number of the expert)."""


SCORINGS = ("softmax", "sigmoid", "sparsemixer")


@dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen: see `kernels.reference.layers.route`.

    Raises `UserError` for a value out of range.
    """

    scoring: str = "softmax"
    """One of `SCORINGS`: the function from a router's logits to scores. "sparsemixer" (arXiv
    2409.12136) chooses one expert after the other; it has no use for the other options."""
    normalize: bool = True  # divide the scores of a token's experts by their sum
    min_sum: float = 1e-20  # lower limit of that sum
    scale: float = 1.0  # factor of the weights
    # Number of expert groups of equal size, and the number of groups that a token may choose
    # experts from (arXiv 2412.19437, section 2.1.2).
    groups: int = 1
    groups_per_token: int = 1
    group_experts: int = 2  # the best experts of a group whose scores are summed to rank the group
    jitter: float = 0.01
    """With "sparsemixer", experts compete if their logits differ by less than twice this share."""

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise UserError(f"a router's scoring must be one of {', '.join(SCORINGS)}, got "
                            f"{self.scoring!r}")
        check_int("the groups of experts", self.groups, ge=1)
        check_int("the groups of experts per token", self.groups_per_token, ge=1, le=self.groups)

    @property
    def is_plain(self) -> bool:
        """Whether it takes the experts with the largest logits, and their softmax as weights."""
        return self.scoring == "softmax" and self.groups == 1 and self.scale == 1.0


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts that is the MLP of decoder layers (arXiv 1701.06538)."""

    count: int  # experts of a layer
    per_token: int  # experts that a token is routed to
    ffn_size: int  # intermediate size of an expert
    router: RouterConfig = RouterConfig()
    shared_ffn_size: int = 0
    """Intermediate size of the shared expert; 0: there is none. Several are one of their total
    size."""
    scale_inputs: bool = False
    """Llama 4: a token's routing weight multiplies the input of its only expert, instead of the
    output."""
    # gpt-oss: the activation is ``x * sigmoid(gate_slope * x)`` with x clamped to `gate_limit`.
    gate_slope: float = 1.0
    gate_limit: float = 0.0

    def slots(self, tokens: int, streamed: int, requested: int | None = None,
              pooled: float = 0.0) -> int:
        """Return the number of expert slots in compute memory.

        Parameters
        ----------
        tokens : int
            Sequences of a decode step.
        streamed : int
            Experts that are not in compute memory permanently: the upper limit.
        requested : int or None
            The number that the policy sets; None: the experts of two layers of a decode step.
        pooled : float
            Share of the experts that have further slots (`config.placement.pool_experts`).
        """
        touched = min(self.count, self.per_token * tokens)
        return min(streamed, (2 * touched if requested is None else requested)
                   + int(pooled * streamed + 1e-6))

    def resident_slots(self, tokens: float, streamed: float, slots: int) -> float:
        """Return the slots that keep their experts between two passes of `tokens` tokens.

        The other slots are for loads of the current and the next layer, at most
        `MAX_EXPERT_LOADS`. All slots keep their experts if there is one for each of the `streamed`
        experts that are not in compute memory permanently.
        """
        loading = min(MAX_EXPERT_LOADS, 2 * self.touched(tokens))
        return slots if slots >= streamed else max(slots - loading, 0)

    def touched(self, tokens: float) -> float:
        """Return the expected number of experts of a layer that some tokens choose, for independent
        tokens and uniform probabilities; see `planning.planned_run`."""
        return self.count * (1 - (1 - min(self.per_token / self.count, 1.0)) ** tokens)


@dataclass(frozen=True)
class ExpertChoices:
    """The experts that the tokens of a run chose, for the plans of later runs.

    The tokens of one text prefer some experts. The last three counts measure this preference on
    prompts. They are sums over prompts and over layers with experts; a prompt in chunks counts with
    its first chunk, and prompts with a common prefix with that prefix.
    """

    counts: tuple[tuple[int, ...], ...] = field(repr=False)
    """Tokens that chose each expert, by decoder layer; empty for a layer without experts."""
    per_token: int  # experts per token
    texts: int = 0  # number of prompts
    text_tokens: int = 0  # tokens of these prompts
    text_experts: int = 0  # different experts that each prompt chose
    source: str = field(default="", compare=False)
    """The file of the counts, for messages and flags."""

    def __add__(self, other: ExpertChoices) -> ExpertChoices:
        """Return the sum of two runs of a model."""
        return replace(
            self, counts=tuple(tuple(first + second for first, second in zip(*layer, strict=True))
                               for layer in zip(self.counts, other.counts, strict=True)),
            texts=self.texts + other.texts, text_tokens=self.text_tokens + other.text_tokens,
            text_experts=self.text_experts + other.text_experts)

    def slice_layers(self, first: int, last: int) -> ExpertChoices:
        """Return the choices of decoder layers first:last, with their share of the other counts."""
        counts = self.counts[first:last]
        share = sum(map(bool, counts)) / max(sum(map(bool, self.counts)), 1)
        return replace(self, counts=counts, texts=round(share * self.texts),
                       text_tokens=round(share * self.text_tokens),
                       text_experts=round(share * self.text_experts))

    @cached_property
    def ranked(self) -> list[ExpertKey]:
        """All experts by descending count; equal ones in the order of layers."""
        keys = [(layer, number) for layer, counts in enumerate(self.counts)
                for number in range(len(counts))]
        return sorted(keys, key=lambda key: -self.counts[key[0]][key[1]])


def sum_choices(choices: Iterable[ExpertChoices | None]) -> ExpertChoices | None:
    """Return the sum of the choices of several runs, or None if there are none."""
    present = [item for item in choices if item is not None]
    return reduce(add, present) if present else None
