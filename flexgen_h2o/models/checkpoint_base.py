"""The interface of a checkpoint: named tensors, known before they are read, read one at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.storage.extent import Extent

_READABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a tensor.

    Attributes
    ----------
    dtype : torch.dtype
        As stored.
    shape : tuple of int
        As stored.
    extent : Extent or None
        Where its raw bytes lie, or None if they do not lie plainly in a file.
    checksum : int or None
        XXH3 (64 bits) of these bytes, where the file keeps it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    extent: Extent | None
    checksum: int | None = None


class Checkpoint(ABC):
    """Named tensors that are read one at a time. Safe to read from several threads.

    Attributes
    ----------
    source : str
        What error messages call it: a path, mostly.
    absent : mapping of str to Path
        The shards of tensors that an index names and no shard has.
    """

    source: str
    absent: Mapping[str, Path] = MappingProxyType({})

    @abstractmethod
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of one tensor; KeyError if there is none of that name."""

    @abstractmethod
    def _fill(self, name: str, info: TensorInfo, out: torch.Tensor) -> None:
        """Fill `out`, which has been checked."""

    def _fill_part(self, name: str, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        """Fill `out`, which has been checked, with elements from `start` on. Those that can read
        a part alone do so."""
        whole = torch.empty(info.shape, dtype=out.dtype)
        self._fill(name, info, whole)
        out.view(-1).copy_(whole.view(-1)[start : start + out.numel()])

    def read(self, name: str, out: torch.Tensor) -> None:
        """Read one tensor into memory that the caller owns, converting to its dtype.

        Parameters
        ----------
        name : str
            One of `names()`.
        out : torch.Tensor
            Contiguous, on the CPU, of the tensor's shape and of any floating dtype; uint8 for a
            tensor of bytes, which quantized ones are. Nothing beyond it and a few MB of scratch is
            held while it is filled.

        Raises
        ------
        KeyError
            If there is no tensor of that name.
        ValueError
            If `out` is not as described.
        UserError
            If the bytes cannot be read, or the tensor is stored as something other than
            float16, bfloat16, float32 or float64 (quantized checkpoints are).
        """
        info = self.info(name)
        if tuple(out.shape) != info.shape:
            raise ValueError(f"{name} has shape {info.shape}, not that of out {tuple(out.shape)}")
        bytes_alone = info.dtype == out.dtype == torch.uint8
        self._check(name, info, out, as_stored=bytes_alone)
        self._fill(name, info, out)

    def read_part(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read some consecutive elements of a tensor, converting to out's dtype.

        Parameters
        ----------
        name : str
            One of `names()`.
        start : int
            The first element to read, in row-major order.
        out : torch.Tensor
            As for `read`, but of any shape: as many elements are read. Also of a tensor's own
            dtype, whatever that is, as the parts of quantized matrices are read.

        Raises
        ------
        KeyError, ValueError, UserError
            As `read`; ValueError also for elements beyond the tensor's last.
        """
        info = self.info(name)
        if not 0 <= start <= math.prod(info.shape) - out.numel():
            raise ValueError(f"{name} has no {out.numel()} elements from {start} on")
        self._check(name, info, out, as_stored=info.dtype == out.dtype)
        self._fill_part(name, info, start, out)

    def _check(self, name: str, info: TensorInfo, out: torch.Tensor, *, as_stored: bool) -> None:
        usable = out.is_floating_point() or as_stored
        if out.device.type != "cpu" or not out.is_contiguous() or not usable:
            raise ValueError(f"{name} can only be read into a contiguous floating CPU tensor")
        if info.dtype not in _READABLE and not as_stored:
            raise UserError(
                f"{self.source}: tensor {name} is stored as {_plain(info.dtype)}; "
                "use a checkpoint in float32, float16 or bfloat16"
            )

    def kept_layout(self, name: str) -> MatrixLayout | None:
        """Return the layout in which `keep` writes a matrix without loss; None for tensors that
        are not stored as codes."""
        return None

    def keep(self, name: str, layout: MatrixLayout, out: torch.Tensor,
             rows: range | None = None) -> bool:
        """Write a matrix into `out` by the codes that it is stored as, with no second rounding.

        Parameters
        ----------
        name : str
            One of `names()`.
        layout : MatrixLayout
            Of the matrix, or of these rows.
        out : uint8 Tensor [layout.nbytes]
        rows : range, optional
            Those wanted, counted over all axes but the last. None: all.

        Returns
        -------
        bool
            False where it is not stored as codes that this layout can hold; what `out` holds then
            is not known.
        """
        return False

    def close(self) -> None:
        """Let go of open files. The checkpoint must not be read afterwards."""
        return None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
