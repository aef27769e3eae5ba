"""Specification of quantized weights, in plain PyTorch; `MatrixLayout` describes their bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from flexgen_h2o.config.limits import MATRIX_TILE, MXFP4_GROUP
from flexgen_h2o.kernels.reference.attention import FLOAT16_MAX, half_below

STEPS = 10
"""Scales that a search of `quantize_matrix` tries."""

REFINEMENTS = 4
"""Further least-squares fits, each to the quantized values of the best scale so far."""

SMALLEST_VARIANCE = 1e-3
"""Minimum variance of a group's quantized values, times its size squared, for a fit. Below it all
values with weight are equal."""

SMALLEST = 2.0**-24
"""The smallest float16 above 0. It replaces a scale of 0, where all quantized values are 0."""

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the MXFP4 codes 0 to 7. Codes 8 to 15 are their negatives."""

ACTIVATION_LEVELS = 127
"""Largest quantized activation."""

_BIAS, _LARGEST = 127, 254  # of MXFP4's exponents
COMPACT_STEP = 1 / 16
"""Unit of compact zero points, as a fraction of their scale."""

COMPACT_MAX = 28.0
"""Largest magnitude with compact scales: half of 15 times the largest scale."""

_MANTISSA = 19  # position of a compact scale's code in a float32
_COMPACT_LOWEST = 127 - 14 << 23 - _MANTISSA  # the exponent of code 0 is -14
_NIBBLES = 0x0F0F0F0F
_BYTES = 0x01010101


def quantize_matrix(weight, layout, *, search=False, importance=None):
    """Quantize a weight.

    Parameters
    ----------
    weight : Tensor [outputs, inputs]
        Any floating dtype. Values outside of float16's range are clamped to it, with compact
        scales to `COMPACT_MAX`.
    layout : MatrixLayout
    search : bool
        Search the scale and zero point of each group for the smallest squared error, weighted by
        `error_weights`. Otherwise they span the group's minimum to its maximum.
    importance : float32 Tensor [inputs], optional
        Weights of the inputs in the error of a search, such as the mean square of each input over a
        calibration text. Default: all equal.

    Returns
    -------
    uint8 Tensor [layout.nbytes]
        Padding of tiles and groups is 0: scales, zero points and quantized values.

    Notes
    -----
    Without search, as `attention.quantize_groups`: the error of an element is at most scale / 2,
    plus the error of rounding scale and zero point to float16.

    With search (make_qkx2_quants of llama.cpp): for scales somewhat larger and smaller than the
    spanning one, round to integers, then fit scale and zero point to these integers by least
    squares. The best fit, rounded to float16, replaces the spanning one if its error is smaller. It
    is then refined by rounding and fitting again, while the error decreases.

    MXFP4 converts as its specification (OCP MX 1.0, section 6.3), and rounds ties to the smaller
    magnitude. The largest element of a group has an exponent of at least that of 4, and values
    beyond 6 become 6. There is no search.

    12 bits converts the weight to bfloat16 (NaN to 0, infinity to the largest number). With P the
    power of two in the largest magnitude of a group, elements larger than P / 2^15 are exact.
    Others become 0 or 129 / 128 * P / 2^15, whichever is nearer. There is no search.
    """
    if layout.mxfp4:
        return _quantized_mxfp4(weight.float(), layout)
    if layout.bits == 12:
        return _shortened(weight.float(), layout)
    outputs, inputs = layout.tiles * MATRIX_TILE, layout.groups * layout.group
    largest = COMPACT_MAX if layout.compact else FLOAT16_MAX
    values = weight.float().clamp(-largest, largest)
    ends = range(0, layout.inputs, layout.group)
    weigh = torch.ones(layout.inputs) if importance is None else importance.float()
    parts = [_quantized(values[:, start : start + layout.group], layout, search,
                        weigh[start : start + layout.group]) for start in ends]
    scales, zeros = (torch.zeros(outputs, layout.groups, dtype=parts[0][0].dtype)
                     for _ in range(2))
    codes = torch.zeros(outputs, inputs, dtype=torch.int32)
    for g, (scale, zero, code) in enumerate(parts):
        scales[: layout.outputs, g], zeros[: layout.outputs, g] = scale, zero
        start = g * layout.group
        codes[: layout.outputs, start : start + code.shape[1]] = code
    return pack_matrix(codes, scales, zeros, layout)


