"""One layer of an `H2OCache`: fixed slots that eviction really frees, or the definition as a mask.

`update` caches nothing: it hands its layer on to the attention function, which sees queries too
and so can score. See arXiv 2306.14048, algorithm 1.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import replace

import torch
from transformers.cache_utils import CacheLayerMixin

from flexgen_h2o.cache import budget as budgets
from flexgen_h2o.cache.appending import Standing, append
from flexgen_h2o.cache.bookkeeping import eviction_of, narrowed, new_book
from flexgen_h2o.cache.budget import Budget
from flexgen_h2o.cache.seats import Seats, Span
from flexgen_h2o.cache.simulation import SimulatedCache
from flexgen_h2o.config import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.integrations.progress import Progress, Step
from flexgen_h2o.integrations.rotations import Rotations
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.eviction import Book, Cut
from flexgen_h2o.storage.quantization import GroupLayout

GROWTH = 64
"""Slots by which a layer grows that is not at its budget yet."""


class H2OLayer(CacheLayerMixin):
    """What every layer does: count columns, tell pads from tokens, and pass work on.

    Parameters
    ----------
    index : int
        Of the layer, from 0.
    h2o : H2OConfig
    progress : Progress
        Shared by the layers of a cache; the first one drives it.
    rotations : Rotations or None
        With positions that roll.
    """

    is_sliding = False

    def __init__(self, index: int, h2o: H2OConfig, progress: Progress,
                 rotations: Rotations | None):
        super().__init__()
        self._index, self._h2o, self._progress = index, h2o, progress
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
               mask: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
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

        Returns
        -------
        Tensor [sequences, columns, heads, head_dim]
            0 for pads.
        """
        self._awaits = False
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
            return step.spread(self._decode(step, *bare, v))
        if step.is_prompt and self._h2o.prompt_chunk is None:
            return step.spread(self._prompt(step, q, k, v, bare=bare))
        out = torch.empty_like(q)
        parts = (x.split(step.new) for x in (*bare, v, out))
        for sequence, (past, new, *tensors) in enumerate(
                zip(step.past, step.new, *parts, strict=True)):
            for rows in _chunks(new, self._h2o.prompt_chunk):
                *chunk, answer = (x[rows] for x in tensors)
                answer.copy_(self._extend(step, sequence, past + rows.start, *chunk))
        return step.spread(out)

    def _budget(self, step: Step, sequence: int) -> Budget | None:
        return budgets.budget(self._h2o, self._index, step.prompts[sequence])

    def _evicts(self, step: Step, sequence: int, tokens: int) -> bool:
        """Whether what is over the budget goes once a sequence has `tokens` tokens."""
        return self._h2o.evict_generated or tokens <= step.prompts[sequence]

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the cached keys and values."""

    @abstractmethod
    def _prompt(self, step: Step, q, k, v, *, bare) -> torch.Tensor:
        """Attend within whole prompts, packed [tokens, heads, head_dim], and cut them.

        bare is q and k as they are cached: where positions roll, before rotation.
        """

    @abstractmethod
    def _extend(self, step: Step, sequence: int, past: int, q, k, v) -> torch.Tensor:
        """Put a chunk [tokens, heads, head_dim], bare, onto `past` tokens of one sequence."""

    @abstractmethod
    def _decode(self, step: Step, q, k, v) -> torch.Tensor:
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


class SlotLayer(H2OLayer):
    """Keys and values in slots [2, sequences, kv_heads, slots, width], as in `KVCache`.

    A layer that evicts has as many slots as the budget has tokens once that many have come.
    """

    def __init__(self, index: int, h2o: H2OConfig, progress: Progress,
                 rotations: Rotations | None, *, layout: GroupLayout | None):
        super().__init__(index, h2o, progress, rotations)
        self._layout = layout
        self._forget()

    def _forget(self) -> None:
        self._slots: torch.Tensor | None = None
        self._book: Book | None = None

    def nbytes(self) -> int:
        """Bytes of the slots; the scores, 8 bytes a slot, come on top where there are some."""
        return 0 if self._slots is None else self._slots.nbytes

    def _prompt(self, step: Step, q, k, v, *, bare) -> torch.Tensor:
        sizes = [self._budget(step, sequence) for sequence in range(len(step.new))]
        evicts, mass = sizes[0] is not None, None
        if evicts and self._h2o.scored:
            mass = torch.zeros((k.shape[1], len(k)), device=k.device)
        out = ops.prefill_attention(q, k, v, list(step.new), mass=mass,
                                    decay=eviction_of(self._h2o).decay)
        self._reserve(step, max(budgets.kept(self._h2o, self._index, new) for new in step.new), k)
        if evicts:
            cuts = [Cut(new, size.heavy, size.recent)
                    for new, size in zip(step.new, sizes, strict=True)]
            ops.select_heavy_hitters(bare[1], v, mass, cuts=cuts, slots=self._slots,
                                     book=self._book, layout=self._layout)
            self._settle()
            return out
        for held, keys, values in zip(self._slots.unbind(1), k.split(step.new), v.split(step.new),
                                      strict=True):
            fresh = torch.stack((keys, values)).transpose(1, 2)
            held[:, :, : len(keys)] = (fresh if self._layout is None
                                       else ops.quantize_groups(fresh, self._layout))
        return out

    def _extend(self, step: Step, sequence: int, past: int, q, k, v) -> torch.Tensor:
        size, tokens = self._budget(step, sequence), past + len(q)
        cached = self._cached(step, sequence, past)
        self._reserve(step, self._cached(step, sequence, tokens), k)
        standing, book = Standing(cached, past), None
        if self._book is not None:
            # With rotations there is a book although nothing more is to go: all are heavy then.
            heavy = size.heavy if self._evicts(step, sequence, tokens) else tokens
            standing = Standing(cached, past, heavy, size.recent, scored=self._h2o.scored)
            book = narrowed(self._book, slice(sequence, sequence + 1))
            if self._rotations is not None:
                book = replace(book, rope=self._rope(cached + len(q), k.device))
        out = append(q, k, v, held=self._slots[:, sequence], standing=standing, book=book,
                     layout=self._layout)
        if sequence == len(step.new) - 1 and tokens == step.prompts[sequence]:
            self._settle()
        return out

    def _decode(self, step: Step, q, k, v) -> torch.Tensor:
        turn, needed = step.turn(self._h2o, self._index, q.device)
        self._reserve(step, needed, k)
        out, _ = ops.decode_attention(q, k, v, slots=self._slots, turn=turn, layout=self._layout,
                                      book=self._book)
        return out

    def _cached(self, step: Step, sequence: int, tokens: int) -> int:
        """Slots that a sequence fills once it has so many tokens."""
        prompt = step.prompts[sequence]
        if tokens < prompt:
            size = self._budget(step, sequence)
            return tokens if size is None else min(tokens, size.total)
        return budgets.cached(self._h2o, self._index, prompt, tokens - prompt)

    def _settle(self) -> None:
        """Prompts are cut: where that was all, scores are of no use from here on."""
        if not self._h2o.evict_generated and self._rotations is None:
            self._book = None

    def _rope(self, ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotations by rank."""
        return self._rotations.tables(torch.arange(ranks, device=device))

    def _reserve(self, step: Step, needed: int, k: torch.Tensor) -> None:
        """Have at least so many slots; k's last two dimensions are [kv_heads, head_dim]."""
        old = self._slots
        if old is not None and old.shape[3] >= needed:
            return
        sizes = [self._budget(step, sequence) for sequence in range(len(step.prompts))]
        evicts = sizes[0] is not None
        slots = -(-needed // GROWTH) * GROWTH
        if evicts and self._h2o.evict_generated:
            slots = min(slots, max(size.total for size in sizes))
        width, dtype = k.shape[-1], k.dtype
        if self._layout is not None:
            width, dtype = self._layout.nbytes, torch.uint8
        shape = (len(step.prompts), k.shape[-2], slots)
        self._slots = torch.empty((2, *shape, width), dtype=dtype, device=k.device)
        book = self._book
        if evicts and (old is None or book is not None):
            rope = None if self._rotations is None else self._rope(slots + 1, k.device)
            self._book = new_book(shape, eviction_of(self._h2o), rope=rope, device=k.device)
        if old is not None:
            self._slots[..., : old.shape[3], :] = old
        if book is not None:
            for name in ("mass", "positions", *(("ranks",) if self._rotations else ())):
                getattr(self._book, name)[..., : old.shape[3]] = getattr(book, name)

    def _choose(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self._slots.device)
        self._slots = self._slots.index_select(1, index)
        if self._book is not None:
            ranks = self._book.ranks
            self._book = replace(self._book, mass=self._book.mass[index],
                                 positions=self._book.positions[index],
                                 ranks=None if ranks is None else ranks[index])


class SimulatedLayer(H2OLayer):
    """The definition: everything stays, and what eviction took is masked (`H2OConfig.simulate`)."""

    def __init__(self, index: int, h2o: H2OConfig, progress: Progress,
                 rotations: Rotations | None):
        super().__init__(index, h2o, progress, rotations)
        self._forget()

    def _forget(self) -> None:
        self._sequences: list[SimulatedCache] = []

    def nbytes(self) -> int:
        """Bytes of all keys and values, in float32."""
        return sum(one.nbytes() for one in self._sequences)

    def _prompt(self, step: Step, q, k, v, *, bare) -> torch.Tensor:
        rows = zip(*(x.split(step.new) for x in (*bare, v)), strict=True)
        return torch.cat([self._extend(step, sequence, 0, *some)
                          for sequence, some in enumerate(rows)])

    def _extend(self, step: Step, sequence: int, past: int, q, k, v) -> torch.Tensor:
        if past == 0:
            self._start(step, sequence)
        one, tokens = self._sequences[sequence], past + len(q)
        # A span is evicted from if it ends its prompt.
        end = tokens if self._evicts(step, sequence, tokens) else tokens + 1
        one.resume([Seats((end,), 0)])
        return one.attend_prompt(0, 0, q, k, v, spans=[Span(0, past, tokens)], rope=None)

    def _start(self, step: Step, sequence: int) -> None:
        """Give a sequence a cache of its own, its budget in tokens."""
        size = self._budget(step, sequence)
        h2o = H2OConfig(simulate=True)
        if size is not None:
            h2o = H2OConfig(
                heavy_tokens=size.heavy, recent_tokens=size.recent, sink_tokens=size.sinks,
                score=self._h2o.score, decay=self._h2o.decay, positions=self._h2o.positions,
                evict_generated=self._h2o.evict_generated, simulate=True)
        one = SimulatedCache(h2o, rope=self._rope)
        one.begin([Seats((step.prompts[sequence],), 0)])
        self._sequences.append(one)

    def _rope(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self._rotations is None else self._rotations.tables(places)

    def _decode(self, step: Step, q, k, v) -> torch.Tensor:
        rows = zip(*(x.split(1) for x in (q, k, v)), strict=True)
        return torch.cat([one.attend_token(0, 0, *some, token=0, rope=None).outputs[0]
                          for one, some in zip(self._sequences, rows, strict=True)])

    def _choose(self, rows: list[int]) -> None:
        self._sequences = [copy.deepcopy(self._sequences[row]) for row in rows]
