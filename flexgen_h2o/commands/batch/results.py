"""The files of a job's results: lines that are whole, of one job at a time, gone on with.

The name of a line, its `id`, holds the key of the request that it answers.
"""

from __future__ import annotations

import errno
import fcntl
import os
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from flexgen_h2o.commands.batch.input import JobInput
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import catch_write_errors, check_writable

PREFIX = "batch_req_"
"""The beginning of a line's `id`, before 16 hexadecimal digits of the request's key."""
_BEGINNING = b'{"id":"' + PREFIX.encode()  # of each line, as `responses` writes it


class _Status(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    id: str
    response: _Status | None


_DECODER = msgspec.json.Decoder(_Line)


class ResultsFile:
    """A file of result lines that this job alone writes.

    What was added is on disk when `add` returns. A last line without its end, as a killed job
    leaves it, is cut off when the file is opened; one that is no line of results stays, for
    `answered` to refuse.

    Parameters
    ----------
    flag, path : str
        The flag that names the file, and the file, which is made if it is not there.

    Raises
    ------
    UserError
        It cannot be written, or another job writes it.
    """

    def __init__(self, flag: str, path: str):
        check_writable(flag, path, hint=": name one, for the same command to go on with")
        self.flag, self.path = flag, path
        with catch_write_errors(flag, path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            with catch_write_errors(flag, path):
                self._cut()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            # It goes with the descriptor, however the process ends.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(f"{self.flag} {self.path} is being written by another job: wait "
                                "for it, or choose another file") from None
            raise UserError(f"cannot lock {self.flag} {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Let go of the file, which goes if nothing is in it."""
        found = os.fstat(self._file)
        # Where it has been removed, its name may be that of another job's file by now.
        if not found.st_size and os.path.exists(self.path) and os.path.samestat(
                found, os.stat(self.path)):
            os.unlink(self.path)
        os.close(self._file)

    def clear(self) -> None:
        """Take out what it holds. Raises `UserError` if it cannot."""
        with catch_write_errors(self.flag, self.path):
            os.ftruncate(self._file, 0)

    @property
    def empty(self) -> bool:
        """True if there are no lines in it."""
        return os.fstat(self._file).st_size == 0

    def _cut(self) -> None:
        """Cut off the beginning of a line of results at the end of the file."""
        whole = self._whole()
        if _BEGINNING.startswith(os.pread(self._file, len(_BEGINNING), whole)):
            os.ftruncate(self._file, whole)

    def _whole(self) -> int:
        """Bytes up to the end of the last whole line."""
        end = os.fstat(self._file).st_size
        while end:
            start = max(0, end - (1 << 20))
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def add(self, lines: Sequence[bytes]) -> None:
        """Add lines, each without its end. Raises `UserError` if they can't be written; then
        none is."""
        if not lines:
            return
        with catch_write_errors(self.flag, self.path):
            if os.fstat(self._file).st_nlink == 0:
                raise OSError(errno.ENOENT, "it has been removed while the job runs")
            start = os.fstat(self._file).st_size
            try:
                data = memoryview(b"".join(line + b"\n" for line in lines))
                while data:
                    data = data[os.write(self._file, data):]
            except BaseException:
                os.ftruncate(self._file, start)
                raise
            os.fsync(self._file)

    def answered(self, source: JobInput) -> tuple[np.ndarray, np.ndarray]:
        """Places of the lines of the input that it answers, and those of them that only failed.

        A failure whose line has been changed since counts no more.

        Raises
        ------
        UserError
            A line is none of results, or answers a request that the input does not have.
        """
        keys, good = array("Q"), array("B")
        with catch_write_errors(self.flag, self.path), open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                for column, value in zip((keys, good), self._read(line, number), strict=True):
                    column.append(value)
        places = source.find(np.frombuffer(keys, np.uint64)) if keys else np.empty(0, np.int64)
        fine = np.frombuffer(good, np.uint8)
        strange = np.flatnonzero((places < 0) & (fine == 1))
        if len(strange):
            raise UserError(f"{self.flag} {self.path} line {strange[0] + 1} answers a request that "
                            f"--input {source.path} does not have: choose another file, or "
                            "--overwrite this one")
        known = places[places >= 0]
        return np.unique(known), np.setdiff1d(known, places[fine == 1])

    def _read(self, line: bytes, number: int) -> tuple[int, bool]:
        try:
            return key_of(line)
        except (ValueError, RecursionError):
            raise UserError(f"{self.flag} {self.path} line {number} is not a line of results: "
                            "choose another file, or --overwrite this one") from None


def key_of(line: bytes) -> tuple[int, bool]:
    """The key of the request that a line answers, and True if the answer is no failure.

    Raises `ValueError` or `RecursionError` for what is no line of results.
    """
    found = _DECODER.decode(line)
    if not found.id.startswith(PREFIX):
        raise ValueError("no id of a job's")
    key = int(found.id.removeprefix(PREFIX), 16)
    if not 0 <= key < 2**64:
        raise ValueError("no key")
    return key, found.response is not None and found.response.status_code == 200