def error_weights(x, importance):
    """Return the weights of a group's elements in the error of a search; their mean is 1.

    Large elements have larger weights, as in llama.cpp's K-quants. With equal weights a fit makes
    elements smaller on average, which increases perplexity.

    Parameters
    ----------
    x : float32 Tensor [rows, size]
    importance : float32 Tensor [size]

    Returns
    -------
    float32 Tensor [rows, size]
        ``importance * (rms(x) + |x|)`` divided by its mean; 1 if all of it is 0.
    """
    if not importance.any():
        importance = torch.ones_like(importance)
    importance = importance / importance.mean()
    weights = importance * (x.square().mean(-1, keepdim=True).sqrt() + x.abs())
    mean = weights.mean(-1, keepdim=True)
    return torch.where(mean > SMALLEST, weights / mean.clamp_min(SMALLEST), 1.0)


def compact_scales(codes):
    """Return the float32 scales of compact codes (uint8 or int32)."""
    return (codes.int() + _COMPACT_LOWEST << _MANTISSA).view(torch.float32)


def compact_zeros(scales, codes):
    """Return the float32 zero points of compact codes (uint8 or int32), for their scales."""
    return scales * (codes.float() * -COMPACT_STEP)


def _compact(scale, zero, *, up):
    """Return the next compact scale up or down, and the nearest zero point for it."""
    bits = scale.float().view(torch.int32) + (2**_MANTISSA - 1 if up else 0)
    scale = compact_scales(((bits >> _MANTISSA) - _COMPACT_LOWEST).clamp(0, 255))
    return scale, compact_zeros(scale, _zero_codes(scale, zero))


def _zero_codes(scale, zero):
    return (-zero / scale / COMPACT_STEP).round().clamp(0, 255)


def _quantized(x, layout, search, importance):
    """Quantize one group of each row to scales and zero points [rows] and integers [rows, size].

    Scales and zero points are float16, or float32 if they are compact.
    """
    levels, low, high = layout.levels, x.amin(-1), x.amax(-1)
    if layout.compact:
        zero = low.clamp(max=0)
        scale, zero = _compact((high.clamp(min=0) - zero) / levels, zero, up=True)
    else:
        zero = half_below(low + 0.0)  # of both zeros, the positive one
        scale = half_below((zero.float() - high) / levels).abs()  # rounded up
    best: Any = (scale, zero, _codes(x, scale, zero, levels))
    if not search:
        return best
    weights = error_weights(x, importance)
    least = _error(x, best[0], best[1], best[2], weights)
    # Scales from one level fewer to one level more than there are, then the best scale so far.
    for step in range(STEPS + REFINEMENTS):
        start, inverse = low, (levels - 1.0 + 0.2 * step) / (high - low).clamp_min(SMALLEST)
        if step >= STEPS:
            start, inverse = best[1].float(), 1 / best[0].float().clamp_min(SMALLEST)
        code = ((x - start[:, None]) * inverse[:, None]).round().clamp(0, levels)
        count = x.shape[1]
        weighed = weights * code
        sums, squares, product = weighed.sum(-1), (weighed * code).sum(-1), (weighed * x).sum(-1)
        total = (weights * x).sum(-1)
        variance = count * squares - sums * sums
        scale = (count * product - sums * total) / variance.clamp_min(SMALLEST_VARIANCE)
        for rounded in _neighbours(scale.clamp(0, FLOAT16_MAX), layout):
            zero = ((total - rounded.float() * sums) / count).clamp(-FLOAT16_MAX, FLOAT16_MAX)
            zero = (compact_zeros(rounded, _zero_codes(rounded, zero)) if layout.compact
                    else zero.half())
            fit = (rounded, zero, _codes(x, rounded, zero, levels))
            error = _error(x, *fit, weights)
            better = (error < least) & (variance > SMALLEST_VARIANCE)
            least = torch.where(better, error, least)
            best = tuple(torch.where(better if one.dim() == 1 else better[:, None], one, other)
                     for one, other in zip(fit, best, strict=True))
    return best


