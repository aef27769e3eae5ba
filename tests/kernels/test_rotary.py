"""Rotations by position, against the product of complex numbers in float64."""

import pytest
import torch
from kernel_cases import BOUND, rotated, same

from flexgen_h2o.kernels import chunks, rotary


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("rows", [0, 1, 29])
@pytest.mark.parametrize("dim", [8, 12])
def test_rotations(monkeypatch, dtype, rows, dim):
    torch.default_generator.manual_seed(rows)
    angles = torch.rand(rows, 4) * 6
    tables = angles.cos(), angles.sin()
    x = torch.randn(rows, 3, dim + 5).to(dtype)
    expected = rotated(x[..., :dim], torch.arange(rows)[:, None], tables)
    before = x.clone()
    out = rotary.rotated(x[..., :dim], *(table[:, None] for table in tables))
    assert out.dtype == dtype and same(x, before)
    torch.testing.assert_close(out.double(), expected, rtol=BOUND[dtype], atol=BOUND[dtype])
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 500)
    result = rotary.apply_rope_(x[..., :dim], *(table.to(dtype) for table in tables))
    assert result.data_ptr() == x.data_ptr()
    torch.testing.assert_close(x[..., :dim].double(), expected, rtol=BOUND[dtype],
                               atol=BOUND[dtype])
    assert same(x[..., dim:], before[..., dim:])


def test_rotations_broadcast_over_leading_dimensions():
    x = torch.randn(2, 4, 5, 12)
    angles = torch.rand(5, 4)
    out = rotary.rotated(x, angles.cos(), angles.sin())
    for place in range(5):
        one = rotated(x[:, :, place], place, (angles.cos(), angles.sin()))
        torch.testing.assert_close(out[:, :, place].double(), one, rtol=1e-5, atol=1e-6)
