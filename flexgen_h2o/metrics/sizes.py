"""Bytes as people read them."""

from __future__ import annotations

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
