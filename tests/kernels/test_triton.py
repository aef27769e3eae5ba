"""The GPU's kernels against their definition in float64, in Triton's interpreter."""

import mmap
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.fakes import T4
from helpers.kernel_cases import (
    BOUND,
    FORMS,
    MIXED,
    check_decode,
    check_prefill,
    check_select,
    copied,
    decode_case,
    prefill_case,
    select_case,
    tied,
)
from helpers.selection import full, full_cases

from flexgen_h2o.config.cache_layout import GroupLayout
from flexgen_h2o.config.layers import DEFAULT_VARIANT, AttentionVariant
from flexgen_h2o.h2o.eviction import Cut, Eviction
from flexgen_h2o.h2o.policies import policy_named
from flexgen_h2o.kernels.arguments import EvictionArguments, VariantArguments
from flexgen_h2o.kernels.dispatch import assume_gpu
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.kernels.triton import decode as triton_decode
from flexgen_h2o.kernels.triton import finish as triton_finish
from flexgen_h2o.kernels.triton import groups as triton_groups
from flexgen_h2o.kernels.triton import prefill as triton_prefill
from flexgen_h2o.kernels.triton import select as triton_select

pytestmark = pytest.mark.usefixtures("mended_interpreter", "seeded")

ATTENTION = [AttentionVariant(scale=0.4), AttentionVariant(softcap=2.5), AttentionVariant(window=7),
             AttentionVariant(sinks=True), AttentionVariant(0.4, 2.5, 20, True)]
EVERY_FORM = [*FORMS, *MIXED]


def prefill(q, k, v, lengths, *, key_lengths, scores, decay, variant=DEFAULT_VARIANT, sinks=None):
    return triton_prefill.prefill_attention(q, k, v, lengths, key_lengths or lengths, scores,
                                            decay, VariantArguments.from_variant(variant, sinks))


def select(k, v, scores, *, cuts, slots, state, layout):
    triton_select.select_heavy_hitters(
        k, v, scores, cuts=[size for cut in cuts for size in cut], slots=slots, layout=layout,
        eviction=EvictionArguments.from_state(state))


def decode(q, k, v, *, slots, metadata, layout, state, variant=DEFAULT_VARIANT, sinks=None):
    return triton_decode.decode_attention(q, k, v, slots=slots, metadata=metadata, layout=layout,
                                          eviction=EvictionArguments.from_state(state),
                                          variant=VariantArguments.from_variant(variant, sinks))


def check_step(*args, **options):
    """Check a decode step, whose weights may be rounded before they meet the values."""
    case = decode_case(*args, **options)
    check_decode([decode], case, bound=BOUND[case["q"].dtype])


def with_odd_strides(state):
    """Return the state with tensors that lie the other way round in memory."""
    tensors = {name: getattr(state, name) for name in ("scores", "positions", "ranks")}
    return replace(state, **{name: x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
                             for name, x in tensors.items() if x is not None})


