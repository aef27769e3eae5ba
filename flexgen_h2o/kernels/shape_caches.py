"""A bound on what PyTorch keeps for each shape of matrix product that it has met on a CPU."""

from __future__ import annotations

import os

SETTINGS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables of oneDNN, and of PyTorch's layer above it: the products that each keeps prepared."""

PRODUCTS = 64
"""A model's matrices with a few numbers of rows each: all that repeats from step to step."""


def bound_shape_caches() -> None:
    """Let PyTorch keep at most `PRODUCTS` products prepared, unless the environment says else.

    One in bfloat16 takes about half a megabyte, and 1,024 are kept by default. Prompts come with
    ever new numbers of rows, so that a job of many texts grew by a gigabyte. The variables are
    read with the first product of the process.
    """
    for name in SETTINGS:
        os.environ.setdefault(name, str(PRODUCTS))
