"""Records of whole pages on disk, as tensors."""

from __future__ import annotations

from torch import Tensor

from flexgen_h2o.cache.parts import Records
from flexgen_h2o.config.page_layout import PageLayout


def page_layout(records: Records, slots: int) -> PageLayout:
    """The layout of a layer with so many slots of a sequence."""
    return PageLayout(records.kv_heads, records.nbytes(1, 1) // records.kv_heads, slots)


def in_records(buffer: Tensor, layout: PageLayout, records: Records) -> Tensor:
    """Records in a buffer, uint8 [n * record_bytes], as [n, tokens, kinds, width] elements."""
    lines = buffer.view(-1, layout.record_bytes)[:, : layout.tokens * layout.token_bytes]
    return lines.view(records.dtype).unflatten(1, (layout.tokens, records.kinds, records.width))


def in_rows(buffer: Tensor, layout: PageLayout, records: Records) -> Tensor:
    """Records in a buffer, as many of each head, as slots of tokens in their order, strided:
    [kinds, kv_heads, rows, tokens, width]."""
    rows = in_records(buffer, layout, records).unflatten(0, (layout.kv_heads, -1))
    return rows.permute(3, 0, 1, 2, 4)
