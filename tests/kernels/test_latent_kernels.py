"""Values that are the last elements of the keys: the kernels against the reference."""

from dataclasses import replace

import pytest
import torch
from helpers.kernel_cases import copied, decode_case, prefill_case, select_case

from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.h2o.eviction import Cut, Eviction
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.kernels.reference import recall as reference_recall

ROPE, DIM = 6, 22
FORMS = [torch.float32, torch.bfloat16, 8, 4]
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def latent(case):
    """Return a case whose values are part of the keys, in slots without values."""
    slots, layout = case["slots"], case["layout"]
    one = slots[:1].clone() if layout is None else slots[:1].contiguous()
    return case | {"v": case["k"][..., ROPE:], "slots": one,
                   "layout": None if layout is None else replace(layout, values=None)}


def both(function, expected_function, case):
    """Return the results of two functions, and the copies of the case that they changed."""
    cases = [{name: copied(x) for name, x in case.items()} for _ in range(2)]
    for case_copy in cases:
        case_copy["v"] = case_copy["k"][..., ROPE:]
    return function(**cases[0]), expected_function(**cases[1]), *cases


@pytest.mark.parametrize("stored", FORMS)
@pytest.mark.parametrize("eviction, rotary", [
    (None, 0), (Eviction(), 0), (Eviction(sinks=1), ROPE)])
def test_decode_attention(stored, eviction, rotary):
    case = latent(decode_case([3, 70, 9], group=5, kv_heads=1, dim=DIM, stored=stored,
                              full=() if eviction is None else {1}, eviction=eviction,
                              rotary=rotary, attention=AttentionVariant(scale=0.3)))
    (out, place), (wanted, wanted_place), ours, theirs = both(
        ops.decode_attention, reference.decode_attention, case)
    assert out.shape == (3, 5, DIM - ROPE)
    torch.testing.assert_close(out, wanted, rtol=0, atol=BOUND[out.dtype])
    assert torch.equal(place, wanted_place)
    torch.testing.assert_close(ours["slots"], theirs["slots"], rtol=0, atol=0, equal_nan=True)
    if eviction is not None:
        assert torch.equal(ours["state"].positions, theirs["state"].positions)
        torch.testing.assert_close(ours["state"].scores, theirs["state"].scores)


@pytest.mark.parametrize("stored", FORMS)
def test_select_heavy_hitters(stored):
    case = latent(select_case([Cut(20, 3, 4), Cut(5, 3, 4)], stored=stored, dim=DIM, kv_heads=1))
    _, _, ours, theirs = both(ops.select_heavy_hitters, reference.select_heavy_hitters, case)
    assert torch.equal(ours["slots"], theirs["slots"])
    assert torch.equal(ours["state"].positions, theirs["state"].positions)


@pytest.mark.parametrize("stored", FORMS)
def test_recall_attention(stored):
    case = latent(decode_case([3, 70, 9], group=5, kv_heads=1, dim=DIM, stored=stored))
    cached = case.pop("metadata")[0]
    del case["state"]
    case["selected"] = torch.stack([torch.randperm(count)[:3] for count in cached.tolist()]
                                   )[:, None].int()
    case["metadata"] = torch.stack((cached, torch.full_like(cached, 3))).contiguous()
    (out, _), (wanted, _), ours, theirs = both(
        ops.recall_attention, reference_recall.recall_attention, case)
    torch.testing.assert_close(out, wanted, rtol=0, atol=BOUND[out.dtype])
    torch.testing.assert_close(ours["slots"], theirs["slots"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("key_lengths", [None, [11, 40]])
def test_prefill_attention(dtype, key_lengths):
    case = prefill_case([7, 40], key_lengths, group=5, kv_heads=1, dim=DIM, dtype=dtype, decay=0.9)
    case |= {"variant": AttentionVariant(scale=0.3), "v": case["k"][..., ROPE:]}
    out, wanted, ours, theirs = both(ops.prefill_attention, reference.prefill_attention, case)
    assert out.shape == (47, 5, DIM - ROPE)
    torch.testing.assert_close(out, wanted, rtol=0, atol=BOUND[dtype])
    torch.testing.assert_close(ours["scores"], theirs["scores"], rtol=1e-5, atol=1e-6)
