"""Each operation against its reference, and the reference against float64 arithmetic."""

import pytest
import torch

from flexgen_h2o.kernels import ops, reference

BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def attention64(q, k, v, allowed):
    """One head in float64: q [n, d], k and v [t, d], allowed [n, t]."""
    scores = (q.double() @ k.double().T) * q.shape[-1] ** -0.5
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v.double()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("lengths", [[1], [7], [33, 33], [5, 1, 64, 17], [257], [300, 511, 3]])
@pytest.mark.parametrize("module", [ops, reference])
def test_prefill_attention(dtype, group, lengths, module):
    torch.manual_seed(hash((group, len(lengths))) % 1000)
    kv_heads, dim, rows = 2, 16, sum(lengths)
    q = torch.randn(rows, kv_heads * group, dim).to(dtype)
    k, v = (torch.randn(rows, kv_heads, dim).to(dtype) for _ in range(2))
    out = module.prefill_attention(q, k, v, lengths)
    assert out.shape == q.shape and out.dtype == dtype
    first = 0
    for length in lengths:
        mine = slice(first, first + length)
        first += length
        for head in range(q.shape[1]):
            expected = attention64(q[mine, head], k[mine, head // group], v[mine, head // group],
                                   torch.ones(length, length, dtype=torch.bool).tril())
            assert (out[mine, head] - expected).abs().max() < BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("filled", [1, 2, 31, 64])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("module", [ops, reference])
def test_decode_attention(dtype, group, filled, padded, module):
    torch.manual_seed(filled)
    sequences, kv_heads, dim, slots = 3, 2, 16, 70
    q = torch.randn(sequences, kv_heads * group, dim).to(dtype)
    k, v = (torch.randn(sequences, kv_heads, slots, dim).to(dtype) for _ in range(2))
    k[:, :, filled:] = v[:, :, filled:] = float("nan")  # slots that nobody has written
    valid = torch.arange(filled) >= torch.tensor([0, filled // 2, filled - 1])[:, None]
    out = module.decode_attention(q, k[:, :, :filled], v[:, :, :filled],
                                  valid if padded else None)
    assert out.shape == q.shape and out.dtype == dtype
    for s in range(sequences):
        allowed = valid[s : s + 1] if padded else torch.ones(1, filled, dtype=torch.bool)
        for head in range(q.shape[1]):
            keys, values = k[s, head // group, :filled], v[s, head // group, :filled]
            expected = attention64(q[s, head : head + 1], keys, values, allowed)
            assert (out[s, head] - expected).abs().max() < BOUND[dtype]


def test_the_reference_can_be_forced(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("not the reference")

    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    monkeypatch.setattr(ops.F, "scaled_dot_product_attention", refuse)
    q = torch.randn(4, 2, 8)
    ops.prefill_attention(q, q, q, [4])
    ops.decode_attention(q[:1], q[None].transpose(1, 2), q[None].transpose(1, 2))
