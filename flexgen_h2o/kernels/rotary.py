"""Rotary position embeddings (RoPE, arXiv 2104.09864, section 3.2), in the GPT-NeoX layout.

Dimension i of a head is rotated with dimension i + rotary_dim / 2. Dimensions from rotary_dim on
are not rotated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexgen_h2o.kernels.torch_ops import chunk_rows


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the rows of packed sequences x [rows, heads, head_dim] in place, and return x.

    With cos and sin [rows, rotary_dim / 2] in x's dtype, products are rounded to it; in a wider
    dtype, only the result is rounded.
    """
    rows = chunk_rows(x)
    for chunk, c, s in zip(x.split(rows), cos[:, None].split(rows), sin[:, None].split(rows),
                           strict=True):
        if cos.dtype == x.dtype:
            rotate_(chunk, c, s)
        else:
            chunk.copy_(rotated(chunk, c, s))
    return x


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return a rotated copy of x.

    x is [..., head_dim]; cos and sin [..., rotary_dim / 2] broadcast over its leading dimensions.
    The result has x's dtype, and is computed in the tables' dtype if that is wider.
    """
    wide = torch.promote_types(x.dtype, cos.dtype)
    return rotate_(x.to(wide, copy=True), cos, sin).to(x.dtype)


def rotated_to(x: Tensor, positions: Tensor, rope: Callable[[Tensor], tuple[Tensor, Tensor] | None]
               ) -> Tensor:
    """Return x rotated to positions; x itself if `rope` returns None.

    x is [heads, tokens, head_dim], positions are [heads or 1, tokens]. `rope` returns cosines and
    sines [n, rotary_dim / 2] of positions [n].
    """
    tables = rope(positions.flatten())
    if tables is None:
        return x
    return rotated(x, *(table.unflatten(0, positions.shape) for table in tables))


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x in place, as `rotated` does, and return it."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    before = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(before, sin)
    return x
