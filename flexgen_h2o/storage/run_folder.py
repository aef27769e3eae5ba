"""The private folder of a run on the disk tier, and its files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import uuid
import weakref
from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.storage.device import PAGE, round_up
from flexgen_h2o.storage.offload_dirs import AnyDirs, AnyPath, OffloadDirs, StripedFile

log = logging.getLogger(__name__)

RUN_PREFIX = "flexgen_h2o-run-"


def offload_error(error: OSError, path: Path) -> UserError:
    """Return the error of a write to an offload file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"the disk of {path.parent} is full: free some space, offload less to "
                         "disk, or choose another --offload-dir")
    return UserError(f"writing {path} failed: {error.strerror}; check --offload-dir")


def _remove_folder(path: Path, owner: int | None = None) -> None:
    try:
        shutil.rmtree(path, ignore_errors=True)
    except BaseException:  # an interrupt must not leave files behind
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        if owner is not None:
            os.close(owner)


def _remove_own(path: Path, owner: int, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        _remove_folder(path, owner)


class _PrivateFolder:
    """The folder of a run (mode 0700) in one offload folder, which is created if needed."""

    def __init__(self, offload_dir: AnyPath):
        self._parent = Path(os.path.expanduser(offload_dir))
        for path in (self._parent, *self._parent.parents):
            if os.path.lexists(path) and not os.path.isdir(path):
                kind = "a file" if os.path.isfile(path) else "no folder"
                raise UserError(f"--offload-dir {self._parent} can't be used: {path} is {kind}; "
                                "give a folder, or a name that is not taken yet")
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            # Creation and cleaning exclude each other: no new folder is seen without its lock.
            guard = os.open(self._parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(guard, fcntl.LOCK_EX)
                self._remove_stale()
                self._make()
            finally:
                os.close(guard)
        except OSError as error:
            raise UserError(f"offload folder {self._parent} can't be used: {error.strerror}; "
                            "choose a writable folder with --offload-dir") from error

    def _make(self) -> None:
        # Set the path before the folder exists, so that an interrupt can remove it.
        self.path = self._parent / f"{RUN_PREFIX}{uuid.uuid4().hex}"
        owner = None
        try:
            self.path.mkdir(mode=0o700)
            owner = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(owner, fcntl.LOCK_EX)
            # Runs at the interpreter's exit, too.
            self._remove = weakref.finalize(self, _remove_own, self.path, owner, os.getpid())
        except BaseException:
            _remove_folder(self.path, owner)
            raise

    def close(self) -> None:
        self._remove()

    def _remove_stale(self) -> None:
        for folder in self._parent.glob(f"{RUN_PREFIX}*"):
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            else:
                log.info("removing %s, left behind by a killed run", folder)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


class RunFolder:
    """Private folder (mode 0700) for the offload files of one run.

    It is created with the first file, and removed with the run. There is one in each of several
    offload folders. A lock on the folder shows that its run is alive. The kernel drops the lock
    when the process ends, however it ends; the next run removes folders without a lock.

    Parameters
    ----------
    offload_dir : path, sequence of path, or OffloadDirs
        Parent folders, which are created if needed.
    """

    def __init__(self, offload_dir: AnyDirs):
        self._dirs = OffloadDirs.parse(offload_dir)
        self._folders: list[_PrivateFolder] = []

    def create(self) -> None:
        """Create the private folders, unless they exist.

        Raises `UserError` if one cannot be created or written.
        """
        if self._folders:
            return
        try:
            for path in self._dirs.paths:
                self._folders.append(_PrivateFolder(path))
        except BaseException:
            self.close()
            self._folders.clear()
            raise

    @property
    def paths(self) -> list[Path]:
        """The private folders; none before the first file."""
        return [folder.path for folder in self._folders]

    def file(self, name: str, nbytes: int) -> Path:
        """Create a file and allocate its bytes, so that a full disk is found at once.

        Of several offload folders, it is in the one with the largest share.
        """
        self.create()
        path = self.paths[self._dirs.stripes.index(max(self._dirs.stripes))] / name
        _allocate(path, nbytes)
        return path

    def striped_file(self, name: str, nbytes: int) -> Path | StripedFile:
        """Create a file like `file`, striped over all offload folders if there are several."""
        if not self._dirs.striped:
            return self.file(name, nbytes)
        self.create()
        file = self._dirs.striped_file([path / name for path in self.paths])
        for path, size in zip(file.files, file.sizes(nbytes), strict=True):
            _allocate(path, size)
        return file

    def close(self) -> None:
        """Remove the folders and their files. A second call is a no-op."""
        for folder in self._folders:
            folder.close()


def _allocate(path: Path, nbytes: int) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(round_up(nbytes, PAGE), PAGE))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise offload_error(error, path) from error
