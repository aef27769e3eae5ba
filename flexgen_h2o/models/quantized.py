"""Checkpoints in the weight format of a run: quantized when read, or once into a disk cache."""

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
from flexgen_h2o.files.disk_cache import CacheFolder, build_once
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.models.checkpoint import Checkpoint, TensorInfo
from flexgen_h2o.models.checkpoint_files import SafetensorsCheckpoint
from flexgen_h2o.models.convert import ByteProgress, natural_key, write_weights
from flexgen_h2o.models.tensors import TensorSpec
from flexgen_h2o.storage.device import Device, typed
from flexgen_h2o.storage.disk import Disk, plan_reads

_VERSION = 3  # raise it when the bytes change, which invalidates older caches
_ALIGN = 64
_AHEAD = 2  # tensors that are quantized while one is written
_EXACT = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class WeightFormat:
    """The storage format of a model's tensors, on disk and in memory.

    Attributes
    ----------
    dtype : torch.dtype
        Dtype of tensors that are not quantized.
    options : WeightOptions
        Options of the matrices.
    never_quantized : frozenset of (outputs, inputs)
        Shapes of matrices that are never quantized, such as routers, which are small, and whose
        rounding selects other experts.
    float32 : frozenset of str
        Names of the tensors that stay in float32.
    """

    dtype: torch.dtype
    options: WeightOptions = WeightOptions()
    never_quantized: frozenset[tuple[int, ...]] = frozenset()
    float32: frozenset[str] = frozenset()

    def layout(self, spec: TensorSpec) -> MatrixLayout | None:
        """Return the layout of a tensor, or of a part of its outputs; None if not quantized."""
        shape = spec.shape
        if len(shape) != 2 or tuple(shape) in self.never_quantized or spec.name in self.float32:
            return None
        return self.options.layout((shape[0], shape[1]), spec.name)

    def stored(self, spec: TensorSpec) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a tensor in a checkpoint of this format."""
        layout = self.layout(spec)
        if layout is None:
            dtype = torch.float32 if spec.name in self.float32 else self.dtype
            return dtype, tuple(spec.shape)
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
    """Another checkpoint in a `WeightFormat`; tensors are quantized when they are read.

    Parameters
    ----------
    inner : Checkpoint
        Closed with this one.
    names : mapping of str to str
        Canonical names, which this checkpoint uses, to names in `inner`.
    form : WeightFormat
        The format of the tensors; also an attribute.

    Attributes
    ----------
    importance : mapping of str to float32 Tensor [inputs]
        By canonical name: `importance` of `ops.quantize_matrix`. Optional for each matrix.
    """

    def __init__(self, inner: Checkpoint, names: Mapping[str, str], form: WeightFormat):
        self.source, self.form = inner.source, form
        self.importance: Mapping[str, Tensor] = {}
        self._inner, self._names = inner, dict(names)
        self._thread = threading.local()
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
        source = self._names[name]
        inner = self._inner.info(source)
        layout = self.form.layout(TensorSpec(name, inner.shape))
        if layout is None:
            self._inner.read(source, out)
        elif not self._inner.read_quantized(source, layout, out):
            # The same size, and a lower perplexity (benchmarks/results/quality).
            ops.quantize_matrix(self._matrix(source, inner), layout, search=True, out=out,
                                importance=self.importance.get(name))

    def _matrix(self, source: str, info: TensorInfo) -> Tensor:
        """Return a matrix of the inner checkpoint, valid until this thread's next call."""
        extent, exact = info.extent, info.dtype in _EXACT
        if extent is None or not exact or extent.offset % info.dtype.itemsize:
            dtype = info.dtype if exact else torch.float32
            weight = torch.empty(info.shape, dtype=dtype)
            self._inner.read(source, weight)
            return weight
        # O_DIRECT is several times as fast if the file is not in the page cache, and keeps the
        # page cache unchanged.
        reads, offsets, nbytes = plan_reads([extent])
        buffer = getattr(self._thread, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._thread.buffer = Device().host_empty(nbytes)
        self._disk.read(reads, buffer)
        return typed(buffer, offsets[extent], info.shape, info.dtype)

    def close(self) -> None:
        self._disk.close()
        self._inner.close()


def open_weight_cache(checkpoint: QuantizingCheckpoint, sources: Sequence[Path], *,
                      cache: CacheFolder, title: str, calibration: str = "",
                      measure: Callable[[], Mapping[str, Tensor]] | None = None,
                      progress: ByteProgress | None = None) -> Checkpoint:
    """Return a checkpoint's quantized tensors in the weight cache, which is built if missing.

    Tensors start at multiples of 64 bytes, so that they can be read in place. The tensors of a
    layer are adjacent.

    Parameters
    ----------
    checkpoint : QuantizingCheckpoint
        Closed when this returns.
    sources : sequence of Path
        The files of the checkpoint, whose identity is part of the cache's key.
    cache : CacheFolder
        The folder of the cache.
    title : str
        Readable part of the cache's name.
    calibration : str
        Key of the calibration text, part of the cache's key; empty for none.
    measure : callable, optional
        Returns the checkpoint's `importance`. Called only if the cache is built.
    progress : callable, optional
        Called with (bytes done, total bytes) while tensors are quantized.

    Raises
    ------
    UserError
        The checkpoint cannot be read, or the cache cannot be written.
    """
    def build(folder: Path) -> None:
        if measure is not None:
            checkpoint.importance = measure()
        layout = _layout(checkpoint)
        write_weights(folder, layout, _chunks(checkpoint, layout), cache=cache, progress=progress)

    with checkpoint:
        key = weight_cache_key(checkpoint.form, calibration)
        folder = build_once(sources, key, title, build, cache=cache)
    try:
        return SafetensorsCheckpoint(folder)
    except UserError as error:
        raise UserError(f"the weight cache is damaged: remove {folder}, and it is built again "
                        f"({error})") from error


def weight_cache_key(form: WeightFormat, calibration: str) -> str:
    """Return the format's part of the key of `open_weight_cache`."""
    dtype = str(form.dtype).removeprefix("torch.")
    options, bits = form.options, AUTO
    if options.weight_bits != AUTO:
        bits = (f"{options.bits}bit-{options.group}" + ("-mxfp4" if options.mxfp4 else "")
                + ("-mixed" if options.layouts else ""))
    suffix = calibration and f"-{calibration}"
    return f"{bits}-{dtype}{suffix}-v{_VERSION}"


def _layout(checkpoint: QuantizingCheckpoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the file's tensors in order, with fillers after tensors of unaligned sizes."""
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name in sorted(checkpoint.names(), key=natural_key):
        info = checkpoint.info(name)
        plain, _ = checkpoint.form.stored(TensorSpec(name, info.shape))
        layout[name] = (info.dtype if info.dtype == torch.uint8 else plain, info.shape)
        excess = math.prod(info.shape) * layout[name][0].itemsize % _ALIGN
        if excess:
            layout[f"{name}.filler"] = (torch.uint8, (_ALIGN - excess,))
    return layout


def _chunks(checkpoint: QuantizingCheckpoint, layout: Mapping):
    """Return the `chunks` of `write_weights`, which quantize `_AHEAD` tensors in advance."""
    def quantized(name: str) -> Tensor:
        dtype, shape = layout[name]
        if name not in checkpoint.names():
            return torch.zeros(shape, dtype=dtype)
        # Own pages: malloc keeps memory that one thread allocates and another frees.
        out = typed(Device().host_empty(math.prod(shape) * dtype.itemsize), 0, shape, dtype)
        checkpoint.read(name, out)
        return out

    def in_order() -> Iterator[Tensor]:
        with ThreadPoolExecutor(_AHEAD) as pool:
            waiting: deque = deque()
            try:
                for name in layout:
                    waiting.append(pool.submit(quantized, name))
                    if len(waiting) > _AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    tensors = in_order()
    return lambda name: iter([next(tensors)])
