"""Recall's kernels against their reference, on every instruction set; what they refuse."""

import pytest
import torch
from helpers.kernel_cases import BUILT, FORMS, MIXED, same, stored_as, threads, using

from flexgen_h2o.config.cache_layout import GroupLayout, IndexLayout, split_slots
from flexgen_h2o.config.layers import DEFAULT_VARIANT, AttentionVariant
from flexgen_h2o.h2o.recall import index_weights, select_tokens
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import VariantArguments
from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.kernels.reference import recall as reference_recall

pytestmark = BUILT
CAPPED = AttentionVariant(scale=0.3, softcap=5.0, sinks=True)


def case(*, sequences=3, kv_heads=2, group=4, dim=64, bits=4, tokens=77, stored=torch.float32,
         attention=DEFAULT_VARIANT, offsets=False):
    """Arguments of the three operations; slots that hold no token, and what is behind the index,
    are NaN. offsets: something is added to the products of each query."""
    torch.default_generator.manual_seed(tokens + group + dim + bits)
    dtype, records = stored_as(stored, dim)  # of slots
    cached = torch.randint(1, tokens + 1, (sequences,))
    cached[0] = tokens
    counts = (cached * 0.3).long().clamp(min=1)
    slots = torch.randn(2, sequences, kv_heads, tokens + 2, dim).to(dtype)
    slots = reference.pack_slots(slots, records)
    for held, n in zip(slots.unbind(1), cached.tolist(), strict=True):
        held[:, :, n:] = float("nan") if records is None else 255
    layout = IndexLayout(dim, bits)
    index = torch.full((sequences, kv_heads, layout.tiles(tokens) + 1, layout.tile_bytes), 255,
                       dtype=torch.uint8)
    q, k, v = (torch.randn(sequences, heads, dim + 3).to(dtype)[..., :dim]
               for heads in (kv_heads * group, kv_heads, kv_heads))
    sinks = torch.randn(kv_heads * group) if attention.sinks else None
    offsets = torch.randn(sequences, kv_heads * group) * 9 if offsets else None
    return {"q": q, "k": k, "v": v, "slots": slots, "index": index, "layout": layout,
            "keys": split_slots(slots, records)[0], "records": records,
            "metadata": torch.stack([cached, counts]).int(),
            "spans": torch.stack([cached * 0, cached * 0, cached]).int(),
            "options": {"variant": attention, "sinks": sinks, "offsets": offsets}}


OFFSETS = {"group": 2, "attention": CAPPED, "offsets": True}
"""Only CPU kernels know them."""

CASES = [{}, {"group": 1, "dim": 128, "tokens": 300}, {"group": 3, "bits": 2},
         {"group": 7, "dim": 80, "attention": CAPPED, "sequences": 1, "tokens": 16},
         # Rows of an index that are no whole fours, in which some CPUs take them.
         {"dim": 20, "tokens": 40}, {"dim": 24, "bits": 2, "group": 1},
         OFFSETS, {"dim": 8, "tokens": 1},
         *({"stored": stored, "tokens": 130} for stored in (*FORMS[1:], *MIXED))]


def key_records(args):
    """The layout of a cached key's record."""
    return None if args["records"] is None else args["records"].keys


def weights_of(args):
    """What each cached token weighs by the index, as the reference has it."""
    kv_heads, (cached, _) = args["k"].shape[1], args["metadata"].long()
    keys = reference_recall.indexed_keys(args["index"], args["layout"])
    filled = (torch.arange(keys.shape[2]) < cached[:, None])[:, None]
    sinks, offsets = args["options"]["sinks"], args["options"]["offsets"]
    return index_weights(
        args["q"].unflatten(1, (kv_heads, -1)), args["k"], keys.where(filled[..., None], 0),
        layout=args["layout"], hidden=~filled[:, :, None], variant=args["options"]["variant"],
        sinks=None if sinks is None else sinks.view(kv_heads, -1, 1),
        offsets=None if offsets is None else offsets.view(len(offsets), kv_heads, -1, 1))


def check_choice(args, selected):
    """Tokens are ascending, and none weighs less than one that was left out."""
    cached, counts = args["metadata"].long()
    weights = weights_of(args)
    mask = select_tokens(weights, counts, cached=cached)
    for sequence, count in enumerate(counts.tolist()):
        assert (selected[sequence, :, count:] == -1).all()
        tokens = selected[sequence, :, :count].long()
        assert (tokens.diff(dim=-1) > 0).all() and (tokens >= 0).all()
        least = weights[sequence].where(mask[sequence], torch.inf).amin(-1, keepdim=True)
        # Sums of another order may swap weights that are nearly equal.
        assert (weights[sequence].gather(-1, tokens) >= least * (1 - 1e-4)).all()


