"""A cache on disk of which decode steps fetch only the selected tokens, and the choice of tiers.

On disk the cache is in *pages*, each with the keys and values of adjacent tokens of one KV head
(`config.cache_layout.PageLayout`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.cache.hot_set import HotSet, RecallCounts, ZeroCopyTier
from flexgen_h2o.cache.layout import Capacity, SlotLayout
from flexgen_h2o.cache.tiers import CacheTier, FetchedTier, ResidentTier, SelectedTokens
from flexgen_h2o.config.cache_layout import PageLayout
from flexgen_h2o.config.limits import RECALL_GROUPS
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.device import PAGE, Device, round_up, typed
from flexgen_h2o.storage.disk import CHUNK, AlignedRead, Extent
from flexgen_h2o.storage.run_folder import RunFolder
from flexgen_h2o.storage.transfer import RECALLS, Handle, StagingBuffer, TransferQueue, Transfers


def page_layout(slot_layout: SlotLayout, slots: int) -> PageLayout:
    """Return the layout on disk of a layer with a number of slots per sequence."""
    token_bytes = slot_layout.nbytes(1, 1) // slot_layout.kv_heads
    return PageLayout(slot_layout.kv_heads, token_bytes, slots)


def view_pages(buffer: Tensor, pages: PageLayout, slot_layout: SlotLayout) -> Tensor:
    """View a buffer of pages, uint8 [n * page_bytes], as [n, tokens, kinds, width]."""
    rows = buffer.view(-1, pages.page_bytes)[:, : pages.page_tokens * pages.token_bytes]
    return rows.view(slot_layout.dtype).unflatten(
        1, (pages.page_tokens, slot_layout.kinds, slot_layout.width))


def view_slots(buffer: Tensor, pages: PageLayout, slot_layout: SlotLayout) -> Tensor:
    """View a buffer with the same number of pages per head as slots in token order.

    Strided: [kinds, kv_heads, pages, tokens, width].
    """
    by_head = view_pages(buffer, pages, slot_layout).unflatten(0, (pages.kv_heads, -1))
    return by_head.permute(3, 0, 1, 2, 4)


@dataclass
class _DiskHotTokens:
    """Tokens of one (layer, batch) in memory.

    `entries` [sequences, kv_heads, slots, kinds, width] are the slots of the hot set, and behind
    them the slots of the newest tokens. `fetches` are running jobs that fill slots of sequences.
    """

    entries: Tensor
    hot_set: HotSet
    cached: list[int]  # tokens of each sequence
    written: list[int]  # of them, those on disk
    empty: list[bool]  # for each sequence: the hot set holds nothing of its prompt yet
    fetches: list[tuple[slice, Handle]] = field(default_factory=list)


def _if_recalled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of `DiskRecallTier`: layers that are fetched whole use `FetchedTier`'s."""
    @functools.wraps(method)
    def call(self: DiskRecallTier, layer: int, *args: Any, **options: Any) -> Any:
        recalled = self.fetches_selected(layer)
        return (method if recalled else getattr(FetchedTier, method.__name__))(
            self, layer, *args, **options)

    return call


