"""What a disk may hold after a power loss, from the log of a job's changes that the shim wrote.

The model is that of a journaling file system that promises what POSIX does and no more:

- Bytes are on disk once their file was synchronized. Of later writes any pages may be there, in any
  order; where the file has grown past a page that is not, zeros are.
- Names are on disk once their folder was synchronized. Of the later changes of a folder the first
  ones may be there: a rename is there or is not, and so is what came before it in the folder.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PAGE = 4096


@dataclass(frozen=True)
class Change:
    """A line of the log: what was done to a path, and for a rename the new path.

    `offset` is that of a write, and the new size of a truncation.
    """

    operation: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


def read_log(path: Path) -> list[Change]:
    """Return the changes and marks in a log."""
    changes, content, place = [], path.read_bytes(), 0
    while place < len(content):
        end = content.index(b"\n", place)
        operation, first, other, offset, length = content[place:end].decode().split("\t")
        place = end + 1 + int(length)
        changes.append(Change(operation, first, other, int(offset), content[end + 1:place]))
    return changes


@dataclass
class _File:
    """A file: the bytes that are on disk, and the later writes and truncations."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)

    def content(self, draw: random.Random | None, share: float) -> bytearray:
        """Return the bytes after a loss that keeps a `share` of the pages written since.

        Without `draw`, return all bytes.
        """
        content = bytearray(self.durable)
        for change in self.pending:
            if change.operation == "truncate":
                if draw is None or draw.random() < share:
                    del content[change.offset:]
                    content.extend(bytes(change.offset - len(content)))
                continue
            end = change.offset + len(change.data)
            for page in range(change.offset // PAGE * PAGE, end, PAGE):
                if draw is None or draw.random() < share:
                    start, stop = max(page, change.offset), min(page + PAGE, end)
                    content.extend(bytes(max(0, stop - len(content))))
                    content[start:stop] = change.data[start - change.offset:stop - change.offset]
        return content

    def sync(self) -> None:
        self.durable, self.pending = self.content(None, 1), []


@dataclass
class _Folder:
    """A folder: its entries on disk, the later changes, and its entries now."""

    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[tuple[str, _File | _Folder | None]] = field(default_factory=list)
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    serial: list[int] = field(default_factory=list)

    def change(self, *changes: tuple[str, _File | _Folder | None]) -> None:
        """Set or remove names at once."""
        self.serial.append(len(self.pending) + len(changes))
        self.pending += changes
        _apply(self.entries, changes)

    def sync(self) -> None:
        self.durable, self.pending, self.serial = dict(self.entries), [], []

    def after_loss(self, draw: random.Random, share: float) -> dict[str, _File | _Folder]:
        """Return the entries after a loss that keeps about a `share` of the later changes."""
        steps = [0, *self.serial]
        kept = steps[min(len(steps) - 1, int(share * len(steps) + draw.random()))]
        entries = dict(self.durable)
        _apply(entries, self.pending[:kept])
        return entries


def _apply(entries: dict, changes) -> None:
    for name, node in changes:
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class SimulatedDisk:
    """A disk that is given changes, and can tell what is on it after a power loss.

    Parameters
    ----------
    root : Path
        The folder of the log's paths. It is on disk, and empty.
    """

    def __init__(self, root: Path):
        self._root = root
        self._top = _Folder()
        self.marks: list[str] = []

    def add(self, change: Change) -> None:
        """Make a change, or keep a mark."""
        if change.operation == "mark":
            self.marks.append(change.path)
            return
        if (place := self._find(change.path)) is None:
            return
        folder, name = place
        if change.operation in ("create", "mkdir"):
            folder.change((name, _File() if change.operation == "create" else _Folder()))
        elif change.operation == "unlink":
            folder.change((name, None))
        elif change.operation == "rename":
            target = self._find(change.other)
            assert target is not None
            node = folder.entries[name]
            if target[0] is folder:
                folder.change((target[1], node), (name, None))
            else:
                target[0].change((target[1], node))
                folder.change((name, None))
        else:
            node = folder.entries[name] if name else folder
            if change.operation == "sync":
                node.sync()
            elif isinstance(node, _File):
                node.pending.append(change)

    def _find(self, path: str) -> tuple[_Folder, str] | None:
        """Return the folder and the name of a path; None outside of the root, or if removed."""
        parts = Path(path.removesuffix(" (deleted)")).relative_to(self._root).parts
        folder = self._top
        for part in parts[:-1]:
            if not isinstance(folder := folder.entries.get(part), _Folder):
                return None
        name = parts[-1] if parts else ""
        return None if path.endswith(" (deleted)") else (folder, name)

    def write_after_loss(self, target: Path, draw: random.Random, share: float) -> None:
        """Write what is on disk after a loss that keeps a `share` of what was not synchronized."""
        self._write(self._top, target, draw, share)

    def _write(self, folder: _Folder, target: Path, draw: random.Random, share: float) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name, node in folder.after_loss(draw, share).items():
            if isinstance(node, _Folder):
                self._write(node, target / name, draw, share)
            else:
                (target / name).write_bytes(node.content(draw, share))


def losses(changes: list[Change], root: Path, *, shares: tuple[float, ...] = (0, 0.5, 0.5, 1),
           seed: int = 0) -> Iterator[tuple[SimulatedDisk, random.Random, float]]:
    """Yield the disk after each change, for each share of unsynchronized data that a loss keeps."""
    disk, draw = SimulatedDisk(root), random.Random(seed)
    for change in changes:
        disk.add(change)
        for share in shares:
            yield disk, draw, share
