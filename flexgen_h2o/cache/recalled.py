"""The part of a cache that stays on disk, of which a decode step fetches what it chooses.

Prompts come and go by whole layers, as in any part that is fetched. After that memory holds, of
each (layer, batch), a *fast set* of tokens that were chosen lately, and the newest tokens, which
are written when their record is full (`page_records`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from flexgen_h2o.cache.fast_set import FastSet
from flexgen_h2o.cache.fetched import CachedRecords, FetchedPart
from flexgen_h2o.cache.page_records import in_records, in_rows, page_layout, runs_of
from flexgen_h2o.cache.parts import Chosen, Grid, Records
from flexgen_h2o.config.limits import NEAR
from flexgen_h2o.config.page_layout import PageLayout
from flexgen_h2o.storage.buffer_ring import StagingBuffer
from flexgen_h2o.storage.disk import CHUNK, AlignedRead
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.tiers import PAGE, round_up, typed
from flexgen_h2o.storage.transfer import RECALLS, Handle, Lane, Transfers


@dataclass
class RecallCounts:
    """Counts of tokens that decode steps have chosen, one for each KV head.

    Of those that rest on disk `hits` were in memory when they were asked for, and `loads` had to be
    read then; `guesses` were read ahead, needed or not. `wait_seconds` is the time for which
    compute waited for reads.
    """

    hits: int = 0
    loads: int = 0
    guesses: int = 0
    wait_seconds: float = 0.0

    def since(self, before: RecallCounts) -> RecallCounts:
        """Counts of what came after another count."""
        return RecallCounts(*(getattr(self, each.name) - getattr(before, each.name)
                              for each in fields(self)))


@dataclass
class _Fast:
    """Tokens of one (layer, batch) in memory.

    Attributes
    ----------
    records : Tensor [sequences, kv_heads, slots, 2, width]
        The slots of the fast set, and behind them those of the newest tokens.
    found : FastSet
    cached : list of int
        Tokens of each sequence that are cached.
    written : list of int
        Those of each sequence that are on disk.
    coming : list of Handle
        The jobs that fill slots.
    """

    records: Tensor
    found: FastSet
    cached: list[int]
    written: list[int]
    coming: list[Handle] = field(default_factory=list)


def layouts(records: Records, grid: Grid, fast: Sequence[int]) -> list[PageLayout | None]:
    """The layout of each layer that has a fast set of so many slots; None where it has none."""
    return [page_layout(records, slots) if some else None
            for slots, some in zip(grid.slots, fast, strict=True)]


class RecalledPart(FetchedPart):
    """A part on disk beside compute in host memory, whose tokens are recalled.

    Parameters
    ----------
    fast : sequence of int
        Slots of the fast set in each layer: at least as many as a step chooses. 0: the layer is
        fetched whole.
    """

    def __init__(self, records: Records, first: int, last: int, *, grid: Grid,
                 transfers: Transfers, path: str, fast: Sequence[int]):
        self._pages = layouts(records, grid, fast)
        self._slots = fast
        super().__init__(records, first, last, grid=grid, transfers=transfers, path=path)
        self.counts = RecallCounts()
        sizes = [self._fast_bytes(layer, last - first) for layer in range(len(fast))]
        self._starts = [0, *accumulate(size * grid.batches for size in sizes)]
        self._buffer = self._device.empty(self._starts[-1])
        self._landing = self._device.host_empty(CHUNK)
        self._fast: dict[tuple[int, int], _Fast] = {}

    @staticmethod
    def recalled_file_bytes(records: Records, sequences: int, grid: Grid, fast: Sequence[int]
                            ) -> int:
        """Bytes of the file of such a part; see `file_bytes`."""
        whole = [slots for slots, some in zip(grid.slots, fast, strict=True) if not some]
        pages = layouts(records, grid, fast)
        return FetchedPart.file_bytes(records, sequences, Grid(grid.batches, tuple(whole))) + (
            grid.batches * sequences * sum(
                each.sequence_bytes for each in pages if each is not None))

    def _layer_sizes(self, sequences: int, grid: Grid) -> list[tuple[int, int]]:
        return [sizes if pages is None else (
                    sequences * pages.sequence_bytes,
                    self.records.nbytes(sequences, pages.rows * pages.tokens))
                for pages, sizes in zip(self._pages, super()._layer_sizes(sequences, grid),
                                        strict=True)]

    def _fast_bytes(self, layer: int, sequences: int) -> int:
        pages = self._pages[layer]
        return 0 if pages is None else round_up(
            self.records.nbytes(sequences, self._slots[layer] + pages.newest), PAGE)

    def recalls(self, layer):
        return self._pages[layer] is not None

    def begin(self, layer, sizes):
        super().begin(layer, sizes)
        pages = self._pages[layer]
        if pages is None:
            return
        records, slots = self.records, self._slots[layer]
        for batch in range(len(sizes)):
            sequences = self._sizes[layer, batch][0]
            start = self._starts[layer] + batch * self._fast_bytes(layer, self.last - self.first)
            shape = (sequences, records.kv_heads, slots + pages.newest, 2, records.width)
            self._fast[layer, batch] = _Fast(
                typed(self._buffer, start, shape, records.dtype),
                FastSet(sequences * records.kv_heads, pages.slots, slots),
                [0] * sequences, [0] * sequences)

    def reset(self):
        super().reset()
        for handle in self._under_way():
            with suppress(Exception):
                handle.synchronize()

    def settle(self):
        super().settle()
        for handle in self._under_way():
            handle.synchronize()

    def _under_way(self) -> Iterator[Handle]:
        for key, fast in self._fast.items():
            yield from (*self._stores[key].busy, *fast.coming)

    # Prompts: by whole layers

    def load(self, layer, batch, *, fetch, keys_only=False, cached=None):
        pages = self._pages[layer]
        if pages is None:
            super().load(layer, batch, fetch=fetch, keys_only=keys_only, cached=cached)
            return
        store, fast = self._stores[layer, batch], self._fast[layer, batch]
        store.slots = pages.rows * pages.tokens
        before, store.busy = [*store.busy, *fast.coming], []
        fill = partial(self._read_all, layer=layer, batch=batch, cached=tuple(fast.cached))
        self._ring.load((layer, batch), fill if fetch else lambda lane, staging: None, after=before)

    def _records_of(self, layer: int, batch: int, sequence: int, tokens: range
                    ) -> Iterator[tuple[slice, Extent]]:
        """Rows of records that hold these tokens of a sequence, some MB at a time."""
        pages, extent = self._pages[layer], self._stores[layer, batch].extent
        step = max(1, CHUNK // pages.row_bytes)
        last = -(-tokens.stop // pages.tokens)
        for row in range(tokens.start // pages.tokens, last, step):
            rows = slice(row, min(row + step, last))
            yield rows, Extent(
                extent.path, extent.offset + (sequence * pages.rows + row) * pages.row_bytes,
                (rows.stop - row) * pages.row_bytes)

    def _read_all(self, lane: Lane, staging: StagingBuffer, *, layer: int, batch: int,
                  cached: Sequence[int]) -> None:
        """Fill the staging buffer with all that is cached: from disk, and over it the newest."""
        pages, held = self._pages[layer], self._held(staging, layer, batch)
        newest = self._fast[layer, batch].records[:, :, self._slots[layer] :]
        landing = self._device.host_empty(max(CHUNK, pages.row_bytes))
        for sequence, count in enumerate(cached):
            by_record = held[:, sequence].unflatten(2, (-1, pages.tokens))
            for rows, extent in self._records_of(layer, batch, sequence, range(count)):
                there = landing[: extent.nbytes]
                lane.disk.read([AlignedRead(extent.path, extent.offset, extent.nbytes, 0)], there)
                by_record[:, :, rows] = in_rows(there, pages, self.records)
            tokens = torch.arange(pages.first_newest(count), count)
            held[:, sequence, :, tokens] = newest[
                sequence, :, tokens % newest.shape[2]].permute(2, 0, 1, 3)

    def _held(self, staging: StagingBuffer, layer: int, batch: int) -> Tensor:
        return typed(staging.host, 0, self._shape(layer, batch, self._stores[layer, batch].slots),
                     self.records.dtype)

    def filled(self, layer, batch, tokens):
        pages = self._pages[layer]
        if pages is None:
            return
        fast, held = self._fast[layer, batch], self.get(layer, batch)
        newest = fast.records[:, :, self._slots[layer] :]
        firsts = torch.full((len(fast.cached), self.records.kv_heads), pages.slots)
        for sequence, first, end in tokens:
            row = sequence - self.first
            fast.cached[row], fast.written[row] = end, min(first, fast.written[row])
            firsts[row] = first
            new = torch.arange(pages.first_newest(end), end)
            newest[row, :, new % newest.shape[2]] = held[:, row, :, new].permute(1, 2, 0, 3)
        fast.found.forget(firsts.view(-1))

    def store(self, layer, batch, changed):
        if self._pages[layer] is None:
            super().store(layer, batch, changed)
            return
        fast = self._fast[layer, batch]
        new = [range(*some) for some in zip(fast.written, fast.cached, strict=True)]
        fast.written[:] = fast.cached
        empty = partial(self._write_all, layer=layer, batch=batch, new=new)
        self._stores[layer, batch].busy.append(self._ring.store((layer, batch), empty))

    def _write_all(self, lane: Lane, staging: StagingBuffer, *, layer: int, batch: int,
                   new: Sequence[range]) -> None:
        """Write the records of new tokens of each sequence."""
        pages, held = self._pages[layer], self._held(staging, layer, batch)
        landing = self._device.host_empty(max(CHUNK, pages.row_bytes))
        for sequence, tokens in enumerate(new):
            by_record = held[:, sequence].unflatten(2, (-1, pages.tokens))
            for rows, extent in self._records_of(layer, batch, sequence, tokens):
                there = landing[: extent.nbytes]
                in_rows(there, pages, self.records).copy_(by_record[:, :, rows])
                lane.disk.write(extent, there)

    # New tokens: those that are chosen

    def recall(self, layer, batch, chosen):
        if self._pages[layer] is None:
            return super().recall(layer, batch, chosen)
        pages, fast, before = self._pages[layer], self._fast[layer, batch], chosen.spans[1]
        self._write_full(layer, batch, before.tolist())
        self._await(fast)
        newest, slots, missing = self._take(layer, batch, chosen)
        if missing.any():
            self._bring(layer, batch, chosen, slots, missing)
            self._await(fast)
        asked, loads = int((chosen.slots >= 0).sum() - newest.sum()), int(missing.sum())
        self.counts.hits += asked - loads
        self.counts.loads += loads
        first = self._slots[layer]
        slots = (first + chosen.slots % pages.newest).where(newest, slots.view_as(newest)).int()
        place = first + before % pages.newest
        fast.cached[:] = (before + 1).tolist()
        spans = torch.stack((place, *chosen.spans[1:]))
        return fast.records.permute(3, 0, 1, 2, 4), Chosen(
            slots, torch.stack((place, chosen.metadata[1])), spans)

    def expect(self, layer, batch, chosen):
        if self._pages[layer] is None:
            return
        _, slots, missing = self._take(layer, batch, chosen)
        self.counts.guesses += int(missing.sum())
        if missing.any():
            self._bring(layer, batch, chosen, slots, missing)

    def _take(self, layer: int, batch: int, chosen: Chosen) -> tuple[Tensor, Tensor, Tensor]:
        """The chosen tokens that are among the newest, bool like `chosen.slots`, and what
        `FastSet.take` says of the others."""
        firsts = [self._pages[layer].first_newest(cached) for cached in chosen.spans[1].tolist()]
        newest = chosen.slots >= torch.tensor(firsts)[:, None, None]
        others = chosen.slots.masked_fill(newest, -1)
        return newest, *self._fast[layer, batch].found.take(others.flatten(0, 1))

    def _await(self, fast: _Fast) -> None:
        """Wait for the tokens that are coming."""
        began = time.perf_counter()
        for handle in fast.coming:
            self._transfers.ready(handle)
        fast.coming.clear()
        self.counts.wait_seconds += time.perf_counter() - began

    def _bring(self, layer: int, batch: int, chosen: Chosen, slots: Tensor, missing: Tensor
               ) -> None:
        """Start reading missing tokens into their slots of the fast set."""
        pages, fast = self._pages[layer], self._fast[layer, batch]
        store, heads = self._stores[layer, batch], self.records.kv_heads
        head, column = missing.nonzero().unbind(1)
        token = chosen.slots.flatten(0, 1)[head, column].long()
        record = (head // heads * pages.rows + token // pages.tokens) * heads + head % heads
        target = head * fast.records.shape[2] + slots[head, column]
        before, store.busy = store.busy, []
        fast.coming.append(self._transfers.submit(RECALLS, partial(
            self._read_some, pages=pages, store=store, record=record, token=token % pages.tokens,
            target=target, slots=fast.records.flatten(0, 2)), after=before))

    def _read_some(self, lane: Lane, *, pages: PageLayout, store: CachedRecords, record: Tensor,
                   token: Tensor, target: Tensor, slots: Tensor) -> None:
        """Read records that hold tokens, and put these into slots.

        Parameters
        ----------
        record, token, target : int64 Tensor [n]
            Numbers of a record, of a token in it, and of the slot.
        slots : Tensor [slots, 2, width]
        """
        most = len(self._landing) // pages.record_bytes
        firsts, counts = runs_of(record.unique(), gap=NEAR // pages.record_bytes, most=most)
        run = torch.searchsorted(firsts, record, right=True) - 1
        for some in _fitting(counts.tolist(), most):
            places = counts[some].cumsum(0) - counts[some]
            ranges = torch.stack((firsts[some], counts[some], places), 1) * pages.record_bytes
            ranges[:, 0] += store.extent.offset
            lane.disk.read_scattered(store.extent.path, ranges.tolist(), self._landing)
            mine = ((run >= some.start) & (run < some.stop)).nonzero().squeeze(1)
            place = places[run[mine] - some.start] + record[mine] - firsts[run[mine]]
            slots.index_copy_(0, target[mine], in_records(
                self._landing[: most * pages.record_bytes], pages, self.records
                )[place, token[mine]])

    def _write_full(self, layer: int, batch: int, cached: Sequence[int]) -> None:
        """Start writing the records of newest tokens that have become full."""
        pages, fast = self._pages[layer], self._fast[layer, batch]
        store = self._stores[layer, batch]
        for handle in store.busy:
            self._transfers.ready(handle)
        store.busy = []
        newest = fast.records[:, :, self._slots[layer] :].unflatten(2, (-1, pages.tokens))
        for sequence, count in enumerate(cached):
            full = count // pages.tokens
            if full * pages.tokens <= fast.written[sequence]:
                continue
            fast.written[sequence] = full * pages.tokens
            row = newest[sequence, :, (full - 1) % newest.shape[2]]  # [kv_heads, tokens, 2, width]
            (_, extent), = self._records_of(layer, batch, sequence, range(
                (full - 1) * pages.tokens, full * pages.tokens))
            store.busy.append(self._transfers.submit(
                "stores", partial(self._write_row, pages=pages, extent=extent, row=row)))

    def _write_row(self, lane: Lane, *, pages: PageLayout, extent: Extent, row: Tensor) -> None:
        landing = self._device.host_empty(extent.nbytes)
        in_records(landing, pages, self.records).copy_(row)
        lane.disk.write(extent, landing)


def _fitting(counts: Sequence[int], most: int) -> Iterator[slice]:
    """Slices of neighbours whose counts come to at most `most`, which none exceeds."""
    start, total = 0, 0
    for number, count in enumerate(counts):
        if total + count > most:
            yield slice(start, number)
            start, total = number, 0
        total += count
    yield slice(start, len(counts))