class DiskRecallTier(FetchedTier):
    """A tier on disk beside compute in host memory, whose decode steps select tokens.

    Prompts are fetched and stored by whole layers, as in `FetchedTier`. After that memory holds,
    of each (layer, batch), a hot set of tokens, and the newest tokens, which are written when
    their page is full.

    Parameters
    ----------
    hot_slots : sequence of int
        Slots of the hot set in each layer: at least as many as a step selects. 0: the layer is
        fetched whole.
    """

    def __init__(self, slot_layout: SlotLayout, first: int, last: int, *, capacity: Capacity,
                 transfers: Transfers, path: Path, hot_slots: Sequence[int]):
        self._pages = self._page_layouts(slot_layout, capacity, hot_slots)
        self._slots = hot_slots
        self._path = path
        super().__init__(slot_layout, first, last, capacity=capacity, transfers=transfers,
                         path=path)
        self.counts = RecallCounts()
        sizes = [self._hot_bytes(layer, last - first) for layer in range(len(hot_slots))]
        self._starts = [0, *accumulate(size * capacity.batches for size in sizes)]
        self._buffer = self._device.empty(self._starts[-1])
        self._read_buffer = self._device.host_empty(CHUNK)
        self._hot: dict[tuple[int, int], _DiskHotTokens] = {}

    @staticmethod
    def _page_layouts(slot_layout: SlotLayout, capacity: Capacity, hot_slots: Sequence[int]
                      ) -> list[PageLayout | None]:
        """Return the layout of each layer on disk; None for layers that are fetched whole."""
        return [page_layout(slot_layout, slots) if hot else None
                for slots, hot in zip(capacity.slots, hot_slots, strict=True)]

    @classmethod
    def recalled_file_bytes(cls, slot_layout: SlotLayout, sequences: int, capacity: Capacity,
                            hot_slots: Sequence[int]) -> int:
        """Return the bytes of the file of a tier with a hot set; see `file_bytes`."""
        unselected_slots = tuple(slots for slots, hot in zip(capacity.slots, hot_slots, strict=True)
                                 if not hot)
        pages = cls._page_layouts(slot_layout, capacity, hot_slots)
        sequence_bytes = sum(layout.sequence_bytes for layout in pages if layout is not None)
        return cls.file_bytes(slot_layout, sequences,
                              Capacity(capacity.batches, unselected_slots)) + (
            capacity.batches * sequences * sequence_bytes)

    def _layer_bytes(self, sequences: int, capacity: Capacity) -> list[tuple[int, int]]:
        return [sizes if pages is None else (
                    sequences * pages.sequence_bytes,
                    self.slot_layout.nbytes(sequences, pages.head_pages * pages.page_tokens))
                for pages, sizes in zip(self._pages, super()._layer_bytes(sequences, capacity),
                                        strict=True)]

    def _hot_bytes(self, layer: int, sequences: int) -> int:
        pages = self._pages[layer]
        return 0 if pages is None else round_up(
            self.slot_layout.nbytes(sequences, self._slots[layer] + pages.newest), PAGE)

    def fetches_selected(self, layer):
        return self._pages[layer] is not None

    def begin(self, layer, sizes):
        super().begin(layer, sizes)
        pages = self._pages[layer]
        if pages is None:
            return
        layout, slots = self.slot_layout, self._slots[layer]
        for batch in range(len(sizes)):
            sequences = self._sizes[layer, batch][0]
            start = self._starts[layer] + batch * self._hot_bytes(layer, self.last - self.first)
            shape = (sequences, layout.kv_heads, slots + pages.newest, layout.kinds, layout.width)
            self._hot[layer, batch] = _DiskHotTokens(
                typed(self._buffer, start, shape, layout.dtype),
                HotSet(sequences * layout.kv_heads, pages.slots, slots, pages.newest),
                [0] * sequences, [0] * sequences, [False] * sequences)

    def reset(self):
        super().reset()
        for handle in self._running():
            with suppress(Exception):
                handle.synchronize()

    def synchronize(self):
        super().synchronize()
        for handle in self._running():
            handle.synchronize()

    def _running(self) -> Iterator[Handle]:
        for key, hot in self._hot.items():
            yield from (*self._stores[key].busy, *(handle for _, handle in hot.fetches))

    # Prompts: whole layers

    @_if_recalled
    def load(self, layer, batch, *, fetch, keys_only=False, cached=None):
        pages = self._pages[layer]
        store, hot = self._stores[layer, batch], self._hot[layer, batch]
        store.slots = pages.head_pages * pages.page_tokens
        before, store.busy = [*store.busy, *(handle for _, handle in hot.fetches)], []
        fill = partial(self._read_all, layer=layer, batch=batch, cached=tuple(hot.cached))
        self._ring.load((layer, batch), fill if fetch else None, after=before)

    def _page_extents(self, layer: int, batch: int, sequence: int, tokens: range
                        ) -> Iterator[tuple[slice, list[Extent]]]:
        """Yield rows of pages that hold tokens of a sequence, and their extent for each head.

        Each item has some MB at most.
        """
        pages, extent = self._pages[layer], self._stores[layer, batch].extent
        step = max(1, CHUNK // (pages.kv_heads * pages.page_bytes))
        last = -(-tokens.stop // pages.page_tokens)
        heads = range(sequence * pages.kv_heads, (sequence + 1) * pages.kv_heads)
        for row in range(tokens.start // pages.page_tokens, last, step):
            rows = slice(row, min(row + step, last))
            yield rows, [Extent(extent.path,
                                extent.offset + (head * pages.head_pages + row) * pages.page_bytes,
                                (rows.stop - row) * pages.page_bytes) for head in heads]

    def _new_read_buffer(self, pages: PageLayout) -> Tensor:
        """Return a buffer for an item of `_page_extents`."""
        return self._device.host_empty(max(CHUNK, pages.kv_heads * pages.page_bytes))

    def _newest(self, layer: int, batch: int) -> Tensor:
        """Return the newest tokens, [sequences, kv_heads, newest, kinds, width]."""
        return self._hot[layer, batch].entries[:, :, self._slots[layer] :]

    def _staged(self, staging: StagingBuffer, layer: int, batch: int) -> Tensor:
        """Return the slots in a staging buffer, [kinds, sequences, kv_heads, slots, width]."""
        return typed(staging.host, 0, self._shape(layer, batch, self._stores[layer, batch].slots),
                     self.slot_layout.dtype)

    def _read_all(self, queue: TransferQueue, staging: StagingBuffer, *, layer: int, batch: int,
                  cached: Sequence[int]) -> None:
        """Fill a staging buffer with all cached tokens, from disk and then from the newest."""
        pages, cache = self._pages[layer], self._staged(staging, layer, batch)
        newest, read_buffer = self._newest(layer, batch), self._new_read_buffer(pages)
        for sequence, count in enumerate(cached):
            by_page = cache[:, sequence].unflatten(2, (-1, pages.page_tokens))
            for rows, extents in self._page_extents(layer, batch, sequence, range(count)):
                size = extents[0].nbytes
                buffer = read_buffer[: len(extents) * size]
                queue.disk.read([AlignedRead(extent.path, extent.offset, size, head * size)
                                for head, extent in enumerate(extents)], buffer)
                by_page[:, :, rows] = view_slots(buffer, pages, self.slot_layout)
            tokens = torch.arange(pages.first_recent_token(count), count)
            cache[:, sequence, :, tokens] = newest[
                sequence, :, tokens % newest.shape[2]].permute(2, 0, 1, 3)

    @_if_recalled
    def on_prompt_cached(self, layer, batch, tokens):
        pages = self._pages[layer]
        hot, cache = self._hot[layer, batch], self.get(layer, batch)
        newest = self._newest(layer, batch)
        firsts = torch.full((len(hot.cached), self.slot_layout.kv_heads), pages.slots)
        for sequence, first, end in tokens:
            row = sequence - self.first
            hot.cached[row], hot.written[row] = end, min(first, hot.written[row])
            hot.empty[row] |= first == 0
            firsts[row] = first
            new = torch.arange(pages.first_recent_token(end), end)
            newest[row, :, new % newest.shape[2]] = cache[:, row, :, new].permute(1, 2, 0, 3)
        hot.hot_set.forget(firsts.view(-1))

    @_if_recalled
    def store(self, layer, batch, update):
        hot = self._hot[layer, batch]
        new = [range(*span) for span in zip(hot.written, hot.cached, strict=True)]
        hot.written[:] = hot.cached
        empty = partial(self._write_all, layer=layer, batch=batch, new=new)
        self._stores[layer, batch].busy.append(self._ring.store((layer, batch), empty))

    def _write_all(self, queue: TransferQueue, staging: StagingBuffer, *, layer: int, batch: int,
                   new: Sequence[range]) -> None:
        """Write the pages of new tokens of each sequence."""
        pages, cache = self._pages[layer], self._staged(staging, layer, batch)
        read_buffer = self._new_read_buffer(pages)
        for sequence, tokens in enumerate(new):
            by_page = cache[:, sequence].unflatten(2, (-1, pages.page_tokens))
            for rows, extents in self._page_extents(layer, batch, sequence, tokens):
                buffer = read_buffer[: sum(extent.nbytes for extent in extents)]
                view_slots(buffer, pages, self.slot_layout).copy_(by_page[:, :, rows])
                queue.disk.write_each(extents, buffer)

    # New tokens: selected ones

    @_if_recalled
    def log_weights(self, layer, batch, rows):
        return self._hot[layer, batch].hot_set.log_weights.unflatten(
            0, (-1, self.slot_layout.kv_heads))[rows]

    @_if_recalled
    def fetch_groups(self, layer, sequences):
        groups = min(sequences, RECALL_GROUPS)
        return [slice(*ends) for ends in pairwise(
            sequences * group // groups for group in range(groups + 1))]

    @_if_recalled
    def fetch_selected(self, layer, batch, rows, selected):
        pages, hot, positions = self._pages[layer], self._hot[layer, batch], selected.spans[1]
        self._write_full_pages(layer, batch, rows, positions.tolist())
        slots, hits, loads = self._fetch_missing(layer, batch, rows, selected)
        self.counts.hits += hits
        self.counts.loads += loads
        newest_slots = self._slots[layer] + positions % pages.newest
        hot.cached[rows] = (positions + 1).tolist()
        return SelectedTokens(slots, torch.stack((newest_slots, selected.metadata[1])),
                              torch.stack((newest_slots, *selected.spans[1:])))

    @_if_recalled
    def selected_entries(self, layer, batch, rows):
        hot, began = self._hot[layer, batch], time.perf_counter()
        for fetch in list(hot.fetches):
            fetched, handle = fetch
            if fetched.start < rows.stop and rows.start < fetched.stop:
                self._transfers.ready(handle)
                hot.fetches.remove(fetch)
        self.counts.wait_seconds += time.perf_counter() - began
        return hot.entries[rows].permute(3, 0, 1, 2, 4)

    @_if_recalled
    def prefetch_capacity(self, layer, batch):
        return [self._slots[layer] * empty for empty in self._hot[layer, batch].empty]

    @_if_recalled
    def prefetch(self, layer, batch, selected):
        hot, fills = self._hot[layer, batch], any(self.prefetch_capacity(layer, batch))
        hot.empty = [False] * len(selected.slots)
        _, _, loads = self._fetch_missing(layer, batch, slice(0, len(selected.slots)), selected)
        if fills:
            self.counts.loads += loads
        else:
            self.counts.prefetches += loads

    def _fetch_missing(self, layer: int, batch: int, rows: slice, selected: SelectedTokens
                       ) -> tuple[Tensor, int, int]:
        """Start reading the selected tokens that the hot set lacks.

        Return the slots of all selected tokens, how many were in memory, and how many were not.
        """
        pages, hot = self._pages[layer], self._hot[layer, batch]
        first_recent = [pages.first_recent_token(cached) for cached in selected.spans[1].tolist()]
        slots, missing, hits = hot.hot_set.assign(
            selected.slots, torch.tensor(first_recent, dtype=torch.int32),
            head=rows.start * self.slot_layout.kv_heads)
        if missing.numel():
            store = self._stores[layer, batch]
            before, store.busy = store.busy, []
            hot.fetches.append((rows, self._transfers.submit(RECALLS, partial(
                self._read_tokens, pages=pages, extent=store.extent, missing=missing,
                slots=hot.entries), after=before)))
        return slots, hits, missing.shape[1]

    def _read_tokens(self, queue: TransferQueue, *, pages: PageLayout, extent: Extent,
                     missing: Tensor, slots: Tensor) -> None:
        """Read missing tokens [3, n] (head, token, slot) from an extent into slots."""
        done = queue.disk.read_by(self._path, partial(
            ops.fetch_tokens, missing, slots, offset=extent.offset, layout=pages,
            read_buffer=self._read_buffer))
        page = self._read_buffer[: pages.page_bytes]
        for head, token, slot in missing[:, done:].T.tolist():  # `read` raises the error
            row = head * pages.head_pages + token // pages.page_tokens
            queue.disk.read([AlignedRead(extent.path, extent.offset + row * pages.page_bytes,
                                        pages.page_bytes, 0)], page)
            slots.flatten(0, 1)[head, slot] = view_pages(
                page, pages, self.slot_layout)[0, token % pages.page_tokens]

    def _write_full_pages(self, layer: int, batch: int, rows: slice, cached: Sequence[int]
                            ) -> None:
        """Start writing the pages of the newest tokens that have become full."""
        pages, hot = self._pages[layer], self._hot[layer, batch]
        store = self._stores[layer, batch]
        if rows.start == 0:  # once a step: wait for the writes of earlier steps
            for handle in store.busy:
                self._transfers.ready(handle)
            store.busy = []
        newest = self._newest(layer, batch).unflatten(2, (-1, pages.page_tokens))
        for sequence, count in enumerate(cached, rows.start):
            full = count // pages.page_tokens
            if full * pages.page_tokens <= hot.written[sequence]:
                continue
            hot.written[sequence] = full * pages.page_tokens
            # [kv_heads, tokens, kinds, width]
            page = newest[sequence, :, (full - 1) % newest.shape[2]]
            (_, extents), = self._page_extents(layer, batch, sequence, range(
                (full - 1) * pages.page_tokens, full * pages.page_tokens))
            store.busy.append(self._transfers.submit(
                "stores", partial(self._write_page, pages=pages, extents=extents,
                                  page=page)))

    def _write_page(self, queue: TransferQueue, *, pages: PageLayout, extents: Sequence[Extent],
                    page: Tensor) -> None:
        buffer = self._device.host_empty(sum(extent.nbytes for extent in extents))
        view_pages(buffer, pages, self.slot_layout).copy_(page)
        queue.disk.write_each(extents, buffer)


def recalls_in_place(device: Device) -> bool:
    """Return whether GPU kernels read selected tokens in host memory in place."""
    return device.zero_copy and not ops.uses_reference(device.torch_device.type)


def make_tiers(slot_layout: SlotLayout, capacity: Capacity, counts: Sequence[int], *,
               transfers: Transfers, on_host: bool, run_folder: RunFolder, name: str,
               recalled: Sequence[bool] = (), hot_slots: Sequence[int] = (),
               fetched: type[FetchedTier] = FetchedTier) -> list[CacheTier]:
    """Return the tiers of a cache.

    Parameters
    ----------
    counts : three ints
        Sequences of a batch on (gpu, cpu, disk).
    on_host : bool
        Attention over the sequences on cpu runs on the host.
    run_folder : RunFolder
        For the sequences on disk.
    name : str
        Name of their file.
    recalled : sequence of bool
        Layers in which decode steps select tokens. A GPU reads their tokens of host memory in
        place.
    hot_slots : sequence of int
        Slots of the hot set in each layer, of a cache on disk without a GPU, or in host memory
        beside one. Beside a GPU whole layers are fetched from disk.
    fetched : type
        Class of tiers that are fetched whole.
    """
    device = transfers.device
    gpu, cpu, disk = counts
    if not device.is_gpu:
        gpu, cpu = gpu + cpu, 0
    in_host, on_disk = (gpu, gpu + cpu), (gpu + cpu, gpu + cpu + disk)
    sizes: dict[str, Any] = {"capacity": capacity, "transfers": transfers}
    tiers: list[CacheTier] = []
    if gpu:
        tiers.append(ResidentTier(slot_layout, 0, gpu, capacity=capacity, device=device))
    if cpu and on_host:
        tiers.append(ResidentTier(slot_layout, *in_host, capacity=capacity, device=device,
                                  on_host=True))
    elif cpu and any(recalled) and recalls_in_place(device):
        tiers.append(ZeroCopyTier(slot_layout, *in_host, recalled=recalled, hot_slots=hot_slots,
                                  **sizes))
    elif cpu:
        tiers.append(fetched(slot_layout, *in_host, path=None, **sizes))
    if disk and any(hot_slots) and not device.is_gpu:
        # A kernel reads the file through one descriptor: it cannot be striped.
        path = run_folder.file(name, DiskRecallTier.recalled_file_bytes(
            slot_layout, disk, capacity, hot_slots))
        tiers.append(DiskRecallTier(slot_layout, *on_disk, path=path, hot_slots=hot_slots, **sizes))
    elif disk:
        striped = run_folder.striped_file(name, FetchedTier.file_bytes(
            slot_layout, disk, capacity))
        tiers.append(fetched(slot_layout, *on_disk, path=striped, **sizes))
    return tiers
