"""Names of the implementations of an operation, for planner and kernels. No torch."""

from __future__ import annotations

from collections.abc import Mapping

IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    # A product with weights of 16 or 32 bits: torch.mm, or ours for few rows of bfloat16, ours for
    # many of them in AMX tiles, or ours that multiplies weights of 16 bits as float32.
    "linear": ("pytorch", "skinny", "tiled", "float32"),
    # With quantized weights: ours on the codes, or PyTorch's on slices that are unpacked to
    # bfloat16 first.
    "linear_quantized": ("codes", "unpacked"),
    # Causal attention of whole prompts without scores: ours, or PyTorch's SDPA.
    "prefill_attention": ("blocks", "sdpa"),
}
"""By operation; the first is used where nothing speaks for another."""

GPU_IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    # Causal attention of prompts with scores: our blocks on matrix units, or torch.matmul's.
    "scored_prefill": ("blocks", "matmul"),
    # The query heads of a KV head in a decode step: together on matrix units, or one by one.
    "decode_attention": ("matrix units", "vectors"),
    # A product with quantized weights: ours on the codes, or cuBLAS's on slices that are unpacked.
    "linear_quantized": ("matrix units", "vectors", "unpacked"),
    # The same where weights are MXFP4 or of 12 bits.
    "linear_short_floats": ("vectors", "unpacked"),
}
"""The same on a GPU, where nothing is measured: `dispatch.GPU_TABLE` decides."""

AutotuneTable = Mapping[str, Mapping[int, Mapping[int, str]]]
"""The fastest implementation by operation, bits of the weights and rows, as it was measured."""
