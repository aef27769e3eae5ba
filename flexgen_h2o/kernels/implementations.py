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

GPU_IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    # Causal attention of prompts with scores: a blockwise kernel, or torch.matmul.
    "scored_prefill": ("blocks", "matmul"),
    # The query heads of a KV head in a decode step: together on tensor cores, or one by one.
    "decode_attention": ("matrix units", "vectors"),
    # Matmul with a quantized weight: kernels with and without tensor cores, or cuBLAS with slices
    # of the weight that are dequantized.
    "linear_quantized": ("matrix units", "vectors", "unpacked"),
    # The same for MXFP4 and 12-bit weights.
    "linear_short_floats": ("vectors", "unpacked"),
}
"""Implementations on a GPU by operation. `dispatch.GPU_TABLE` chooses; nothing is timed."""

AutotuneTable = Mapping[str, Mapping[int, Mapping[int, str]]]
"""The fastest implementation by operation, bit width of the weights, and rows, as timed."""
