"""Rotations by position, against the product of complex numbers in float64."""

import pytest
import torch
from helpers.kernel_cases import BOUND, rotated, same

from flexgen_h2o.kernels import ops, rotary, torch_ops


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
    monkeypatch.setattr(torch_ops, "CHUNK_BYTES", 500)
    result = rotary.apply_rope_(x[..., :dim], *(table.to(dtype) for table in tables))
    assert result.data_ptr() == x.data_ptr()
    torch.testing.assert_close(x[..., :dim].double(), expected, rtol=BOUND[dtype],
                               atol=BOUND[dtype])
    assert same(x[..., dim:], before[..., dim:])


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("dtype", BOUND)
def test_strided_rotation_rounds_once(isa, monkeypatch, kernels, dtype):
    """Prompts' queries and keys, where one matrix gives both; a rounding of the tables or of a
    product would be off by more than the last one alone."""
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", kernels)
    torch.default_generator.manual_seed(3)
    angles = torch.rand(70, 6) * 6
    tables = angles.cos(), angles.sin()
    assert tables[0].dtype == ops.table_dtype(torch.device("cpu"), dtype)
    wide = torch.randn(70, 5, 16).to(dtype)
    x, before = wide[:, 1:4, :15], wide.clone()
    expected = rotated(x, torch.arange(70)[:, None], tables)
    ops.rotate_(x, tables)
    torch.testing.assert_close(x.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=2**-20)
    x.copy_(before[:, 1:4, :15])
    assert same(wide, before)  # nothing else was touched


def test_rotations_broadcast_over_leading_dimensions():
    x = torch.randn(2, 4, 5, 12)
    angles = torch.rand(5, 4)
    out = rotary.rotated(x, angles.cos(), angles.sin())
    for place in range(5):
        one = rotated(x[:, :, place], place, (angles.cos(), angles.sin()))
        torch.testing.assert_close(out[:, :, place].double(), one, rtol=1e-5, atol=1e-6)
