"""The metadata of a decode step: what the kernels are told of each sequence."""

from __future__ import annotations

import torch

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.budget import budget, cached


def decode_metadata(batch_layout: BatchLayout, sequences: slice, h2o: H2OConfig | None, *,
                    layer: int, token: int,
                    device: torch.device) -> torch.Tensor:
    """The metadata of the decode step of new token `token` (from 1), for all layers of one budget.

    Returns int32 [4, sequences], the `metadata` of `reference.decode_attention`.
    """
    rows = []
    for length in batch_layout.lengths[sequences]:
        size = budget(h2o, layer, length)
        before = cached(h2o, layer, length, token - 1)
        full = size is not None and h2o.evict_generated and before >= size.total
        rows.append((before, length + token, size.recent if size else 0, int(full)))
    return torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device)
