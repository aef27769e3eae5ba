"""AMX tiles and their twin in plain C++ (cpu/amx.h): the same bits, which float64 bears out."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.kernel_cases import SETS, packaging

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.full, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
SIZES = [(16, 16, 16), (1, 16, 16), (16, 1, 16), (16, 16, 1), (3, 7, 5), (9, 16, 2)]
"""Rows, pairs and columns."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """tests/helpers/tile_matmuls.cpp by instruction set, of those that this machine runs."""
    folder, compiled = tmp_path_factory.mktemp("tiles"), {}
    for isa in set(SETS) & {"amx", "amx_emulated"}:
        compiled[isa] = folder / isa
        subprocess.run(["g++", *packaging()["FLAGS"], *packaging()["INSTRUCTION_SETS"][isa],
                        f"-DISA={isa}", f"-I{ROOT / packaging()['CPP_FOLDER']}",
                        ROOT / "tests/helpers/tile_matmuls.cpp", "-o", compiled[isa]], check=True)
    return compiled or pytest.skip("needs a CPU with AVX2")


def halves(x):
    """float32 to the upper halves of its bits: bfloat16 by cutting off."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def as_floats(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def cases(spread):
    """Random tiles of each size, bfloat16 [16, 32] and float32 [16, 16], as bytes.

    What lies outside of a size is NaN. Exponents go from -`spread` to `spread`.
    """
    draw = np.random.default_rng(spread)

    def numbers(*shape):
        return draw.standard_normal(shape) * 2.0 ** draw.uniform(-spread, spread, shape)

    for rows, pairs, columns in SIZES * 8:
        a, b = halves(numbers(16, 16, 2)), halves(numbers(16, 16, 2))
        c = numbers(16, 16).astype(np.float32)
        a[rows:], a[:, pairs:], b[pairs:], b[:, columns:] = (0x7fc0,) * 4
        c[rows:], c[:, columns:] = np.nan, np.nan
        yield (rows, pairs, columns), a, b, c


def computed(program, tiles):
    data = b"".join(bytes(size) + a.tobytes() + b.tobytes() + c.tobytes()
                    for size, a, b, c in tiles)
    done = subprocess.run([program], input=data, stdout=subprocess.PIPE, check=True)
    return np.frombuffer(done.stdout, np.uint32).reshape(-1, 16, 16)


@pytest.mark.parametrize("spread", [0, 4, 20])
def test_a_product_of_tiles(programs, spread):
    tiles = list(cases(spread))
    for program in programs.values():
        for (size, a, b, c), after in zip(tiles, computed(program, tiles), strict=True):
            rows, pairs, columns = size
            left = as_floats(a[:rows, :pairs]).astype(np.float64)
            right = as_floats(b[:pairs, :columns]).astype(np.float64)
            wanted = c[:rows, :columns] + np.einsum("mkp,knp->mn", left, right)
            terms = abs(c[:rows, :columns]) + np.einsum("mkp,knp->mn", abs(left), abs(right))
            results = after.view(np.float32)
            assert (abs(results[:rows, :columns] - wanted) <= 2**-19 * terms).all()
            outside = np.ones((16, 16), bool)
            outside[:rows, :columns] = False
            assert (after[outside] == c.view(np.uint32)[outside]).all()


@pytest.mark.parametrize("spread", [0, 20, 63, 120])
def test_emulated_tiles_are_bit_identical(programs, spread):
    """Up to infinities, and down to denormals, which count as zeros."""
    if len(programs) < 2:
        pytest.skip("needs a CPU with AMX")
    tiles = list(cases(spread))
    real, emulated = (computed(programs[isa], tiles) for isa in ("amx", "amx_emulated"))
    numbers = ~np.isnan(real.view(np.float32))
    assert (np.isnan(emulated.view(np.float32)) == ~numbers).all()
    assert (real[numbers] == emulated[numbers]).all()


def test_denormals_are_zeros(programs):
    """In A, in B, in C and in the sum."""
    size, one = (16, 16, 16), halves(np.ones((16, 16, 2)))
    tiny, none = halves(np.full((16, 16, 2), 2.0**-130)), np.zeros((16, 16), np.float32)
    small = halves(np.full((16, 16, 2), 2.0**-70))
    below = np.full((16, 16), -2.0**-128, np.float32)
    for program in programs.values():
        for a, b, c in ((tiny, one, none), (one, tiny, none), (small, small, none),
                        (halves(np.zeros((16, 16, 2))), one, below)):
            after = computed(program, [(size, a, b, c)]).view(np.float32)
            assert (after == 0).all()
