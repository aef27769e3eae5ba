"""Progress of the sequences of an `H2OCache`: their tokens so far, and those of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.budget import budget
from flexgen_h2o.h2o.eviction import decode_metadata


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass: `columns` of the padded batch, and the real tokens among them.

    Attributes
    ----------
    start : int
        Columns that came before, pads included.
    columns : int
    prompts : tuple of int
        Tokens of each sequence's prompt, pads left out; they set the budgets.
    past : tuple of int
        Tokens of each sequence before this pass, the evicted ones included.
    new : tuple of int
        Tokens of each that this pass brings.
    index : int64 Tensor [tokens] or None
        Where they stand in the flattened batch [sequences * columns]; None: there are no pads.
    memo : dict
        What layers share and need not make again.
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
        """True if nothing came before."""
        return self.start == 0

    @property
    def decodes(self) -> bool:
        """True if every sequence goes on by one token."""
        return self.start > 0 and self.columns == 1 and self.index is None

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of the real tokens, [tokens, ...], of x [sequences, columns, ...]."""
        rows = x.flatten(0, 1)
        return rows if self.index is None else rows[self.index.to(x.device)]

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The opposite of `packed`; 0 where pads are."""
        shape = (len(self.new), self.columns)
        if self.index is None:
            return rows.unflatten(0, shape)
        out = rows.new_zeros((shape[0] * shape[1], *rows.shape[1:]))
        return out.index_copy_(0, self.index.to(rows.device), rows).unflatten(0, shape)

    def metadata(self, h2o: H2OConfig, layer: int, device: torch.device
                 ) -> tuple[torch.Tensor, int]:
        """The `metadata` of `reference.decode_attention`, and the slots that it needs.

        Made once for all layers that share the budgets of each sequence.
        """
        sizes = tuple(budget(h2o, layer, prompt) for prompt in self.prompts)
        key = ("metadata", sizes, h2o.evicts_generated_at(layer), device)
        if key not in self.memo:
            made = decode_metadata(self.prompts, [past + 1 for past in self.past], h2o, layer)
            cached, _, _, full = made
            self.memo[key] = made.to(device), int((cached + 1 - full).max())
        return self.memo[key]


class PassTracker:
    """Lengths of the sequences, which all layers of a cache share."""

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
            Columns that came before.
        sequences, columns : int
        mask : bool Tensor [sequences, start + columns or columns], or None
            False for pads. None: there are none. A causal mask [sequences, 1, columns, start +
            columns or more], bool or to be added to logits, serves too: transformers 4 makes no
            other for OPT.

        Raises
        ------
        UserError
            Another number of sequences than before, another mask, an empty prompt.
        """
        if start and sequences != len(self._tokens):
            raise UserError(f"the cache holds {len(self._tokens)} sequences, but {sequences} came")
        new, index = (columns,) * sequences, None
        if mask is not None:
            real = _real(mask, start, columns)[:, -columns:]
            counts = tuple(real.sum(1).tolist())
            if counts != new:
                new, index = counts, real.flatten().nonzero()[:, 0]
        if start == 0:
            if 0 in new:
                raise UserError(f"prompt {new.index(0)} of the batch has no token, only pads")
            self._prompts, self._tokens = new, (0,) * sequences
        self.step = ForwardPass(start, columns, self._prompts, self._tokens, new, index)
        self._tokens = tuple(a + b for a, b in zip(self._tokens, new, strict=True))
        return self.step

    def choose(self, rows: list[int]) -> None:
        """Go on with some of the sequences, in this order; one may come several times."""
        self._prompts, self._tokens = (tuple(old[row] for row in rows)
                                       for old in (self._prompts, self._tokens))


def _real(mask: torch.Tensor, start: int, columns: int) -> torch.Tensor:
    """Mask of tokens that are no pad, bool [sequences, start + columns or columns], by either kind
    of mask."""
    if mask.ndim == 2 and mask.shape[1] in (columns, start + columns):
        return mask.bool()
    if mask.ndim == 4 and mask.shape[1:3] == (1, columns) and mask.shape[3] >= start + columns:
        seen = mask[:, 0, :, : start + columns]
        seen = seen if seen.dtype == torch.bool else seen == 0
        real = seen[:, -1]  # the last query sees all before it
        if columns == 1 or torch.equal(seen, real[:, None] & torch.ones_like(seen).tril(start)):
            return real
    raise UserError("an H2OCache takes an attention mask of [sequences, tokens so far] that marks "
                    f"pads, got another of shape {list(mask.shape)} for {start} + {columns} tokens")
