"""The data directory of a server: files, and an SQLite database of files and batches. No torch.

A file or batch that has been accepted is on disk, even if the process is killed. File names are
random ids; names that clients give are only text.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import catch_write_errors, check_folder, make_folder, sync

ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that has work left."""
INPUT, OUTPUT = "batch", "batch_output"
"""Purposes of files."""

_PARTIAL = ".part"  # suffix of a file that is being accepted or deleted
_VERSION = 1  # raise it when earlier releases cannot read the database any more
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    data TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_kind ON records (kind, number);
"""


class StoreError(UserError):
    """The data directory cannot be read or written, for example because the disk is full."""


class File(msgspec.Struct):
    """A file of the API. `bytes` is its size; times are in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def public(self) -> dict[str, Any]:
        """Return the object of the API."""
        return {"object": "file", **msgspec.to_builtins(self), "status": "processed"}


class Counts(msgspec.Struct):
    """The requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch of the API. Times are in seconds since 1970.

    `output_file_id` and `error_file_id` name the files from the beginning; the API shows them when
    they are complete, and only if they are not empty.
    """

    id: str
    endpoint: str
    model: str
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str
    error_file_id: str
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts
    metadata: dict[str, str] | None = None
    errors: list[dict[str, Any]] = []

    @property
    def active(self) -> bool:
        """Whether the batch has work left."""
        return self.status in ACTIVE

    def public(self) -> dict[str, Any]:
        """Return the object of the API."""
        fields = {"object": "batch", **msgspec.to_builtins(self)}
        fields["errors"] = {"object": "list", "data": self.errors} if self.errors else None
        if self.active or self.status == "failed":
            fields |= {"output_file_id": None, "error_file_id": None}
        return fields | {name: fields[name] or None for name in ("output_file_id", "error_file_id")}


_KINDS: dict[type, str] = {File: "file", Batch: "batch"}
_Record = TypeVar("_Record", File, Batch)


