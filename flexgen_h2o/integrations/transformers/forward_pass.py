"""Forward passes of a model with an `H2OCache`: tokens without pads, lengths, and rotations."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.budget import budget
from flexgen_h2o.h2o.eviction import decode_metadata
from flexgen_h2o.kernels.torch_ops import rotated

DYNAMIC_ROPE_TYPES = ("dynamic", "longrope")
"""Types of rotary embedding whose angles depend on the length of the text."""


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass: `columns` of the padded batch, and the tokens among them.

    Attributes
    ----------
    start : int
        Columns of earlier passes, pads included.
    columns : int
    prompts : tuple of int
        Tokens of each sequence's prompt, without pads; they set the budgets.
    past : tuple of int
        Tokens of each sequence before this pass, evicted ones included.
    new : tuple of int
        Tokens of each sequence in this pass.
    index : int64 Tensor [tokens] or None
        Rows of the tokens in the flattened batch [sequences * columns]; None: there are no pads.
    memo : dict
        Results that layers share.
    """

    start: int
    columns: int
    prompts: tuple[int, ...]
    past: tuple[int, ...]
    new: tuple[int, ...]
    index: torch.Tensor | None
    memo: dict = field(default_factory=dict)

    @property
    def is_prompt(self) -> bool:
        """True for the first pass."""
        return self.start == 0

    @property
    def is_decode(self) -> bool:
        """True if every sequence gets one token."""
        return self.start > 0 and self.columns == 1 and self.index is None

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens, [tokens, ...], of x [sequences, columns, ...]."""
        rows = x.flatten(0, 1)
        return rows if self.index is None else rows[self.index.to(x.device)]

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [sequences, columns, ...] of rows of tokens, with 0 for pads."""
        shape = (len(self.new), self.columns)
        if self.index is None:
            return rows.unflatten(0, shape)
        out = rows.new_zeros((shape[0] * shape[1], *rows.shape[1:]))
        return out.index_copy_(0, self.index.to(rows.device), rows).unflatten(0, shape)

    def metadata(self, h2o: H2OConfig, layer: int, device: torch.device
                 ) -> tuple[torch.Tensor, int]:
        """Return the metadata of `ops.decode_attention`, and the slots that the step needs.

        Layers with the same budgets share it.
        """
        sizes = tuple(budget(h2o, layer, prompt) for prompt in self.prompts)
        key = ("metadata", sizes, h2o.evicts_generated_at(layer), device)
        if key not in self.memo:
            metadata = decode_metadata(self.prompts, [past + 1 for past in self.past], h2o, layer)
            cached, _, _, full = metadata
            self.memo[key] = metadata.to(device), int((cached + 1 - full).max())
        return self.memo[key]


class PassTracker:
    """Lengths of the sequences of a cache, which its layers share.

    Attributes
    ----------
    step : ForwardPass or None
        The current forward pass.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Forget all sequences."""
        self.step: ForwardPass | None = None
        self._prompts: tuple[int, ...] = ()
        self._tokens: tuple[int, ...] = ()

    def begin(self, start: int, sequences: int, columns: int,
              mask: torch.Tensor | None) -> ForwardPass:
        """Start a forward pass.

        Parameters
        ----------
        start : int
            Columns of earlier passes.
        sequences, columns : int
        mask : bool Tensor [sequences, start + columns or columns], or None
            False for pads; None: there are none. A causal mask [sequences, 1, columns, at least
            start + columns], bool or added to logits, works too: transformers 4 makes it for OPT.

        Raises
        ------
        UserError
            Another number of sequences than before, another mask, an empty prompt.
        """
        if start and sequences != len(self._tokens):
            raise UserError(f"the cache holds {len(self._tokens)} sequences, but {sequences} came")
        new, index = (columns,) * sequences, None
        if mask is not None:
            is_token = _token_mask(mask, start, columns)[:, -columns:]
            counts = tuple(is_token.sum(1).tolist())
            if counts != new:
                new, index = counts, is_token.flatten().nonzero()[:, 0]
        if start == 0:
            if 0 in new:
                raise UserError(f"prompt {new.index(0)} of the batch has no token, only pads")
            self._prompts, self._tokens = new, (0,) * sequences
        self.step = ForwardPass(start, columns, self._prompts, self._tokens, new, index)
        self._tokens = tuple(a + b for a, b in zip(self._tokens, new, strict=True))
        return self.step

    def select(self, rows: list[int]) -> None:
        """Continue some of the sequences, in this order; one may be repeated."""
        self._prompts, self._tokens = (tuple(lengths[row] for row in rows)
                                       for lengths in (self._prompts, self._tokens))


