"""Records of whole pages on disk, as tensors: what lies in them, and which of them to read."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from flexgen_h2o.cache.parts import Records
from flexgen_h2o.config.page_layout import PageLayout


def page_layout(records: Records, slots: int) -> PageLayout:
    """The layout of a layer with so many slots of a sequence."""
    return PageLayout(records.kv_heads, 2 * records.width * records.dtype.itemsize, slots)


def in_records(buffer: Tensor, layout: PageLayout, records: Records) -> Tensor:
    """Records in a buffer, uint8 [n * record_bytes], as [n, tokens, 2, width] elements."""
    lines = buffer.view(-1, layout.record_bytes)[:, : layout.tokens * layout.token_bytes]
    return lines.view(records.dtype).unflatten(1, (layout.tokens, 2, records.width))


def tokens_of(buffer: Tensor, layout: PageLayout) -> np.ndarray:
    """Records in a buffer as [n, tokens] elements, each of which is a token's key and value."""
    return np.ndarray((len(buffer) // layout.record_bytes, layout.tokens),
                      np.dtype((np.void, layout.token_bytes)), buffer.numpy(),
                      strides=(layout.record_bytes, layout.token_bytes))


def in_rows(buffer: Tensor, layout: PageLayout, records: Records) -> Tensor:
    """Records in a buffer, as many of each head, as keys and values of tokens in their order,
    strided: [2, kv_heads, rows, tokens, width]."""
    rows = in_records(buffer, layout, records).unflatten(0, (layout.kv_heads, -1))
    return rows.permute(3, 0, 1, 2, 4)


def runs_of(records: np.ndarray, *, gap: int, most: int) -> np.ndarray:
    """The runs of neighbours to read for some records.

    Parameters
    ----------
    records : int64 ndarray [n]
        Their numbers, ascending, different, at least one.
    gap : int
        Records between two that are read with them, at most.
    most : int
        Records of a run, at most.

    Returns
    -------
    int64 ndarray [2, runs]
        The first record of each, and how many there are.
    """
    before, after = records[:-1], records[1:]
    apart = (after - before > gap + 1) | (after // most != before // most)
    firsts = np.concatenate((records[:1], after[apart]))
    lasts = np.concatenate((before[apart], records[-1:]))
    return np.stack((firsts, lasts - firsts + 1))