def far_apart(slots):
    """A copy of records whose values lie 2 ** 31 bytes behind its keys, with nothing between."""
    pages = mmap.mmap(-1, 2**31 + slots.numel(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    apart = torch.frombuffer(pages, dtype=torch.uint8)
    return apart.as_strided(slots.shape, (2**31, *slots[0].contiguous().stride())).copy_(slots)


@pytest.mark.parametrize(("stored", "group", "rotary"), [
    (torch.float32, 1, 0), (torch.float16, 3, 16), (8, 4, 0), (4, 8, 12), *full_cases(*product(
        EVERY_FORM, (1, 4), (0,)), *product(EVERY_FORM, (1, 3, 8), (8, 16)))])
def test_decode(stored, group, rotary):
    check_step([0, 33, 17], full=(1,), stored=stored, group=group, rotary=rotary,
               kv_heads=2 if rotary == 0 else 1, eviction=Eviction())


@pytest.mark.parametrize(("eviction", "recent", "part"), [
    (Eviction(policy_named("mean")), 30, 16), (Eviction(decay=0.9, sinks=3), 1, 32),
    *full_cases(*product((Eviction(policy_named("mean")), Eviction(decay=0.9), Eviction(sinks=3),
                          Eviction(policy_named("mean"), 0.5, 1)), (1, 30), (16, 32, 1000)))])
def test_decode_variants(monkeypatch, eviction, recent, part):
    monkeypatch.setattr(triton_finish, "FINISH_ELEMENTS", 64)
    monkeypatch.setattr(triton_finish, "_score_slots", lambda n, programs, device: part)
    check_step([31, 65], full=(0, 1), recent=recent, eviction=eviction, rotary=4)


@pytest.mark.parametrize(("stored", "cached"), [
    (torch.bfloat16, [0]), (4, [16]), (MIXED[0], [64, 63, 0]),
    *full_cases(*product(EVERY_FORM, ([0], [1], [2], [15], [16], [17], [31], [32], [64, 63, 0])))])
def test_decode_lengths_without_state(stored, cached):
    check_step(cached, stored=stored, kv_heads=1, group=1 + 2 * (cached[0] % 2))


@pytest.mark.parametrize(("stored", "dim"), [
    (torch.float32, 66), (8, 130), *full_cases(*product((torch.float32, 8, 4), (
        2, 12, 66, 80, 96, 130, 256)))])
def test_decode_dims(stored, dim):
    for rotary in (dim // 4 * 2, dim):
        check_step([19], full=(0,), stored=stored, dim=dim, kv_heads=1, rotary=rotary,
                   group=2 if rotary == dim else 1, eviction=Eviction())


@pytest.mark.parametrize(("stored", "group"), [(4, 3), *full_cases((torch.float16, 4), (8, 1))])
def test_decode_with_scores_in_parts(monkeypatch, stored, group):
    parts, launch = [], triton_finish._score_slots
    monkeypatch.setattr(triton_finish, "_score_slots",
                        lambda *shape: parts.append(launch(*shape)) or parts[-1])
    options = {"stored": stored, "group": group, "eviction": Eviction()}
    check_step([300], full=(0,), kv_heads=1, attention=AttentionVariant(sinks=True), **options)
    check_step([0, 299], full=(1,), rotary=8, **options)
    assert parts[0] == 64 and parts[1] >= 299  # few programs, and enough of them


@pytest.mark.parametrize("rotary", [16, *full(0)])
def test_decode_with_states_of_any_strides(rotary):
    case = decode_case([31, 20], full=(0, 1), eviction=Eviction(), rotary=rotary)
    check_decode([decode], case | {"state": with_odd_strides(case["state"])})


@pytest.mark.parametrize("group", [1, *full(3)])
def test_decode_of_a_cache_whose_keys_have_2_gb(group):
    case = decode_case([3], full=(0,), stored=8, kv_heads=1, group=group, eviction=Eviction())
    wide = {name: copied(x) for name, x in case.items()} | {"slots": far_apart(case["slots"])}
    for one, other in zip(decode(**case), decode(**wide), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(wide["slots"], case["slots"])


@pytest.mark.parametrize("part", [16, 1000])
@pytest.mark.parametrize("score", ["sum", "mean"])
def test_ties_evict_the_oldest(monkeypatch, part, score):
    monkeypatch.setattr(triton_finish, "_score_slots", lambda n, programs, device: part)
    case = decode_case([40], full=(0,), eviction=Eviction(policy_named(score)), ties=True)
    check_decode([decode], case, ties=True)


@pytest.mark.parametrize(("dtype", "group", "rows", "tokens"), [
    (torch.float32, 1, [18, 3], [34, 50]), (torch.bfloat16, 3, [16, 17, 15], [16, 17, 15]),
    (torch.float16, 4, [2, 1], [2, 5]),
    *full_cases(*((dtype, group, *lengths) for dtype, group, lengths in product(
        BOUND, (1, 3, 4, 8), (([1], [1]), ([2, 1], [2, 5]), ([16, 17, 15], [16, 17, 15]),
                              ([18, 3], [34, 50])))))])
def test_prefill(dtype, group, rows, tokens):
    check_prefill([prefill], prefill_case(
        rows, tokens, group=group, dim=20, decay={3: 0.9, 8: 0.98}.get(group, 1.0), dtype=dtype,
        kv_heads=2 if group == 1 else 1))


@pytest.mark.parametrize(("attention", "stored", "group"), [
    (ATTENTION[2], torch.float32, 1), (ATTENTION[-1], 4, 4),
    *full_cases(*((attention, stored, group) for attention in ATTENTION for stored, group in (
        (torch.float32, 1), (torch.bfloat16, 3), (4, 4))))], ids=str)
def test_decode_of_every_form_of_attention(attention, stored, group):
    check_step([0, 33], stored=stored, group=group, attention=attention)
    check_step([33, 70], full=(0,), stored=stored, group=group, attention=attention,
               eviction=Eviction(window=attention.window or 0))


@pytest.mark.parametrize(("bits", "dim", "attention"), [
    (MIXED[0], 80, DEFAULT_VARIANT),
    *full_cases(*product((8, 4, *MIXED), (8, 64, 80, 128), (DEFAULT_VARIANT,)),
                (4, 96, DEFAULT_VARIANT),
                (8, 64, ATTENTION[1]), (4, 128, ATTENTION[2]), (4, 80, ATTENTION[-1]))], ids=str)
def test_decode_reads_codes_in_place(monkeypatch, bits, dim, attention):
    """One head at a time, as without matrix units."""
    monkeypatch.setattr(triton_decode, "_read", None)
    options = {"stored": bits, "dim": dim, "attention": attention, "kv_heads": 2}
    check_step([33], **options)
    with assume_gpu(T4):
        check_step([70], full=(0,), group=3, **options,
                   eviction=Eviction(window=attention.window or 0))


@pytest.mark.parametrize("bits", [4, *full(8, *MIXED)])
def test_decode_of_unaligned_codes(monkeypatch, bits):
    monkeypatch.setattr(triton_decode, "read_codes", None)
    for begin, end in ((1, 2), (2, 2)):  # strides, or where the first record lies
        case = decode_case([33], stored=bits, dim=64)
        wide = torch.full((*case["slots"].shape[:-1], begin + case["layout"].width + end), 77,
                          dtype=torch.uint8)
        slots = wide[..., begin : begin + case["layout"].width]
        slots.copy_(case["slots"])
        out, _ = decode(**case | {"slots": slots})
        expected, _ = reference.decode_attention(**case)
        assert (out.float() - expected.float()).abs().max() < BOUND[out.dtype]
        assert torch.equal(slots, case["slots"])
        wide[..., begin : begin + case["layout"].width] = 77
        assert (wide == 77).all()


@pytest.mark.parametrize(("attention", "dtype", "decay"), [
    (ATTENTION[-1], torch.float16, 0.9),
    *full_cases(*((attention, dtype, decay) for attention in ATTENTION for dtype, decay in (
        (torch.bfloat16, 1.0), (torch.float16, 0.9))))], ids=str)
def test_prefill_of_every_form_of_attention(attention, dtype, decay):
    check_prefill([prefill], prefill_case([18, 3], [34, 30], group=3, dim=20, decay=decay,
                                          dtype=dtype, attention=attention))


@pytest.mark.parametrize(("dtype", "dim"), [
    (torch.float32, 2), (torch.bfloat16, 80),
    *full_cases(*product(BOUND, (2, 64, 80, 96, 128, 256)))])
def test_prefill_dims(dtype, dim):
    check_prefill([prefill], prefill_case([21], dim=dim, dtype=dtype))


def test_large_logits_do_not_overflow():
    q, k, v = torch.randn(3, 40, 2, 16)
    scores = torch.zeros(2, 40)
    out = triton_prefill.prefill_attention(q * 300, k * 300, v, [40], [40], scores, 1.0)
    # Logits of 1e5 have an error of 1e-2, not the same one in both passes.
    assert out.isfinite().all() and abs(scores.sum().item() - 80) < 1


CUTS = [Cut(1, 1, 1), Cut(7, 2, 2), Cut(31, 10, 5), Cut(33, 1, 1), Cut(65, 0, 9), Cut(64, 20, 0),
        Cut(100, 40, 33)]


@pytest.mark.parametrize(("draw", "eviction"), [
    (tied, Eviction(policy_named("mean"), sinks=4)), (None, Eviction()),
    *full_cases(*product((torch.rand, torch.randn, tied), (
        Eviction(), Eviction(policy_named("mean")), Eviction(sinks=4))))])
def test_select(draw, eviction):
    """The long ones of `CUTS` have more scores than registers, here; the short ones have not."""
    rolls = eviction.sinks > 0
    for cuts in (CUTS, CUTS[:4]):
        check_select([select], select_case(cuts, draw=draw, eviction=eviction, rolls=rolls,
                                           kv_heads=1 + rolls))


@pytest.mark.parametrize(("stored", "dim"), [(torch.float32, 12), (4, 80), (MIXED[0], 128),
                                             *full_cases(*product(EVERY_FORM, (12, 80, 128)))])
def test_select_forms(stored, dim):
    case = select_case([Cut(9, 3, 2), Cut(40, 15, 5)], stored=stored, dim=dim)
    if dim == 80:
        case["state"] = with_odd_strides(case["state"])
    check_select([select], case)


@pytest.mark.full
def test_select_to_a_cache_whose_keys_have_2_gb():
    case = select_case([Cut(9, 3, 2)], stored=8)
    wide = {name: copied(x) for name, x in case.items()} | {"slots": far_apart(case["slots"])}
    select(**case)
    select(**wide)
    assert torch.equal(wide["slots"], case["slots"])


def test_select_with_scores_of_every_size():
    check_select([select], select_case([Cut(60, 13, 5)], draw=lambda *shape: (
        torch.randn(shape) * 10.0 ** torch.randint(-44, 38, shape))))


@pytest.mark.parametrize(("bits", "dim"), [
    (8, 66), (4, 80), *full_cases(*product((8, 4), (2, 6, 12, 64, 66, 80, 96, 128, 130, 256)))])
def test_groups(bits, dim):
    layout = GroupLayout(dim, bits)
    for dtype in BOUND:
        sizes = torch.tensor([1.0, 1e-6, 1e5, 3e-8, 0.0])[:, None]
        x = (torch.randn(3, 5, dim) * sizes).to(dtype)
        x[0, 0], x[:, 4] = 1.5, 0  # of zeros of both signs, either may be the lowest
        records = triton_groups.quantize_groups(x.transpose(0, 1), layout)
        wanted = reference.quantize_groups(x, layout).transpose(0, 1)
        assert torch.equal(records, wanted)
        assert torch.equal(triton_groups.dequantize_groups(wanted, layout),
                           reference.dequantize_groups(wanted, layout))
