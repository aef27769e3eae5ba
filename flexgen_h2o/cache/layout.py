"""Sizes of a KV cache: bytes of a slot, slots of each layer, and the plan of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.layers import DEFAULT_VARIANT, AttentionVariant
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.budget import budget, num_slots


@dataclass(frozen=True)
class SlotLayout:
    """Contents of a slot: `kinds` entries of `width` elements of `dtype` for each KV head.

    An entry is a key or value in the run's dtype, or its quantized groups in bytes. The kinds are
    keys and values, or one kind whose entries hold both (`CacheLayout`, `CacheShape.latent`).
    """

    kv_heads: int
    width: int
    dtype: torch.dtype
    kinds: int = 2

    def shape(self, sequences: int, slots: int) -> tuple[int, ...]:
        """Return [kinds, sequences, kv_heads, slots, width]."""
        return self.kinds, sequences, self.kv_heads, slots, self.width

    def nbytes(self, sequences: int, slots: int) -> int:
        """Return the bytes of the slots of one layer."""
        return self.kinds * sequences * self.kv_heads * slots * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Capacity:
    """Capacity of a tier of a cache: batches of a block, and slots of a sequence in each layer."""

    batches: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class CacheShape:
    """Sizes that all sequences share.

    Attributes
    ----------
    num_layers, kv_heads, head_dim : int
    dtype : torch.dtype
        Data type of a cache that is not quantized.
    layout : CacheLayout or None
        Layout of quantized keys and values; None: the cache has `dtype`.
    attn_sparsity : float
        Share of the cached values that a new token reads (`kernels.reference.sparse`).
    attention : tuple of AttentionVariant
        Variant of each layer. Empty: all layers have the default variant.
    latent : bool
        Slots hold keys only, and a value is the end of its key (`config.layers.LatentConfig`).
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    layout: CacheLayout | None = None
    attn_sparsity: float = 1.0
    attention: tuple[AttentionVariant, ...] = ()
    latent: bool = False

    def attention_variant(self, layer: int) -> AttentionVariant:
        """Return the variant of attention of a layer."""
        return self.attention[layer] if self.attention else DEFAULT_VARIANT

    def slot_layout(self, *, quantized: bool = True) -> SlotLayout:
        """Return the contents of a slot, in the run's dtype unless the cache is quantized."""
        if self.layout is None or not quantized:
            return SlotLayout(self.kv_heads, self.head_dim, self.dtype, 1 if self.latent else 2)
        return SlotLayout(self.kv_heads, self.layout.width, torch.uint8, self.layout.kinds)

    def token_bytes(self) -> int:
        """Return the bytes of one cached token of a sequence in all layers."""
        return self.num_layers * self.slot_layout().nbytes(1, 1)


@dataclass(frozen=True)
class CacheSize:
    """Capacity of a cache.

    Attributes
    ----------
    sequences : int
        Sequences per batch.
    batches : int
        Batches per block.
    slots : tuple of int
        Slots of a sequence in each layer.
    prompt : int
        Tokens of the longest prompt that is prefilled in chunks; 0 without chunked prefill.
    """

    sequences: int
    batches: int
    slots: tuple[int, ...]
    prompt: int = 0

    def select_layers(self, layers: Sequence[int]) -> CacheSize:
        """Return the capacity of a cache of some layers."""
        return replace(self, slots=tuple(self.slots[layer] for layer in layers))

    def covers(self, other: CacheSize) -> bool:
        """Return whether a cache of this size is at least as large as `other` in each dimension."""
        sizes = ((size.sequences, size.batches, *size.slots, size.prompt) for size in (self, other))
        return all(a >= b for a, b in zip(*sizes, strict=True))


def slots_of(sizes: Iterable[tuple[int, int]], h2o: H2OConfig | None, num_layers: int
             ) -> tuple[int, ...]:
    """Return the slots of each layer that hold every sequence of some sizes.

    A size is (tokens of the prompt, tokens appended to it).
    """
    return tuple(max(num_slots(h2o, layer, *size) for size in sizes) for layer in range(num_layers))


def evicting_layers(sizes: Iterable[tuple[int, int]], h2o: H2OConfig | None, num_layers: int
                    ) -> tuple[bool, ...]:
    """Return for each layer whether some sequence of these sizes will lose a token."""
    def evicts(layer: int, length: int, new: int) -> bool:
        new *= h2o is None or h2o.evicts_generated_at(layer)
        return num_slots(h2o, layer, length, new) < length + new

    return tuple(any(evicts(layer, *size) for size in sizes) for layer in range(num_layers))


@dataclass(frozen=True)
class LayerCachePlan:
    """The plan of one layer's cache for a batch.

    Attributes
    ----------
    slots : int
    evicts : bool
        Some sequence will lose a token. If not, nothing is scored and positions need no ranks.
    budget_group : int
        The first layer with the same budgets.
    scored : bool
        Some sequence has heavy hitters.
    """

    slots: int
    evicts: bool
    budget_group: int
    scored: bool


def layer_cache_plans(batch_layout: BatchLayout, h2o: H2OConfig | None,
                      num_layers: int) -> list[LayerCachePlan]:
    """Return the plan of each layer for a batch."""
    def growth(layer: int) -> tuple:
        # These decide how budgets grow with generated tokens, together with the prompts' budgets.
        if h2o is None:
            return ()
        grows = (*h2o.ratios(layer), h2o.window(layer)) if h2o.budget_of == "text" else ()
        return h2o.evicts_generated_at(layer), *grows

    first: dict[tuple, int] = {}
    budgets = [tuple(budget(h2o, layer, length) for length in batch_layout.lengths)
               for layer in range(num_layers)]
    groups = [first.setdefault((sizes, *growth(layer)), layer)
              for layer, sizes in enumerate(budgets)]
    scored = [any(size is not None and size.heavy > 0 for size in sizes) for sizes in budgets]
    evicts = batch_layout.evicts or evicting_layers(batch_layout.sizes, h2o, num_layers)
    return [LayerCachePlan(*plan) for plan in zip(
        slots_of(batch_layout.sizes, h2o, num_layers), evicts, groups, scored, strict=True)]
