"""Key smoothing: a change of basis in which quantizing keys loses little.

Quantized keys are ``k' = H((k - c) / s)``, and the queries that read them ``q' = H(q * s)``. Then
``q' . k' = q . k - q . c``, and softmax ignores ``q . c``, which is the same for all keys. Only
soft caps and attention sinks need it added to the products again.

Channels with a large mean (key biases) or a large deviation would otherwise set the step of their
whole quantization group. Subtracting the mean c follows SageAttention (arXiv 2410.02367), the
Hadamard matrix H QuaRot (arXiv 2404.00456), the scale s SmoothQuant (arXiv 2211.10438): where keys
deviate much and queries are small, the channel shrinks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

EXPONENT = 1 / 3
"""Power of deviation over query size that is a channel's scale. With independent channels 1 / 2
would give the least error of logits; measured on three models, 1 / 4 to 1 / 2 do."""

MIN_RELATIVE_SCALE = 1e-3
"""Smallest deviation, and query size, of a channel relative to the largest of its head."""


@dataclass(frozen=True)
class BasisChange:
    """The map ``x -> H(x * factor + shift)`` of the heads of a layer.

    Attributes
    ----------
    factor : float32 Tensor [kv_heads, head_dim]
    shift : float32 Tensor [kv_heads, head_dim] or None
        None: zeros.
    mean : float32 Tensor [kv_heads, head_dim] or None
        For queries: the mean that was subtracted from the keys.
    """

    factor: Tensor
    shift: Tensor | None = None
    mean: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the mapped vectors in float32.

        Parameters
        ----------
        x : Tensor [..., heads, head_dim], any floating dtype
            heads is a multiple of kv_heads; head h belongs to KV head h // group.
        """
        grouped = x.float().unflatten(-2, (len(self.factor), -1))
        grouped = grouped * self.factor[:, None]
        if self.shift is not None:
            grouped = grouped + self.shift[:, None]
        return hadamard(grouped).flatten(-3, -2)

    def offsets(self, x: Tensor) -> Tensor:
        """Return the products of queries x [..., heads, head_dim], before the map, with the mean of
        the keys: float32 [..., heads]."""
        grouped = x.float().unflatten(-2, (len(self.factor), -1))
        return (grouped * self.mean[:, None]).sum(-1).flatten(-2)


@dataclass(frozen=True)
class KeySmoothing:
    """The constants by which the keys of a layer are smoothed.

    Attributes
    ----------
    mean : float32 Tensor [kv_heads, head_dim]
        c of the module's description.
    scale : float32 Tensor [kv_heads, head_dim]
        s, above 0.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def fit(cls, keys: Tensor, queries: Tensor, *, centered: bool = True) -> KeySmoothing:
        """Return the constants of a sample of keys and queries.

        Parameters
        ----------
        keys : Tensor [tokens, kv_heads, head_dim], any floating dtype
        queries : Tensor [tokens, heads, head_dim]
        centered : bool
            Subtract the mean.
        """
        keys = keys.double()
        grouped = queries.double().unflatten(1, (keys.shape[1], -1))
        sizes = _floored(grouped.square().mean((0, 2)).sqrt())
        scale = (_floored(keys.std(0, correction=0)) / sizes) ** EXPONENT
        mean = keys.mean(0).float()
        return cls(mean if centered else torch.zeros_like(mean), scale.float())

    @classmethod
    def rotation(cls, kv_heads: int, head_dim: int, device: torch.device) -> KeySmoothing:
        """Return constants that only apply the Hadamard matrix, for models with random weights."""
        shape = (kv_heads, head_dim)
        return cls(torch.zeros(shape, device=device), torch.ones(shape, device=device))

    @cached_property
    def keys(self) -> BasisChange:
        """The map of keys before they are quantized."""
        return BasisChange(1 / self.scale, -self.mean / self.scale)

    @cached_property
    def queries(self) -> BasisChange:
        """The map of the queries that read these keys."""
        return BasisChange(self.scale, mean=self.mean)

    def to(self, device: torch.device) -> KeySmoothing:
        """Return the same constants on a device."""
        if self.mean.device == device:
            return self
        return KeySmoothing(self.mean.to(device), self.scale.to(device))

    def restored(self, keys: Tensor) -> Tensor:
        """Return cached keys [..., kv_heads, tokens, head_dim] as they were before smoothing, in
        float32."""
        return hadamard(keys.float()) * self.scale[:, None] + self.mean[:, None]


@dataclass(frozen=True)
class LayerSmoothing:
    """The constants of a layer for keys that are cached rotated, and for keys that are not.

    Keys are cached before rotation where positions roll.
    """

    rotated: KeySmoothing
    unrotated: KeySmoothing

    def stacked(self) -> Tensor:
        """Return all constants as one tensor [2, 2, kv_heads, head_dim]."""
        return torch.stack([torch.stack((smoothing.mean, smoothing.scale))
                            for smoothing in (self.rotated, self.unrotated)])

    @classmethod
    def unstacked(cls, constants: Tensor) -> LayerSmoothing:
        """Return the constants of a result of `stacked`."""
        return cls(*(KeySmoothing(*pair) for pair in constants.unbind()))


def hadamard(x: Tensor) -> Tensor:
    """Return x [..., head_dim] times the orthogonal Hadamard matrix, float32.

    The matrix is its own inverse. If head_dim is not a power of two, the matrix is block-diagonal
    with blocks of the largest power of two that divides it.
    """
    size = block_size(x.shape[-1])
    return (x.unflatten(-1, (-1, size)) @ _matrix(size, x.device)).flatten(-2)


def block_size(head_dim: int) -> int:
    """Return the largest power of two that divides a head size."""
    return head_dim & -head_dim


def _floored(x: Tensor) -> Tensor:
    """Return x [kv_heads, head_dim] with no channel far below its head's largest; 1 for a head that
    is all 0."""
    least = MIN_RELATIVE_SCALE * x.amax(-1, keepdim=True)
    return x.maximum(least).where(least > 0, 1.0)


@functools.cache
def _matrix(size: int, device: torch.device) -> Tensor:
    """Return Sylvester's matrix, float32 [size, size], scaled to be orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / size**0.5).to(device, torch.float32)
