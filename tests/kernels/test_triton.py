"""The GPU's kernels against the reference, in Triton's interpreter."""

from __future__ import annotations

import mmap
import os
import platform
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch

# Triton reads it when it is imported, and when a kernel is decorated.
os.environ.setdefault("TRITON_INTERPRET", "1")
if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")

import triton.language as tl  # noqa: E402
from helpers.fakes import T4  # noqa: E402
from helpers.kernel_cases import MIXED, of_form  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from flexgen_h2o.config.cache_layout import GroupLayout  # noqa: E402
from flexgen_h2o.config.layers import DEFAULT_FORM, AttentionForm  # noqa: E402
from flexgen_h2o.h2o.eviction import EMPTY, Cut, Eviction, EvictionState  # noqa: E402
from flexgen_h2o.kernels.arguments import EvictionArguments, FormArguments  # noqa: E402
from flexgen_h2o.kernels.dispatch import assume_gpu  # noqa: E402
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.kernels.triton import decode as triton_decode
from flexgen_h2o.kernels.triton import finish as triton_finish
from flexgen_h2o.kernels.triton import groups as triton_groups
from flexgen_h2o.kernels.triton import prefill as triton_prefill
from flexgen_h2o.kernels.triton import select as triton_select

ATTENTION = [AttentionForm(scale=0.4), AttentionForm(softcap=2.5), AttentionForm(window=7),
             AttentionForm(sinks=True), AttentionForm(0.4, 2.5, 20, True)]
BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
FORMS = [torch.float32, torch.bfloat16, torch.float16, 8, 4, *MIXED]


