"""A range of bytes in a file: the word that checkpoints and the disk engine share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Extent:
    """A run of bytes in a file: the raw, row-major, little-endian elements of one tensor.

    Attributes
    ----------
    path : Path
        The file.
    offset : int
        Where the bytes start, in bytes from the start of the file. Any value: the safetensors
        format promises no alignment.
    nbytes : int
        How many bytes.
    """

    path: Path
    offset: int
    nbytes: int