def _token_mask(mask: torch.Tensor, start: int, columns: int) -> torch.Tensor:
    """Return a mask of tokens, bool [sequences, start + columns or columns], of either mask."""
    if mask.ndim == 2 and mask.shape[1] in (columns, start + columns):
        return mask.bool()
    if mask.ndim == 4 and mask.shape[1:3] == (1, columns) and mask.shape[3] >= start + columns:
        visible = mask[:, 0, :, : start + columns]
        visible = visible if visible.dtype == torch.bool else visible == 0
        is_token = visible[:, -1]  # the last query sees all tokens before it
        causal = torch.ones_like(visible).tril(start)
        if columns == 1 or torch.equal(visible, is_token[:, None] & causal):
            return is_token
    raise UserError("an H2OCache takes an attention mask of [sequences, tokens so far] that marks "
                    f"pads, got another of shape {list(mask.shape)} for {start} + {columns} tokens")


class Rotations:
    """A model's rotary embedding (arXiv 2104.09864), and its inverse.

    transformers' models rotate keys before a cache sees them. Rolling positions undo that.

    Parameters
    ----------
    rotary : Module (x, positions [sequences, tokens]) -> cosines, sines
        transformers' module; it returns [sequences, tokens, rotary_dim] each, in x's dtype.

    Raises
    ------
    UserError
        There is no module, or its angles change as the text grows.
    """

    def __init__(self, rotary: torch.nn.Module | None):
        if rotary is None:
            raise UserError("positions='rolling' needs a model with rotary embeddings, and a cache "
                            "that enable_h2o or its new_cache() made")
        kind = getattr(rotary, "rope_type", "default")
        if kind in DYNAMIC_ROPE_TYPES:
            raise UserError(f"positions='rolling' does not work with rotary embeddings of type "
                            f"{kind}: their angles change as the text grows")
        self._rotary = rotary

    def tables(self, positions: torch.Tensor, like: torch.Tensor | None = None
               ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, float32 [tokens, rotary_dim / 2], at positions [tokens].

        With `like` they are rounded to its dtype, as the model's are.
        """
        like = positions.new_empty(0, dtype=torch.float32) if like is None else like[:0]
        tables = self._rotary(like, positions[None])
        return tuple(x[0, :, : x.shape[-1] // 2].to(positions.device, torch.float32).contiguous()
                     for x in tables)

    def undo(self, step: ForwardPass, positions: torch.Tensor | None, *rows: torch.Tensor
             ) -> list[torch.Tensor]:
        """Return packed rows [tokens, heads, head_dim] before the model's rotation.

        `positions` are int [sequences or 1, columns]. The result is exact up to one rounding.
        """
        if positions is None:
            raise UserError("positions='rolling' needs the position_ids of the tokens")
        key = ("undo", rows[0].device, rows[0].dtype)
        if key not in step.memo:  # the same for all layers on a device
            positions = positions.expand(len(step.new), -1).to(rows[0].device)
            cos, sin = self.tables(step.packed(positions), rows[0])
            # Rounded tables, and the tables of some rope types, also scale vectors.
            scale = cos.square() + sin.square()
            step.memo[key] = (cos / scale)[:, None], (-sin / scale)[:, None]
        return [rotated(x, *step.memo[key]) for x in rows]
