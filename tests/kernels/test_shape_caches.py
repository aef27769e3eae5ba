"""Products of ever new shapes take no more and more memory."""

import os
import subprocess
import sys

import pytest

from flexgen_h2o.kernels.torch_ops import CACHE_VARIABLES, CACHED_SHAPES, limit_shape_caches

# 500 numbers of rows. Unbounded, they take some 250 MB with oneDNN; 64 of them are 32.
GROWN = """
import sys
import torch
from flexgen_h2o.kernels.torch_ops import limit_shape_caches
from flexgen_h2o.storage.free_memory import resident_bytes
limit_shape_caches()
torch.set_num_threads(1)
weight = torch.randn(80, 48).bfloat16()
for rows in range(100, 600):
    torch.nn.functional.linear(torch.randn(rows, 48).bfloat16(), weight)
    if rows == 170:
        before = resident_bytes()
print(resident_bytes() - before)
"""


@pytest.mark.full
def test_new_shapes_do_not_grow_memory(monkeypatch):
    for name in CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 << 20


def test_environment_variables_are_kept(monkeypatch):
    first, second = CACHE_VARIABLES
    for name in CACHE_VARIABLES:
        monkeypatch.setenv(name, "7")  # so that it is put back
    monkeypatch.delenv(second)
    limit_shape_caches()
    assert (os.environ[first], os.environ[second]) == ("7", str(CACHED_SHAPES))
