"""The interface of a checkpoint: named tensors, known before they are read, read one at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.storage.disk import Extent

_SCRATCH_ELEMENTS = 1 << 20  # read at a time where rows are selected or transposed
_READABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a tensor.

    Attributes
    ----------
    dtype : torch.dtype
        As stored.
    shape : tuple of int
        As stored.
    extent : Extent or None
        Where its raw bytes lie, or None if they do not lie plainly in a file.
    checksum : int or None
        XXH3 (64 bits) of these bytes, where the file keeps it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    extent: Extent | None
    checksum: int | None = None


class Checkpoint(ABC):
    """Named tensors that are read one at a time. Safe to read from several threads.

    Attributes
    ----------
    source : str
        What error messages call it: a path, mostly.
    absent : mapping of str to Path
        The shards of tensors that an index names and no shard has.
    """

    source: str
    absent: Mapping[str, Path] = MappingProxyType({})

    @abstractmethod
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of one tensor; KeyError if there is none of that name."""

    @abstractmethod
    def _fill(self, name: str, info: TensorInfo, out: torch.Tensor) -> None:
        """Fill `out`, which has been checked."""

    def _fill_part(self, name: str, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        """Fill `out`, which has been checked, with elements from `start` on. Those that can read
        a part alone do so."""
        whole = torch.empty(info.shape, dtype=out.dtype)
        self._fill(name, info, whole)
        out.view(-1).copy_(whole.view(-1)[start : start + out.numel()])

    def read(self, name: str, out: torch.Tensor) -> None:
        """Read one tensor into memory that the caller owns, converting to its dtype.

        Parameters
        ----------
        name : str
            One of `names()`.
        out : torch.Tensor
            Contiguous, on the CPU, of the tensor's shape and of any floating dtype; uint8 for a
            tensor of bytes, which quantized ones are. Nothing beyond it and a few MB of scratch is
            held while it is filled.

        Raises
        ------
        KeyError
            If there is no tensor of that name.
        ValueError
            If `out` is not as described.
        UserError
            If the bytes cannot be read, or the tensor is stored as something other than
            float16, bfloat16, float32 or float64 (quantized checkpoints are).
        """
        info = self.info(name)
        if tuple(out.shape) != info.shape:
            raise ValueError(f"{name} has shape {info.shape}, not that of out {tuple(out.shape)}")
        bytes_alone = info.dtype == out.dtype == torch.uint8
        self._check(name, info, out, as_stored=bytes_alone)
        self._fill(name, info, out)

    def read_part(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read some consecutive elements of a tensor, converting to out's dtype.

        Parameters
        ----------
        name : str
            One of `names()`.
        start : int
            The first element to read, in row-major order.
        out : torch.Tensor
            As for `read`, but of any shape: as many elements are read. Also of a tensor's own
            dtype, whatever that is, as the parts of quantized matrices are read.

        Raises
        ------
        KeyError, ValueError, UserError
            As `read`; ValueError also for elements beyond the tensor's last.
        """
        info = self.info(name)
        if not 0 <= start <= math.prod(info.shape) - out.numel():
            raise ValueError(f"{name} has no {out.numel()} elements from {start} on")
        self._check(name, info, out, as_stored=info.dtype == out.dtype)
        self._fill_part(name, info, start, out)

    def _check(self, name: str, info: TensorInfo, out: torch.Tensor, *, as_stored: bool) -> None:
        usable = out.is_floating_point() or as_stored
        if out.device.type != "cpu" or not out.is_contiguous() or not usable:
            raise ValueError(f"{name} can only be read into a contiguous floating CPU tensor")
        if info.dtype not in _READABLE and not as_stored:
            raise UserError(
                f"{self.source}: tensor {name} is stored as {_plain(info.dtype)}; "
                "use a checkpoint in float32, float16 or bfloat16"
            )

    def kept_layout(self, name: str) -> MatrixLayout | None:
        """Return the layout in which `keep` writes a matrix without loss; None for tensors that
        are not stored as codes."""
        return None

    def keep(self, name: str, layout: MatrixLayout, out: torch.Tensor,
             rows: range | None = None) -> bool:
        """Write a matrix into `out` by the codes that it is stored as, with no second rounding.

        Parameters
        ----------
        name : str
            One of `names()`.
        layout : MatrixLayout
            Of the matrix, or of these rows.
        out : uint8 Tensor [layout.nbytes]
        rows : range, optional
            Those wanted, counted over all axes but the last. None: all.

        Returns
        -------
        bool
            False where it is not stored as codes that this layout can hold; what `out` holds then
            is not known.
        """
        return False

    def close(self) -> None:
        """Let go of open files. The checkpoint must not be read afterwards."""
        return None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Spec(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def resolve(
    checkpoint: Checkpoint,
    specs: Iterable[_Spec],
    aliases: Callable[[str], tuple[str, ...]],
) -> dict[str, str]:
    """Find every wanted tensor of a model under the name that this checkpoint has for it.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where to look.
    specs : iterable of objects with `name` and `shape`
        The tensors wanted, by canonical name.
    aliases : callable
        Given a canonical name, the names to try in turn, the canonical one first.

    Returns
    -------
    dict of str to str
        Canonical name to the checkpoint's name.

    Raises
    ------
    UserError
        If a tensor is missing or of another shape.
    """
    present = checkpoint.names()
    found = {}
    for spec in specs:
        tried = aliases(spec.name)
        actual = next((name for name in tried if name in present), None)
        if actual is None:
            also = [name for name in tried if name != spec.name]
            hint = f" (nor {' or '.join(also)})" if also else ""
            absent = next((name for name in tried if name in checkpoint.absent), None)
            if absent is not None:
                raise UserError(f"{checkpoint.absent[absent]} has no tensor {absent}, which the "
                                "index places in it; get the file again")
            raise UserError(
                f"{checkpoint.source} has no tensor {spec.name}{hint}; "
                "is it complete, and does its config.json belong to it?"
            )
        shape = checkpoint.info(actual).shape
        if shape != tuple(spec.shape):
            raise UserError(
                f"{checkpoint.source}: tensor {actual} has shape {list(shape)}, but config.json "
                f"calls for {list(spec.shape)}; do the two belong together?"
            )
        found[spec.name] = actual
    return found


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