def check_kernels(module, options):
    """Check the three operations of a module against the reference."""
    args = case(**options)
    expected = args["index"].clone()
    reference_recall.index_keys(args["keys"], expected, args["spans"], layout=args["layout"],
                                key_layout=key_records(args))
    first, rest = args["spans"].clone(), args["spans"].clone()  # as in a generation
    first[2] //= 2
    rest[:2] = first[2]
    rest[2] -= first[2]
    for spans in (first, rest):
        module.index_keys(args["keys"], args["index"], spans, layout=args["layout"],
                          key_layout=key_records(args))
    assert same(args["index"], expected)
    selected = module.select_keys(
        args["q"], args["k"], index=args["index"], top_k=int(args["metadata"][1].max()) + 2,
        metadata=args["metadata"], layout=args["layout"], **args["options"])
    check_choice(args, selected)
    check_attention(module, args, selected)


def check_attention(module, args, selected):
    """Check attention to selected tokens, and that nothing but new tokens is written."""
    outs = []
    for attend in (module.recall_attention, reference_recall.recall_attention):
        slots = args["slots"].clone()
        out, taken = attend(args["q"], args["k"], args["v"], slots=slots, selected=selected,
                            metadata=args["metadata"], layout=args["records"], **args["options"])
        outs.append((out, taken, slots))
    (out, *others), (wanted, *rest) = outs
    bound = 2e-5 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, wanted, rtol=bound, atol=bound)
    assert all(map(same, others, rest))


@pytest.mark.source("choose")
def test_kernels_equal_the_reference(isa):
    for options in CASES:
        check_kernels(ops, options)


def recall(args, *, capture=None):
    """Run the three operations eagerly or captured. Return their results."""
    noted = {} if capture is None else {"capture": capture}
    variant = VariantArguments.from_variant(*args["options"].values())
    shared = {"metadata": args["metadata"], "variant": variant}
    native_recall.index_keys(args["keys"], args["index"], args["spans"], layout=args["layout"],
                             key_layout=key_records(args), **noted)
    selected = native_recall.select_keys(args["q"], args["k"], index=args["index"],
                                         layout=args["layout"], top_k=99, **shared, **noted)
    return selected, *native_recall.recall_attention(
        args["q"], args["k"], args["v"], slots=args["slots"], selected=selected,
        layout=args["records"], **shared, **noted)


@pytest.mark.source("choose")
def test_replay_equals_eager_recall_with_new_metadata(isa):
    for options in CASES:
        args, other = case(**options), case(**options)
        with using(isa):
            program = CapturedCalls()
            results = recall(args, capture=program)
            for attended in (args["metadata"][1].clone(), args["metadata"][1] * 0 + 1):
                for arguments in (args, other):
                    arguments["metadata"][1] = attended
                for poisoned in results:
                    poisoned.fill_(-9)
                program.replay()
                assert all(map(same, results, recall(other)))
                assert same(args["slots"], other["slots"]) and same(args["index"], other["index"])


@pytest.mark.source("choose")
def test_running_means_of_log_weights(isa):
    """Those of tokens that are not cached stay as they are, and the first weight is the mean."""
    for options in CASES:
        args = case(**options)
        reference_recall.index_keys(args["keys"], args["index"], args["spans"],
                                    layout=args["layout"], key_layout=key_records(args))
        weights = weights_of(args)[..., : int(args["metadata"][0].max())]
        before = torch.randint(2**30, weights.shape, dtype=torch.int32)
        before[..., ::3] = 0
        logs = (weights.log2() + 127) * 2**23
        expected = before + (logs - before) / 8
        expected[..., ::3] = logs[..., ::3]
        cached = torch.arange(before.shape[-1]) < args["metadata"][0][:, None, None]
        for select_keys in (ops.select_keys, reference_recall.select_keys):
            log_weights = before.clone()
            with using(isa):
                select_keys(args["q"], args["k"], index=args["index"], top_k=99,
                            layout=args["layout"], metadata=args["metadata"],
                            log_weights=log_weights, **args["options"])
            apart = (log_weights - expected)[cached.expand_as(expected)].abs() / 2**23
            assert apart.max() < 0.09  # of a logarithm to base 2
            assert same(log_weights.where(~cached, 0), before.where(~cached, 0))