class Store:
    """The files and batches of a server, on disk. Methods may be called from any thread.

    Raises `UserError` if the folder cannot be written, another server uses it, or the database is
    damaged or of a newer release.

    `folder`: it is created if it is missing. One server at a time uses it.
    """

    def __init__(self, folder: str):
        self._folder, self._files = Path(folder), Path(folder, "files")
        self._lock = threading.RLock()
        check_folder("--data-dir", folder, [])
        with catch_write_errors("--data-dir", folder):
            for new in (self._folder, self._files):
                make_folder(new, 0o700)
            self._held = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                                 0o600)
        try:
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
            except OSError:
                raise UserError(f"--data-dir {folder} is in use by another server: stop that one, "
                                "or choose another folder") from None
            self._database = self._open(self._folder / "serve.db")
            try:
                self._settle_partial_files()
            except BaseException:
                self._database.close()
                raise
        except BaseException:
            os.close(self._held)
            raise

    def _settle_partial_files(self) -> None:
        """Keep the partial files that have a record, and remove the others.

        A kill leaves them if it comes while a file is accepted or deleted.
        """
        with catch_write_errors("--data-dir", str(self._folder)):
            for path in self._files.glob(f"*{_PARTIAL}"):
                id = path.name.removesuffix(_PARTIAL)
                if self.get(File, id) is None:
                    path.unlink()
                else:
                    path.rename(self.path(id))

    def _open(self, path: Path) -> sqlite3.Connection:
        """Open the database, and check it."""
        try:
            database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")  # an accepted batch survives power loss
            (state,), = database.execute("PRAGMA quick_check(1)")
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            (version,), = database.execute("PRAGMA user_version")
            if version > _VERSION:
                raise UserError(f"the database {path} was written by a newer release: use that "
                                "one, or choose another --data-dir")
            database.executescript(_SCHEMA)
            if version < _VERSION:  # a full disk must not keep others from being opened
                database.execute(f"PRAGMA user_version = {_VERSION}")
            for record_type, name in _KINDS.items():
                for data, in database.execute("SELECT data FROM records WHERE kind = ?", (name,)):
                    msgspec.json.decode(data, type=record_type)
            return database
        except sqlite3.OperationalError as error:  # no permission, or no space
            raise UserError(f"cannot open the database {path}: {error}") from None
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise UserError(
                f"the database {path} is damaged ({error}): restore a backup of it with "
                f"{path.name}-wal, or move both away to begin without batches; uploads and results "
                f"stay in {self._files}") from None

    def close(self) -> None:
        """Close the database and release the folder."""
        with self._lock:
            self._database.close()
            os.close(self._held)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                try:
                    yield self._database
                    self._database.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):  # a full disk may have rolled back already
                        self._database.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StoreError(f"the server's database cannot be used: {error}") from None

    # Records.

    def _insert(self, database: sqlite3.Connection, record: File | Batch) -> None:
        database.execute("INSERT OR REPLACE INTO records (id, kind, data) VALUES (?, ?, ?)",
                         (record.id, _KINDS[type(record)], msgspec.json.encode(record).decode()))

    def _select(self, record_type: type[_Record], condition: str, *values: Any) -> list[_Record]:
        """Return the files or batches with a condition in SQL."""
        try:
            with self._lock:
                rows = self._database.execute(
                    f"SELECT data FROM records WHERE kind = ? AND {condition}",
                    (_KINDS[record_type], *values)).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"the server's database cannot be used: {error}") from None
        return [msgspec.json.decode(data, type=record_type) for data, in rows]

    def get(self, record_type: type[_Record], id: str) -> _Record | None:
        """Return the file or batch with this id; None if there is none."""
        return next(iter(self._select(record_type, "id = ?", id)), None)

    def page(self, record_type: type[_Record], *, after: str | None = None,
             limit: int | None = None, descending: bool = True, purpose: str | None = None
             ) -> tuple[list[_Record], bool]:
        """Return files or batches by the time of their creation, and whether there are more.

        `after`: begin after the record with this id. Raises `KeyError` if there is none. `limit`:
        maximum number of records. `purpose`: only files with this purpose.
        """
        conditions: list[str] = []
        values: list[Any] = []
        if purpose is not None:
            conditions.append("json_extract(data, '$.purpose') = ?")
            values.append(purpose)
        if after is not None:
            if self.get(record_type, after) is None:
                raise KeyError(after)
            conditions.append(f"number {'<' if descending else '>'} "
                              "(SELECT number FROM records WHERE id = ?)")
            values.append(after)
        records = self._select(
            record_type, f"{' AND '.join(conditions) or 'TRUE'} ORDER BY number "
            f"{'DESC' if descending else 'ASC'} LIMIT ?", *values,
            -1 if limit is None else limit + 1)
        return records[:limit], limit is not None and len(records) > limit

    # Files.

    def path(self, file_id: str) -> str:
        """Return where the file with this id is, or will be."""
        return str(self._files / file_id)

    def new_upload(self) -> str:
        """Return the path of a new file for `add_upload`."""
        return str(self._files / f"{new_id('file-')}{_PARTIAL}")

    def add_upload(self, path: str, filename: str) -> File:
        """Keep a file of `new_upload` as an input of batches. Raises `StoreError`.

        It is renamed once it has its record. After a kill in between, the next start renames it.
        """
        id = Path(path).name.removesuffix(_PARTIAL)
        try:
            sync(path)
            sync(self._files)
            with self._lock:
                file = self._add_file(id, path, filename, INPUT)
                try:
                    os.rename(path, self.path(id))
                except OSError:
                    self._delete_record(id)
                    raise
        except OSError as error:
            raise StoreError(f"the file cannot be stored: {error.strerror}") from None
        return file

    def _add_file(self, id: str, path: str, filename: str, purpose: str) -> File:
        file = File(id, os.path.getsize(path), int(time.time()), filename[:255], purpose)
        with self._transaction() as database:
            self._insert(database, file)
        return file

    def discard_upload(self, path: str) -> None:
        """Remove a file of `new_upload` that was not kept."""
        with suppress(OSError, StoreError):  # the next start removes it
            if self.get(File, Path(path).name.removesuffix(_PARTIAL)) is None:
                os.unlink(path)

    def _delete_record(self, id: str) -> None:
        with self._transaction() as database:
            database.execute("DELETE FROM records WHERE id = ?", (id,))

    def delete_file(self, id: str) -> bool:
        """Delete a file. Return False, and keep it, if a batch with work left reads it.

        Raises `StoreError`. A file that cannot be removed is left to the next start.
        """
        path = self.path(id)
        with self._lock:
            if any(batch.input_file_id == id for batch in self.active_batches()):
                return False
            try:
                with suppress(FileNotFoundError):
                    os.rename(path, path + _PARTIAL)
                sync(self._files)
                self._delete_record(id)
            except (OSError, StoreError) as error:
                with suppress(OSError):
                    os.rename(path + _PARTIAL, path)
                if isinstance(error, StoreError):
                    raise
                raise StoreError(f"the file cannot be deleted: {error.strerror}") from None
        with suppress(OSError):
            os.unlink(path + _PARTIAL)
        return True

    # Batches.

    def add_batch(self, batch: Batch) -> bool:
        """Keep a new batch. Return False if its input file has been deleted."""
        with self._lock:
            if self.get(File, batch.input_file_id) is None:
                return False
            with self._transaction() as database:
                self._insert(database, batch)
            return True

    def update_batch(self, id: str, *, only_if: Collection[str] = ACTIVE, **changes: Any) -> Batch:
        """Change fields of a batch, if its status is one of `only_if`, and return the batch.

        A new `status` also sets the field `<status>_at`.
        """
        with self._transaction() as database:
            data, = database.execute("SELECT data FROM records WHERE id = ?", (id,)).fetchone()
            batch = msgspec.json.decode(data, type=Batch)
            if batch.status not in only_if:
                return batch
            if "status" in changes:
                changes = {f"{changes['status']}_at": int(time.time())} | changes
            batch = msgspec.structs.replace(batch, **changes)
            database.execute("UPDATE records SET data = ? WHERE id = ?",
                             (msgspec.json.encode(batch).decode(), id))
        return batch

    def finish_batch(self, batch: Batch, status: str) -> Batch:
        """End a batch, and publish the result files that exist."""
        ids = {}
        for field, name in (("output_file_id", "output"), ("error_file_id", "error")):
            id = getattr(batch, field)
            ids[field] = id if id and os.path.exists(self.path(id)) else ""
            if ids[field]:
                self._add_file(id, self.path(id), f"{batch.id}_{name}.jsonl", OUTPUT)
        return self.update_batch(batch.id, status=status, **ids)

    def active_batches(self) -> list[Batch]:
        """Return the batches with work left, oldest first."""
        marks = ", ".join("?" * len(ACTIVE))
        return self._select(Batch, f"json_extract(data, '$.status') IN ({marks}) ORDER BY number",
                            *ACTIVE)


def new_id(prefix: str) -> str:
    """Return a random id."""
    return f"{prefix}{secrets.token_hex(12)}"
