"""The base of the layers of an `H2OCache`.

`update` caches nothing: it hands its layer on to the attention function, which sees queries too
and so can score.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from transformers.cache_utils import CacheLayerMixin

from flexgen_h2o.cache.prefill import LayerAttention
from flexgen_h2o.config.attention_form import DEFAULT_FORM
from flexgen_h2o.config.h2o import H2OConfig, windowed
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o import budget as budgets
from flexgen_h2o.h2o.budget import Budget
from flexgen_h2o.integrations.transformers.passes import ForwardPass, PassTracker
from flexgen_h2o.integrations.transformers.rotations import Rotations


class H2OLayer(CacheLayerMixin):
    """Base of the layers: count columns, tell pads from tokens, and pass work on.

    Parameters
    ----------
    index : int
        Of the layer, from 0.
    h2o : H2OConfig
    progress : PassTracker
        Shared by the layers of a cache; the first one drives it.
    rotations : Rotations or None
        With positions that roll.
    """

    is_sliding = False

    def __init__(self, index: int, h2o: H2OConfig, progress: PassTracker,
                 rotations: Rotations | None):
        super().__init__()
        self._index, self._h2o, self._progress = index, h2o, progress
        self._attention = LayerAttention()
        # Where nothing is evicted a rank is the position itself.
        self._rotations = None if h2o.is_full_at(index) else rotations
        self._columns = 0
        self._awaits = False

    def lazy_initialization(self, key_states, value_states=None) -> None:
        """Nothing: how much a layer holds is known once pads and prompts are, when it attends."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
               ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand on the new keys and values, and with the keys (their `h2o_layer`) this layer."""
        if self._awaits:
            raise UserError("an H2OCache works under enable_h2o(model, ...) alone, and for one "
                            "forward pass at a time")
        self._awaits = True
        keys = key_states.view_as(key_states)
        keys.h2o_layer = self
        return keys, value_states

    def get_seq_length(self, *args) -> int:
        """Columns so far, pads and evicted tokens included: positions are counted from it."""
        return self._columns

    def get_mask_sizes(self, *args) -> tuple[int, int]:
        """A mask over 0 keys: pads are all that this layer has to be told of."""
        return 0, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def reset(self) -> None:
        """Forget everything."""
        self._columns, self._awaits = 0, False
        self._forget()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Go on with some of the sequences, in this order: beams that survive."""
        if self._columns:
            self._choose(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with some of the sequences."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: nothing that goes through `generate` needs it."""
        raise UserError("an H2OCache cannot repeat its sequences: repeat the prompts")

    def crop(self, *args) -> None:
        """Refused: what was evicted in favour of the tokens to remove is gone."""
        raise UserError("an H2OCache cannot take tokens back, as what they evicted is gone: "
                        "assisted decoding and other uses of crop() don't work with it")

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
               mask: torch.Tensor | None, positions: torch.Tensor | None,
               attention: LayerAttention) -> torch.Tensor:
        """Attend from new tokens over what is cached and each other; cache them; evict.

        Parameters
        ----------
        q : Tensor [sequences, heads, columns, head_dim]
        k, v : Tensor [sequences, kv_heads, columns, head_dim]
            After rotation.
        mask : bool Tensor [sequences, columns so far], or None
            False for pads.
        positions : int Tensor [sequences or 1, columns], or None
            That q and k were rotated to; looked at if positions roll.
        attention : LayerAttention
            The form of the layer's attention, always the same. A window bounds what is cached.

        Returns
        -------
        Tensor [sequences, columns, heads, head_dim]
            0 for pads.
        """
        self._awaits = False
        if attention.form != self._attention.form and not self._columns:
            self._h2o = windowed(self._h2o, [DEFAULT_FORM] * self._index + [attention.form])
        self._attention = attention
        sequences, _, columns, _ = q.shape
        if self._index == 0:
            self._progress.begin(self._columns, sequences, columns, mask)
        step = self._progress.step
        if step is None or step.start != self._columns or step.columns != columns:
            raise UserError("an earlier forward pass broke off in the middle: make a new H2OCache")
        self._columns += columns
        q, k, v = (step.packed(x.transpose(1, 2)) for x in (q, k, v))
        bare = (q, k) if self._rotations is None else self._rotations.undone(step, positions, q, k)
        if step.decodes:
            return step.padded(self._decode(step, *bare, v))
        if step.is_prompt and self._h2o.prompt_chunk is None:
            return step.padded(self._prompt(step, q, k, v, bare=bare))
        out = torch.empty_like(q)
        parts = (x.split(step.new) for x in (*bare, v, out))
        for sequence, (past, new, *tensors) in enumerate(
                zip(step.past, step.new, *parts, strict=True)):
            for rows in _chunks(new, self._h2o.prompt_chunk):
                *chunk, answer = (x[rows] for x in tensors)
                answer.copy_(self._extend(step, sequence, past + rows.start, *chunk))
        return step.padded(out)

    def _budget(self, step: ForwardPass, sequence: int) -> Budget | None:
        return budgets.budget(self._h2o, self._index, step.prompts[sequence])

    def _evicts(self, step: ForwardPass, sequence: int, tokens: int) -> bool:
        """True if what is over the budget goes once a sequence has `tokens` tokens."""
        return (self._h2o.evicts_generated_at(self._index)
                or tokens <= step.prompts[sequence])

    def _scored(self, step: ForwardPass) -> bool:
        """True if there are heavy hitters in any sequence."""
        sizes = (self._budget(step, sequence) for sequence in range(len(step.prompts)))
        return any(size is not None and size.heavy > 0 for size in sizes)

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the cached keys and values."""

    @abstractmethod
    def _prompt(self, step: ForwardPass, q, k, v, *, bare) -> torch.Tensor:
        """Attend within whole prompts, packed [tokens, heads, head_dim], and cut them.

        bare is q and k as they are cached: where positions roll, before rotation.
        """

    @abstractmethod
    def _extend(self, step: ForwardPass, sequence: int, past: int, q, k, v) -> torch.Tensor:
        """Put a chunk [tokens, heads, head_dim], bare, onto `past` tokens of one sequence."""

    @abstractmethod
    def _decode(self, step: ForwardPass, q, k, v) -> torch.Tensor:
        """One new token of each sequence, [sequences, heads, head_dim], bare."""

    @abstractmethod
    def _choose(self, rows: list[int]) -> None:
        """Keep what is cached of these sequences, in this order."""

    @abstractmethod
    def _forget(self) -> None:
        """Let go of what is cached."""


def _chunks(tokens: int, chunk: int | None) -> list[slice]:
    """Rows that are put on together; chunks are counted from the end."""
    ends = range(tokens, 0, -(chunk or tokens)) if tokens else ()
    return [slice(max(0, end - (chunk or tokens)), end) for end in reversed(ends)]
