"""Converted copies of checkpoints, built once and atomically in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from flexgen_h2o.config.weight_layout import DTYPES
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import check_text_file
from flexgen_h2o.metrics.report import format_bytes
from flexgen_h2o.models.checkpoint import Checkpoint, View, unstacked
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.registry import read_config
from flexgen_h2o.models.safetensors_io import write_safetensors

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
ByteProgress = Callable[[int, int], None]

_FORMAT = 4  # raise it when the files change, which invalidates older copies
# The key of a copy hashes this many chunks of each source file, from its beginning to its end.
# Files of up to a megabyte are hashed completely. 100 MB take 1 ms, 35 ms without page cache.
_SAMPLES, _SAMPLE_BYTES = 256, 4 << 10
_WEIGHTS = (".safetensors", ".bin")
TEXTS = (".json", ".model", ".txt", ".jinja")  # configuration and tokenizer
_SPARE_BYTES = 64 << 20  # disk space for the small files of a copy


def cache_dir() -> Path:
    """Return `$FLEXGEN_H2O_CACHE`, or `~/.cache/flexgen_h2o`."""
    chosen = os.environ.get("FLEXGEN_H2O_CACHE")
    return Path(os.path.expanduser(chosen or "~/.cache/flexgen_h2o"))


@dataclass(frozen=True)
class Keep:
    """A cache folder of converted copies.

    Attributes
    ----------
    root : Path
    advice : str
        What to do if it cannot be written, for error messages: continues "free some or ...".
    """

    root: Path
    advice: str


def converted() -> Keep:
    """Return the cache folder of converted models."""
    return Keep(cache_dir() / "converted", "set FLEXGEN_H2O_CACHE to another folder")


def converted_folder(folder: Path, dtype: str, progress: ByteProgress | None = None, *,
                     views: Mapping[str, Sequence[View]] | None = None) -> Path:
    """Return a copy of a local checkpoint in another dtype, as one safetensors file.

    Weights can be streamed from the copy if the checkpoint's own dtype or format does not allow
    that. Quantized tensors are dequantized. Tensors are ordered by layer, and the data starts at a
    multiple of 64 bytes. Tensors that are not floating-point (masks in old checkpoints) are left
    out. Configuration and tokenizer files are copied.

    Parameters
    ----------
    folder : Path
        A Hugging Face folder with safetensors or `.bin` weights.
    dtype : str
        "float32", "float16" or "bfloat16".
    progress : callable, optional
        Called with (bytes done, total bytes).
    views : mapping of str to sequence of View, optional
        Tensors to write in place of stacked and fused ones: see `StackedCheckpoint`.

    Returns
    -------
    Path
        A complete Hugging Face folder in `cache_dir()`. The same source gives the same folder.

    Raises
    ------
    UserError
        If the checkpoint cannot be read or the copy cannot be written.
    """
    folder = Path(folder).resolve()
    target = torch_dtype(dtype)

    def build(copy: Path) -> None:
        with unstacked(open_checkpoint(folder), views or {}) as checkpoint:
            layout = _layout(checkpoint, target)
            chunks = _whole_tensors(checkpoint, target)
            write_weights(copy, layout, chunks, keep=converted(), progress=progress)
        for path in _files(folder, TEXTS):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(check_text_file(path), copy / path.name)
        config = read_config(folder)
        config.pop("quantization_config", None)
        config.pop("torch_dtype", None)  # the key of transformers before 5
        (copy / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))

    return build_once(_files(folder, _WEIGHTS + TEXTS), dtype, folder.name, build,
                      keep=converted())


def build_once(
    sources: Sequence[Path], form: str, title: str, build: Callable[[Path], None], *, keep: Keep
) -> Path:
    """Return the cached folder for these sources, which is built if it is missing.

    It is built under a temporary name and renamed, so a folder with the final name is complete.
    Other processes and threads that need the same folder wait. Leftovers of killed processes are
    removed by the next build.

    Parameters
    ----------
    sources : sequence of Path
        The source files. The key has their resolved paths, sizes and times, the headers of
        safetensors, and samples of their contents: fine-tunes of one model differ in most bytes,
        and all files of a container image may have the same time.
    form : str
        The target format; part of the key.
    title : str
        Readable part of the folder's name; not part of the key.
    build : callable
        Fills an empty folder.
    keep : Keep
        The cache.

    Raises
    ------
    UserError
        If the folder cannot be written, or the sources change meanwhile.
    """
    root, key = keep.root, _key(sources, form)
    target = cached_folder(sources, form, title, keep)
    name = target.name
    if os.path.isdir(target):  # Path.is_dir raises some errors
        return target

    def build_unchanged(temporary: Path) -> None:
        build(temporary)
        if _key(sources, form) != key:  # the copy would mix both versions
            raise UserError(f"{sources[0].parent} has changed while it was converted: run it again "
                            "when its files are whole")

    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f".{name}.lock"):
            if not target.is_dir():
                _build(root / f".{name}.tmp", target, build_unchanged)
    except OSError as error:
        raise UserError(
            f"cannot write a converted copy to {target} ({error.strerror or error}); "
            f"free space there or {keep.advice}"
        ) from error
    return target


def cached_folder(sources: Sequence[Path], form: str, title: str, keep: Keep) -> Path:
    """Return the path of the folder of `build_once`, whether it exists or not."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", title)[:60]
    return keep.root / f"{name}-{form}-{_key(sources, form)}"


