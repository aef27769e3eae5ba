"""The interface of checkpoints: named tensors, read one at a time; and views of stacked tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.tensors import TensorSpec
from flexgen_h2o.storage.disk import Extent

_SCRATCH_ELEMENTS = 1 << 20  # read at a time where rows are selected or transposed
_READABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a tensor.

    Attributes
    ----------
    dtype : torch.dtype
        The stored dtype.
    shape : tuple of int
    extent : Extent or None
        The position of its bytes in a file; None if they are not contiguous in a file.
    checksum : int or None
        XXH3 (64 bits) of these bytes, if the file has it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    extent: Extent | None
    checksum: int | None = None


class Checkpoint:
    """Named tensors that are read one at a time. Thread-safe.

    Attributes
    ----------
    source : str
        Name in error messages, usually a path.
    absent : mapping of str to Path
        The shards of tensors that are in the index and missing in the shard.
    """

    source: str
    absent: Mapping[str, Path] = MappingProxyType({})
    _infos: Mapping[str, TensorInfo]

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._infos.keys()

    def info(self, name: str) -> TensorInfo:
        """Return the metadata of a tensor; raise KeyError if there is none of that name."""
        return self._infos[name]

    # Subclasses override one of these, and the second if they can read a part of a tensor.

    def _fill(self, name: str, info: TensorInfo, out: torch.Tensor) -> None:
        """Fill `out`, which is checked already."""
        self._fill_part(name, info, 0, out)

    def _fill_part(self, name: str, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        """Fill `out`, which is checked already, with elements from `start` on."""
        tensor = torch.empty(info.shape, dtype=out.dtype)
        self._fill(name, info, tensor)
        out.view(-1).copy_(tensor.view(-1)[start : start + out.numel()])

    def read(self, name: str, out: torch.Tensor) -> None:
        """Read a tensor into `out`, converting to its dtype.

        Parameters
        ----------
        name : str
            One of `names()`.
        out : torch.Tensor
            Contiguous CPU tensor of the same shape and of any floating dtype; uint8 for a uint8
            tensor, such as quantized values. At most a few MB of scratch memory are used.

        Raises
        ------
        KeyError
            If there is no tensor of that name.
        ValueError
            If `out` is not as described.
        UserError
            If the bytes cannot be read, or the stored dtype is not float16, bfloat16, float32
            or float64.
        """
        info = self.info(name)
        if tuple(out.shape) != info.shape:
            raise ValueError(f"{name} has shape {info.shape}, and out has {tuple(out.shape)}")
        self._check(name, info, out, as_stored=info.dtype == out.dtype == torch.uint8)
        self._fill(name, info, out)

    def read_part(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read consecutive elements of a tensor, converting to the dtype of `out`.

        Parameters
        ----------
        name : str
            One of `names()`.
        start : int
            The first element to read, in row-major order.
        out : torch.Tensor
            See `read`, but any shape is allowed, and also the stored dtype.

        Raises
        ------
        KeyError, ValueError, UserError
            See `read`. ValueError also if the tensor has too few elements.
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
        if not as_stored:
            self.check_dtype(name)

    def check_dtype(self, name: str) -> None:
        """Raise `UserError` for a tensor that is not stored as floating-point numbers."""
        dtype = self.info(name).dtype
        if dtype not in _READABLE:
            raise UserError(f"{self.source}: tensor {name} is stored as {_plain(dtype)}; "
                            "use a checkpoint in float32, float16 or bfloat16")

    def stored_layout(self, name: str) -> MatrixLayout | None:
        """Return the layout of a tensor's quantized values; None if it is not quantized."""
        return None

    def read_quantized(self, name: str, layout: MatrixLayout, out: torch.Tensor,
                       rows: range | None = None) -> bool:
        """Write the stored quantized values of a matrix into `out`, without rounding again.

        Parameters
        ----------
        name : str
            One of `names()`.
        layout : MatrixLayout
            The layout of the matrix, or of these rows.
        out : uint8 Tensor [layout.nbytes]
        rows : range, optional
            Rows to write, counted over all axes but the last. None: all.

        Returns
        -------
        bool
            False if the matrix has no quantized values that this layout can hold. The contents of
            `out` are then undefined.
        """
        return False

    def close(self) -> None:
        """Close files. The checkpoint must not be read afterwards."""
        return None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def fill_rows(out: torch.Tensor, start: int, columns: int,
              values: Callable[[int, int], torch.Tensor]) -> None:
    """Fill `out` with elements from `start` on of a tensor whose rows are computed.

    Parameters
    ----------
    columns : int
        Elements of a row.
    values : callable (first, stop) -> float Tensor [stop - first, columns]
        Compute some rows.
    """
    flat = out.view(-1)
    end, step = start + len(flat), max(1, _SCRATCH_ELEMENTS // columns)
    for first in range(start // columns, -(-end // columns), step):
        stop = min(first + step, -(-end // columns))
        begin, finish = max(start, first * columns), min(end, stop * columns)
        flat[begin - start : finish - start].copy_(
            values(first, stop).view(-1)[begin - first * columns : finish - first * columns])


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def resolve(checkpoint: Checkpoint, specs: Iterable[TensorSpec],
            aliases: Callable[[str], tuple[str, ...]]) -> dict[str, str]:
    """Return the checkpoint's names of a model's tensors.

    Parameters
    ----------
    specs : iterable of TensorSpec
        The tensors, by canonical name.
    aliases : callable
        Returns the possible names of a tensor, the canonical one first.

    Returns
    -------
    dict of str to str
        Canonical name to name in the checkpoint.

    Raises
    ------
    UserError
        If a tensor is missing or has another shape.
    """
    present = checkpoint.names()
    names = {}
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
            raise UserError(f"{checkpoint.source} has no tensor {spec.name}{hint}; is it complete, "
                            "and does its config.json belong to it?")
        shape = checkpoint.info(actual).shape
        if shape != tuple(spec.shape):
            raise UserError(f"{checkpoint.source}: tensor {actual} has shape {list(shape)}, but "
                            f"config.json calls for {list(spec.shape)}; do the two belong "
                            "together?")
        names[spec.name] = actual
    return names


@dataclass(frozen=True)
class View:
    """A matrix or vector inside a larger tensor: ``tensor[entry]``, transposed, ``[rows]``.

    Attributes
    ----------
    tensor : str
        Name of the larger tensor in the checkpoint.
    entry : int or None
        Index on its first axis, such as the expert. None: the tensor is not stacked.
    transposed : bool
        Whether the entry is stored as [inputs, outputs].
    rows : range or None
        Rows of the entry, after transposition. ``range(n)`` and ``range(n, 2 * n)`` are halves,
        ``range(0, 2 * n, 2)`` and ``range(1, 2 * n, 2)`` alternate. None: all. For a vector, its
        elements.
    row_ranges : tuple of range
        In place of `rows`, ranges that follow one another in the result, such as the queries of
        each head in a matrix of queries and gates.
    blocks : int
        Equal blocks of rows in the tensor, such as heads: the result is [blocks, rows, inputs] with
        these stored rows of each block, or [blocks, inputs, rows] if `transposed`. 0: none.
    """

    tensor: str
    entry: int | None = None
    transposed: bool = False
    rows: range | None = None
    row_ranges: tuple[range, ...] = ()
    blocks: int = 0


@dataclass(frozen=True)
class _Region:
    """The position of a view, or of a part of it, in a tensor of known shape, in elements."""

    shape: tuple[int, ...]
    start: int  # of the entry
    rows: range  # within the entry
    width: int  # of a stored row; 1 for a vector, whose elements count as rows
    height: int  # stored rows of the entry


class StackedCheckpoint(Checkpoint):
    """A checkpoint with views of another checkpoint's stacked and fused tensors.

    Checkpoints may have one tensor for all experts of a layer [experts, rows, columns], for
    queries, keys and values, or for both halves of a gated MLP. The engine reads single matrices. A
    view of consecutive rows has an extent, and is streamed from the file. Others are read through a
    few MB of scratch memory.

    Parameters
    ----------
    inner : Checkpoint
        Closed with this one.
    views : mapping of str to sequence of View
        Possible views by tensor name; the first whose tensor exists is used. Names that `inner`
        has itself are not viewed.

    Notes
    -----
    `names()` does not include the viewed tensors, so that a converted copy has each byte once.
    """

    def __init__(self, inner: Checkpoint, views: Mapping[str, Sequence[View]]):
        self.source, self.absent, self._inner = inner.source, inner.absent, inner
        present = inner.names()
        self._views: dict[str, View] = {}
        for name, candidates in views.items():
            view = next((view for view in candidates if view.tensor in present), None)
            if view is not None and name not in present:
                self._views[name] = view
        viewed = {view.tensor for view in self._views.values()}
        self._names = dict.fromkeys(
            [*(name for name in present if name not in viewed), *self._views])

    def names(self) -> Collection[str]:
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        if name not in self._views:
            return self._inner.info(name)
        view = self._views[name]
        stacked = self._inner.info(view.tensor)
        if view.blocks:
            rows, (_, width) = self._block(name)
            shape = (width, len(rows)) if view.transposed else (len(rows), width)
            return replace(stacked, shape=(view.blocks, *shape), extent=None, checksum=None)
        (region, *others), extent = self._regions(name), None
        height = sum(part.shape[0] for part in (region, *others))
        if (stacked.extent is not None and not view.transposed and not others
                and region.rows.step == 1):
            size = stacked.dtype.itemsize
            first = (region.start + region.rows.start * region.width) * size
            extent = Extent(stacked.extent.path, stacked.extent.offset + first,
                            math.prod(region.shape) * size)
        return replace(stacked, shape=(height, *region.shape[1:]), extent=extent, checksum=None)

    def _regions(self, name: str) -> list[_Region]:
        """Return the regions of a view: of its rows, or of each range of rows."""
        view = self._views[name]
        return [self._region(name, rows) for rows in view.row_ranges or (view.rows,)]

    def _region(self, name: str, view_rows: range | None) -> _Region:
        """Return the position of some rows of a view's tensor; None: of all rows.

        Raise `UserError` if the tensor lacks the part.
        """
        view = self._views[name]
        stored = self._inner.info(view.tensor).shape
        stacked = view.entry is not None
        entry, entries = view.entry or 0, stored[0] if stacked and stored else 1
        shape = stored[1:] if stacked else stored
        transposed = shape[::-1] if view.transposed else shape
        height = transposed[0] if transposed else 0
        rows = range(height) if view_rows is None else view_rows
        fits = len(shape) == 2 or len(shape) == 1 and not view.transposed
        inside = not rows or 0 <= rows[0] <= rows[-1] < height
        if not fits or not inside or not 0 <= entry < entries:
            raise self._missing(name)
        width = shape[1] if len(shape) == 2 else 1
        return _Region((len(rows), *transposed[1:]), entry * math.prod(shape), rows, width,
                       shape[0])

    def _block(self, name: str) -> tuple[range, tuple[int, int]]:
        """Return the rows of a view in a block, and the (height, width) of a stored block."""
        view = self._views[name]
        shape = self._inner.info(view.tensor).shape
        height = shape[0] // view.blocks if len(shape) == 2 else 0
        rows = range(height) if view.rows is None else view.rows
        if not height or shape[0] % view.blocks or not 0 <= rows[0] <= rows[-1] < height:
            raise self._missing(name)
        return rows, (height, shape[1])

    def _missing(self, name: str) -> UserError:
        tensor = self._views[name].tensor
        shape = list(self._inner.info(tensor).shape)
        return UserError(f"{self.source}: tensor {tensor} has shape {shape}, in which there is no "
                         f"{name}; does config.json belong to it?")

    def _fill(self, name: str, info: TensorInfo, out: torch.Tensor) -> None:
        if name not in self._views:
            self._inner.read(name, out)
            return
        view = self._views[name]
        if view.blocks:
            self._fill_blocks(name, out)
            return
        regions = self._regions(name)
        for region, part in zip(regions, out.split([region.shape[0] for region in regions]),
                               strict=True):
            if view.transposed:
                self._fill_transposed(view.tensor, region, part)
            elif region.rows.step == 1:
                first = region.start + region.rows.start * region.width
                self._inner.read_part(view.tensor, first, part)
            else:
                self._fill_strided(view.tensor, region, part.view(len(region.rows), region.width))

    def _fill_blocks(self, name: str, out: torch.Tensor) -> None:
        """Read some rows of each block."""
        view, (rows, block) = self._views[name], self._block(name)
        step = max(1, _SCRATCH_ELEMENTS // math.prod(block))
        for first in range(0, view.blocks, step):
            target = out[first : first + step]
            part = torch.empty(len(target), *block, dtype=out.dtype)
            self._inner.read_part(view.tensor, first * math.prod(block), part)
            part = part[:, rows.start : rows.stop : rows.step]
            target.copy_(part.transpose(1, 2) if view.transposed else part)

    def _fill_transposed(self, tensor: str, region: _Region, out: torch.Tensor) -> None:
        """Read columns of the stored entry as rows."""
        step = max(1, _SCRATCH_ELEMENTS // max(1, region.width))
        scratch = torch.empty(min(step, region.height), region.width, dtype=out.dtype)
        columns = slice(region.rows.start, region.rows.stop, region.rows.step)
        for first in range(0, region.height, step):
            part = scratch[: region.height - first]
            self._inner.read_part(tensor, region.start + first * region.width, part)
            out[:, first : first + len(part)] = part[:, columns].T

    def _fill_strided(self, tensor: str, region: _Region, out: torch.Tensor) -> None:
        """Read every n-th stored row."""
        skip = region.rows.step
        step = max(1, _SCRATCH_ELEMENTS // max(1, region.width * skip))
        for first in range(0, len(region.rows), step):
            rows = region.rows[first : first + step]
            part = torch.empty(rows[-1] + 1 - rows[0], region.width, dtype=out.dtype)
            self._inner.read_part(tensor, region.start + rows[0] * region.width, part)
            out[first : first + len(rows)] = part[::skip]

    def stored_layout(self, name: str) -> MatrixLayout | None:
        if name not in self._views:
            return self._inner.stored_layout(name)
        regions = self._quantized_regions(name)
        layout = self._inner.stored_layout(self._views[name].tensor)
        if layout is None or not regions:
            return None
        return replace(layout, outputs=sum(len(region.rows) for region in regions))

    def read_quantized(self, name: str, layout: MatrixLayout, out: torch.Tensor,
                       rows: range | None = None) -> bool:
        if name not in self._views:
            return self._inner.read_quantized(name, layout, out, rows)
        regions, end = self._quantized_regions(name), 0
        if not regions or rows is not None and len(regions) > 1:
            return False
        for region in regions:
            part = region.rows if rows is None else region.rows[rows.start : rows.stop : rows.step]
            first = region.start // region.width
            part_layout = replace(layout, outputs=len(part))
            begin, end = end, end + part_layout.nbytes
            if not self._inner.read_quantized(
                    self._views[name].tensor, part_layout, out[begin:end],
                    range(first + part.start, first + part.stop, part.step)):
                return False
        return True

    def _quantized_regions(self, name: str) -> list[_Region]:
        """Return the regions whose quantized values make up a view, one after the other.

        None of a view that changes the order within rows, or the tiles of a `MatrixLayout`.
        """
        view = self._views[name]
        if view.transposed or view.blocks:
            return []
        regions = self._regions(name)
        whole = all(len(region.rows) % MATRIX_TILE == 0 for region in regions[:-1])
        return regions if whole and len(regions[0].shape) == 2 else []

    def close(self) -> None:
        self._inner.close()


def unstacked(checkpoint: Checkpoint, views: Mapping[str, Sequence[View]]) -> Checkpoint:
    """Return `checkpoint` with these views; itself if it has none of their tensors."""
    present = checkpoint.names()
    stacked = any(view.tensor in present for candidates in views.values() for view in candidates)
    return StackedCheckpoint(checkpoint, views) if stacked else checkpoint
