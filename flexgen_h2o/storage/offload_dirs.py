"""The folders of the disk tier, and files that are striped over them. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexgen_h2o.config.validation import Text, validate
from flexgen_h2o.errors import UserError

STRIPE = 512 << 10  # bytes, a multiple of a page
ROUND = 16
"""Approximate number of stripes after which their order repeats."""

AnyPath = str | os.PathLike


@dataclass(frozen=True)
class StripedFile:
    """Several files that are used as one: its stripes alternate between them (RAID 0).

    Attributes
    ----------
    files : tuple of Path
    order : tuple of int
        Index of the file that has a stripe, by the stripe's number modulo the length.
    stripe : int
        Bytes of a stripe.
    """

    files: tuple[Path, ...]
    order: tuple[int, ...]
    stripe: int

    def __str__(self) -> str:
        return str(self.files[0])

    def sizes(self, nbytes: int) -> list[int]:
        """Return the bytes of each file, for `nbytes` in all, rounded up to whole stripes."""
        rounds, rest = divmod(-(-nbytes // self.stripe), len(self.order))
        return [self.stripe * (rounds * self.order.count(index) + self.order[:rest].count(index))
                for index in range(len(self.files))]

    def ranges(self, offset: int, nbytes: int) -> Iterator[tuple[Path, int, int]]:
        """Yield the file, the offset and the bytes of each part of a range, in order."""
        end = offset + nbytes
        while offset < end:
            stripe, start = divmod(offset, self.stripe)
            rounds, place = divmod(stripe, len(self.order))
            index = self.order[place]
            before = rounds * self.order.count(index) + self.order[:place].count(index)
            size = min(self.stripe - start, end - offset)
            yield self.files[index], before * self.stripe + start, size
            offset += size


@dataclass(frozen=True)
class OffloadDirs:
    """The folders of the disk tier, and how files are spread over them.

    Attributes
    ----------
    paths : tuple of path
    stripes : tuple of int
        Stripes of a file in each folder, in a round over all of them.
    """

    paths: tuple[AnyPath, ...]
    stripes: tuple[int, ...]

    @classmethod
    def parse(cls, value: AnyDirs) -> OffloadDirs:
        """Return one or several folders; they have equal shares unless `value` has others.

        Raises `UserError` if there is no folder, or if one has no name.
        """
        if isinstance(value, OffloadDirs):
            return value
        paths = (value,) if isinstance(value, (str, os.PathLike)) else tuple(value)
        if not paths:
            raise UserError("offload_dir is empty: give a folder, or several")
        for path in paths:
            validate(Text, os.fspath(path) if isinstance(path, os.PathLike) else path,
                     "offload_dir")
        return cls(paths, (1,) * len(paths))

    @property
    def striped(self) -> bool:
        """True if files are striped: there are several folders."""
        return len(self.paths) > 1

    def share(self, folders: Iterable[int]) -> float:
        """Return the share of a file that some folders have together, by their indices."""
        return sum(self.stripes[folder] for folder in folders) / sum(self.stripes)

    def by_rates(self, rates: Sequence[float]) -> OffloadDirs:
        """Return the folders with shares in proportion to rates, each of at least a stripe."""
        counts = [max(1, round(ROUND * rate / sum(rates))) for rate in rates]
        return replace(self, stripes=tuple(count // math.gcd(*counts) for count in counts))

    def striped_file(self, files: Sequence[Path]) -> StripedFile:
        """Return a file that is striped over a file of each folder."""
        # The stripes of each folder are spread evenly over a round.
        places = sorted(((number + 0.5) / count, index) for index, count in enumerate(self.stripes)
                        for number in range(count))
        order = tuple(index for _, index in places)
        return StripedFile(tuple(files), order, STRIPE)


AnyDirs = AnyPath | Sequence[AnyPath] | OffloadDirs
"""Offload folders as they are given: one or several."""
