"""Sizes of a cache: bytes of a stored vector, slots by layer, and the plan of each layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from flexgen_h2o.cache.tiers import SlotLayout
from flexgen_h2o.config.attention_form import DEFAULT_FORM, AttentionForm
from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.budget import budget, slots


@dataclass(frozen=True)
class CacheShape:
    """Sizes that all sequences share: the model's, and those of a stored vector.

    `layout` is that of compressed records; None: vectors of `dtype`. `attn_sparsity` is the share
    of the cached values that a new token reads (`kernels.reference.sparse`), `attention` the forms
    of all layers, or empty: `ModelConfig.form`.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    layout: CacheLayout | None = None
    attn_sparsity: float = 1.0
    attention: tuple[AttentionForm, ...] = ()

    def form(self, layer: int) -> AttentionForm:
        """The form of attention of a layer."""
        return self.attention[layer] if self.attention else DEFAULT_FORM

    def records(self) -> SlotLayout:
        """The contents of a slot at rest."""
        if self.layout is None:
            return self.plain()
        return SlotLayout(self.kv_heads, self.layout.width, torch.uint8, self.layout.kinds)

    def token_bytes(self) -> int:
        """Bytes of one cached token of a sequence at rest, in all layers."""
        return self.num_layers * self.records().nbytes(1, 1)

    def plain(self) -> SlotLayout:
        """The contents of a slot in the run's dtype."""
        return SlotLayout(self.kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class CacheSize:
    """The most that a cache has to hold: sequences of a batch, batches of a block, slots of a
    sequence in each layer, and tokens of a prompt that comes in chunks (0 without chunks)."""

    sequences: int
    batches: int
    slots: tuple[int, ...]
    prompt: int = 0

    def covers(self, other: CacheSize) -> bool:
        """True if what fits into a cache of size `other` fits into one of this size."""
        mine, its = ((size.sequences, size.batches, *size.slots, size.prompt)
                     for size in (self, other))
        return all(a >= b for a, b in zip(mine, its, strict=True))


def slots_of(sizes: Iterable[tuple[int, int]], h2o: H2OConfig | None, num_layers: int
             ) -> tuple[int, ...]:
    """Slots of each layer that hold every sequence of these sizes: prompt, and tokens after it."""
    return tuple(max(slots(h2o, layer, *size) for size in sizes) for layer in range(num_layers))


def evicting_layers(sizes: Iterable[tuple[int, int]], h2o: H2OConfig | None, num_layers: int
                    ) -> tuple[bool, ...]:
    """The layers in which some sequence of these sizes will lose a token."""
    def evicts(layer: int, length: int, new: int) -> bool:
        new *= h2o is None or h2o.evicts_generated_at(layer)
        return slots(h2o, layer, length, new) < length + new

    return tuple(any(evicts(layer, *size) for size in sizes) for layer in range(num_layers))


@dataclass(frozen=True)
class LayerCachePlan:
    """The plan of one layer's cache for a batch.

    Attributes
    ----------
    slots : int
    evicts : bool
        Some sequence will lose a token; if not, nothing is scored and no position rolls, as
        a rank is then the position itself.
    like : int
        The first layer with the same budgets.
    scored : bool
        Some sequence has heavy hitters.
    """

    slots: int
    evicts: bool
    like: int
    scored: bool


def _growth(h2o: H2OConfig | None, layer: int) -> tuple:
    """A key that layers share whose caches grow alike, given the same budgets of the prompts."""
    if h2o is None:
        return ()
    return (h2o.evicts_generated_at(layer), *(h2o.ratios(layer) if h2o.budget_of == "text" else ()))


def layer_cache_plans(batch_layout: BatchLayout, h2o: H2OConfig | None,
                      num_layers: int) -> list[LayerCachePlan]:
    """One for each layer."""
    seen: dict[tuple, int] = {}
    budgets = [tuple(budget(h2o, layer, length) for length in batch_layout.lengths)
               for layer in range(num_layers)]
    like = [seen.setdefault((each, *_growth(h2o, layer)), layer)
            for layer, each in enumerate(budgets)]
    scored = [any(size is not None and size.heavy > 0 for size in each) for each in budgets]
    evicts = batch_layout.evicts or evicting_layers(batch_layout.sizes, h2o, num_layers)
    return [LayerCachePlan(*plan) for plan in zip(
        slots_of(batch_layout.sizes, h2o, num_layers), evicts, like, scored, strict=True)]
