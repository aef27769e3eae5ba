"""Sparse attention of new tokens: all cached keys are read, and the values with large weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexgen_h2o.cache.parts import CachePart, picked
from flexgen_h2o.cache.shape import CacheShape
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.transfer import D2H, H2D, Transfers


class SparseAttention:
    """Decode attention as FlexGen has it (arXiv 2303.06865, section 5).

    Parameters
    ----------
    shape : CacheShape
        With `attn_sparsity` below 1.
    transfers : Transfers
    """

    def __init__(self, shape: CacheShape, transfers: Transfers):
        self._shape = shape
        self._transfers = transfers

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, part: CachePart, where: tuple[int, int],
               most: int, metadata: Tensor, **attention: Any) -> tuple[Tensor, Tensor]:
        """Attend over a part, and cache the new tokens.

        Parameters
        ----------
        q : Tensor [sequences, heads, head_dim]
        k, v : Tensor [sequences, kv_heads, head_dim]
        where : (int, int)
            Layer and batch.
        most : int
            Tokens before the new one of the sequence that has most.
        metadata : Tensor
            As of `ops.decode_attention`.
        **attention
            The form of attention.

        Returns
        -------
        out : Tensor like q
        taken : int64 Tensor [sequences, kv_heads]
            The slot that each new token got.
        """
        held, layout = part.get(*where), self._shape.layout
        index, weights = ops.choose_values(q, k, keys=held[0, :, :, :most], metadata=metadata,
                                           sparsity=self._shape.attn_sparsity, layout=layout,
                                           **attention)
        if part.gathers_values:
            index = self._carry(index, "cpu", D2H)
            values = self._carry(part.gather(*where, index), self._transfers.device.torch, H2D)
        else:
            values = picked(held[1], index)
        return ops.attend_chosen(k, v, slots=held, values=values, weights=weights,
                                 metadata=metadata, layout=layout)

    def _carry(self, x: Tensor, place, link: str) -> Tensor:
        """A copy in the other memory, waited for."""
        device = self._transfers.device
        began = device.stamp()
        there = x.to(place)
        self._transfers.moved(link, x.nbytes, began, device.stamp())
        return there
