"""Recall's kernels of the GPU against the reference, in Triton's interpreter."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from helpers.fakes import T4
from helpers.kernel_cases import MIXED, same
from helpers.selection import full, full_cases
from kernels.test_recall_kernels import (
    CAPPED,
    CASES,
    case,
    check_attention,
    check_kernels,
    check_largest_sums,
    check_ties,
)

from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.config.h2o import INDEX_BITS
from flexgen_h2o.config.layers import DEFAULT_VARIANT
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.recall import QUERY_LEVELS
from flexgen_h2o.kernels.arguments import VariantArguments
from flexgen_h2o.kernels.dispatch import assume_gpu
from flexgen_h2o.kernels.reference import recall as reference_recall
from flexgen_h2o.kernels.triton import decode as triton_decode
from flexgen_h2o.kernels.triton import hot_set as triton_hot_set
from flexgen_h2o.kernels.triton import recall as triton_recall

pytestmark = pytest.mark.usefixtures("mended_interpreter")

SHORTER = [
    {"sequences": 2, "tokens": 40, "kv_heads": 1},
    {"sequences": 2, "tokens": 40, "dim": 24, "bits": 2, "group": 1},
    {"sequences": 1, "tokens": 16, "dim": 80, "group": 3, "attention": CAPPED},
    *full(*({"sequences": 2, **options, "tokens": min(options.get("tokens", 77), 150)}
            for options in CASES if "offsets" not in options))]
"""The interpreter takes ten seconds for three sequences of 150 tokens."""


def index_keys(keys, index, spans, *, layout, key_layout=None):
    triton_recall.index_keys(keys, index, spans, layout=layout, key_layout=key_layout)


def select_keys(q, k, *, log_weights=None, variant=DEFAULT_VARIANT, sinks=None, offsets=None,
                **options):
    return triton_recall.select_keys(q, k, log_weights=log_weights,
                                     variant=VariantArguments.from_variant(variant, sinks),
                                     **options)


def recall_attention(q, k, v, *, layout=None, variant=DEFAULT_VARIANT, sinks=None, offsets=None,
                     **options):
    return triton_recall.recall_attention(q, k, v, layout=layout,
                                          variant=VariantArguments.from_variant(variant, sinks),
                                          **options)


KERNELS = SimpleNamespace(index_keys=index_keys, select_keys=select_keys,
                          recall_attention=recall_attention)


@pytest.mark.parametrize("options", SHORTER)
def test_kernels_equal_the_reference(options):
    check_kernels(KERNELS, options)


def test_running_means_of_log_weights():
    args = case(sequences=2, kv_heads=1, tokens=40)
    reference_recall.index_keys(args["keys"], args["index"], args["spans"], layout=args["layout"])
    before = torch.randint(2**30, (2, 1, 40), dtype=torch.int32)
    ours, theirs = before.clone(), before.clone()
    for choose, log_weights in ((select_keys, ours), (reference_recall.select_keys, theirs)):
        choose(args["q"], args["k"], index=args["index"], metadata=args["metadata"], top_k=20,
               layout=args["layout"], log_weights=log_weights)
    assert (ours - theirs).abs().max() < 2**8 and not torch.equal(ours, before)


def test_ties_select_the_newer_tokens():
    check_ties(KERNELS, 40)


def test_partial_sums_of_every_layout_fit_16_bits():
    for length in range(2, 1025, 2):
        for bits in INDEX_BITS:
            with suppress(UserError):  # groups that do not fill bytes
                layout = IndexLayout(length, bits)
                depth = triton_recall._depth(layout)
                assert layout.group // layout.per_byte % depth == 0
                assert depth * layout.levels * QUERY_LEVELS < 2**15


def test_largest_integer_sums_do_not_overflow():
    check_largest_sums(KERNELS, 64, 4)


def test_new_tokens_are_stored_in_given_slots():
    """Those of a hot set, anywhere; sequences that choose nothing attend to themselves."""
    slots = torch.randn(2, 2, 1, 9, 16)
    q, k, v = torch.randn(2, 4, 16), *torch.randn(2, 2, 1, 16)
    selected = torch.tensor([[[7, 1, 3]], [[-1, -1, -1]]]).int()
    metadata = torch.tensor([[5, 0], [3, 0]]).int()
    ours, theirs = slots.clone(), slots.clone()
    out, taken = recall_attention(q, k, v, slots=ours, selected=selected, metadata=metadata)
    wanted, _ = reference_recall.recall_attention(q, k, v, slots=theirs, selected=selected,
                                                  metadata=metadata)
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(out[1], v[1].expand(4, 16), rtol=2e-5, atol=2e-5)
    assert taken.flatten().tolist() == [5, 0] and same(ours, theirs)


@pytest.mark.parametrize(("bits", "dim", "variant"), [
    ((8, 4), 80, CAPPED),
    *full_cases(*((bits, *form) for bits in (8, 4, *MIXED) for form in (
        (64, DEFAULT_VARIANT), (80, CAPPED), (128, CAPPED))))])
def test_recalled_codes_are_read_in_place(monkeypatch, bits, dim, variant):
    """One head at a time, as without matrix units."""
    monkeypatch.setattr(triton_decode, "_read", None)
    for gpu, group in ((None, 1), (T4, 3)):
        args = case(group=group, dim=dim, stored=bits, attention=variant, sequences=2, tokens=40)
        most = int(args["metadata"][1].max())
        selected = torch.stack([torch.stack([torch.randperm(cached)[:most] for _ in range(2)])
                                if cached >= most else torch.full((2, most), -1)
                                for cached in args["metadata"][0].tolist()]).int()
        args["metadata"][1] *= selected[:, 0, 0] >= 0
        with assume_gpu(gpu):
            check_attention(KERNELS, args, selected)


@pytest.mark.parametrize("tokens, slots, most", [
    (50, 12, 7), *full_cases((33, 33, 20), (90, 40, 40), (200, 70, 1))])
def test_claimed_slots_equal_the_reference(tokens, slots, most):
    """Step after step: some tokens go on being selected, others take the slots of the lightest."""
    sequences, kv_heads = 2, 2
    ours, theirs = ([torch.full((4, tokens), -1).int(), torch.full((4, slots), -1).int(),
                     torch.zeros(4, tokens).int()] for _ in range(2))
    for step in range(4):
        weights = torch.randint(9 if step % 2 else 2**30, (4, tokens)).int()  # with ties
        selected = torch.rand(4, tokens).argsort(-1)[:, :most].sort(-1).values.int()
        selected[0, most - most // 3 :] = -1
        selected = selected.view(sequences, kv_heads, most)
        results = []
        for module, state in ((triton_hot_set, ours), (reference_recall, theirs)):
            state[2].copy_(weights)
            taken, moves, counts = module.claim_slots(
                selected, **dict(zip(("slot_of", "token_of", "log_weights"), state, strict=True)))
            live = torch.arange(most) < counts[..., None]
            results.append((taken, moves.where(live, -1), counts))
        assert all(map(torch.equal, *results)) and all(map(torch.equal, ours, theirs))
        assert step or (counts.flatten()[1:] == most).all()
    assert (counts < most).any() or most == 1


@pytest.mark.parametrize("dtype, width", [(torch.float16, 64), (torch.float32, 5),
                                          (torch.uint8, 72), (torch.bfloat16, 3),
                                          (torch.uint8, 35)])
def test_tokens_are_copied_to_their_slots(dtype, width):
    source, target = (torch.randint(200, (2, 2, 3, slots, width)).to(dtype) for slots in (40, 21))
    moves = torch.stack([torch.rand(2, 3, n).argsort(-1)[..., :9] for n in (40, 20)]).int()
    counts = torch.tensor([[9, 0, 4], [1, 8, 9]]).int()
    for kinds in (1, 2):  # keys and values in one record, or apart
        results, expected = target[:kinds].clone(), target[:kinds].clone()
        reference_recall.copy_tokens(source[:kinds], expected, moves, counts)
        triton_hot_set.copy_tokens(source[:kinds], results, moves, counts)
        assert same(results, expected)
