"""Converted copies of checkpoints: made once, in the user's cache, whole or not at all."""

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
from flexgen_h2o.files.readers import checkpoint_text
from flexgen_h2o.metrics.report import format_bytes
from flexgen_h2o.models.checkpoint import Checkpoint, View, unstacked
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.registry import read_config
from flexgen_h2o.models.safetensors_io import write_safetensors

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
ByteProgress = Callable[[int, int], None]

_FORMAT = 4  # raise it when what is written changes: copies of an older format are then made anew
# Hashed into the key of a copy, of each source file: so many chunks, the first at its beginning and
# the last at its end; a file of up to a megabyte is read whole, and 100 MB take 1 ms, 35 when cold.
_SAMPLES, _SAMPLE_BYTES = 256, 4 << 10
_WEIGHTS = (".safetensors", ".bin")
TEXTS = (".json", ".model", ".txt", ".jinja")  # configuration and tokenizer
_SPARE_BYTES = 64 << 20  # left free beside a copy, for its small files


def cache_dir() -> Path:
    """Folder of converted models: `$FLEXGEN_H2O_CACHE`, else `~/.cache/flexgen_h2o`."""
    chosen = os.environ.get("FLEXGEN_H2O_CACHE")
    return Path(os.path.expanduser(chosen or "~/.cache/flexgen_h2o"))


@dataclass(frozen=True)
class Keep:
    """A folder that keeps what is made out of checkpoints.

    Attributes
    ----------
    root : Path
    advice : str
        What to do where it cannot be written, in words that follow "or".
    """

    root: Path
    advice: str


def converted() -> Keep:
    """Folder of whole converted models."""
    return Keep(cache_dir() / "converted", "set FLEXGEN_H2O_CACHE to another folder")


def converted_folder(folder: Path, dtype: str, progress: ByteProgress | None = None, *,
                     views: Mapping[str, Sequence[View]] | None = None) -> Path:
    """A copy of a local checkpoint in another dtype, as one safetensors file, made once.

    For weights that are to be streamed straight from a file when the checkpoint's own dtype
    or format does not allow it. What is quantized is dequantized. Tensors follow one another by
    layer and their data starts at a multiple of 64 bytes. Tensors that are not floating (masks that
    old checkpoints carry) are left out; configuration and tokenizer files are copied.

    Parameters
    ----------
    folder : Path
        A Hugging Face folder with safetensors or `.bin` weights.
    dtype : str
        "float32", "float16" or "bfloat16".
    progress : callable, optional
        Called with (bytes done, bytes in all).
    views : mapping of str to sequence of View, optional
        What to write in place of stacked and fused tensors: see `stacked.StackedCheckpoint`.

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

    def build(made: Path) -> None:
        with unstacked(open_checkpoint(folder), views or {}) as checkpoint:
            layout = _layout(checkpoint, target)
            chunks = _whole_tensors(checkpoint, target)
            write_weights(made, layout, chunks, keep=converted(), progress=progress)
        for path in _files(folder, TEXTS):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(checkpoint_text(path), made / path.name)
        config = read_config(folder)
        config.pop("quantization_config", None)
        config.pop("torch_dtype", None)  # the name that transformers before 5 gave it
        (made / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))

    return build_once(_files(folder, _WEIGHTS + TEXTS), dtype, folder.name, build,
                      keep=converted())


def build_once(
    sources: Sequence[Path], form: str, title: str, build: Callable[[Path], None], *, keep: Keep
) -> Path:
    """The kept folder for these sources, built first if it is not there yet.

    It is built under another name and renamed into place, so what stands under its own name is
    whole. Processes (and threads) that want the same folder wait for the one that builds it.
    What a killed process left is removed by the next build of anything.

    Parameters
    ----------
    sources : sequence of Path
        The files it is made from. The key is where they really are, their sizes and times, the
        headers of safetensors, and samples all over each file: two fine-tunes of one shape differ
        in most bytes, and a container's image may give all files one time.
    form : str
        What it is made into; part of the key.
    title : str
        For people who look into the cache; not part of the key.
    build : callable
        Given an empty folder, fills it.
    keep : Keep
        Where the folder is to be.

    Raises
    ------
    UserError
        If it cannot be written there, or the sources have changed meanwhile.
    """
    root, key = keep.root, _key(sources, form)
    target = kept_folder(sources, form, title, keep)
    name = target.name
    if os.path.isdir(target):  # which, other than Path.is_dir, does not raise an error
        return target

    def build_unchanged(made: Path) -> None:
        build(made)
        if _key(sources, form) != key:  # a mixture of both would stand under the name of the first
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


def kept_folder(sources: Sequence[Path], form: str, title: str, keep: Keep) -> Path:
    """Return where `build_once` puts what it builds, whether it is there or not."""
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
    """Write `model.safetensors` in a folder under construction, if the disk has room for it.

    Parameters are those of `write_safetensors` and `build_once`. Raises UserError if there is no
    room.
    """
    need = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
    free = shutil.disk_usage(folder).free
    if need + _SPARE_BYTES > free:
        needed, left = format_bytes(need + _SPARE_BYTES, free)
        raise UserError(f"a converted copy takes {needed}, but {keep.root} has {left} free; free "
                        f"some or {keep.advice}")
    write_safetensors(folder / "model.safetensors", layout, chunks, progress=progress)


def natural_key(name: str) -> list:
    """Sorts tensor names with layer 2 before layer 10, so that a layer's tensors are neighbours."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of one of `DTYPES`; UserError for any other name."""
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
    """The files of a Hugging Face folder that say what its weights are."""
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
                held = _sampled(file.fileno(), status.st_size, path.suffix == ".safetensors")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        real = os.fsencode(path.resolve()).hex()
        parts.append([path.name, real, status.st_size, status.st_mtime_ns, held])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _sampled(fd: int, size: int, has_header: bool) -> str:
    """The hash of samples of a file of `size` bytes, and of its safetensors header if it has one.
    """
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
    """Hold the lock that a file is, for which other processes and threads wait."""
    lock = FileLock(path)  # ends with the process, however that ends, and so is never stale
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
    """Build and rename; the lock of `temporary` is held, so what stands there is left over."""
    _remove_left_over(temporary.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        build(temporary)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_left_over(root: Path) -> None:
    """Remove the temporary folders that no living process holds the lock of."""
    for temporary in root.glob(".*.tmp"):
        with contextlib.suppress(Timeout), FileLock(temporary.with_suffix(".lock"), timeout=0):
            shutil.rmtree(temporary, ignore_errors=True)
