"""The metadata of a decode step: what the kernels are told of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.budget import budget, cached


def decode_metadata(prompts: Sequence[int], tokens: Sequence[int], h2o: H2OConfig | None,
                    layer: int) -> torch.Tensor:
    """The metadata of a step that appends one token to each sequence, for all layers of one budget.

    Parameters
    ----------
    prompts : sequence of int
        Tokens of each prompt.
    tokens : sequence of int
        Tokens of each sequence, the evicted ones and the new one included.

    Returns
    -------
    int32 Tensor [4, sequences], on the host
        The `metadata` of `reference.decode_attention`.
    """
    pairs = list(zip(prompts, tokens, strict=True))
    rows = {}
    for prompt, count in set(pairs):  # sequences are often of one length, and then alike
        size = budget(h2o, layer, prompt, count - prompt)
        before = cached(h2o, layer, prompt, count - 1 - prompt)
        full = size is not None and h2o.evicts_generated_at(layer) and before >= size.total
        rows[prompt, count] = before, count, size.recent if size else 0, int(full)
    return torch.tensor([rows[pair] for pair in pairs], dtype=torch.int32).T.contiguous()
