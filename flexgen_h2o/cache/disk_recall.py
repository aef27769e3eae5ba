"""Records of whole pages on disk, as tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from flexgen_h2o.cache.hot_set import HotSet, RecallCounts, ZeroCopyPart
from flexgen_h2o.cache.tiers import (
    CachePart,
    Capacity,
    FetchedPart,
    ResidentPart,
    SelectedTokens,
    SlotLayout,
)
from flexgen_h2o.config.cache_layout import PageLayout
from flexgen_h2o.config.limits import TURNS
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.buffer_ring import StagingBuffer
from flexgen_h2o.storage.disk import CHUNK, AlignedRead, Extent
from flexgen_h2o.storage.tiers import PAGE, Device, round_up, typed
from flexgen_h2o.storage.transfer import RECALLS, Handle, Lane, Transfers


def page_layout(records: SlotLayout, slots: int) -> PageLayout:
    """The layout of a layer with so many slots of a sequence."""
    return PageLayout(records.kv_heads, records.nbytes(1, 1) // records.kv_heads, slots)


def in_records(buffer: Tensor, layout: PageLayout, records: SlotLayout) -> Tensor:
    """Records in a buffer, uint8 [n * record_bytes], as [n, tokens, kinds, width] elements."""
    lines = buffer.view(-1, layout.record_bytes)[:, : layout.tokens * layout.token_bytes]
    return lines.view(records.dtype).unflatten(1, (layout.tokens, records.kinds, records.width))


def in_rows(buffer: Tensor, layout: PageLayout, records: SlotLayout) -> Tensor:
    """Records in a buffer, as many of each head, as slots of tokens in their order, strided:
    [kinds, kv_heads, rows, tokens, width]."""
    rows = in_records(buffer, layout, records).unflatten(0, (layout.kv_heads, -1))
    return rows.permute(3, 0, 1, 2, 4)


# The part of a cache that stays on disk, of which a decode step fetches what it chooses.
#
# Prompts come and go by whole layers, as in any part that is fetched. After that memory holds, of
# each (layer, batch), a *fast set* of tokens that had most weight lately, and the newest tokens,
# which are written when their record is full (`page_records`).


@dataclass
class _Fast:
    """Tokens of one (layer, batch) in memory.

    Attributes
    ----------
    records : Tensor [sequences, kv_heads, slots, kinds, width]
        The slots of the fast set, and behind them those of the newest tokens.
    found : HotSet
    cached : list of int
        Tokens of each sequence that are cached.
    written : list of int
        Those of each sequence that are on disk.
    empty : list of bool
        True for each sequence of whose prompt the fast set has had nothing yet.
    coming : list of (slice, Handle)
        The jobs that fill slots, and of which sequences.
    """

    records: Tensor
    found: HotSet
    cached: list[int]
    written: list[int]
    empty: list[bool]
    coming: list[tuple[slice, Handle]] = field(default_factory=list)


def layouts(records: SlotLayout, capacity: Capacity, fast: Sequence[int]
            ) -> list[PageLayout | None]:
    """The layout of each layer that has a fast set of so many slots; None where it has none."""
    return [page_layout(records, slots) if some else None
            for slots, some in zip(capacity.slots, fast, strict=True)]


class DiskRecallPart(FetchedPart):
    """A part on disk beside compute in host memory, whose tokens are recalled.

    Parameters
    ----------
    fast : sequence of int
        Slots of the fast set in each layer: at least as many as a step chooses. 0: the layer is
        fetched whole.
    """

    def __init__(self, records: SlotLayout, first: int, last: int, *, capacity: Capacity,
                 transfers: Transfers, path: str, fast: Sequence[int]):
        self._pages = layouts(records, capacity, fast)
        self._slots = fast
        super().__init__(records, first, last, capacity=capacity, transfers=transfers, path=path)
        self.counts = RecallCounts()
        sizes = [self._fast_bytes(layer, last - first) for layer in range(len(fast))]
        self._starts = [0, *accumulate(size * capacity.batches for size in sizes)]
        self._buffer = self._device.empty(self._starts[-1])
        self._landing = self._device.host_empty(CHUNK)
        self._fast: dict[tuple[int, int], _Fast] = {}

    @staticmethod
    def recalled_file_bytes(records: SlotLayout, sequences: int, capacity: Capacity,
                            fast: Sequence[int]) -> int:
        """Bytes of the file of such a part; see `file_bytes`."""
        whole = [slots for slots, some in zip(capacity.slots, fast, strict=True) if not some]
        pages = layouts(records, capacity, fast)
        rest = Capacity(capacity.batches, tuple(whole))
        return FetchedPart.file_bytes(records, sequences, rest) + (
            capacity.batches * sequences * sum(
                each.sequence_bytes for each in pages if each is not None))

    def _layer_sizes(self, sequences: int, capacity: Capacity) -> list[tuple[int, int]]:
        return [sizes if pages is None else (
                    sequences * pages.sequence_bytes,
                    self.records.nbytes(sequences, pages.rows * pages.tokens))
                for pages, sizes in zip(self._pages, super()._layer_sizes(sequences, capacity),
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
            shape = (sequences, records.kv_heads, slots + pages.newest, records.kinds,
                     records.width)
            self._fast[layer, batch] = _Fast(
                typed(self._buffer, start, shape, records.dtype),
                HotSet(sequences * records.kv_heads, pages.slots, slots, pages.newest),
                [0] * sequences, [0] * sequences, [False] * sequences)

    def reset(self):
        super().reset()
        for handle in self._under_way():
            with suppress(Exception):
                handle.synchronize()

    def synchronize(self):
        super().synchronize()
        for handle in self._under_way():
            handle.synchronize()

    def _under_way(self) -> Iterator[Handle]:
        for key, fast in self._fast.items():
            yield from (*self._stores[key].busy, *(handle for _, handle in fast.coming))

    # Prompts: by whole layers

    def load(self, layer, batch, *, fetch, keys_only=False, cached=None):
        pages = self._pages[layer]
        if pages is None:
            super().load(layer, batch, fetch=fetch, keys_only=keys_only, cached=cached)
            return
        store, fast = self._stores[layer, batch], self._fast[layer, batch]
        store.slots = pages.rows * pages.tokens
        before, store.busy = [*store.busy, *(handle for _, handle in fast.coming)], []
        fill = partial(self._read_all, layer=layer, batch=batch, cached=tuple(fast.cached))
        self._ring.load((layer, batch), fill if fetch else lambda lane, staging: None, after=before)

    def _records_of(self, layer: int, batch: int, sequence: int, tokens: range
                    ) -> Iterator[tuple[slice, list[Extent]]]:
        """Rows of records that hold these tokens of a sequence, and where those of each head lie,
        some MB at a time."""
        pages, extent = self._pages[layer], self._stores[layer, batch].extent
        step = max(1, CHUNK // (pages.kv_heads * pages.record_bytes))
        last = -(-tokens.stop // pages.tokens)
        heads = range(sequence * pages.kv_heads, (sequence + 1) * pages.kv_heads)
        for row in range(tokens.start // pages.tokens, last, step):
            rows = slice(row, min(row + step, last))
            yield rows, [Extent(extent.path,
                                extent.offset + (head * pages.rows + row) * pages.record_bytes,
                                (rows.stop - row) * pages.record_bytes) for head in heads]

    def _landing_for(self, pages: PageLayout) -> Tensor:
        """A buffer for what `_records_of` yields."""
        return self._device.host_empty(max(CHUNK, pages.kv_heads * pages.record_bytes))

    def _read_all(self, lane: Lane, staging: StagingBuffer, *, layer: int, batch: int,
                  cached: Sequence[int]) -> None:
        """Fill the staging buffer with all that is cached: from disk, and over it the newest."""
        pages, held = self._pages[layer], self._held(staging, layer, batch)
        newest = self._fast[layer, batch].records[:, :, self._slots[layer] :]
        landing = self._landing_for(pages)
        for sequence, count in enumerate(cached):
            by_record = held[:, sequence].unflatten(2, (-1, pages.tokens))
            for rows, extents in self._records_of(layer, batch, sequence, range(count)):
                there, size = landing[: sum(each.nbytes for each in extents)], extents[0].nbytes
                lane.disk.read([AlignedRead(each.path, each.offset, size, head * size)
                                for head, each in enumerate(extents)], there)
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
            fast.empty[row] |= first == 0
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
        landing = self._landing_for(pages)
        for sequence, tokens in enumerate(new):
            by_record = held[:, sequence].unflatten(2, (-1, pages.tokens))
            for rows, extents in self._records_of(layer, batch, sequence, tokens):
                there = landing[: sum(each.nbytes for each in extents)]
                in_rows(there, pages, self.records).copy_(by_record[:, :, rows])
                lane.disk.write_each(extents, there)

    # New tokens: those that are chosen

    def log_weights(self, layer, batch, rows):
        if self._pages[layer] is None:
            return super().log_weights(layer, batch, rows)
        return self._fast[layer, batch].found.log_weights.unflatten(
            0, (-1, self.records.kv_heads))[rows]

    def turns(self, layer, sequences):
        if self._pages[layer] is None:
            return super().turns(layer, sequences)
        groups = min(sequences, TURNS)
        ends = [sequences * group // groups for group in range(groups + 1)]
        return [slice(*each) for each in pairwise(ends)]

    def ask(self, layer, batch, rows, chosen):
        if self._pages[layer] is None:
            return super().ask(layer, batch, rows, chosen)
        pages, fast, before = self._pages[layer], self._fast[layer, batch], chosen.spans[1]
        self._write_full(layer, batch, rows, before.tolist())
        slots, held, loads = self._take(layer, batch, rows, chosen)
        self.counts.hits += held
        self.counts.loads += loads
        place = self._slots[layer] + before % pages.newest
        fast.cached[rows] = (before + 1).tolist()
        spans = torch.stack((place, *chosen.spans[1:]))
        return SelectedTokens(slots, torch.stack((place, chosen.metadata[1])), spans)

    def recalled(self, layer, batch, rows):
        if self._pages[layer] is None:
            return super().recalled(layer, batch, rows)
        fast, began = self._fast[layer, batch], time.perf_counter()
        for each in list(fast.coming):
            mine, handle = each
            if mine.start < rows.stop and rows.start < mine.stop:
                self._transfers.ready(handle)
                fast.coming.remove(each)
        self.counts.wait_seconds += time.perf_counter() - began
        return fast.records[rows].permute(3, 0, 1, 2, 4)

    def room(self, layer, batch):
        if self._pages[layer] is None:
            return ()
        return [self._slots[layer] * empty for empty in self._fast[layer, batch].empty]

    def expect(self, layer, batch, chosen):
        if self._pages[layer] is None:
            return
        fast, fills = self._fast[layer, batch], any(self.room(layer, batch))
        fast.empty = [False] * len(chosen.slots)
        _, _, loads = self._take(layer, batch, slice(0, len(chosen.slots)), chosen)
        if fills:
            self.counts.loads += loads
        else:
            self.counts.guesses += loads

    def _take(self, layer: int, batch: int, rows: slice, chosen: SelectedTokens
              ) -> tuple[Tensor, int, int]:
        """The slots of the tokens that some sequences choose, of which those that are missing
        start to come; how many were in memory, and how many were not."""
        firsts = [self._pages[layer].first_newest(cached) for cached in chosen.spans[1].tolist()]
        slots, missing, held = self._fast[layer, batch].found.take(
            chosen.slots, torch.tensor(firsts, dtype=torch.int32),
            head=rows.start * self.records.kv_heads)
        if missing.numel():
            self._bring(layer, batch, rows, missing)
        return slots, held, missing.shape[1]

    def _bring(self, layer: int, batch: int, rows: slice, missing: Tensor) -> None:
        """Start reading missing tokens [3, n] (head, token, slot) into their slots of the fast
        set."""
        store, fast = self._stores[layer, batch], self._fast[layer, batch]
        before, store.busy = store.busy, []
        fast.coming.append((rows, self._transfers.submit(RECALLS, partial(
            self._read_some, pages=self._pages[layer], extent=store.extent, missing=missing,
            slots=fast.records), after=before)))

    def _read_some(self, lane: Lane, *, pages: PageLayout, extent: Extent, missing: Tensor,
                   slots: Tensor) -> None:
        """Read missing tokens of the file that begins with an extent into slots of all heads."""
        came = lane.disk.read_by(extent.path, partial(
            ops.fetch_tokens, missing, slots, offset=extent.offset, layout=pages,
            landing=self._landing))
        record = self._landing[: pages.record_bytes]
        for head, token, slot in missing[:, came:].T.tolist():  # the disk tells what is wrong
            row = head * pages.rows + token // pages.tokens
            lane.disk.read([AlignedRead(extent.path, extent.offset + row * pages.record_bytes,
                                        pages.record_bytes, 0)], record)
            slots.flatten(0, 1)[head, slot] = in_records(
                record, pages, self.records)[0, token % pages.tokens]

    def _write_full(self, layer: int, batch: int, rows: slice, cached: Sequence[int]) -> None:
        """Start writing the records of some sequences' newest tokens that have become full."""
        pages, fast = self._pages[layer], self._fast[layer, batch]
        store = self._stores[layer, batch]
        if rows.start == 0:  # once a step: what the steps before began to write
            for handle in store.busy:
                self._transfers.ready(handle)
            store.busy = []
        newest = fast.records[:, :, self._slots[layer] :].unflatten(2, (-1, pages.tokens))
        for sequence, count in enumerate(cached, rows.start):
            full = count // pages.tokens
            if full * pages.tokens <= fast.written[sequence]:
                continue
            fast.written[sequence] = full * pages.tokens
            # [kv_heads, tokens, kinds, width]
            row = newest[sequence, :, (full - 1) % newest.shape[2]]
            (_, extents), = self._records_of(layer, batch, sequence, range(
                (full - 1) * pages.tokens, full * pages.tokens))
            store.busy.append(self._transfers.submit(
                "stores", partial(self._write_row, pages=pages, extents=extents, row=row)))

    def _write_row(self, lane: Lane, *, pages: PageLayout, extents: Sequence[Extent], row: Tensor
                   ) -> None:
        landing = self._device.host_empty(sum(each.nbytes for each in extents))
        in_records(landing, pages, self.records).copy_(row)
        lane.disk.write_each(extents, landing)


