"""Records of quantized vectors: their sizes, their bytes, and how far off an element may be."""

import pytest
import torch
from helpers.error_cases import refused
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout, split_slots
from flexgen_h2o.config.limits import GROUP_SIZE
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference import attention as reference

LENGTHS = (2, 6, 12, 64, 66, 80, 96, 128, 320)
BITS = (4, 8)
LARGEST = 65504.0  # of float16
SMALLEST = 2.0**-24

layouts = st.builds(GroupLayout, st.sampled_from(LENGTHS), st.sampled_from(BITS))


@given(st.integers(1, 2000).map(lambda half: 2 * half), st.sampled_from(BITS))
def test_a_layout_has_the_fewest_even_groups(length, bits):
    layout = GroupLayout(length, bits)
    most = 32 if bits == 4 and length == 64 else GROUP_SIZE
    fits = [n for n in range(1, length + 1) if length % n == 0 and length // n % 2 == 0
            and length // n <= most]
    assert layout.groups == fits[0] and layout.group == length // fits[0]
    assert 0 <= 8 * layout.code_bytes - length * bits < 16 and layout.code_bytes % 2 == 0
    assert layout.nbytes == layout.code_bytes + 4 * layout.groups
    assert layout.levels == (15 if bits == 4 else 255)


@pytest.mark.parametrize(("length", "bits"), [(64, 3), (64, 16), (7, 4), (0, 4), (-2, 8)])
def test_unsupported_layouts_are_errors(length, bits):
    refused(lambda: GroupLayout(length, bits), match="cannot quantize")


def vectors(seed, layout, *, rows=7, size=1.0, offset=0.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, layout.length, generator=generator) * size + offset).to(dtype)


