"""Figures as text: bytes as people read them, cells in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_h2o.metrics.links import GB

_UNITS = (("GB", GB), ("MB", 1e6), ("KB", 1e3))


def sizes(*nbytes: int) -> list[str]:
    """Bytes as people read them, in GB or the unit that suits; no two that differ read the same.

    They have one digit after the point, or as many more as it takes to tell them apart.
    """
    for digits in range(1, 10):  # nine are bytes, whatever the unit
        texts = [_size(each, digits) for each in nbytes]
        if len(set(texts)) == len(set(nbytes)):
            break
    return texts


def _size(nbytes: int, digits: int) -> str:
    for unit, scale in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes} bytes"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells as text in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([line[0].ljust(widths[0]),
                                *map(str.rjust, line[1:], widths[1:])]) for line in lines)