def write_weights(
    folder: Path,
    layout: Layout,
    chunks: Callable[[str], Iterator[torch.Tensor]],
    *,
    keep: Keep,
    progress: ByteProgress | None = None,
) -> None:
    """Write `model.safetensors` into a folder; raise `UserError` if the disk is too full.

    The parameters are those of `write_safetensors` and `build_once`.
    """
    nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
    free = shutil.disk_usage(folder).free
    if nbytes + _SPARE_BYTES > free:
        needed, left = format_bytes(nbytes + _SPARE_BYTES, free)
        raise UserError(f"a converted copy takes {needed}, but {keep.root} has {left} free; free "
                        f"some or {keep.advice}")
    write_safetensors(folder / "model.safetensors", layout, chunks, progress=progress)


def natural_key(name: str) -> list:
    """Return a sort key that puts layer 2 before layer 10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of one of `DTYPES`; raise `UserError` for any other name."""
    if dtype not in DTYPES:
        raise UserError(f"cannot convert weights to dtype {dtype!r}; use {', '.join(DTYPES)}")
    return getattr(torch, dtype)


def _layout(checkpoint: Checkpoint, dtype: torch.dtype) -> Layout:
    infos = {name: checkpoint.info(name) for name in sorted(checkpoint.names(), key=natural_key)}
    return {
        name: (dtype, info.shape) for name, info in infos.items() if info.dtype.is_floating_point
    }


def _whole_tensors(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> Callable[[str], Iterator[torch.Tensor]]:
    def chunks(name: str) -> Iterator[torch.Tensor]:
        out = torch.empty(checkpoint.info(name).shape, dtype=dtype)
        checkpoint.read(name, out)
        yield out

    return chunks


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a Hugging Face folder that determine its weights."""
    indexes = [path for path in _files(folder, (".json",)) if path.name.endswith(".index.json")]
    return [*_files(folder, _WEIGHTS), *indexes, folder / "config.json"]


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.suffix in suffixes and p.is_file())
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from error


def _key(sources: Sequence[Path], form: str) -> str:
    parts: list[object] = [_FORMAT, form]
    for path in sources:
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                digest = _sampled(file.fileno(), status.st_size, path.suffix == ".safetensors")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        real = os.fsencode(path.resolve()).hex()
        parts.append([path.name, real, status.st_size, status.st_mtime_ns, digest])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _sampled(fd: int, size: int, has_header: bool) -> str:
    """Return the hash of samples of a file, and of its safetensors header if it has one."""
    digest = hashlib.sha256()
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # or 32 times as much is read ahead
    if has_header:
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        digest.update(os.pread(fd, min(length, size), 8))
    last = max(0, size - _SAMPLE_BYTES)
    step = max(_SAMPLE_BYTES, -(-last // (_SAMPLES - 1)))
    for start in (*range(0, last, step), last):
        digest.update(os.pread(fd, _SAMPLE_BYTES, start))
    return digest.hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, for which other processes and threads wait."""
    lock = FileLock(path)  # released when the process ends, so never stale
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logging.getLogger(__name__).info("waiting for another process that makes %s", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(temporary: Path, target: Path, build: Callable[[Path], None]) -> None:
    """Build and rename. The caller holds the lock of `temporary`, so its contents are leftovers."""
    _remove_left_over(temporary.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        build(temporary)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_left_over(root: Path) -> None:
    """Remove the temporary folders that no process has locked."""
    for temporary in root.glob(".*.tmp"):
        with contextlib.suppress(Timeout), FileLock(temporary.with_suffix(".lock"), timeout=0):
            shutil.rmtree(temporary, ignore_errors=True)
