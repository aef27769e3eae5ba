"""Weights that belong on disk but lie in no file as compute wants them: where they are written.

Those of a checkpoint are written for a run, and go with it. Random weights in 8 or 4 bits stay for
later runs: all of a model's have places in one file, of which only what was ever placed on disk is
there, so that another placement writes no more than what is new to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.atomic import open_atomic
from flexgen_h2o.models.convert import Keep, locked
from flexgen_h2o.storage.disk import RunFolder
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.tiers import PAGE, round_up

_FORMAT = 1  # raise it when other bytes are written for the same tensors: files are made anew then


@dataclass(frozen=True)
class Spill:
    """Places of tensors on disk, by name, and the names of those that have to be written first."""

    extents: Mapping[str, Extent]
    left: Collection[str]


def spill_of_run(folder: RunFolder, sizes: Mapping[str, int]) -> Spill:
    """Places for tensors of these sizes in bytes, in a file of a run's own."""
    path = folder.file("weights.bin", sum(round_up(size, PAGE) for size in sizes.values()))
    return Spill(_places(path, sizes), sizes.keys())


def _places(path: Path, sizes: Mapping[str, int]) -> dict[str, Extent]:
    """Consecutive extents, each from a new page on."""
    places, offset = {}, 0
    for name, size in sizes.items():
        places[name] = Extent(path, offset, size)
        offset += round_up(size, PAGE)
    return places


class KeptWeights:
    """A model's tensors in a file that stays.

    Parameters
    ----------
    keep : Keep
        Where the file's folder is.
    title : str
        For people who look into it.
    identity : object
        All that the tensors' bytes follow from, for JSON.
    sizes : mapping of str to int
        Bytes of all tensors.
    """

    def __init__(self, keep: Keep, title: str, identity: object, sizes: Mapping[str, int]):
        text = json.dumps([_FORMAT, identity, list(sizes.items())])
        self._keep = keep
        self._folder = keep.root / f"{title}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self._file = self._folder / "weights.bin"
        self._extents = _places(self._file, sizes)

    @contextlib.contextmanager
    def writing(self, names: Collection[str]) -> Iterator[Spill]:
        """Places for some of the tensors; those that are left must be written in the meantime, and
        count as written from then on. Other processes wait.

        Raises
        ------
        UserError
            There can't be such a file, or the disk has no room for it.
        """
        noted = self._folder / "written.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / ".lock"):
                written = self._written(noted)
                lacking = set(names) - set(written)
                left = [name for name in self._extents if name in lacking]
                with self._reserved(left):
                    yield Spill({name: self._extents[name] for name in names}, left)
                if left:
                    with open_atomic(noted) as file:
                        json.dump([*written, *left], file)
        except OSError as error:
            raise UserError(f"cannot keep random weights in {self._folder} "
                            f"({error.strerror or error}); free space there or "
                            f"{self._keep.advice}") from error

    def _written(self, noted: Path) -> list[str]:
        """The tensors that are there: none if the file or the note of them is gone or damaged, and
        none that a file which was cut short lacks the end of."""
        try:
            size = self._file.stat().st_size
            found = json.loads(noted.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return []
        noted_names = set(map(str, found)) if isinstance(found, list) else set()
        return [name for name, extent in self._extents.items()
                if name in noted_names and extent.offset + extent.nbytes <= size]

    @contextlib.contextmanager
    def _reserved(self, names: Collection[str]) -> Iterator[None]:
        """Have room on disk for tensors, so that a full one shows now; then have them for good.

        After an error the file is no longer than before.
        """
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        before = os.fstat(descriptor).st_size
        try:
            for extent in (self._extents[name] for name in names):
                os.posix_fallocate(descriptor, extent.offset, round_up(extent.nbytes, PAGE))
            yield
            if names:
                os.fsync(descriptor)
        except BaseException:
            os.ftruncate(descriptor, before)
            raise
        finally:
            os.close(descriptor)
