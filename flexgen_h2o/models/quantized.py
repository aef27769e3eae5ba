"""Checkpoints with quantized matrices: made when read, or once, in a cache on disk."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flexgen_h2o.config.weight_layout import AUTO, MatrixLayout, WeightOptions
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.models.checkpoint import Checkpoint, TensorInfo
from flexgen_h2o.models.checkpoint_files import SafetensorsCheckpoint
from flexgen_h2o.models.convert import ByteProgress, Keep, build_once, natural_key, write_weights
from flexgen_h2o.models.model_config import TensorSpec
from flexgen_h2o.storage.disk import Disk, plan_reads
from flexgen_h2o.storage.tiers import Device, typed

_VERSION = 3  # raise it when the bytes change: caches of an older version are then made anew
_ALIGN = 64
_AHEAD = 2  # tensors that are made while one is written
_EXACT = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class WeightFormat:
    """The form of every tensor of a model, at rest and in memory.

    Attributes
    ----------
    dtype : torch.dtype
        Of everything that is not quantized.
    options : WeightOptions
        Of the matrices.
    exact : frozenset of (outputs, inputs)
        Shapes of the matrices that are never quantized: routers of experts, which are small, and
        by which a rounded number picks another expert.
    """

    dtype: torch.dtype
    options: WeightOptions = WeightOptions()
    exact: frozenset[tuple[int, ...]] = frozenset()

    def layout(self, spec: TensorSpec) -> MatrixLayout | None:
        """Return the layout of a tensor, or of some outputs of it; None if it is not quantized."""
        shape = spec.shape
        if len(shape) != 2 or tuple(shape) in self.exact:
            return None
        return self.options.layout((shape[0], shape[1]), spec.name)

    def stored(self, spec: TensorSpec) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape by which a checkpoint in this format knows a tensor."""
        layout = self.layout(spec)
        if layout is None:
            return self.dtype, tuple(spec.shape)
        return torch.uint8, (layout.nbytes,)

    def nbytes(self, spec: TensorSpec) -> int:
        """Return the bytes of a tensor."""
        dtype, stored = self.stored(spec)
        return math.prod(stored) * dtype.itemsize

    def view(self, buffer: Tensor, offset: int, spec: TensorSpec) -> Tensor | QuantizedMatrix:
        """Return the tensor that starts `offset` bytes into the uint8 tensor `buffer`."""
        dtype, stored = self.stored(spec)
        data, layout = typed(buffer, offset, stored, dtype), self.layout(spec)
        return data if layout is None else QuantizedMatrix(
            data, layout, self.options.activation_bits)


