"""Converted copies of checkpoints in the user's cache: see `files.disk_cache`."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from flexgen_h2o.config.weight_layout import DTYPES
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.disk_cache import CacheFolder, build_once, cache_dir, model_title
from flexgen_h2o.files.readers import check_text_file
from flexgen_h2o.metrics.report import format_bytes
from flexgen_h2o.models.checkpoint import Checkpoint, View, unstacked
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.registry import read_config
from flexgen_h2o.models.safetensors_io import write_safetensors

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
ByteProgress = Callable[[int, int], None]

_WEIGHTS = (".safetensors", ".bin")
CONFIG_SUFFIXES = (".json", ".model", ".txt", ".jinja")  # configuration and tokenizer
_SPARE_BYTES = 64 << 20  # disk space for the small files of a copy


def converted() -> CacheFolder:
    """Return the cache folder of converted models."""
    return CacheFolder(cache_dir() / "converted", "set FLEXGEN_H2O_CACHE to another folder")


def converted_folder(folder: Path, dtype: str, progress: ByteProgress | None = None, *,
                     views: Mapping[str, Sequence[View]] | None = None,
                     float32: Collection[str] = ()) -> Path:
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
    float32 : collection of str
        Tensors to write in float32.

    Returns
    -------
    Path
        A complete Hugging Face folder in `cache_dir()`. Equal sources give the same folder.

    Raises
    ------
    UserError
        If the checkpoint cannot be read or the copy cannot be written.
    """
    folder = Path(folder).resolve()
    target = torch_dtype(dtype)

    def build(copy: Path) -> None:
        with unstacked(open_checkpoint(folder), views or {}) as checkpoint:
            layout = _layout(checkpoint, target, float32)
            chunks = _whole_tensors(checkpoint, layout)
            write_weights(copy, layout, chunks, cache=converted(), progress=progress)
        for path in _files(folder, CONFIG_SUFFIXES):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(check_text_file(path), copy / path.name)
        config = read_config(folder)
        config.pop("quantization_config", None)
        config.pop("torch_dtype", None)  # the key of transformers before 5
        (copy / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))

    return build_once(_files(folder, _WEIGHTS + CONFIG_SUFFIXES), dtype, model_title(folder), build,
                      cache=converted())


def write_weights(
    folder: Path,
    layout: Layout,
    chunks: Callable[[str], Iterator[torch.Tensor]],
    *,
    cache: CacheFolder,
    progress: ByteProgress | None = None,
) -> None:
    """Write `model.safetensors` into a folder; raise `UserError` if the disk is too full.

    Parameters are as in `write_safetensors` and `build_once`.
    """
    nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
    free = shutil.disk_usage(folder).free
    if nbytes + _SPARE_BYTES > free:
        needed, available = format_bytes(nbytes + _SPARE_BYTES, free)
        raise UserError(f"a converted copy takes {needed}, but {cache.root} has {available} free; "
                        f"free some or {cache.advice}")
    write_safetensors(folder / "model.safetensors", layout, chunks, progress=progress)


def natural_key(name: str) -> list:
    """Return a sort key that puts layer 2 before layer 10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of one of `DTYPES`; raise `UserError` for any other name."""
    if dtype not in DTYPES:
        raise UserError(f"cannot convert weights to dtype {dtype!r}; use {', '.join(DTYPES)}")
    return getattr(torch, dtype)


def _layout(checkpoint: Checkpoint, dtype: torch.dtype, float32: Collection[str]) -> Layout:
    infos = {name: checkpoint.info(name) for name in sorted(checkpoint.names(), key=natural_key)}
    return {name: (torch.float32 if name in float32 else dtype, info.shape)
            for name, info in infos.items() if info.dtype.is_floating_point}


def _whole_tensors(checkpoint: Checkpoint, layout: Layout
                   ) -> Callable[[str], Iterator[torch.Tensor]]:
    def chunks(name: str) -> Iterator[torch.Tensor]:
        dtype, shape = layout[name]
        out = torch.empty(shape, dtype=dtype)
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
