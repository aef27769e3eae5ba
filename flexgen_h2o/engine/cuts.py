"""Matrices cut into parts of some outputs each, which have places of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from flexgen_h2o.config.placement import Placement
from flexgen_h2o.models.spec import TensorSpec
from flexgen_h2o.models.weight_format import WeightFormat
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.placement import assign, chunk_rows


class CutRows(NamedTuple):
    """Some outputs of a matrix, and where they rest: on disk, or in memory."""

    rows: slice
    on_disk: bool


def cut(specs: Mapping[str, TensorSpec], form: WeightFormat, placement: Placement, *,
        whole: Collection[str], layer: int) -> dict[str, list[CutRows]]:
    """The parts of the matrices that are on disk, all or in part.

    Parameters
    ----------
    specs : mapping of name to TensorSpec
        In the order in which they are placed. Vectors stay in memory.
    placement : Placement
        Share of the bytes on each tier.
    whole : collection of names
        Matrices that are on one tier, though they may be read in parts.
    layer : int
        Bytes of a decoder layer.
    """
    sizes: dict[tuple[str, int, int], int] = {}
    for name, spec in specs.items():
        if len(spec.shape) != 2:
            continue
        for rows in _chunks(spec, form, layer):
            first, end = (0, spec.shape[0]) if name in whole else (rows.start, rows.stop)
            sizes[name, first, end] = form.nbytes(TensorSpec(name, (end - first, spec.shape[1])))
    parts: dict[str, list[CutRows]] = {}
    for (name, first, end), tier in assign(sizes.items(), placement).items():
        before, on_disk = parts.setdefault(name, []), tier == "disk"
        if before and not on_disk and not before[-1].on_disk:  # one product instead of two
            first = before.pop().rows.start
        before.append(CutRows(slice(first, end), on_disk))
    for name in parts.keys() & set(whole):
        if parts[name][0].on_disk:
            parts[name] = [CutRows(rows, True) for rows in _chunks(specs[name], form, layer)]
    return {name: those for name, those in parts.items() if any(each.on_disk for each in those)}


def _chunks(spec: TensorSpec, form: WeightFormat, layer: int) -> list[slice]:
    """The outputs of each chunk of a matrix."""
    outputs = spec.shape[0]
    step = chunk_rows(outputs, form.nbytes(spec), layer)
    return [slice(first, min(first + step, outputs)) for first in range(0, outputs, step)]


def piece_of(extent: Extent, rows: slice, spec: TensorSpec, form: WeightFormat
             ) -> tuple[TensorSpec, Extent]:
    """Some outputs of a matrix as a tensor, and where they lie; rows begin with a tile."""
    inputs = spec.shape[1]
    piece = TensorSpec(spec.name, (rows.stop - rows.start, inputs))
    before = form.nbytes(TensorSpec(spec.name, (rows.start, inputs))) if rows.start else 0
    return piece, Extent(extent.path, extent.offset + before, form.nbytes(piece))
