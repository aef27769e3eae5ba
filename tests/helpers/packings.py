"""Quantized tensors written as the formats' descriptions say, bit by bit, for tests to read back.

Each function takes a matrix and gives the tensors that a checkpoint keeps in its place, by the end
of their names, and the float32 matrix that they stand for. Slow, and apart from the package.
"""

import numpy as np
import torch
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Parts = tuple[dict[str, Tensor], Tensor]


def words(codes: np.ndarray, bits: int, order=None) -> np.ndarray:
    """Codes [rows, n] as int32 [rows, ceil(n * bits / 32)]; field i of a word is code order[i]."""
    per_word = 32 // bits
    rows, n = codes.shape
    out = np.zeros((rows, -(-n // per_word)), dtype=np.uint64)
    for column in range(out.shape[1]):
        for place in range(per_word):
            source = column * per_word + (place if order is None else order[place])
            if source < n:
                out[:, column] |= codes[:, source].astype(np.uint64) << np.uint64(bits * place)
    return out.astype(np.uint32).view(np.int32)


def tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def affine(weight: Tensor, bits: int, group: int, *, symmetric=False, dtype=torch.float16,
           group_of: np.ndarray | None = None):
    """Codes [rows, columns], scales and zero points [rows, groups] of a matrix, and its values."""
    rows, columns = weight.shape
    levels = (1 << bits) - 1
    group_of = np.arange(columns) // group if group_of is None else group_of
    groups = int(group_of.max()) + 1
    codes = np.zeros((rows, columns), dtype=np.int64)
    scales, zeros = torch.zeros(rows, groups, dtype=dtype), np.zeros((rows, groups), dtype=np.int64)
    for g in range(groups):
        part = weight.numpy()[:, group_of == g]
        if symmetric:
            scale = np.abs(part).max(1) / (levels // 2)
            zeros[:, g] = (levels + 1) // 2
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / levels
            zeros[:, g] = np.clip(np.round(-low / scale), 0, levels)
        scales[:, g] = tensor(scale).to(dtype)
        steps = scales[:, g].float().numpy()[:, None]
        codes[:, group_of == g] = np.clip(np.round(part / steps) + zeros[:, g : g + 1], 0, levels)
    values = (tensor(codes - zeros[:, group_of]).float() * scales.float()[:, group_of])
    return codes, scales, zeros, values


def awq(weight: Tensor, *, group: int = 32) -> Parts:
    codes, scales, zeros, values = affine(weight, 4, group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {"qweight": tensor(words(codes.T, 4, order)), "qzeros": tensor(words(zeros.T, 4, order)),
            "scales": scales.T.contiguous()}, values


def gptq(weight: Tensor, *, bits: int = 4, group: int = 32, below: bool = True, act_order=False,
         with_index=True) -> Parts:
    columns = weight.shape[1]
    group_of = np.arange(columns) // group
    if act_order:
        group_of = np.random.default_rng(columns).permutation(group_of)
    codes, scales, zeros, values = affine(weight, bits, group, group_of=group_of)
    if below:  # the first format cannot tell 0 from 16
        zeros = np.maximum(zeros, 1)
        values = tensor(codes - zeros[:, group_of]).float() * scales.float()[:, group_of]
    parts = {"qweight": tensor(_down(codes.T, bits)),
             "qzeros": tensor(words(zeros.T - int(below), bits)), "scales": scales.T.contiguous(),
             "g_idx": tensor(group_of.astype(np.int32))}
    if not with_index:
        del parts["g_idx"]
    return parts, values


def _down(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packed along the first axis."""
    return words(codes.T, bits).T


def compressed(weight: Tensor, *, bits: int = 4, group: int | None = 32, symmetric=True,
               act_order=False, dtype=torch.bfloat16) -> Parts:
    """pack-quantized."""
    rows, columns = weight.shape
    group_of = np.arange(columns) // (group or columns)
    if act_order:
        group_of = np.random.default_rng(columns).permutation(group_of)
    codes, scales, zeros, values = affine(weight, bits, group or columns, symmetric=symmetric,
                                          dtype=dtype, group_of=group_of)
    parts = {"weight_packed": tensor(words(codes, bits)), "weight_scale": scales,
             "weight_shape": torch.tensor([rows, columns])}
    if not symmetric:
        parts["weight_zero_point"] = tensor(_down(zeros, bits))
    if act_order:
        parts["weight_g_idx"] = tensor(group_of.astype(np.int32))
    return parts, values


def int8(weight: Tensor, *, per: str = "row", symmetric=True) -> Parts:
    """int-quantized."""
    columns = weight.shape[1]
    if per == "tensor":
        codes, scales, zeros, values = affine(weight.reshape(1, -1), 8, weight.numel(),
                                              symmetric=symmetric, dtype=torch.float32)
        codes, values = codes.reshape(weight.shape), values.reshape(weight.shape)
        scales, zeros = scales.reshape(1), zeros.reshape(1)
    else:
        codes, scales, zeros, values = affine(weight, 8, columns, symmetric=symmetric,
                                              dtype=torch.bfloat16)
    parts = {"weight": tensor((codes - 128).astype(np.int8)), "weight_scale": scales}
    if not symmetric:
        parts["weight_zero_point"] = tensor((zeros - 128).astype(np.int8))
    return parts, values


def fp8(weight: Tensor, *, block: tuple[int, int] | None = (24, 40), suffix="weight_scale_inv",
        dtype=torch.float32) -> Parts:
    """In blocks, or by one scale."""
    rows, columns = weight.shape
    high, wide = block or weight.shape
    scales = torch.zeros(-(-rows // high), -(-columns // wide), dtype=dtype)
    stored, values = torch.zeros_like(weight, dtype=torch.float8_e4m3fn), torch.zeros_like(weight)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[i, j].float()).to(torch.float8_e4m3fn)
            values[place] = stored[place].float() * scales[i, j].float()
    scales = scales.reshape(()) if block is None else scales
    return {"weight": stored, suffix: scales}, values


def mxfp4(weight: Tensor) -> Parts:
    """The last axis in blocks of 32; any axes before. Parts are named ``_blocks``, ``_scales``."""
    blocks = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))).int() - 2
    table = torch.tensor(E2M1 + [-value for value in E2M1])
    scaled = blocks / torch.exp2(exponents.float())[..., None]
    codes = (scaled[..., None] - table).abs().argmin(-1)
    values = (table[codes] * torch.exp2(exponents.float())[..., None]).reshape(weight.shape)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {"_blocks": packed, "_scales": (exponents + 127).to(torch.uint8)}, values
