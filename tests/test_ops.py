"""Each operation against its reference, and the reference against float64 arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flexgen_h2o.kernels import ops, pieces, reference, rotary, torch_attention, torch_groups
from flexgen_h2o.storage.quantization import GroupLayout

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


def causal64(q, k, v, decay):
    """Output and mass of the last rows in float64: q [rows, heads, d], k and v [kv, tokens, d]."""
    rows, heads, _ = q.shape
    kv_heads, tokens, _ = k.shape
    allowed = torch.ones(rows, tokens, dtype=torch.bool).tril(tokens - rows)
    weights = decay ** torch.arange(rows - 1, -1, -1).double()
    out, mass = torch.empty(q.shape, dtype=torch.float64), torch.zeros(kv_heads, tokens).double()
    for head in range(heads):
        mine = head // (heads // kv_heads)
        scores = (q[:, head].double() @ k[mine].double().T) * q.shape[-1] ** -0.5
        probabilities = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        out[:, head] = probabilities @ v[mine].double()
        mass[mine] += weights @ probabilities
    return out, mass


def causal_inputs(rows, tokens, *, group=2, kv_heads=2, dim=16, dtype=torch.float32):
    """q as a slice of fused projections, k and v as packed rows: all strided."""
    torch.manual_seed(rows + tokens)
    q = torch.randn(rows, kv_heads * group, dim + 3).to(dtype)[..., :dim]
    k, v = (torch.randn(tokens, kv_heads, dim).to(dtype).transpose(0, 1) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("group", "decay"), [(1, 1.0), (3, 1.0), (1, 0.98), (3, 0.9)])
@pytest.mark.parametrize(("rows", "tokens"), [
    (1, 1), (7, 7), (64, 64), (257, 257), (700, 700), (1, 700), (65, 300)])
@pytest.mark.parametrize("module", [ops, reference])
def test_causal_attention(dtype, group, decay, rows, tokens, module):
    q, k, v = causal_inputs(rows, tokens, group=group, dtype=dtype)
    before = torch.rand(2, tokens)
    held = torch.full((2, tokens + 5), float("nan"))
    held[:, :tokens] = before
    out = module.causal_attention(q, k, v, mass=held[:, :tokens], decay=decay)
    expected, mass = causal64(q, k, v, decay)
    assert out.shape == q.shape and out.dtype == dtype
    assert (out - expected).abs().max() < BOUND[dtype]
    mass += before.double() * decay**rows
    torch.testing.assert_close(held[:, :tokens].double(), mass, rtol=1e-5, atol=1e-9)
    assert held[:, tokens:].isnan().all()
    alone = module.causal_attention(q, k, v)
    assert (alone - expected).abs().max() < BOUND[dtype]


@given(tokens=st.integers(1, 700), before=st.integers(0, 300), group=st.sampled_from([1, 2, 4]),
       kv_heads=st.integers(1, 5), decay=st.sampled_from([1.0, 0.98, 0.5]))
@settings(max_examples=25)
def test_any_causal_shape(tokens, before, group, kv_heads, decay):
    rows = max(1, tokens - before)
    q, k, v = causal_inputs(rows, tokens, group=group, kv_heads=kv_heads, dim=8)
    mass = torch.zeros(kv_heads, tokens)
    expected, wanted = causal64(q, k, v, decay)
    assert (ops.causal_attention(q, k, v, mass=mass, decay=decay) - expected).abs().max() < 2e-5
    torch.testing.assert_close(mass.double(), wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("chunks", [[1] * 9, [100, 1, 64, 200], [130, 235]])
@pytest.mark.parametrize("module", [ops, reference])
def test_chunks_accumulate_what_the_whole_gives(decay, chunks, module):
    tokens = sum(chunks)
    q, k, v = causal_inputs(tokens, tokens)
    expected, whole = causal64(q, k, v, decay)
    mass, end = torch.zeros(2, tokens), 0
    for rows in chunks:
        start, end = end, end + rows
        out = module.causal_attention(q[start:end], k[:, :end], v[:, :end], mass=mass[:, :end],
                                      decay=decay)
        assert (out - expected[start:end]).abs().max() < BOUND[torch.float32]
    torch.testing.assert_close(mass.double(), whole, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("size", [1, 1 << 15, 1 << 18])
def test_blocks_of_any_size_give_the_same(monkeypatch, size):
    monkeypatch.setattr(torch_attention, "CPU_BYTES", size)
    q, k, v = causal_inputs(150, 200, kv_heads=5)
    mass = torch.zeros(5, 200)
    expected, wanted = causal64(q, k, v, 0.99)
    out = ops.causal_attention(q, k, v, mass=mass, decay=0.99)
    assert (out - expected).abs().max() < BOUND[torch.float32]
    torch.testing.assert_close(mass.double(), wanted, rtol=1e-5, atol=1e-9)


def test_large_logits_do_not_overflow():
    q, k, v = causal_inputs(90, 90)
    mass = torch.zeros(2, 90)
    out = ops.causal_attention(q * 300, k * 300, v, mass=mass)
    assert out.isfinite().all() and abs(mass.sum().item() - 4 * 90) < 1e-2


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("scored", [True, False])
def test_causal_memory_is_linear_in_the_tokens(scored):
    q, k, v = causal_inputs(2048, 2048, dim=8)
    mass = torch.zeros(2, 2048) if scored else None
    with LargestTensor() as largest:
        ops.causal_attention(q, k, v, mass=mass)
    assert 4 * largest.elements <= torch_attention.CPU_BYTES  # the square of one head: 16 MB


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (300, 300), (270, 400), (1, 40)])
def test_the_fused_kernels_of_a_gpu_get_the_right_mask(dtype, rows, tokens):
    q, k, v = causal_inputs(rows, tokens, group=3, dtype=dtype)
    out = torch_attention.fused_causal_attention(q, k, v)
    assert out.shape == q.shape and out.dtype == dtype
    assert (out - causal64(q, k, v, 1.0)[0]).abs().max() < BOUND[dtype]


POSITIONS, ROTARY = 41, 8
FORMS = [torch.float32, torch.bfloat16, torch.float16, 8, 4]


def turned(x, position, tables):
    """x [..., d] at its position, rotated in float64 as complex numbers."""
    half = ROTARY // 2
    x = x.double()
    turn = torch.complex(*(table[position].double() for table in tables))
    parts = torch.complex(x[..., :half], x[..., half:ROTARY]) * turn
    return torch.cat([parts.real, parts.imag, x[..., ROTARY:]], dim=-1)


def slot_case(form, *, sequences=3, n=37, group=3, kv_heads=2, dim=12, masked=True, rolls=False):
    """q, k, v, slots and view of one decode step; what is in empty slots is poison."""
    torch.manual_seed(sequences + n + group + dim)
    dtype, layout = (form, None) if isinstance(form, torch.dtype) else (torch.bfloat16,
                                                                       GroupLayout(dim, form))
    q = torch.randn(sequences, kv_heads * group, dim).to(dtype)
    k, v = (torch.randn(sequences, kv_heads, dim).to(dtype) for _ in range(2))
    cached = torch.randn(2, sequences, kv_heads, n, dim).to(dtype)
    if layout is not None:
        cached = ops.quantize_groups(cached, layout)
    # A record full of ones has NaN for scale and zero point.
    poison = float("nan") if layout is None else 255
    slots = torch.full((2, sequences, kv_heads, n + 4, cached.shape[-1]), poison,
                       dtype=cached.dtype)[:, :, :, :n]
    slots.copy_(cached)
    filled = ranks = newest = tables = None
    if masked:
        filled = torch.rand(sequences, n) < 0.7
        filled[0] = False  # nothing cached: the new token attends to itself alone
        slots.masked_fill_(~filled[:, None, :, None], poison)
    if rolls:
        ranks = torch.rand(sequences, kv_heads, n).argsort(-1).int() % POSITIONS
        newest = torch.randint(0, POSITIONS, (sequences,))
        angles = torch.rand(POSITIONS, ROTARY // 2) * 6
        tables = (angles.cos(), angles.sin())
        if masked:
            garbage = torch.tensor([-2**31, -1, POSITIONS, 2**31 - 1], dtype=torch.int32)
            garbage = garbage.repeat(n)[:n].expand_as(ranks)
            ranks = torch.where(filled[:, None], ranks, garbage)
    return q, k, v, slots, ops.SlotView(filled, layout, ranks, newest, tables)


def slots64(q, k, v, slots, view):
    """Output and mass in float64, head by head, of the filled slots alone."""
    _, sequences, kv_heads, n, _ = slots.shape
    group = q.shape[1] // kv_heads
    if view.layout is not None:
        slots = reference.dequantize_groups(slots, view.layout)
    out, mass = q.double(), torch.zeros(sequences, kv_heads, n + 1).double()
    for s in range(sequences):
        cached = torch.arange(n) if view.filled is None else view.filled[s].nonzero()[:, 0]
        for head in range(q.shape[1]):
            mine = head // group
            query, new = q[s, head].double(), k[s, mine].double()
            keys, values = slots[:, s, mine, cached].double()
            if view.ranks is not None:
                keys = turned(keys, view.ranks[s, mine, cached], view.rope)
                query, new = (turned(x, view.newest[s], view.rope) for x in (query, new))
            scores = torch.cat([keys, new[None]]) @ query * q.shape[-1] ** -0.5
            probabilities = scores.softmax(-1)
            out[s, head] = probabilities @ torch.cat([values, v[s, mine].double()[None]])
            mass[s, mine, torch.cat([cached, torch.tensor([n])])] += probabilities
    return out, mass


def check_slots(module, q, k, v, slots, view):
    out, mass = module.slot_attention(q, k, v, slots, view)
    expected, received = slots64(q, k, v, slots, view)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert mass.shape == received.shape and mass.dtype == torch.float32
    assert (out - expected).abs().max() < BOUND[q.dtype]
    torch.testing.assert_close(mass.double(), received, rtol=2e-5, atol=1e-9)
    if view.filled is not None:
        empty = ~view.filled[:, None].expand(-1, slots.shape[2], -1)
        assert (mass[..., :-1][empty] == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rolls", [False, True])
@pytest.mark.parametrize("dim", [12, 80])  # quantized: one group, and two
@pytest.mark.parametrize("module", [ops, reference])
def test_slot_attention(form, group, masked, rolls, dim, module):
    check_slots(module, *slot_case(form, group=group, masked=masked, rolls=rolls, dim=dim))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rolls", [False, True])
@pytest.mark.parametrize(("sequences", "n"), [(1, 0), (3, 0), (1, 1), (1, 37)])
@pytest.mark.parametrize("module", [ops, reference])
def test_few_slots_and_sequences(form, rolls, sequences, n, module):
    for masked in (False, True):
        check_slots(module, *slot_case(form, sequences=sequences, n=n, masked=masked, rolls=rolls))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3 * 37 * 12 * 4, 3 * 4 * 37 * 12 * 4])
def test_slots_in_blocks(monkeypatch, form, size):
    """Of one head, of heads that do not divide evenly, of sequences that do not."""
    monkeypatch.setattr(torch_attention, "CPU_BYTES", size)
    for rolls in (False, True):
        check_slots(ops, *slot_case(form, sequences=5, kv_heads=4, rolls=rolls))


def test_slots_stay_as_they_are():
    """What is computed in place is computed on copies, also where float32 needs none."""
    for form in FORMS:
        q, k, v, slots, view = slot_case(form, rolls=True)
        inputs = [q, k, v, slots, view.ranks, *view.rope]
        before = [x.clone() for x in inputs]
        ops.slot_attention(q, k, v, slots, view)
        for x, old in zip(inputs, before, strict=True):
            torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)


def test_slots_without_a_view_are_plain_and_full():
    q, k, v, slots, view = slot_case(torch.float32, masked=False)
    for module in (ops, reference):
        for one, other in zip(module.slot_attention(q, k, v, slots),
                              module.slot_attention(q, k, v, slots, view), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("rows", [0, 1, 29])
@pytest.mark.parametrize("dim", [ROTARY, 12])
def test_rotations(monkeypatch, dtype, rows, dim):
    torch.manual_seed(rows)
    angles = torch.rand(rows, ROTARY // 2) * 6
    tables = angles.cos(), angles.sin()
    x = torch.randn(rows, 3, dim + 5).to(dtype)
    expected = turned(x[..., :dim], torch.arange(rows)[:, None], tables)
    before = x.clone()
    out = rotary.rotated(x[..., :dim], *(table[:, None] for table in tables))
    assert out.dtype == dtype and torch.equal(x, before)
    torch.testing.assert_close(out.double(), expected, rtol=BOUND[dtype], atol=BOUND[dtype])
    monkeypatch.setattr(pieces, "PIECE_BYTES", 500)
    result = rotary.apply_rope_(x[..., :dim], *(table.to(dtype) for table in tables))
    assert result.data_ptr() == x.data_ptr()
    torch.testing.assert_close(x[..., :dim].double(), expected, rtol=BOUND[dtype],
                               atol=BOUND[dtype])
    assert torch.equal(x[..., dim:], before[..., dim:])


def test_rotations_broadcast_over_leading_dimensions():
    x = torch.randn(2, 4, 5, 12)
    angles = torch.rand(5, ROTARY // 2)
    out = rotary.rotated(x, angles.cos(), angles.sin())
    for place in range(5):
        one = turned(x[:, :, place], place, (angles.cos(), angles.sin()))
        torch.testing.assert_close(out[:, :, place].double(), one, rtol=1e-5, atol=1e-6)


def test_the_reference_can_be_forced(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("not the reference")

    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    monkeypatch.setattr(ops.F, "scaled_dot_product_attention", refuse)
    for module in (torch_attention, torch_groups):
        for name in ("causal_attention", "slot_attention", "quantize_groups", "dequantize_groups"):
            monkeypatch.setattr(module, name, refuse, raising=False)
    q = torch.randn(4, 2, 8)
    ops.prefill_attention(q, q, q, [4])
    ops.decode_attention(q[:1], q[None].transpose(1, 2), q[None].transpose(1, 2))
    ops.causal_attention(q, q.transpose(0, 1), q.transpose(0, 1))
    ops.slot_attention(q, q, q, torch.randn(2, 4, 2, 3, 8))
    layout = GroupLayout(8, 4)
    ops.dequantize_groups(ops.quantize_groups(q, layout), layout)