def by_hand(record, layout):
    """One record, decoded in Python: values and the scale of each element."""
    raw = record.tolist()
    halves = torch.tensor(raw[layout.code_bytes :], dtype=torch.uint8).view(torch.float16).tolist()
    values, scales = [], []
    for i in range(layout.length):
        half = layout.length // 2
        code = raw[i] if layout.bits == 8 else (raw[i % half] >> (4 * (i // half))) & 15
        scale, zero = (halves[i // layout.group + part * layout.groups] for part in (0, 1))
        values.append(zero + scale * code)
        scales.append(scale)
    return torch.tensor([values, scales], dtype=torch.float64)


@pytest.mark.parametrize("module", [ops, reference])
@given(layout=layouts, seed=st.integers(0, 1000), offset=st.sampled_from([0, 1.5, -200, 9e4]),
       size=st.sampled_from([1e-9, 1e-6, 1e-3, 1, 500, 1e5]),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_quantization_error_is_within_half_a_step(module, layout, seed, offset, size, dtype):
    x = vectors(seed, layout, size=size, offset=offset, dtype=dtype)
    records = module.quantize_groups(x, layout)
    x = x.double().clamp(-LARGEST, LARGEST)
    assert records.shape == (7, layout.nbytes) and records.dtype == torch.uint8
    values, scales = torch.stack([by_hand(record, layout) for record in records], dim=1)
    # Zero points are rounded down and scales up, so every element lies between two codes. What is
    # left is float32 arithmetic: x, the difference and the quotient are each rounded once.
    slack = 2.0**-22 * x.abs().amax(-1, keepdim=True)
    assert ((x - values).abs() <= scales / 2 + slack).all()
    # And a step is the range over the levels, but for rounding: of the zero point, which adds less
    # than a float16 step to the range, and of the scale, by less than one of its own.
    low, high = x.unflatten(-1, (layout.groups, layout.group)).aminmax(dim=-1)
    widest = (high - low + low.abs() * 2.0**-9.9 + SMALLEST) / layout.levels
    widest = widest * (1 + 2.0**-9.9) + SMALLEST
    assert (scales.unflatten(-1, (layout.groups, layout.group)).amax(-1) <= widest).all()
    out = module.dequantize_groups(records, layout)
    assert out.dtype == torch.float32 and out.shape == x.shape
    assert ((out - values).abs() <= slack + 1e-30).all()


@pytest.mark.source("groups")
@pytest.mark.parametrize("bits", BITS)
def test_ties_round_as_in_the_reference_with_every_isa(isa, bits):
    """Or a bit to either side of it, where a quotient that is a bit off gives another code."""
    layout = GroupLayout(64, bits)
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(2000, 64, generator=generator) * 10.0 ** torch.randint(
        -4, 5, (2000, 1), generator=generator)
    low, high = x.aminmax(dim=-1, keepdim=True)
    zero = reference.half_below(low).float()
    scale = reference.half_below((zero - high) / layout.levels).abs().float()
    halfway = zero + scale * (torch.randint(layout.levels, x.shape, generator=generator) + 0.5)
    aside = halfway + torch.randint(-1, 2, x.shape, generator=generator)
    x = torch.nextafter(halfway, aside).clamp(low, high)
    x[:, :1], x[:, 1:2] = low, high  # the same scale and zero point
    assert torch.equal(ops.quantize_groups(x, layout), reference.quantize_groups(x, layout))


@pytest.mark.parametrize("module", [ops, reference])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.140625, 0.1, -0.1, 1e-7, -1e-9, LARGEST])
def test_constant_groups_are_exact(module, bits, value):
    layout = GroupLayout(128, bits)
    x = torch.full((3, 128), value)
    out = module.dequantize_groups(module.quantize_groups(x, layout), layout)
    # Exact if it is a float16; otherwise no further off than the nearest of those.
    assert (out - x).abs().max() <= abs(torch.tensor(value).half().double().item() - x[0, 0])


@pytest.mark.parametrize("module", [ops, reference])
@pytest.mark.parametrize("bits", BITS)
def test_values_beyond_float16_are_clamped(module, bits):
    layout = GroupLayout(64, bits)
    x = torch.randn(4, 64)
    x[0, 3], x[1, 5], x[2, 7], x[2, 8] = 1e6, -1e38, float("inf"), -float("inf")
    x[3] = 3e38
    out = module.dequantize_groups(module.quantize_groups(x, layout), layout)
    error = (out - x.clamp(-LARGEST, LARGEST)).abs()
    assert (error <= 2 * LARGEST / layout.levels / 2 * 1.001 + 0.001).all()
    assert (out[3] == LARGEST).all()


@pytest.mark.parametrize("module", [ops, reference])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [12, 80])
def test_strided_records_and_odd_offsets(module, bits, length):
    layout = GroupLayout(length, bits)
    x = torch.randn(2, 3, 5, length, generator=torch.Generator().manual_seed(1))
    records = module.quantize_groups(x.transpose(0, 1), layout)
    assert torch.equal(records, module.quantize_groups(x, layout).transpose(0, 1))
    expected = module.dequantize_groups(records, layout)
    for offset, stride in ((0, layout.nbytes + 4), (1, layout.nbytes), (2, layout.nbytes + 3)):
        wide = torch.full((3, 2, 6, stride), 255, dtype=torch.uint8)
        rows = wide.flatten()[offset : offset + 3 * 2 * 5 * stride].view(3, 2, 5, stride)
        rows = rows[..., : layout.nbytes]
        rows.copy_(records)
        assert torch.equal(module.dequantize_groups(rows, layout), expected)
        assert torch.equal(module.dequantize_groups(rows[:, 1, 2:3], layout), expected[:, 1, 2:3])


@pytest.mark.parametrize("module", [ops, reference])
@pytest.mark.parametrize("bits", [(8, 4), (4, 8), (4, 4)])
@pytest.mark.parametrize("length", [12, 64])
def test_keys_and_values_of_different_bits_share_a_record(module, bits, length):
    layout, x = CacheLayout.from_bits(length, *bits), torch.randn(2, 3, 5, length)
    parts = [module.quantize_groups(part, GroupLayout(length, one))
             for part, one in zip(x, bits, strict=True)]
    records = module.pack_slots(x, layout)
    expected = torch.stack(parts) if bits[0] == bits[1] else torch.cat(parts, -1)[None]
    assert torch.equal(records, expected)
    assert records.shape == (layout.kinds, 3, 5, layout.width)
    assert all(map(torch.equal, split_slots(records, layout), parts))
    vectors = [module.dequantize_groups(part, GroupLayout(length, one))
               for part, one in zip(parts, bits, strict=True)]
    assert torch.equal(module.unpack_slots(records, layout), torch.stack(vectors))


@pytest.mark.parametrize("module", [ops, reference])
def test_empty_tensors(module):
    layout = GroupLayout(64, 4)
    records = module.quantize_groups(torch.empty(2, 0, 64), layout)
    assert records.shape == (2, 0, layout.nbytes)
    assert module.dequantize_groups(records, layout).shape == (2, 0, 64)


def test_half_below_is_the_next_float16_down():
    halves = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()].unique()  # sorted
    between = torch.cat([(halves[:-1].float() + halves[1:].float()) / 2,
                         torch.nextafter(halves[1:].float(), torch.tensor(-1e9))])
    assert torch.equal(reference.half_below(between), halves[:-1].repeat(2))
    assert torch.equal(reference.half_below(halves.float()), halves)
