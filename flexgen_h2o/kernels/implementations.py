"""Names of the implementations of an operation, for planner and kernels. No torch."""

from __future__ import annotations

from collections.abc import Mapping

IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    # Matmul with a 16-bit weight: torch.mm; kernels for few rows, for many rows with AMX tiles, and
    # for any rows with float32 arithmetic.
    "linear": ("pytorch", "skinny", "tiled", "float32"),
    # Matmul with a quantized weight: a kernel that reads the quantized values, or torch.mm with
    # slices of the weight that are dequantized to bfloat16.
    "linear_quantized": ("codes", "unpacked"),
    # Causal attention of whole prompts without scores: a blockwise kernel, or PyTorch's SDPA.
    "prefill_attention": ("blocks", "sdpa"),
}
"""Implementations on a CPU by operation. The first is the default."""

AutotuneTable = Mapping[str, Mapping[int, Mapping[int, str]]]
"""The fastest implementation by operation, bit width of the weights, and rows, as timed."""
