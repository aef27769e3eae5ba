"""Positions that roll in models that rotate keys before a cache sees them: turning them back."""

from __future__ import annotations

import torch

from flexgen_h2o.errors import UserError
from flexgen_h2o.integrations.transformers.passes import ForwardPass
from flexgen_h2o.kernels.rotary import rotate_

GROWING = ("dynamic", "longrope")
"""Types of rotary embedding whose angles depend on how long the text is."""


class Rotations:
    """A model's rotary embedding (arXiv 2104.09864), and its inverse.

    Parameters
    ----------
    rotary : Module (x, positions [sequences, tokens]) -> cosines, sines
        transformers', [sequences, tokens, rotary_dim] each, in x's dtype.

    Raises
    ------
    UserError
        No such module, or one whose angles change as the text grows.
    """

    def __init__(self, rotary: torch.nn.Module | None):
        if rotary is None:
            raise UserError("positions='rolling' needs a model with rotary embeddings, and a cache "
                            "that enable_h2o or its new_cache() made")
        kind = getattr(rotary, "rope_type", "default")
        if kind in GROWING:
            raise UserError(f"positions='rolling' does not work with rotary embeddings of type "
                            f"{kind}: their angles change as the text grows")
        self._rotary = rotary

    def tables(self, positions: torch.Tensor, like: torch.Tensor | None = None
               ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, rotary_dim / 2] at positions [tokens], in float32.

        With `like`, rounded to its dtype as the model's own are.
        """
        like = positions.new_empty(0, dtype=torch.float32) if like is None else like[:0]
        both = self._rotary(like, positions[None])
        return tuple(x[0, :, : x.shape[-1] // 2].to(positions.device, torch.float32).contiguous()
                     for x in both)

    def undone(self, step: ForwardPass, positions: torch.Tensor | None, *rows: torch.Tensor
               ) -> list[torch.Tensor]:
        """Packed rows [tokens, heads, head_dim] as they were before the model rotated them.

        Exact but for one rounding to their dtype. positions are int [sequences or 1, columns].
        """
        if positions is None:
            raise UserError("positions='rolling' needs the position_ids of the tokens")
        key = ("undone", rows[0].device, rows[0].dtype)
        if key not in step.memo:  # the same for all layers on a device
            every = positions.expand(len(step.new), -1).to(rows[0].device)
            cos, sin = self.tables(step.packed(every), rows[0])
            # Rounded tables, and those of some types, change lengths too.
            scale = cos.square() + sin.square()
            step.memo[key] = (cos / scale)[:, None], (-sin / scale)[:, None]
        return [rotate_(x.to(torch.float32, copy=True), *step.memo[key]).to(x.dtype) for x in rows]