def check_ties(module, tokens):
    layout = IndexLayout(16, 4)
    keys = torch.zeros(1, 1, tokens, 16)
    keys[0, 0, ::2] = 1  # half of them equal, and heavier than the others, which are equal, too
    index = torch.zeros(1, 1, layout.tiles(tokens), layout.tile_bytes, dtype=torch.uint8)
    module.index_keys(keys, index, torch.tensor([[0], [0], [tokens]]).int(), layout=layout)
    q, heavy = torch.ones(1, 2, 16), range(0, tokens, 2)
    for wanted in (heavy[-3:], [*heavy, tokens - 3, tokens - 1], range(tokens)):
        metadata = torch.tensor([[tokens], [len(wanted)]]).int()
        actual, = module.select_keys(q, q[:, :1], index=index, metadata=metadata, layout=layout,
                                    top_k=len(wanted)).tolist()[0]
        assert actual == sorted(wanted)


def test_ties_select_the_newer_tokens():
    check_ties(ops, 40)


def check_largest_sums(module, dim, bits):
    """Tokens in the order of their codes, up to the highest in all but one element of a group."""
    layout = IndexLayout(dim, bits)
    keys = (torch.arange(40.0) / 39)[:, None].expand(40, dim).contiguous()
    keys[:, :: layout.group], keys[:, 1 :: layout.group] = 0, 1
    keys = keys[torch.randperm(40, generator=torch.Generator().manual_seed(0))][None, None]
    index = torch.zeros(1, 1, layout.tiles(40), layout.tile_bytes, dtype=torch.uint8)
    options = {"index": index, "metadata": torch.tensor([[40], [11]]).int(), "layout": layout,
               "top_k": 11, "variant": AttentionVariant(scale=0.01)}
    module.index_keys(keys, index, torch.tensor([[0], [0], [40]]).int(), layout=layout)
    last = reference_recall.indexed_keys(index, layout)[0, 0, :40, -1]
    for sign in (1, -1):
        q = torch.full((1, 3, dim), float(sign))
        selected = module.select_keys(q, 0 * q[:, :1], **options)[0, 0].long()
        assert same(last[selected].sort().values,
                    (sign * last).topk(11).values.mul(sign).sort().values)


@pytest.mark.source("choose")
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("bits", [4, 2])
def test_largest_integer_sums_do_not_overflow(isa, dim, bits):
    check_largest_sums(ops, dim, bits)


def test_results_do_not_depend_on_threads():
    args = case(tokens=200)
    results = []
    for count in (1, 2):
        with threads(count):
            ops.index_keys(args["keys"], args["index"], args["spans"], layout=args["layout"])
            selected = ops.select_keys(args["q"], args["k"], index=args["index"], top_k=60,
                                       metadata=args["metadata"], layout=args["layout"])
            results.append((selected, ops.recall_attention(
                args["q"], args["k"], args["v"], slots=args["slots"].clone(), selected=selected,
                metadata=args["metadata"])[0]))
    assert all(map(same, *results))


def test_invalid_arguments_raise_and_write_nothing():
    args = case()
    index, layout = args["index"].clone(), args["layout"]
    late = args["spans"].clone()
    late[1] += 40
    with pytest.raises(ValueError, match="index_keys: an index is out of range"):
        ops.index_keys(args["keys"], args["index"], late, layout=layout)
    assert same(args["index"], index)
    records = reference.quantize_groups(args["keys"], GroupLayout(64, 4))
    with pytest.raises(ValueError, match="index_keys: keys must be"):
        native_recall.index_keys(records[..., 1:], index, args["spans"], layout=layout,
                                 key_layout=GroupLayout(64, 4))
    assert same(args["index"], index)
    many = args["metadata"].clone()
    many[1] = many[0] + 1
    with pytest.raises(ValueError, match="select_keys: an index"):
        ops.select_keys(args["q"], args["k"], index=index, metadata=many, layout=layout, top_k=99)
    few = torch.zeros(3, 2, 76, dtype=torch.int32)
    with pytest.raises(ValueError, match="select_keys: an index"):
        ops.select_keys(args["q"], args["k"], index=index, metadata=args["metadata"],
                        layout=layout, top_k=99, log_weights=few)
    assert not few.any()
    selected = torch.full((3, 2, 30), 500, dtype=torch.int32)
    with pytest.raises(ValueError, match="recall_attention: an index"):
        ops.recall_attention(args["q"], args["k"], args["v"], slots=args["slots"],
                             selected=selected, metadata=args["metadata"])
    with pytest.raises(ValueError, match="index must be"):
        native_recall.select_keys(args["q"], args["k"], index=index[:1], layout=layout, top_k=9,
                                  metadata=args["metadata"])
