"""The KV cache of a block: fixed slots over tiers; append, attend, evict, write back.

The cache of a GPU batch is ``[keys and values, sequences, kv_heads, slots, width]`` for each
decoder layer, contiguous; nothing is shifted or concatenated. A percentage of the cache is a
share of each batch's sequences. With an eviction policy (arXiv 2306.14048) there are as many
slots as the budget has tokens, and a new token takes its victim's slot; the slots' order means
nothing then. Prompts that come in chunks are held whole until they are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flexgen_h2o.cache import budget as budgets
from flexgen_h2o.cache.bookkeeping import Book, Turn
from flexgen_h2o.cache.eviction import Eviction
from flexgen_h2o.cache.parts import Changed, Grid, Part, Records, make_parts
from flexgen_h2o.cache.seats import Seats, Span
from flexgen_h2o.cache.shape import CacheShape, CacheSize, fates
from flexgen_h2o.config import H2OConfig, Policy
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.rotary import apply_rope_, rotated
from flexgen_h2o.storage.disk import RunFolder
from flexgen_h2o.storage.placement import split
from flexgen_h2o.storage.transfer import DOWN, UP, Transfers

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [rows, rotary_dim / 2] each."""


class KVCache:
    """The cache of one block of GPU batches, reused by the next.

    Parameters
    ----------
    shape : CacheShape
    size : CacheSize
    policy : Policy
        Where the cache lives, and where attention over host memory runs.
    h2o : H2OConfig or None
        What stays cached; None is everything.
    rope : callable (positions) -> Rope or None
        float32 tables, for positions that roll.
    run_folder : callable
        Makes the folder of the disk's share.
    """

    def __init__(self, shape: CacheShape, size: CacheSize, policy: Policy, *,
                 h2o: H2OConfig | None, rope: Callable[[torch.Tensor], Rope | None],
                 transfers: Transfers, run_folder: Callable[[], RunFolder]):
        self.shape = shape
        self._h2o = None if h2o is None or h2o.is_full else h2o
        self._eviction = None if self._h2o is None else Eviction(self._h2o)
        self._transfers = transfers
        self._device = transfers.device.torch
        self._rope = rope
        self._tables: Rope | None = None
        self._seats: list[Seats] = []
        counts = split(size.sequences, policy.cache)

        def make(name: str, records: Records, slots: tuple[int, ...], *, on_host: bool):
            return make_parts(
                records, Grid(size.batches, slots), counts, transfers=transfers, on_host=on_host,
                file=lambda nbytes: run_folder().file(f"{name}.bin", nbytes))

        host = policy.cpu_cache_compute and transfers.device.separate
        self.parts: list[Part] = make("cache", shape.records(), size.slots, on_host=host)
        self._prompts: list[Part] = self.parts
        """Where prompts are gathered that come in chunks. The full cache has room for them."""
        if size.prompt and (self._h2o is not None or shape.bits != 16):
            self._prompts = make("prompts", shape.plain(), (size.prompt,) * shape.num_layers,
                                 on_host=False)

    def begin(self, batches: Sequence[Seats]) -> None:
        """Start a new block: forget what is cached."""
        layers = self.shape.num_layers
        self._seats = list(batches)
        self._fates = [fates(seats, self._h2o, layers) for seats in batches]
        for part in self.parts:
            part.begin([(len(seats), [fate.slots for fate in each])
                        for seats, each in zip(batches, self._fates, strict=True)])
        if self._prompts is not self.parts:
            for part in self._prompts:
                part.begin([(len(seats), [max(seats.lengths)] * layers) for seats in batches])
        self._books: dict[tuple, Book] = {}
        self._mass: dict[tuple, torch.Tensor] = {}
        self._turns: dict[tuple, tuple[int, Turn]] = {}
        self._changed: dict[tuple, Changed] = {}

    def nbytes(self) -> int:
        """Bytes of all keys and values of the block at rest, once the prompts have been cut."""
        records = self.shape.records()
        return sum(records.nbytes(len(seats), fate.slots)
                   for seats, each in zip(self._seats, self._fates, strict=True) for fate in each)

    def _here(self, batch: int, parts: list[Part] | None = None) -> list[Part]:
        return [part for part in parts or self.parts if part.first < len(self._seats[batch])]

    def load(self, layer: int, batch: int, sweep: int) -> None:
        """Start bringing what compute of (layer, batch) needs; layer counts from 0."""
        seats = self._seats[batch]
        if not seats.in_prefill(sweep):
            for part in self._here(batch):
                part.load(layer, batch, fetch=True)
            return
        chunked = seats.chunk is not None
        if chunked:
            for part in self._here(batch, self._prompts):
                part.load(layer, batch, fetch=seats.begun(sweep))
        if seats.token(sweep) == 0 and not (chunked and self._prompts is self.parts):
            for part in self._here(batch):
                part.load(layer, batch, fetch=False)

    def store(self, layer: int, batch: int, sweep: int) -> None:
        """Start writing back what compute of (layer, batch) changed."""
        seats = self._seats[batch]
        last = seats.token(sweep) >= 0
        for part in self._here(batch, self.parts if last else self._prompts):
            part.store(layer, batch, self._changed.pop((layer, batch, part.first), None))

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, spans: Sequence[Span],
                      rope: Rope | None) -> torch.Tensor:
        """Cache spans of prompts and attend within each prompt.

        Parameters
        ----------
        q : Tensor [rows, heads, head_dim]
        k, v : Tensor [rows, kv_heads, head_dim]
            Rows of all spans, packed one after the other; q and k before rotation, and rotated in
            place.
        rope : Rope or None
            Of the rows.

        Returns
        -------
        Tensor [rows, heads, head_dim]
        """
        rolling = rope is not None and self._rolls(layer, batch)
        cached = k.clone() if rolling else k
        if rope is not None:
            for x in (q, k):
                apply_rope_(x, *rope)
        lengths = [len(span) for span in spans]
        rows = list(zip(*(x.split(lengths) for x in (q, k, cached, v)), strict=True))
        if self._seats[batch].chunk is not None:
            outputs = [self._attend_span(layer, batch, span, q, cached, v)
                       for span, (q, _, cached, v) in zip(spans, rows, strict=True)]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        scored = self._scored(layer, batch)
        out = torch.empty_like(q) if scored else ops.prefill_attention(q, k, v, lengths)
        first = 0
        for span, (q, k, cached, v) in zip(spans, rows, strict=True):
            keys, values, cached = (x.transpose(0, 1) for x in (k, v, cached))
            mass = None
            if scored:
                mass = torch.zeros(keys.shape[:2], device=k.device)
                out[first : first + len(span)] = ops.causal_attention(
                    q, keys, values, mass=mass, decay=self._eviction.decay)
                first += len(span)
            self._keep(layer, batch, span.sequence, cached, values, mass)
        return out

    def _attend_span(self, layer: int, batch: int, span: Span, q, k, v) -> torch.Tensor:
        """Attend from a chunk of a prompt over all that came before; cut the prompt at its end."""
        part = next(p for p in self._prompts if span.sequence < p.last)
        held = part.get(layer, batch)[:, span.sequence - part.first]
        for cached, new in zip(held, (k, v), strict=True):
            cached[:, span.start : span.end] = new.transpose(0, 1)
        cached, values = held[:, :, : span.end].to(q.device)
        keys = cached
        if self._rolls(layer, batch):
            keys = rotated(cached, *(table[: span.end] for table in self._table(span.end)))
        key = (layer, batch, span.sequence)
        mass = None
        if self._scored(layer, batch):
            length = self._seats[batch].lengths[span.sequence]
            if key not in self._mass:
                self._mass[key] = torch.zeros((held.shape[1], length), device=q.device)
            mass = self._mass[key][:, : span.end]
        out = ops.causal_attention(q, keys, values, mass=mass,
                                   decay=1.0 if mass is None else self._eviction.decay)
        if span.end == self._seats[batch].lengths[span.sequence]:
            self._keep(layer, batch, span.sequence, cached, values, self._mass.pop(key, None))
        return out

    def _keep(self, layer: int, batch: int, sequence: int, k, v, mass) -> None:
        """Cut a prompt to its budget and put what stays into slots; k, v [kv_heads, tokens, ...]"""
        part = next(p for p in self.parts if sequence < p.last)
        held = part.get(layer, batch)[:, sequence - part.first]
        length = k.shape[1]
        budget = budgets.budget(self._h2o, layer, length)
        positions = torch.arange(length, device=k.device).expand(k.shape[0], -1)
        if budget is not None and length > budget.total:
            if mass is None:
                mass = torch.zeros(k.shape[:2], device=k.device)
            positions = self._eviction.select(mass, budget)
            mass = mass.gather(1, positions)
            k, v = (x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1])) for x in (k, v))
        gathered = self._seats[batch].chunk is not None and self._prompts is self.parts
        kept = k.shape[1]
        for slots, new in zip(held, (k, v), strict=True):
            if not gathered:  # a prompt that came in chunks may lie in its slots already
                slots[:, :kept] = self._encode(new)
            if self._plain(layer, batch):
                slots[:, kept:] = 0  # a masked slot still gets multiplied: it must not hold a NaN
        if self._fates[batch][layer].evicts:
            book = self._book(layer, batch, part)
            book.keep(sequence - part.first, positions, mass)

    def attend_token(self, layer: int, batch: int, q, k, v, *, token: int,
                     rope: Rope | None) -> torch.Tensor:
        """Attend from one new token of each sequence over what is cached and itself; cache it.

        q is [sequences, heads, head_dim], k and v [sequences, kv_heads, head_dim], before rotation;
        rope is of the sequences. Returns [sequences, heads, head_dim].
        """
        if rope is not None and not self._rolls(layer, batch):
            for x in (q, k):
                apply_rope_(x, *rope)
        outputs = []
        for part in self._here(batch):
            mine = part.sequences(batch)
            rows = [x[mine] for x in (q, k, v)]
            if part.on_host:
                rows = [self._carry(x, "cpu", DOWN) for x in rows]
            attend = self._attend_plain if self._plain(layer, batch) else self._attend_slots
            out, changed = attend(layer, batch, part, *rows, self._turn(layer, batch, part, token))
            if part.moves:
                self._changed[layer, batch, part.first] = changed
            outputs.append(self._carry(out, self._device, UP) if part.on_host else out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_plain(self, layer: int, batch: int, part: Part, q, k, v, turn: Turn):
        """Append, then attend over the first slots with PyTorch's own attention: no scores."""
        held = part.get(layer, batch)
        changed = Changed(torch.stack((k, v)), turn.before[:, None].expand(k.shape[:2]))
        changed.write(held)
        keys, values = held[:, :, :, : turn.span]
        return ops.decode_attention(q, keys, values, turn.filled), changed

    def _attend_slots(self, layer: int, batch: int, part: Part, q, k, v, turn: Turn):
        """Attend over the slots and the new token beside them; then it takes its slot."""
        held = part.get(layer, batch)
        evicts, rolls = self._fates[batch][layer].evicts, self._rolls(layer, batch)
        book = self._book(layer, batch, part) if evicts else None
        view = ops.SlotView(
            filled=turn.filled, layout=self.shape.layout,
            ranks=book.ranks[..., : turn.span] if rolls else None,
            newest=turn.before if rolls else None,
            rope=tuple(t.to(k.device) for t in self._table(turn.span + 1)) if rolls else None)
        out, mass = ops.slot_attention(q, k, v, held[:, :, :, : turn.span], view)
        slots = turn.before[:, None].expand(k.shape[:2])
        if evicts:
            slots = book.add(turn, mass, eviction=self._eviction, sinks=self._h2o.sink_tokens)
        changed = Changed(self._encode(torch.stack((k, v))), slots)
        changed.write(held)
        return out, changed

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.shape.layout is None else ops.quantize_groups(x, self.shape.layout)

    def _plain(self, layer: int, batch: int) -> bool:
        """Whether nothing is scored, evicted or compressed, so that slots stand in order."""
        return self.shape.bits == 16 and not self._fates[batch][layer].evicts

    def _scored(self, layer: int, batch: int) -> bool:
        return self._fates[batch][layer].evicts and self._h2o.scored

    def _rolls(self, layer: int, batch: int) -> bool:
        """Whether positions are ranks. As long as nothing is evicted, the two are the same."""
        return self._fates[batch][layer].evicts and self._h2o.positions == "rolling"

    def _table(self, positions: int) -> Rope:
        """Rotations at the first `positions` positions, or more."""
        if self._tables is None or len(self._tables[0]) < positions:
            most = max(fate.slots for each in self._fates for fate in each) + 1
            self._tables = self._rope(torch.arange(max(positions, most), device=self._device))
        return self._tables

    def _book(self, layer: int, batch: int, part: Part) -> Book:
        key = (layer, batch, part.first)
        if key not in self._books:
            mine = part.sequences(batch)
            shape = (mine.stop - mine.start, self.shape.kv_heads, self._fates[batch][layer].slots)
            self._books[key] = Book(shape, rolling=self._rolls(layer, batch),
                                    device=self._place(part))
        return self._books[key]

    def _turn(self, layer: int, batch: int, part: Part, token: int) -> Turn:
        """The turn of a token, made once for all layers that share it."""
        key = (batch, part.first, self._fates[batch][layer].like)
        made, turn = self._turns.get(key, (0, None))
        if made != token:
            turn = Turn.of(self._seats[batch], part.sequences(batch), self._h2o, layer=layer,
                           token=token, appended=self._plain(layer, batch),
                           device=self._place(part))
            self._turns[key] = (token, turn)
        return turn

    def _place(self, part: Part) -> torch.device:
        """Where attention over a part runs."""
        return torch.device("cpu") if part.on_host else self._device

    def _carry(self, x: torch.Tensor, place, link: str) -> torch.Tensor:
        """A copy in the other memory, waited for."""
        device = self._transfers.device
        began = device.stamp()
        there = x.to(place)
        self._transfers.moved(link, x.nbytes, began, device.stamp())
        return there