class QuantizingCheckpoint(Checkpoint):
    """Another checkpoint in a `WeightFormat` of fewer bits: what is read of it is quantized then.

    Parameters
    ----------
    inner : Checkpoint
        Closed with this one.
    names : mapping of str to str
        Canonical names, which this checkpoint goes by, to those of `inner`.
    form : WeightFormat
        What it gives; an attribute, too.

    Attributes
    ----------
    importance : mapping of str to float32 Tensor [inputs]
        By canonical name: as of `ops.quantize_matrix`. Others are quantized without.
    """

    def __init__(self, inner: Checkpoint, names: Mapping[str, str], form: WeightFormat):
        self.source, self.form = inner.source, form
        self.importance: Mapping[str, Tensor] = {}
        self._inner, self._names = inner, dict(names)
        self._mine = threading.local()
        self._disk = Disk()

    def names(self) -> Collection[str]:
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        info = self._inner.info(self._names[name])
        spec = TensorSpec(name, info.shape)
        if self.form.layout(spec) is None:
            return info
        return TensorInfo(*self.form.stored(spec), None)

    def _fill(self, name: str, info: TensorInfo, out: Tensor) -> None:
        own = self._names[name]
        inner = self._inner.info(own)
        layout = self.form.layout(TensorSpec(name, inner.shape))
        if layout is None:
            self._inner.read(own, out)
        elif not self._inner.keep(own, layout, out):
            # The same size, and a lower perplexity (benchmarks/results/quality).
            ops.quantize_matrix(self._matrix(own, inner), layout, search=True, out=out,
                                importance=self.importance.get(name))

    def _matrix(self, own: str, info: TensorInfo) -> Tensor:
        """A matrix of the other checkpoint, good until this thread asks for the next one."""
        extent, exact = info.extent, info.dtype in _EXACT
        if extent is None or not exact or extent.offset % info.dtype.itemsize:
            dtype = info.dtype if exact else torch.float32
            weight = torch.empty(info.shape, dtype=dtype)
            self._inner.read(own, weight)
            return weight
        # Past the page cache: several times as fast where the file is not in it, and it goes on
        # holding what it held.
        reads, places, nbytes = plan_reads([extent])
        buffer = getattr(self._mine, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._mine.buffer = Device().host_empty(nbytes)
        self._disk.read(reads, buffer)
        return typed(buffer, places[extent], info.shape, info.dtype)

    def close(self) -> None:
        self._disk.close()
        self._inner.close()


def cached(checkpoint: QuantizingCheckpoint, sources: Sequence[Path], *, keep: Keep, title: str,
           calibration: str = "", measure: Callable[[], Mapping[str, Tensor]] | None = None,
           progress: ByteProgress | None = None) -> Checkpoint:
    """A checkpoint's quantized tensors from the weight cache, where they are put first if need be.

    Every tensor lies at a multiple of 64 bytes, so that it can be read straight to where it is
    used; those of a layer are neighbours.

    Parameters
    ----------
    checkpoint : QuantizingCheckpoint
        Closed when this returns.
    sources : sequence of Path
        The files it is made from: their identity is the cache's key.
    keep : Keep
        Where the cache is.
    title : str
        For people who look into it.
    calibration : str
        The key of the calibration text, which is part of the cache's key; empty for none.
    measure : callable, optional
        Returns the checkpoint's `importance`. Called if there is something to quantize.
    progress : callable, optional
        Called with (bytes done, bytes in all) while tensors are quantized.

    Raises
    ------
    UserError
        The checkpoint cannot be read, or the cache cannot be written.
    """
    def build(folder: Path) -> None:
        if measure is not None:
            checkpoint.importance = measure()
        layout = _layout(checkpoint)
        write_weights(folder, layout, _chunks(checkpoint, layout), keep=keep, progress=progress)

    with checkpoint:
        folder = build_once(sources, tag(checkpoint.form, calibration), title, build, keep=keep)
    try:
        return SafetensorsCheckpoint(folder)
    except UserError as error:
        raise UserError(f"the weight cache is damaged: remove {folder}, and it is made anew "
                        f"({error})") from error


def tag(form: WeightFormat, calibration: str) -> str:
    """Return what `cached` adds to the identity of the files in its key."""
    dtype = str(form.dtype).removeprefix("torch.")
    options, what = form.options, AUTO
    if options.asked_bits != AUTO:
        what = (f"{options.bits}bit-{options.group}" + ("-mxfp4" if options.mxfp4 else "")
                + ("-mixed" if options.kept else ""))
    by = calibration and f"-{calibration}"
    return f"{what}-{dtype}{by}-v{_VERSION}"


def _layout(checkpoint: QuantizingCheckpoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The file's tensors in order, with fillers behind tensors of odd sizes."""
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name in sorted(checkpoint.names(), key=natural_key):
        info = checkpoint.info(name)
        quantized = info.dtype == torch.uint8
        layout[name] = (info.dtype if quantized else checkpoint.form.dtype, info.shape)
        odd = math.prod(info.shape) * layout[name][0].itemsize % _ALIGN
        if odd:
            layout[f"{name}.filler"] = (torch.uint8, (_ALIGN - odd,))
    return layout


def _chunks(checkpoint: QuantizingCheckpoint, layout: Mapping):
    """For `write_weights`: tensors in the order of `layout`, made some ahead of their turn."""
    def make(name: str) -> Tensor:
        dtype, shape = layout[name]
        if name not in checkpoint.names():
            return torch.zeros(shape, dtype=dtype)
        # Pages of its own: malloc would keep what one thread takes and another gives back.
        out = typed(Device().host_empty(math.prod(shape) * dtype.itemsize), 0, shape, dtype)
        checkpoint.read(name, out)
        return out

    def every() -> Iterator[Tensor]:
        with ThreadPoolExecutor(_AHEAD) as pool:
            waiting: deque = deque()
            try:
                for name in layout:
                    waiting.append(pool.submit(make, name))
                    if len(waiting) > _AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    tensors = every()
    return lambda name: iter([next(tensors)])
