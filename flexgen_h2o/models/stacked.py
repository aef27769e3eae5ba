"""Stacked and fused tensors of a checkpoint, seen as the single matrices of a model.

Families of today ship one tensor where the model has many: all experts of a layer in one tensor
[experts, rows, columns], queries, keys and values in one matrix, or the two halves of a gated MLP,
one after the other or row by row. A family says where each of its own tensors lies, and the engine
goes on reading one matrix at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.checkpoint_base import Checkpoint, TensorInfo
from flexgen_h2o.storage.extent import Extent

_SCRATCH_ELEMENTS = 1 << 20  # read at a time where rows are picked out or turned


@dataclass(frozen=True)
class View:
    """One matrix (or vector) inside of a larger tensor: ``tensor[entry]``, transposed, ``[rows]``.

    Attributes
    ----------
    tensor : str
        The checkpoint's name of the larger one.
    entry : int or None
        Index on its first axis: the expert. None where it is not stacked.
    transposed : bool
        Whether the entry is stored as [inputs, outputs].
    rows : range or None
        Those of the entry (after transposition) that make up the matrix, in order: ``range(0, n)``
        and ``range(n, 2 * n)`` are halves, ``range(0, 2 * n, 2)`` and ``range(1, 2 * n, 2)`` are
        rows in turn. None: all. Of a vector, its elements.
    """

    tensor: str
    entry: int | None = None
    transposed: bool = False
    rows: range | None = None


@dataclass(frozen=True)
class _Place:
    """A view of a tensor of known shape. Sizes are in elements."""

    shape: tuple[int, ...]
    start: int  # of the entry
    rows: range  # of the entry
    width: int  # of a stored row; 1 where elements of a vector count as rows
    height: int  # stored rows of the entry


class StackedCheckpoint(Checkpoint):
    """Another checkpoint, with views of its tensors under names of their own.

    A view of consecutive rows has an extent: its bytes lie plainly in the file, and are streamed
    from there. Others are read through a few MB of scratch.

    Parameters
    ----------
    inner : Checkpoint
        Closed with this one.
    views : mapping of str to sequence of View
        For each name the places where its tensor may be: the first whose tensor the checkpoint
        has is taken. A name that the checkpoint has itself, and one with no place there, is left
        to the checkpoint.

    Notes
    -----
    `names()` leaves out the tensors that are viewed, so that a converted copy holds each byte once,
    under the names that the engine reads.
    """

    def __init__(self, inner: Checkpoint, views: Mapping[str, Sequence[View]]):
        self.source, self.absent, self._inner = inner.source, inner.absent, inner
        present = inner.names()
        self._views: dict[str, View] = {}
        for name, places in views.items():
            found = next((view for view in places if view.tensor in present), None)
            if found is not None and name not in present:
                self._views[name] = found
        viewed = {view.tensor for view in self._views.values()}
        self._names = dict.fromkeys(
            [*(name for name in present if name not in viewed), *self._views])

    def names(self) -> Collection[str]:
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        if name not in self._views:
            return self._inner.info(name)
        view = self._views[name]
        place, whole = self._place(name), self._inner.info(view.tensor)
        extent = None
        if whole.extent is not None and not view.transposed and place.rows.step == 1:
            size = whole.dtype.itemsize
            first = (place.start + place.rows.start * place.width) * size
            extent = Extent(whole.extent.path, whole.extent.offset + first,
                            math.prod(place.shape) * size)
        return replace(whole, shape=place.shape, extent=extent, checksum=None)

    def _place(self, name: str) -> _Place:
        """The part of its tensor that a view is; UserError where the tensor has no such part."""
        view = self._views[name]
        stored = self._inner.info(view.tensor).shape
        stacked = view.entry is not None
        entry, entries = view.entry or 0, stored[0] if stacked and stored else 1
        shape = stored[1:] if stacked else stored
        turned = shape[::-1] if view.transposed else shape
        height = turned[0] if turned else 0
        rows = range(height) if view.rows is None else view.rows
        fits = len(shape) == 2 or len(shape) == 1 and not view.transposed
        inside = not rows or 0 <= rows[0] <= rows[-1] < height
        if not fits or not inside or not 0 <= entry < entries:
            raise UserError(f"{self.source}: tensor {view.tensor} has shape {list(stored)}, in "
                            f"which there is no {name}; does config.json belong to it?")
        width = shape[1] if len(shape) == 2 else 1
        return _Place((len(rows), *turned[1:]), entry * math.prod(shape), rows, width, shape[0])

    def _fill(self, name: str, info: TensorInfo, out: torch.Tensor) -> None:
        if name not in self._views:
            self._inner.read(name, out)
            return
        view, place = self._views[name], self._place(name)
        if view.transposed:
            self._fill_turned(view.tensor, place, out)
        elif place.rows.step == 1:
            first = place.start + place.rows.start * place.width
            self._inner.read_part(view.tensor, first, out)
        else:
            self._fill_every(view.tensor, place, out.view(len(place.rows), place.width))

    def _fill_turned(self, tensor: str, place: _Place, out: torch.Tensor) -> None:
        """Columns of the stored entry, as rows."""
        step = max(1, _SCRATCH_ELEMENTS // max(1, place.width))
        scratch = torch.empty(min(step, place.height), place.width, dtype=out.dtype)
        columns = slice(place.rows.start, place.rows.stop, place.rows.step)
        for first in range(0, place.height, step):
            part = scratch[: place.height - first]
            self._inner.read_part(tensor, place.start + first * place.width, part)
            out[:, first : first + len(part)] = part[:, columns].T

    def _fill_every(self, tensor: str, place: _Place, out: torch.Tensor) -> None:
        """Every so many of the stored rows."""
        skip = place.rows.step
        step = max(1, _SCRATCH_ELEMENTS // max(1, place.width * skip))
        for first in range(0, len(place.rows), step):
            rows = place.rows[first : first + step]
            part = torch.empty(rows[-1] + 1 - rows[0], place.width, dtype=out.dtype)
            self._inner.read_part(tensor, place.start + rows[0] * place.width, part)
            out[first : first + len(rows)] = part[::skip]

    def kept_layout(self, name: str) -> MatrixLayout | None:
        if name not in self._views:
            return self._inner.kept_layout(name)
        view, place = self._views[name], self._place(name)
        layout = self._inner.kept_layout(view.tensor)
        if layout is None or view.transposed or len(place.shape) != 2:
            return None
        return replace(layout, outputs=place.shape[0])

    def keep(self, name: str, layout: MatrixLayout, out: torch.Tensor,
             rows: range | None = None) -> bool:
        if name not in self._views:
            return self._inner.keep(name, layout, out, rows)
        view, place = self._views[name], self._place(name)
        if view.transposed or len(place.shape) != 2:
            return False
        some = place.rows if rows is None else place.rows[rows.start : rows.stop : rows.step]
        above = place.start // place.width
        return self._inner.keep(view.tensor, layout, out,
                                range(above + some.start, above + some.stop, some.step))

    def close(self) -> None:
        self._inner.close()


def unstacked(checkpoint: Checkpoint, views: Mapping[str, Sequence[View]]) -> Checkpoint:
    """`checkpoint` with these views; as it is where it has none of their tensors."""
    present = checkpoint.names()
    found = any(view.tensor in present for places in views.values() for view in places)
    return StackedCheckpoint(checkpoint, views) if found else checkpoint
