"""Names of the implementations of an operation on a CPU, for planner and kernels. No torch."""

from __future__ import annotations

from collections.abc import Mapping

IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    # A product with weights of 16 or 32 bits: torch.mm, or ours for few rows of bfloat16.
    "linear": ("pytorch", "skinny"),
    # With quantized weights: ours on the codes, or PyTorch's on slices that are unpacked to
    # bfloat16 first.
    "linear_quantized": ("codes", "unpacked"),
    # Causal attention of whole prompts without scores: ours, or PyTorch's SDPA.
    "prefill_attention": ("blocks", "sdpa"),
}
"""By operation; the first is used where nothing speaks for another."""

Winners = Mapping[str, Mapping[int, Mapping[int, str]]]
"""The fastest implementation by operation, bits of the weights and rows, as it was measured."""
