"""linear_tiled against float64: many rows by 16-bit weights, in AMX tiles and their twin."""

import pytest
import torch
from helpers import kernel_internals
from helpers.kernel_cases import SETS, TILED, check_linear, linear_case, threads, using
from helpers.selection import full_cases

from flexgen_h2o.config.limits import TILED_INPUTS, TILED_OUTPUTS, TILED_ROWS
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu.library import CapturedCalls


@pytest.fixture(params=TILED)
def tiles(request):
    with using(request.param):
        yield


@pytest.mark.parametrize("rows, inputs, outputs", [
    (1, 1, 1), (129, 32, 33), (TILED_ROWS + 17, TILED_INPUTS + 32, 7),
    *full_cases((17, 31, 8), (160, 65, 192), (40, 576, 520),
                (33, TILED_INPUTS, 2 * TILED_OUTPUTS + 40),
                (50, TILED_INPUTS + 27, TILED_OUTPUTS + 2))])
def test_products(tiles, rows, inputs, outputs):
    """Rows, inputs and outputs that fill tiles and that do not; one slab and several of either, and
    more rows than have their sums kept."""
    for bias, add in ((True, False), (False, True)):
        check_linear(native.linear_tiled, rows, inputs, outputs, bias=bias, add=add)


def test_padding_of_rows_is_not_read(tiles):
    """Where inputs fill no step, and rows and outputs no tile: what is there may be no number."""
    x, weight = torch.randn(150, 70).bfloat16(), torch.randn(61, 80).bfloat16()
    for each, rows in ((x, 140), (weight, 50)):
        each[:, 45:], each[rows:] = (float("nan"),) * 2
    out = torch.full((140, 50), float("nan")).bfloat16()
    native.linear_tiled(x[:140, :45], weight[:50, :45], None, out)
    torch.testing.assert_close(out.float(), x[:140, :45].float() @ weight[:50, :45].float().T,
                               rtol=2**-8, atol=1e-3)


def test_results_do_not_depend_on_threads(tiles):
    """More of them than there are slabs share rows, too."""
    results = []
    for count in (1, 2, 3, 9):
        x, weight, bias, out = linear_case(270, 130, 77)
        with threads(count):
            native.linear_tiled(x, weight, bias, out[:, :77])
        results.append(out[:, :77])
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_matmuls_of_one_input_are_merged_into_a_call(tiles):
    torch.default_generator.manual_seed(0)
    x, program, wanted, found = torch.randn(140, 70).bfloat16(), CapturedCalls(), [], []
    for outputs, add in ((40, False), (7, True), (160, False)):
        weight, bias = torch.randn(outputs, 70).bfloat16(), torch.randn(outputs).bfloat16()
        found.append(torch.randn(140, outputs).bfloat16())
        wanted.append(found[-1].clone())
        native.linear_tiled(x, weight, bias, wanted[-1], add=add)
        native.linear_tiled(x, weight, bias, found[-1], add, capture=program)
    assert kernel_internals.calls(program) == ["linear_tiled"]
    program.replay()
    for mine, one in zip(found, wanted, strict=True):
        assert torch.equal(mine, one)


@pytest.mark.parametrize("name", sorted({*SETS} - {*TILED}))
def test_tiled_linear_needs_amx(name):
    x, weight, _, out = linear_case(140, 32, 16)
    with using(name), pytest.raises(ValueError, match="where there is AMX"):
        native.linear_tiled(x, weight, None, out[:, :16])