@pytest.fixture(autouse=True, scope="module")
def _mended_interpreter():
    """Two bugs of the interpreter in Triton 3.6, which a GPU does not have, and most of its time.

    Integers of one-element arrays, which NumPy 2.4 refuses; and the product of bfloat16 matrices,
    which it takes for matrices of the integers with the same bits. And it puts its own functions
    in the place of Triton's for each call of a function by a kernel, not only for the kernel; and
    does all arithmetic of integers in 64 bits, too, to tell of an overflow, which results would
    show as well.
    """
    assert isinstance(tl.sum, interpreter.InterpretedFunction), (
        "Triton was imported before this module: set TRITON_INTERPRET=1 for the whole run")
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    patch_all = interpreter._patch_lang

    def once(function):
        if not tl.core.is_builtin(tl.load):
            return interpreter._LangPatchScope()  # for the kernel that calls the function
        return patch_all(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def create_dot(self, a, b, *rest):
        a, b = (x if x.dtype.scalar != tl.bfloat16 or x.data.dtype != numpy.uint16
                else interpreter.TensorHandle(
                    (x.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)
                for x in (a, b))
        return dot(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as context:
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        context.setattr(interpreter.interpreter_builder, "options", options)
        context.setattr(interpreter, "_patch_lang", once)
        context.setattr(interpreter, "_patch_lang_tensor", patched)
        context.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.default_generator.manual_seed(0)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def clone(state: EvictionState | None, copy=torch.clone) -> EvictionState | None:
    if state is None:
        return None
    return EvictionState(state.eviction, copy(state.scores), copy(state.positions),
                         None if state.ranks is None else copy(state.ranks), state.rope)


def rotated(x):
    """A copy that lies the other way round in memory."""
    return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def far_apart(slots):
    """A copy of records whose values lie 2 ** 31 bytes behind its keys, with nothing between."""
    pages = mmap.mmap(-1, 2**31 + slots.numel(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    apart = torch.frombuffer(pages, dtype=torch.uint8)
    return apart.as_strided(slots.shape, (2**31, *slots[0].contiguous().stride())).copy_(slots)


def decode_case(cached, *, form=torch.float32, group=1, kv_heads=2, dim=16, n=None, full=(),
                recent=2, eviction=None, rotary=0):
    """Arguments of a decode step of sequences with `cached` slots each; empty ones hold poison."""
    dtype, layout = of_form(form, dim)
    sequences, n = len(cached), n or max(cached) + 3
    q = random(sequences, kv_heads * group, dim + 2, dtype=dtype)[..., :dim]
    k, v = random(2, sequences, kv_heads, dim, dtype=dtype)
    held = random(2, sequences, kv_heads, n, dim, dtype=dtype)
    held = reference.pack_slots(held, layout)
    filled = torch.arange(n) < torch.tensor(cached)[:, None]
    slots = torch.full((len(held), sequences, kv_heads, n + 4, held.shape[-1]),
                       float("nan") if layout is None else 255, dtype=held.dtype)[:, :, :, :n]
    slots.copy_(torch.where(filled[:, None, :, None], held, slots))
    tokens = [c + 1 + 5 * (s in full) for s, c in enumerate(cached)]
    metadata = torch.tensor([cached, tokens, [recent] * sequences,
                             [int(s in full) for s in range(sequences)]], dtype=torch.int32)
    state = None
    if eviction is not None:
        shape = (sequences, kv_heads, n)
        scores = torch.rand(shape).masked_fill(~filled[:, None], 0)
        positions = torch.full(shape, EMPTY, dtype=torch.int32)
        ranks = torch.zeros(shape, dtype=torch.int32) if rotary else None
        for s, c in enumerate(cached):
            for h in range(kv_heads):
                chosen = torch.randperm(tokens[s] - 1)[:c].int()
                positions[s, h, :c] = chosen
                if rotary:
                    ranks[s, h, :c] = chosen.argsort().argsort().int()
        angles = torch.rand(n + 1, rotary // 2) * 6
        state = EvictionState(eviction, scores, positions, ranks, (angles.cos(), angles.sin())
                              if rotary else None)
    return dict(q=q, k=k, v=v, slots=slots, metadata=metadata, layout=layout, state=state)


def triton_decode_step(q, k, v, *, slots, metadata, layout, state, form=DEFAULT_FORM, sinks=None):
    return triton_decode.decode_attention(
        q, k, v, slots=slots, metadata=metadata, layout=layout,
        eviction=EvictionArguments.of(state), form=FormArguments.of(form, sinks))


def check_decode(copy=torch.clone, attention=DEFAULT_FORM, put=torch.clone, **options):
    case = decode_case(**options)
    case |= {"form": attention,
             "sinks": random(case["q"].shape[1]) * 3 if attention.sinks else None}
    other = case | {"slots": put(case["slots"]), "state": clone(case["state"], copy)}
    expected, place = reference.decode_attention(**case)
    out, taken = triton_decode_step(**other)
    assert torch.equal(taken, place) and taken.dtype == torch.int64
    assert out.dtype == case["q"].dtype and out.shape == case["q"].shape
    assert (out.double() - expected.double()).abs().max() < BOUND[out.dtype]
    torch.testing.assert_close(other["slots"], case["slots"], rtol=0, atol=0, equal_nan=True)
    state, wanted = other["state"], case["state"]
    if wanted is not None:
        torch.testing.assert_close(state.scores, wanted.scores, rtol=1e-5, atol=1e-6)
        assert torch.equal(state.positions, wanted.positions)
        assert wanted.ranks is None or torch.equal(state.ranks, wanted.ranks)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("group", "rotary"), [(1, 0), (3, 8), (4, 0), (8, 12), (1, 16), (3, 16)])
def test_decode(form, group, rotary):
    check_decode(cached=[0, 33, 1, 50], full=(1, 3), form=form, group=group,
                 kv_heads=2 if rotary == 0 else 1, eviction=Eviction(), rotary=rotary)


@pytest.mark.parametrize("eviction", [Eviction(mean=True), Eviction(decay=0.9),
                                      Eviction(sinks=3), Eviction(True, 0.5, 1)])
@pytest.mark.parametrize("recent", [1, 30])
@pytest.mark.parametrize("part", [16, 32, 1000])
def test_decode_variants(monkeypatch, eviction, recent, part):
    monkeypatch.setattr(triton_finish, "FINISH_ELEMENTS", 64)
    monkeypatch.setattr(triton_finish, "_score_slots", lambda n, programs, device: part)
    check_decode(cached=[31, 32, 65], full=(0, 1, 2), recent=recent, eviction=eviction, rotary=4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cached", [[0], [1], [2], [15], [16], [17], [31], [32], [64, 63, 0]])
def test_decode_lengths_without_state(form, cached):
    check_decode(cached=cached, form=form, kv_heads=1, group=1 + 2 * (cached[0] % 2))


@pytest.mark.parametrize(("form", "dim"), [
    (form, dim) for dim in (2, 12, 66, 80, 96, 130, 256) for form in (torch.float32, 8, 4)])
def test_decode_dims(form, dim):
    for rotary in (0, dim // 4 * 2, dim):
        check_decode(cached=[19], full=(0,), form=form, dim=dim, kv_heads=1,
                     group=2 if rotary == dim else 1, eviction=Eviction(), rotary=rotary)


@pytest.mark.parametrize(("form", "group"), [(torch.float16, 4), (4, 3), (8, 1)])
def test_decode_with_scores_in_parts(monkeypatch, form, group):
    parts, launch = [], triton_finish._score_slots
    monkeypatch.setattr(triton_finish, "_score_slots",
                        lambda *shape: parts.append(launch(*shape)) or parts[-1])
    check_decode(cached=[300], full=(0,), form=form, group=group, kv_heads=1, eviction=Eviction(),
                 attention=AttentionForm(sinks=True))
    check_decode(cached=[0, 299], full=(1,), form=form, group=group, kv_heads=2,
                 eviction=Eviction(), rotary=8)
    assert parts[0] == 64 and parts[1] >= 299  # few programs, and enough of them


def test_decode_with_states_of_any_strides():
    for rotary in (0, 16):
        check_decode(rotated, cached=[31, 20], full=(0, 1), eviction=Eviction(), rotary=rotary)


@pytest.mark.parametrize("group", [1, 3])
def test_decode_of_a_cache_whose_keys_have_2_gb(group):
    check_decode(put=far_apart, cached=[3], full=(0,), form=8, kv_heads=1, group=group,
                 eviction=Eviction())


def attention64(q, k, v, allowed):
    """Of one head in float64: q [n, dim], k and v [t, dim], allowed [n, t]."""
    logits = (q.double() @ k.double().T) * q.shape[-1] ** -0.5
    return logits.masked_fill(~allowed, float("-inf")).softmax(-1) @ v.double()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("group", [1, 3])
def test_decode_beside_float64(dtype, group):
    case = decode_case([0, 50], form=dtype, group=group)
    keys, values = (torch.cat([held, new[:, :, None]], 2)
                    for held, new in zip(case["slots"].clone(), (case["k"], case["v"]),
                                         strict=True))
    out, _ = triton_decode_step(**case)
    for s, cached in enumerate((0, 50)):
        index = torch.tensor([*range(cached), keys.shape[2] - 1])
        for h in range(2 * group):
            wanted = attention64(case["q"][s, h : h + 1], keys[s, h // group, index],
                                 values[s, h // group, index],
                                 torch.ones(1, cached + 1, dtype=torch.bool))
            assert (out[s, h] - wanted[0]).abs().max() < BOUND[dtype]


@pytest.mark.parametrize("part", [16, 1000])
def test_equal_scores_evict_the_oldest(monkeypatch, part):
    monkeypatch.setattr(triton_finish, "_score_slots", lambda n, programs, device: part)
    for mean in (False, True):
        case = decode_case(cached=[40], full=(0,), eviction=Eviction(mean=mean))
        case["q"].zero_()
        state = case["state"]
        state.scores.copy_(torch.rand(state.scores.shape).mul(3).floor())
        if mean:
            state.scores.zero_()
        other = case | {"slots": case["slots"].clone(), "state": clone(state)}
        assert torch.equal(triton_decode_step(**other)[1],
                           reference.decode_attention(**case)[1])


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("group", "decay"), [(1, 1.0), (3, 0.9), (4, 1.0), (8, 0.98)])
@pytest.mark.parametrize(("rows", "tokens"), [
    ([1], [1]), ([2, 1], [2, 5]), ([16, 17, 15], [16, 17, 15]), ([18, 3], [34, 50])])
def test_prefill(dtype, group, decay, rows, tokens):
    kv_heads, dim = 2 if group == 1 else 1, 20
    q = random(sum(rows), kv_heads * group, dim + 4, dtype=dtype)[..., :dim]
    k, v = random(2, kv_heads, sum(tokens), dim, dtype=dtype).transpose(1, 2)
    scores = torch.full((kv_heads, sum(tokens) + 5), float("nan"))
    scores[:, :-5] = torch.rand(kv_heads, sum(tokens))
    wanted = scores.clone()
    expected = reference.prefill_attention(
        q.float(), k.float(), v.float(), rows, key_lengths=tokens, scores=wanted[:, :-5],
        decay=decay)
    out = triton_prefill.prefill_attention(q, k, v, rows, tokens, scores[:, :-5], decay)
    assert out.dtype == dtype and out.shape == q.shape
    assert (out.float() - expected).abs().max() < BOUND[dtype]
    torch.testing.assert_close(scores, wanted, rtol=2e-5, atol=2e-6, equal_nan=True)
    if group == 1:
        alone = triton_prefill.prefill_attention(q, k, v, rows, tokens, None, 1.0)
        assert torch.equal(alone, out)


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
@pytest.mark.parametrize(("form", "group"), [(torch.float32, 1), (torch.bfloat16, 3), (4, 4)])
def test_decode_of_every_form_of_attention(attention, form, group):
    check_decode(cached=[0, 33, 1, 50], form=form, group=group, attention=attention)
    check_decode(cached=[33, 70], full=(0,), form=form, group=group, attention=attention,
                 eviction=Eviction(window=attention.window or 0))


@pytest.mark.parametrize(("bits", "dim", "attention"), [
    *((bits, dim, DEFAULT_FORM) for bits in (8, 4, *MIXED) for dim in (8, 64, 80, 128)),
    (4, 96, DEFAULT_FORM), (8, 64, ATTENTION[1]), (4, 128, ATTENTION[2]), (4, 80, ATTENTION[-1])],
    ids=str)
def test_decode_of_codes_as_they_lie(monkeypatch, bits, dim, attention):
    """Of one head, and of several one by one, as they are without matrix units."""
    monkeypatch.setattr(triton_decode, "_read", None)
    options = {"form": bits, "dim": dim, "attention": attention}
    check_decode(cached=[0, 33, 1], kv_heads=2, **options)
    with assume_gpu(T4):
        check_decode(cached=[70], full=(0,), kv_heads=2, group=3, **options,
                     eviction=Eviction(window=attention.window or 0))


@pytest.mark.parametrize("bits", [8, 4, *MIXED])
def test_decode_of_codes_that_are_no_whole_words(monkeypatch, bits):
    monkeypatch.setattr(triton_decode, "read_codes", None)
    for begin, end in ((1, 2), (2, 2)):  # strides, or where the first record lies
        case = decode_case([33], form=bits, dim=64)
        wide = torch.full((*case["slots"].shape[:-1], begin + case["layout"].width + end), 77,
                          dtype=torch.uint8)
        slots = wide[..., begin : begin + case["layout"].width]
        slots.copy_(case["slots"])
        out, _ = triton_decode_step(**case | {"slots": slots})
        expected, _ = reference.decode_attention(**case)
        assert (out.float() - expected.float()).abs().max() < BOUND[out.dtype]
        assert torch.equal(slots, case["slots"])
        wide[..., begin : begin + case["layout"].width] = 77
        assert (wide == 77).all()


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
@pytest.mark.parametrize(("dtype", "decay"), [(torch.bfloat16, 1.0), (torch.float16, 0.9)])
def test_prefill_of_every_form_of_attention(attention, dtype, decay):
    for rows, tokens in (([40], [40]), ([18, 3], [34, 50])):
        q = random(sum(rows), 6, 20, dtype=dtype)
        k, v = random(2, sum(tokens), 2, 20, dtype=dtype)
        sinks = random(6) * 3 if attention.sinks else None
        scores, wanted = torch.zeros(2, 2, sum(tokens))
        expected = reference.prefill_attention(
            q.float(), k.float(), v.float(), rows, key_lengths=tokens, scores=wanted, decay=decay,
            form=attention, sinks=sinks)
        out = triton_prefill.prefill_attention(q, k, v, rows, tokens, scores, decay,
                                               FormArguments.of(attention, sinks))
        assert (out.float() - expected).abs().max() < BOUND[dtype]
        torch.testing.assert_close(scores, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("dim", [2, 64, 80, 96, 128, 256])
def test_prefill_dims_beside_float64(dtype, dim):
    q, k, v = random(3, 21, 2, dim, dtype=dtype)
    scores, wanted = torch.zeros(2, 2, 21)
    out = triton_prefill.prefill_attention(q, k, v, [21], [21], scores, 1.0)
    reference.prefill_attention(q, k, v, [21], scores=wanted)
    torch.testing.assert_close(scores, wanted, rtol=2e-5, atol=2e-6)
    for h in range(2):
        right = attention64(q[:, h], k[:, h], v[:, h], torch.ones(21, 21, dtype=torch.bool).tril())
        assert (out[:, h] - right).abs().max() < BOUND[dtype]


def test_large_logits_do_not_overflow():
    q, k, v = random(3, 40, 2, 16)
    scores = torch.zeros(2, 40)
    out = triton_prefill.prefill_attention(q * 300, k * 300, v, [40], [40], scores, 1.0)
    # Logits of 1e5 have an error of 1e-2, not the same one in both passes.
    assert out.isfinite().all() and abs(scores.sum().item() - 80) < 1


def check_select(cuts, *, form=torch.float32, dim=16, kv_heads=2, eviction=None, rolls=False,
                 draw=torch.rand, copy=torch.clone, put=torch.clone):
    dtype, layout = of_form(form, dim)
    eviction = eviction or Eviction()
    rows, sequences = sum(cut.length for cut in cuts), len(cuts)
    k = random(rows, kv_heads, dim + 2, dtype=dtype)[..., :dim]
    v = random(kv_heads, rows, dim, dtype=dtype).transpose(0, 1)
    scores = None if draw is None else draw((kv_heads, rows + 3))[:, :rows]
    n = max(eviction.num_cached(cut) for cut in cuts) + 2
    shape = (sequences, kv_heads, n)
    kinds, width, kind = (2, dim, dtype) if layout is None else (
        layout.kinds, layout.width, torch.uint8)
    cases = []
    for _ in range(2):
        state = clone(EvictionState(eviction, torch.full(shape, float("nan")),
                                    torch.full(shape, -7).int(),
                                    torch.full(shape, -7).int() if rolls else None), copy)
        slots = torch.full((kinds, sequences, kv_heads, n + 1, width), 77.0).to(kind)[:, :, :, :n]
        cases.append((put(slots), state))
    (slots, state), (wanted_slots, wanted) = cases
    reference.select_heavy_hitters(k, v, scores, cuts=cuts, slots=wanted_slots, state=wanted,
                                   layout=layout)
    triton_select.select_heavy_hitters(
        k, v, scores, cuts=[x for cut in cuts for x in cut], slots=slots,
        layout=layout, eviction=EvictionArguments.of(state))
    assert torch.equal(state.positions, wanted.positions)
    assert torch.equal(state.scores, wanted.scores)
    assert not rolls or torch.equal(state.ranks, wanted.ranks)
    assert torch.equal(slots, wanted_slots)


def tied(shape):
    """Few values, of both signs, and both zeros."""
    return torch.randint(-3, 4, shape) * torch.tensor(0.5) * torch.tensor([1.0, -1.0])[
        torch.randint(0, 2, shape)]


CUTS = [Cut(1, 1, 1), Cut(7, 2, 2), Cut(31, 10, 5), Cut(33, 1, 1), Cut(65, 0, 9), Cut(64, 20, 0),
        Cut(100, 40, 33)]


@pytest.mark.parametrize("draw", [torch.rand, torch.randn, tied, None])
@pytest.mark.parametrize("eviction", [Eviction(), Eviction(mean=True), Eviction(sinks=4)])
def test_select(draw, eviction):
    """The long ones of `CUTS` have more scores than registers, here; the short ones have not."""
    rolls = eviction.sinks > 0
    check_select(CUTS, draw=draw, eviction=eviction, rolls=rolls, kv_heads=1 + rolls)
    check_select(CUTS[:4], draw=draw, eviction=eviction, kv_heads=1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [12, 80, 128])
def test_select_forms(form, dim):
    check_select([Cut(9, 3, 2), Cut(40, 15, 5)], form=form, dim=dim,
                 copy=rotated if dim == 80 else torch.clone)


def test_select_to_a_cache_whose_keys_have_2_gb():
    check_select([Cut(9, 3, 2)], form=8, put=far_apart)


def test_select_with_scores_of_every_size():
    check_select([Cut(60, 13, 5)], draw=lambda shape: torch.randn(shape) * 10.0 ** (
        torch.randint(-44, 38, shape)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [2, 6, 12, 64, 66, 80, 96, 128, 130, 256])
def test_groups(bits, dim):
    layout = GroupLayout(dim, bits)
    for dtype in BOUND:
        sizes = torch.tensor([1.0, 1e-6, 1e5, 3e-8, 0.0])[:, None]
        x = (random(3, 5, dim) * sizes).to(dtype)
        x[0, 0], x[:, 4] = 1.5, 0  # of zeros of both signs, either may be the lowest
        records = triton_groups.quantize_groups(x.transpose(0, 1), layout)
        wanted = reference.quantize_groups(x, layout).transpose(0, 1)
        assert torch.equal(records, wanted)
        assert torch.equal(triton_groups.dequantize_groups(wanted, layout),
                           reference.dequantize_groups(wanted, layout))
