"""Checksums of the bytes that are read from disk again and again (`--verify`)."""

from __future__ import annotations

from torch import Tensor
from xxhash import xxh3_64_intdigest

from flexgen_h2o.errors import UserError
from flexgen_h2o.storage.extent import Extent


class Checksums:
    """XXH3 (64 bits) of extents of files, each made when its bytes were first read or written.

    It finds what changes by accident: a failing disk, a file that is copied over. Somebody who
    writes to the files on purpose can make other bytes of the same checksum. Threads may share it:
    large buffers are hashed without the interpreter lock.
    """

    def __init__(self) -> None:
        self._known: dict[Extent, int] = {}

    def written(self, extent: Extent, data: Tensor) -> None:
        """Note what is written to an extent: uint8 on the host."""
        self._known[extent] = _checksum(data)

    def expect(self, extent: Extent, checksum: int) -> None:
        """Hold an extent against a checksum that its file keeps."""
        self._known[extent] = checksum

    def read(self, extent: Extent, data: Tensor) -> None:
        """Check what was read of an extent (uint8 on the host); the first time, note it.

        Raises `UserError`, which names file and offset, where it is not what it was.
        """
        found = _checksum(data)
        if self._known.setdefault(extent, found) != found:
            raise UserError(f"{extent.path} has changed: the {extent.nbytes} bytes at byte "
                            f"{extent.offset} are not those that were first read or written; "
                            "check the disk, and get or make the file again")


def _checksum(data: Tensor) -> int:
    return xxh3_64_intdigest(memoryview(data.numpy()))