# The parts of a cache over the tiers that its sequences are placed on.


def recalls_in_place(device: Device) -> bool:
    """True if kernels of a GPU read in host memory what a step recalls."""
    return device.zero_copy and not ops.uses_reference(device.torch.type)


def make_parts(records: SlotLayout, capacity: Capacity, counts: Sequence[int], *,
               transfers: Transfers, on_host: bool, file: Callable[[int], str],
               recalled: Sequence[bool] = (), fast: Sequence[int] = ()) -> list[CachePart]:
    """The parts of a cache.

    Parameters
    ----------
    counts : three ints
        Sequences of a batch on (gpu, cpu, disk).
    on_host : bool
        Attention over the sequences on cpu runs there.
    file : callable (bytes) -> path
        Makes a file for them on disk.
    recalled : sequence of bool
        Of a cache that is recalled: the layers of which steps choose tokens. A GPU reads those of
        host memory in place.
    fast : sequence of int
        Slots of the fast set in each layer, of a cache that is recalled: from disk without a GPU,
        and with one from host memory. Beside a GPU whole layers are fetched from disk.
    """
    device = transfers.device
    gpu, cpu, disk = counts
    if not device.separate:
        gpu, cpu = gpu + cpu, 0
    parts: list[CachePart] = []
    if gpu:
        parts.append(ResidentPart(records, 0, gpu, capacity=capacity, device=device))
    if cpu and on_host:
        parts.append(ResidentPart(records, gpu, gpu + cpu, capacity=capacity, device=device,
                                  on_host=True))
    elif cpu and any(recalled) and recalls_in_place(device):
        parts.append(ZeroCopyPart(records, gpu, gpu + cpu, capacity=capacity, transfers=transfers,
                                recalled=recalled, fast=fast))
    elif cpu:
        parts.append(FetchedPart(records, gpu, gpu + cpu, capacity=capacity, transfers=transfers,
                                 path=None))
    if disk and any(fast) and not device.separate:
        path = file(DiskRecallPart.recalled_file_bytes(records, disk, capacity, fast))
        parts.append(DiskRecallPart(records, gpu, gpu + disk, capacity=capacity,
                                    transfers=transfers, path=path, fast=fast))
    elif disk:
        path = file(FetchedPart.file_bytes(records, disk, capacity))
        parts.append(FetchedPart(records, gpu + cpu, gpu + cpu + disk, capacity=capacity,
                                 transfers=transfers, path=path))
    return parts
