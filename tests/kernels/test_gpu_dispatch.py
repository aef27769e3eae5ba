"""What runs on which GPU: the table, and its paths on a fake one against the reference."""

from types import SimpleNamespace

import pytest
import torch
from helpers import internals
from helpers.fakes import A100, T4
from helpers.kernel_cases import BOUND, check_prefill, prefill_case
from helpers.selection import full_cases
from kernels.test_triton import check_step, prefill

from flexgen_h2o.h2o.eviction import Eviction
from flexgen_h2o.kernels import dispatch, torch_ops
from flexgen_h2o.kernels.dispatch import GPU, assume_gpu
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.storage.device import Device

pytestmark = pytest.mark.usefixtures("mended_interpreter")

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
V100, L4, H100 = GPU(70, 80), GPU(89, 58), GPU(90, 132)


@pytest.mark.parametrize("gpu", [V100, T4, A100, L4, H100, None])
@pytest.mark.parametrize("dtype", BOUND)
def test_every_gpu_has_an_implementation_for_any_rows(gpu, dtype):
    units = dtype != FULL and gpu not in (V100, T4)
    for operation, with_units, without in (
            ("scored_prefill", ["blocks"] * 6, ["matmul"] * 6),
            ("decode_attention", ["matrix units"] * 6, ["vectors"] * 6),
            ("linear_quantized", ["matrix units"] * 5 + ["unpacked"],
             ["vectors"] * 3 + ["unpacked"] * 3),
            ("linear_short_floats", *[["vectors"] * 3 + ["unpacked"] * 3] * 2)):
        chosen = [dispatch.select_gpu_implementation(operation, rows, dtype, gpu)
                  for rows in (1, 2, 8, 9, 64, 65)]
        assert chosen == (with_units if units else without)


@pytest.mark.parametrize(("gpu", "name", "chosen"), [
    (T4, "bfloat16", HALF), (V100, "bfloat16", HALF), (A100, "bfloat16", BRAIN),
    (T4, "float16", HALF), (A100, "float16", HALF), (H100, "float32", HALF),
    (None, "float16", BRAIN)])
def test_auto_dtype_is_native_to_the_gpu(gpu, name, chosen):
    with assume_gpu(gpu):
        assert internals.run_dtype("auto", SimpleNamespace(dtype=name), Device()) == chosen
        assert internals.run_dtype("bfloat16", SimpleNamespace(dtype=name), Device()) == BRAIN


@pytest.mark.parametrize(("stored", "group", "rotary"), [
    (HALF, 1, 16), (4, 3, 8),
    *full_cases((HALF, 8, 16), (BRAIN, 3, 0), (8, 4, 8), (8, 1, 0), (4, 8, 16))])
def test_decode_of_heads_one_by_one(stored, group, rotary):
    with assume_gpu(T4):
        check_step([0, 33], full=(1,), stored=stored, group=group, kv_heads=2,
                   eviction=Eviction(), rotary=rotary)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("group", "decay"), [(1, 1.0), (3, 0.9), (4, 1.0)])
@pytest.mark.parametrize(("rows", "tokens"), [
    ([1], [1]), ([2, 1], [2, 5]), ([0, 40], [3, 40]), ([18, 3], [34, 50])])
@pytest.mark.parametrize("block", [1, 7, 10**6])
def test_blockwise_prefill(monkeypatch, dtype, group, decay, rows, tokens, block):
    """Blocks of one row, of some, and of all of them."""
    monkeypatch.setattr(torch_ops, "BLOCK_BYTES", block * 4 * 2 * group * max(tokens))
    taken = []
    plain = torch_ops.blockwise_prefill_attention
    monkeypatch.setattr(torch_ops, "blockwise_prefill_attention",
                        lambda *args: taken.append(1) or plain(*args))
    with assume_gpu(T4):
        check_prefill([prefill], prefill_case(rows, tokens, group=group, dim=20, decay=decay,
                                              dtype=dtype))
    assert len(taken) == 2


@pytest.mark.parametrize("gpu", [T4, A100, None])
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_prefill_without_scores_of_groups(monkeypatch, gpu, dtype):
    """Where no flash kernel takes groups, each query head gets keys of its own."""
    heads, attend = [], torch.nn.functional.scaled_dot_product_attention

    def noted(q, k, v, **options):
        heads.append(k.shape[1])
        return attend(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    q, k, v = (torch.randn(30, count, 16).to(dtype) for count in (6, 2, 2))
    wanted = reference.prefill_attention(q.float(), k.float(), v.float(), [30])
    with assume_gpu(gpu):
        out = torch_ops.sdpa_prefill_attention(q, k, v, [30])
    assert (out.float() - wanted).abs().max() < BOUND[dtype]
    assert heads == [6 if gpu is not None and (gpu == T4 or dtype == FULL) else 2]


def test_blockwise_prefill_memory_is_linear_in_tokens(monkeypatch):
    """Of a block's logits, whatever the prompt's length."""
    largest = []
    product = torch.bmm

    def noted(a, b):
        largest.append(product(a, b).numel())
        return product(a, b)

    monkeypatch.setattr(torch, "bmm", noted)
    monkeypatch.setattr(torch_ops, "BLOCK_BYTES", 4 * 2 * 2000)
    for length in (100, 1000):
        q, k, v = torch.randn(3, length, 2, 8)
        torch_ops.blockwise_prefill_attention(q, k, v, [length], [length],
                                              torch.zeros(2, length), 1.0)
    assert max(largest) <= 2 * 2000