def _quantized_mxfp4(x, layout):
    filled = torch.nn.functional.pad(x, (0, layout.groups * MXFP4_GROUP - layout.inputs))
    groups = filled.view(layout.outputs, layout.groups, MXFP4_GROUP)
    _, exponents = groups.abs().amax(-1).frexp()  # of mantissas from 0.5 to 1
    exponents = (exponents - 3 + _BIAS).clamp(0, _LARGEST)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents - _BIAS)
    sizes = groups.abs() / scales[..., None]
    numbers = torch.tensor(NUMBERS)
    codes = torch.bucketize(sizes, (numbers[1:] + numbers[:-1]) / 2) + 8 * (groups < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return pack_mxfp4(blocks, exponents.to(torch.uint8), layout)


def _shortened(x, layout):
    bits = x.nan_to_num(nan=0.0).to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    sign, size = bits & 0x8000, (bits & 0x7FFF).clamp(max=0x7F7F)
    size = F.pad(size, (0, layout.groups * layout.group - layout.inputs))
    sign = F.pad(sign, (0, layout.groups * layout.group - layout.inputs))
    groups = size.view(layout.outputs, layout.groups, layout.group)
    exponents = groups.amax(-1) >> 7
    code = groups - (exponents[..., None] - 15 << 7)
    # Values nearer to 0 than to the smallest number become 0, and so do subnormal ones.
    code = torch.where((code > -127) & (groups > 127), code.clamp(min=1), 0).flatten(1) | sign
    filled = torch.zeros(layout.tiles * MATRIX_TILE, code.shape[1], dtype=torch.int32)
    filled[: layout.outputs] = code
    units = filled.view(layout.tiles, MATRIX_TILE, layout.groups, layout.group // 8, 4, 2)
    p0, p1, p2, p3 = (units[..., 0] | units[..., 1] << 16).unbind(-1)
    p3_signs = p3 >> 1 & 0x40004000
    words = torch.stack((p0 | (p3 & 0x07800780) << 4, p1 | (p3 & 0x00700070) << 7 | p3_signs,
                         p2 | (p3 & 0x000F000F) << 11), dim=-1).flatten(-2)
    heads = torch.zeros(layout.tiles, MATRIX_TILE, layout.groups, dtype=torch.uint8)
    heads.flatten(0, 1)[: layout.outputs] = exponents
    return _joined(heads.transpose(1, 2), words)


def _lengthened(words, exponents):
    """Return the values of 12-bit words [..., 3 words per 8 inputs], with the groups' exponents."""
    w0, w1, w2 = words.unflatten(-1, (-1, 3)).unbind(-1)
    p3 = (w0 >> 4 & 0x07800780) | (w1 >> 7 & 0x00700070) | (w2 >> 11 & 0x000F000F)
    pairs = torch.stack((w0, w1, w2, p3 | (w1 & 0x40004000) << 1), dim=-1)
    codes = torch.stack((pairs << 16, pairs), dim=-1).flatten(-3)  # in the upper half of a word
    normal = codes & 0x07FF0000 != 0
    codes &= ~0x7800FFFF  # the sign and the eleven bits
    codes |= 0x38000000  # 2 ** -15 for an exponent of 0
    return codes.view(torch.float32).mul_(normal).mul_((exponents << 23).view(torch.float32))


def _neighbours(scale, layout):
    """Return the scales to try for a fit: rounded to float16, or the compact ones next to it."""
    if not layout.compact:
        return [scale.half()]
    return [_compact(scale, torch.zeros_like(scale), up=up)[0] for up in (False, True)]


def _codes(x, scale, zero, levels):
    steps = scale.float().clamp_min(SMALLEST)
    return ((x - zero.float()[:, None]) / steps[:, None]).round().clamp(0, levels).to(torch.int32)


def _error(x, scale, zero, code, weights):
    off = zero.float()[:, None] + scale.float()[:, None] * code - x
    return (weights * off.square()).sum(-1)


def pack_matrix(codes, scales, zeros, layout):
    """Return the bytes of a matrix, given its quantized values, scales and zero points.

    Parameters
    ----------
    codes : int32 Tensor [tiles * MATRIX_TILE, groups * group]
    scales, zeros : float16 Tensor [tiles * MATRIX_TILE, groups]
        With compact scales: float32, with representable values.
    layout : MatrixLayout

    Returns
    -------
    uint8 Tensor [layout.nbytes]
    """
    tiles, groups, width = layout.tiles, layout.groups, 4 if layout.bits == 4 else 8
    inner = codes.view(tiles, MATRIX_TILE, groups, -1, 16 // width, 2)
    shifts = width * torch.arange(16 // width)[:, None] + 16 * torch.arange(2)
    words = (inner.long() << shifts).sum((-1, -2))  # disjoint bits
    if layout.bits == 6:
        *three, last = words.unflatten(-1, (-1, 4)).unbind(-1)
        words = torch.stack([word | (last & 3 * _BYTES << 2 * n) << 6 - 2 * n
                             for n, word in enumerate(three)], dim=-1).flatten(-2)
    words = words.where(words < 2**31, words - 2**32).to(torch.int32)
    if layout.compact:
        scaled = scales.clamp_min(compact_scales(torch.zeros(1, dtype=torch.uint8)).item())
        zeros = _zero_codes(scaled, zeros).to(torch.uint8)
        scales = ((scaled.view(torch.int32) >> _MANTISSA) - _COMPACT_LOWEST).to(torch.uint8)
    halves = torch.stack((scales, zeros)).view(2, tiles, MATRIX_TILE, groups).permute(1, 3, 0, 2)
    return _joined(halves.contiguous().view(torch.uint8), words)


def pack_mxfp4(blocks, exponents, layout):
    """Return the bytes of an MXFP4 matrix.

    Parameters
    ----------
    blocks : uint8 Tensor [outputs, groups, 16]
        Element 2 * i of a group in the low half of byte i, and 2 * i + 1 in its high half.
    exponents : uint8 Tensor [outputs, groups]
        Exponents with a bias of 127.
    layout : MatrixLayout

    Returns
    -------
    uint8 Tensor [layout.nbytes]
    """
    filled = layout.tiles, MATRIX_TILE, layout.groups
    pairs = torch.zeros(*filled, layout.words, dtype=torch.int32)
    pairs.flatten(0, 1)[: layout.outputs] = blocks.contiguous().view(torch.int32)
    heads = torch.zeros(*filled, dtype=torch.uint8)
    heads.flatten(0, 1)[: layout.outputs] = exponents
    words = _narrowed(pairs & _NIBBLES) | _narrowed(pairs >> 4 & _NIBBLES) << 16
    return _joined(heads.transpose(1, 2), words)


def _narrowed(words):
    """Pack the low halves of the bytes of words next to each other."""
    words = (words | words >> 4) & 0x00FF00FF
    return (words | words >> 8) & 0xFFFF


def _joined(heads, words):
    """Return the bytes of blocks: uint8 `heads` [tiles, groups, ...], then int32 `words` [tiles,
    MATRIX_TILE, groups, words]."""
    codes = words.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)
    return torch.cat((heads.flatten(2), codes), dim=-1).view(-1)


def unpack_rows(data, layout, rows, dtype):
    """Dequantize rows of a matrix.

    Parameters
    ----------
    data : uint8 Tensor [layout.nbytes]
    layout : MatrixLayout
    rows : int64 Tensor [count]
        Outputs in any order, on data's device.
    dtype : torch.dtype

    Returns
    -------
    Tensor [count, inputs]
        In `dtype`; computed in float32 and rounded once.
    """
    tile, lane = rows // MATRIX_TILE, rows % MATRIX_TILE

    def of_rows(width, first, end):
        """Return elements [rows, groups, n] of a dtype from bytes `first` to `end` of blocks."""
        blocks = data.view(width).view(layout.tiles, layout.groups, -1)
        part = blocks[..., first // width.itemsize : end // width.itemsize]
        return part.unflatten(-1, (-1, MATRIX_TILE))[tile, :, :, lane]

    head = layout.head_bytes
    words = of_rows(torch.int32, head, layout.block_bytes)
    if layout.bits == 12:
        values = _lengthened(words, of_rows(torch.uint8, 0, head).int())
        return values.flatten(1)[:, : layout.inputs].to(dtype)
    if layout.bits == 6:
        word_groups = words.unflatten(-1, (-1, 3))
        last = sum((word_groups[..., n] >> 6 - 2 * n & 3 * _BYTES << 2 * n) for n in range(3))
        words = torch.cat((word_groups & 63 * _BYTES, last[..., None]), dim=-1).flatten(-2)
    width = 4 if layout.bits == 4 else 8
    shifts = (width * torch.arange(16 // width, device=data.device)[:, None]
              + 16 * torch.arange(2, device=data.device))
    codes = (words[..., None, None] >> shifts & layout.levels).flatten(-3)
    if layout.mxfp4:
        numbers = torch.tensor((*NUMBERS, *(-number for number in NUMBERS)), device=data.device)
        exponents = of_rows(torch.uint8, 0, head).int() - _BIAS
        values = torch.ldexp(numbers[codes], exponents)
    else:
        scale, zero = of_rows(torch.uint8 if layout.compact else torch.float16, 0, head).split(
            1, dim=-1)
        if layout.compact:
            scale = compact_scales(scale)
            zero = compact_zeros(scale, zero)
        scale, zero = scale.float(), zero.float()
        values = zero + scale * codes
    return values.flatten(1)[:, : layout.inputs].to(dtype)


def quantize_activations(x, group):
    """Return x after quantization to 8 bits: integers from -127 to 127, times a scale per group.

    Parameters
    ----------
    x : Tensor [rows, inputs]
    group : int
        Inputs that share a scale: the groups of the weight.

    Returns
    -------
    float32 Tensor [rows, inputs]

    Notes
    -----
    A scale is the largest magnitude of its group divided by 127, as in llama.cpp's Q8_0. The error
    of an element is at most scale / 2. NaN or infinity makes all of its group NaN.
    """
    parts = F.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    largest = parts.abs().amax(-1, keepdim=True)
    step = torch.where(largest.isfinite(), largest / ACTIVATION_LEVELS, torch.nan)
    codes = (parts / torch.where(step > 0, step, 1.0)).round()
    codes = codes.clamp(-ACTIVATION_LEVELS, ACTIVATION_LEVELS).nan_to_num()
    return (codes * step).flatten(1)[:, : x.shape[1]]


def linear_quantized(x, matrix, bias, out, *, add=False):
    """Compute ``out = x @ weight.T + bias``, plus out if `add`, rounded to out's dtype once.

    Parameters
    ----------
    x : Tensor [rows, inputs]
    matrix : QuantizedMatrix
        The weight. With `activation_bits` of 8, x is quantized by `quantize_activations`.
    bias : Tensor [outputs] or None
    out : Tensor [rows, outputs]
        Written in place; must not overlap x.
    add : bool
        Add the result to out, such as a residual.
    """
    data, layout = matrix.data, matrix.layout
    outputs = torch.arange(layout.outputs, device=data.device)
    x = x.float() if matrix.activation_bits == 16 else quantize_activations(x, layout.group)
    result = x @ unpack_rows(data, layout, outputs, torch.float32).T
    for summand in (bias, out if add else None):
        if summand is not None:
            result += summand.float()
    out.copy_(result)
