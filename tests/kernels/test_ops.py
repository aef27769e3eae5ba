"""Each operation and its reference against the definition: in float64, or in plain Python."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from helpers import kernel_internals, selection
from helpers.error_cases import refused
from helpers.kernel_cases import (
    BOUND,
    BUILT,
    FORMS,
    MIXED,
    blockwise_prefill,
    check_decode,
    check_prefill,
    check_select,
    decode_case,
    is_built,
    library_prefill,
    poisoned_memory,
    prefill64,
    prefill_case,
    select_case,
    tied,
)
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flexgen_h2o.config.cache_layout import GroupLayout
from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.h2o.eviction import Cut, Eviction, EvictionState
from flexgen_h2o.h2o.policies import policy_named
from flexgen_h2o.kernels import ops, torch_ops
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.reference import attention as reference

pytestmark = pytest.mark.usefixtures("isa")

PREFILL = (ops.prefill_attention, reference.prefill_attention)
SELECT = (ops.select_heavy_hitters, reference.select_heavy_hitters)
DECODE = (ops.decode_attention, reference.decode_attention)
DIMS = [12, 64, 80, 96, 128, 256]
GROUPS = [1, 3, 4, 8]
EVICTIONS = [Eviction(), Eviction(policy_named("mean")), Eviction(decay=0.9), Eviction(sinks=3),
             Eviction(policy_named("mean"), decay=0.5, sinks=1)]
VARIANTS = [AttentionVariant(scale, cap, window, sinks) for scale, cap, window, sinks in
            product((None, 0.4), (0.0, 2.5), (None, 7), (False, True))][1:]


@pytest.fixture(autouse=True)
def _poison():
    with poisoned_memory():
        yield


# prefill_attention


PREFILL_AXES = {
    "lengths": [([1], [1]), ([2, 1, 7], [2, 1, 7]), ([127, 33], [127, 33]), ([128], [128]),
                ([129, 5, 1], [129, 5, 1]), ([257, 90], [257, 90]), ([1], [700]), ([65], [300]),
                ([1, 40, 64], [1, 129, 64]), ([256, 3], [257, 400])],
    "dtype": [*BOUND], "group": GROUPS, "dim": [5, 7, 130, *DIMS], "kv_heads": [1, 2],
    "decay": [1.0, 0.98, 0.9], "attention": [None, *VARIANTS]}


@pytest.mark.source("prefill")
@pytest.mark.parametrize("case", selection.pairwise(PREFILL_AXES))
def test_prefill(case):
    """Prompts in one piece and in chunks; all kernels, also those that `ops` would not choose."""
    case = dict(case)
    check_prefill([*PREFILL, blockwise_prefill, *([library_prefill] if is_built() else [])],
                  prefill_case(*case.pop("lengths"), **case))


@pytest.mark.source("prefill")
@pytest.mark.parametrize("group", GROUPS)
def test_prefill_around_blocks_of_queries(group):
    """The C++ computes 64 (AVX-512), 16 or 8 queries together, those of the group's heads too."""
    edges = {lanes // group for lanes in (8, 16, 64, 128)} - {0}
    lengths = sorted({edge + near for edge in edges for near in (-1, 0, 1)} - {0})
    for dtype in BOUND:
        check_prefill(PREFILL, prefill_case(lengths, group=group, dtype=dtype, kv_heads=1))


@pytest.mark.source("prefill")
@given(lengths=st.lists(st.tuples(st.integers(0, 200), st.sampled_from([0, 0, 1, 100])),
                        min_size=1, max_size=4),
       group=st.integers(1, 9), kv_heads=st.integers(1, 3), dim=st.integers(1, 40),
       decay=st.sampled_from([1.0, 0.98, 0.5]), dtype=st.sampled_from(list(BOUND)),
       attention=st.none() | st.builds(AttentionVariant, scale=st.sampled_from((None, 0.05, 1.0)),
                                       softcap=st.sampled_from((0.0, 1.0, 30.0)),
                                       window=st.none() | st.integers(2, 200), sinks=st.booleans()))
@settings(max_examples=examples(60))
def test_any_prefill(lengths, group, kv_heads, dim, decay, dtype, attention):
    rows = [length for length, _ in lengths]
    check_prefill([*PREFILL, blockwise_prefill], prefill_case(
        rows, [length + before for length, before in lengths], group=group, dim=dim,
        kv_heads=kv_heads, decay=decay, dtype=dtype, attention=attention))


@pytest.mark.source("prefill")
@pytest.mark.parametrize("window", [2, 31, 64, 130, 300, 399])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_prefill_in_windows_of_every_size(window, dtype):
    variant = AttentionVariant(window=window, softcap=3.0, sinks=True)
    check_prefill(PREFILL, prefill_case([400], group=2, dim=32, dtype=dtype, attention=variant))


@pytest.mark.source("prefill")
@pytest.mark.parametrize("window", [None, 40, 200])
def test_prefill_with_more_keys_than_the_cpu_cache(window):
    """In AMX tiles, some of the queries that are computed together see none of a chunk's keys."""
    variant = AttentionVariant(window=window, sinks=True)
    for group in (1, 3):
        check_prefill(PREFILL, prefill_case([150], [1500], group=group, dim=250, kv_heads=1,
                                            dtype=torch.bfloat16, attention=variant))


@pytest.mark.source("prefill")
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("chunks", [[1] * 9, [100, 1, 64, 200], [130, 235]], ids=str)
@pytest.mark.parametrize("function", PREFILL)
def test_chunked_prefill_accumulates_the_same_scores(decay, chunks, function):
    case = prefill_case([sum(chunks)], group=3, decay=decay)
    expected, whole = prefill64(**case)
    scores, end = case["scores"], 0
    for rows in chunks:
        start, end = end, end + rows
        out = function(case["q"][start:end], case["k"][:end], case["v"][:end], [rows],
                       key_lengths=[end], scores=scores[:, :end], decay=decay)
        # A prompt that comes whole decays what all of its keys had before.
        scores[:, end:] *= decay**rows
        assert (out - expected[start:end]).abs().max() < BOUND[torch.float32]
    torch.testing.assert_close(scores.double(), whole, rtol=2e-5, atol=1e-7)


@pytest.mark.source("prefill")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rise", [0.125, 8, 512, 3e5, -512])
def test_prefill_with_rising_or_falling_logits(dtype, rise):
    """The running maximum grows a little, or by more than float32 holds; logits are exact."""
    case = prefill_case([420], group=2, dtype=dtype, dim=16)
    case["q"][:] = torch.eye(16)[0]
    case["k"][:] = (torch.arange(420) // 32 * rise)[:, None, None]
    check_prefill([PREFILL[0], *([library_prefill] if is_built() else [])], case)


@pytest.mark.source("prefill")
@pytest.mark.parametrize("function", PREFILL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [300, 3e4])
def test_large_logits_do_not_overflow(function, dtype, size):
    case = prefill_case([90], dim=12, dtype=dtype)
    case["scores"].zero_()
    out = function(case["q"] * size, case["k"] * size, case["v"], [90], scores=case["scores"])
    assert out.isfinite().all() and abs(case["scores"].sum().item() - 2 * 90) < 1e-2


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.source("prefill")
@pytest.mark.parametrize("function", PREFILL)
def test_prefill_memory_is_linear(function):
    case = prefill_case([2048], group=1, kv_heads=2, dim=8)
    with LargestTensor() as largest:
        function(**case)
    assert largest.elements <= 2 * 2048 * reference.QUERIES


# Prefill without scores where PyTorch's own kernels are the fastest: sdpa.py.


@pytest.mark.source("prefill")
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("lengths", [[1], [33, 33], [5, 1, 64, 17], [257], [300, 511, 3], [769]],
                         ids=str)
@pytest.mark.parametrize("variant", [AttentionVariant(), AttentionVariant(scale=0.3, window=3)],
                         ids=str)
def test_sdpa_prefill(dtype, group, lengths, variant):
    case = prefill_case(lengths, group=group, dtype=dtype, attention=variant)
    out = torch_ops.sdpa_prefill_attention(case["q"], case["k"], case["v"], lengths,
                                           variant=variant)
    assert out.shape == case["q"].shape and out.dtype == dtype
    assert (out - prefill64(**case)[0]).abs().max() < BOUND[dtype]
    assert not torch_ops.sdpa_supports(AttentionVariant(softcap=1.0))
    assert not torch_ops.sdpa_supports(AttentionVariant(sinks=True))


# select_heavy_hitters


CUTS = [Cut(1, 1, 1), Cut(7, 2, 2), Cut(31, 10, 5), Cut(33, 1, 1), Cut(65, 0, 9), Cut(64, 20, 0),
        Cut(100, 40, 33), Cut(100, 90, 9), Cut(5, 4, 9), Cut(300, 1, 298)]


@pytest.mark.source("select")
@pytest.mark.parametrize("draw", [torch.rand, torch.randn, tied, torch.zeros, None])
@pytest.mark.parametrize("eviction", [EVICTIONS[0], EVICTIONS[1], Eviction(sinks=4)])
@pytest.mark.parametrize("stored", [torch.float32, 4])
def test_select(draw, eviction, stored):
    check_select(SELECT, select_case(CUTS[:-1] if eviction.sinks else CUTS, draw=draw,
                                     eviction=eviction, stored=stored, rolls=stored == 4))


@pytest.mark.source("select")
@pytest.mark.parametrize("stored", [*FORMS, *MIXED])
@pytest.mark.parametrize("dim", [5, *DIMS])
def test_select_of_every_form(stored, dim):
    if not isinstance(stored, torch.dtype) and dim % 2:
        pytest.skip("records have an even number of elements")
    check_select(SELECT, select_case([Cut(40, 13, 2), Cut(9, 3, 2)], stored=stored, dim=dim,
                                     kv_heads=3, eviction=Eviction(sinks=1), draw=tied))


@pytest.mark.source("select")
def test_select_by_scores_of_every_size():
    def draw(*shape):
        return torch.randn(shape) * 10.0 ** torch.randint(-44, 38, shape)

    check_select(SELECT, select_case([Cut(900, 250, 5)], draw=draw))


@pytest.mark.source("select")
@pytest.mark.parametrize("draw", [torch.rand, torch.randn, tied,
                                  lambda *shape: torch.randint(40, shape).float()])
@pytest.mark.parametrize("score", ["sum", "mean"])
def test_select_from_long_prompts(draw, score):
    cuts = [Cut(131072, 8192, 8192), Cut(2048, 409, 409), Cut(4097, 4000, 1)]
    check_select(SELECT, select_case(cuts, dim=2, kv_heads=1, draw=draw,
                                     eviction=Eviction(policy_named(score), sinks=4)))


@pytest.mark.source("select")
@given(cuts=st.lists(st.builds(Cut, st.integers(1, 150), st.integers(0, 60), st.integers(1, 60)),
                     min_size=1, max_size=5),
       sinks=st.integers(0, 5), score=st.sampled_from(["sum", "mean"]), kv_heads=st.integers(1, 4),
       draw=st.sampled_from([torch.rand, tied, torch.ones]))
@settings(max_examples=examples(50))
def test_any_selection(cuts, sinks, score, kv_heads, draw):
    check_select(SELECT, select_case(cuts, eviction=Eviction(policy_named(score), sinks=sinks),
                                     kv_heads=kv_heads, draw=draw, dim=4))


# decode_attention


DECODE_AXES = {
    "cached": [[0], [1], [2], [15, 16, 17], [5, 39], [63, 64, 65], [31, 33, 0], [129, 127, 2],
               [0, 63, 1, 70], [255], [256], [257], [513, 0], [700, 300], [1500], [191, 192],
               [193, 255], [288, 256]],
    "stored": [*FORMS, *MIXED], "group": [*GROUPS, 5, 9], "kv_heads": [1, 2],
    "dim": [2, 6, 20, 32, 66, 130, 148, 192, *DIMS], "rotated": [0, 0.5, 1], "recent": [1, 2, 30],
    "eviction": [None, *EVICTIONS, Eviction(window=6), Eviction(policy_named("mean"), window=40)],
    "attention": [None, *(variant for variant in VARIANTS if variant.window is None)],
    "offsets": [False, True], "smoothed": [False, True]}


def is_decoded(case: dict) -> bool:
    """Whether a step can be so; `case` may lack axes."""
    attention, stored = case.get("attention", VARIANTS[0]), case.get("stored")
    return not (case.get("offsets") and (
        attention is None or not (attention.softcap or attention.sinks))
        or case.get("smoothed") and (isinstance(stored, torch.dtype) or case.get("rotated") == 0
                                     or case.get("eviction", True) is None))


@pytest.mark.source("decode")
@pytest.mark.parametrize("case", selection.pairwise(DECODE_AXES, is_decoded))
def test_decode(case):
    """Also over slots of few heads, which are split into parts."""
    case = dict(case)
    cached, eviction, recent = case["cached"], case["eviction"], case["recent"]
    many = [place for place, count in enumerate(cached) if count > recent + 3]
    if eviction is not None and eviction.window:
        case["attention"] = replace(case["attention"] or AttentionVariant(), window=eviction.window)
    check_decode(DECODE, decode_case(
        full=many[len(many) // 2 :] if eviction else (),
        rotary=int(case.pop("rotated") * case["dim"]) // 2 * 2, **case))


@pytest.mark.source("decode")
@pytest.mark.parametrize("eviction", EVICTIONS, ids=str)
def test_many_victims(eviction):
    check_decode(DECODE, decode_case([40] * 6, full=range(6), recent=1, kv_heads=50, dim=4,
                                     eviction=eviction))


@pytest.mark.source("decode")
@pytest.mark.parametrize("eviction", [e for e in EVICTIONS if e.decay != 0.9], ids=str)
@pytest.mark.parametrize("cached", [[40, 9, 17], [700, 128]], ids=str)
def test_ties_evict_the_oldest(eviction, cached):
    full = range(len(cached))
    for recent in (1, 7):
        check_decode(DECODE, decode_case(cached, full=full, recent=recent, kv_heads=5, ties=True,
                                         eviction=eviction), ties=True)


@pytest.mark.parametrize("function", [*PREFILL, *SELECT, *DECODE])
def test_strided_inputs(function):
    """Inputs may have any strides, in the last dimension too."""
    if function in PREFILL:
        case, check = prefill_case([40, 3]), check_prefill
    elif function in SELECT:
        case, check = select_case([Cut(9, 2, 3), Cut(4, 1, 1)]), check_select
    else:
        case, check = decode_case([9, 3], full=(0,), eviction=Eviction()), check_decode
    for name in set("qkv") & set(case):
        wide = torch.full((*case[name].shape, 2), float("nan"))
        case[name] = wide[..., 0].copy_(case[name])
    check([function], case)


@pytest.mark.source("decode")
@given(cached=st.lists(st.integers(0, 90), min_size=1, max_size=4), group=st.integers(1, 9),
       kv_heads=st.integers(1, 3), half=st.integers(1, 36), rotary=st.integers(0, 36),
       stored=st.sampled_from([*FORMS, *MIXED]), eviction=st.sampled_from([None, *EVICTIONS]),
       window=st.sampled_from([0, 0, 2, 40]), cap=st.sampled_from((0.0, 5.0)), sinks=st.booleans(),
       room=st.integers(1, 300), data=st.data())
@settings(max_examples=examples(80))
def test_any_decode(cached, group, kv_heads, half, rotary, stored, eviction, window, cap, sinks,
                    room, data):
    if eviction is not None:
        eviction = replace(eviction, window=window)
    many = [s for s, c in enumerate(cached) if c > 20]
    full = data.draw(st.sets(st.sampled_from(many))) if many and eviction else ()
    check_decode(DECODE, decode_case(
        cached, stored=stored, group=group, kv_heads=kv_heads, dim=2 * half, n=max(cached) + room,
        full=full, recent=data.draw(st.integers(1, 9)), eviction=eviction,
        rotary=2 * min(rotary, half), attention=AttentionVariant(softcap=cap, sinks=sinks)))


@pytest.mark.source("decode")
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("variant", [AttentionVariant(0.3, 2.0),
                                     AttentionVariant(window=200, sinks=True)], ids=str)
@pytest.mark.parametrize("stored", [4, *MIXED])
def test_decode_of_grouped_queries_over_many_records(stored, variant, group):
    eviction = Eviction(window=variant.window or 0)
    for dim, cached in ((64, [300, 192]), (128, [600])):
        check_decode(DECODE, decode_case(cached, group=group, dim=dim, full=[0], stored=stored,
                                         eviction=eviction, attention=variant, offsets=True))


# quantize_groups and dequantize_groups: test_quantization.py.


# The backend


@BUILT
def test_reference_kernels_can_be_forced(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("not the reference")

    for name, module in (*ops.BACKENDS["cpu"].items(), ("sdpa_prefill_attention", torch_ops)):
        monkeypatch.setattr(module, name, refuse)
    layout = GroupLayout(16, 4)
    calls = [partial(function, **case) for function, case in (
        (ops.prefill_attention, prefill_case([9])),
        (ops.prefill_attention, prefill_case([9]) | {"scores": None, "key_lengths": None}),
        (ops.select_heavy_hitters, select_case([Cut(9, 2, 3)])),
        (ops.decode_attention, decode_case([9], eviction=Eviction())),
        (ops.decode_attention, decode_case([9], stored=8)),
        (ops.quantize_groups, {"x": torch.randn(3, 16), "layout": layout}),
        (ops.dequantize_groups, {"packed": torch.zeros(3, layout.nbytes, dtype=torch.uint8),
                                 "layout": layout}))]
    for call in calls:
        with pytest.raises(AssertionError, match="not the reference"):
            call()
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    for call in calls:
        call()


def test_devices_without_kernels_use_the_reference(monkeypatch, caplog):
    """And the log says so once."""
    monkeypatch.delenv("FLEXGEN_H2O_KERNELS", raising=False)
    kernel_internals.forget_kernels()
    case = decode_case([3, 1], eviction=Eviction())
    state = case.pop("state")
    meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in case.items()}
    meta["state"] = EvictionState(state.eviction, state.scores.to("meta"),
                                  state.positions.to("meta"))
    for _ in range(2):
        out, taken = ops.decode_attention(**meta)
        assert out.shape == case["q"].shape and taken.shape == (2, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "attention and eviction run in plain PyTorch on meta, slowly: no kernels for this kind of "
        "device"]


@BUILT
def test_arguments_of_attention_variants_are_checked():
    case = prefill_case([4], attention=AttentionVariant(sinks=True)) | {"sinks": torch.zeros(3)}
    with pytest.raises(ValueError, match="sinks"):
        ops.prefill_attention(**case)
    case = decode_case([4])
    with pytest.raises(ValueError, match="window"):
        native.decode_attention(**{name: case[name] for name in ("q", "k", "v", "slots",
                                                                 "metadata", "layout")},
                                eviction=ops.EvictionArguments(window=3))


@pytest.mark.parametrize(("options", "word"), [
    ({"scale": 0.0}, "scale"), ({"scale": float("inf")}, "scale"), ({"softcap": -1.0}, "soft cap"),
    ({"window": 1}, "window"), ({"window": 2.5}, "window"), ({"sinks": 1}, "sinks")])
def test_invalid_attention_variants_are_errors(options, word):
    refused(lambda: AttentionVariant(**options), match=word)


def test_strided_rotation_tables():
    case = decode_case([9, 4], eviction=Eviction(), rotary=16, full=(0,))
    strided = tuple(table.T.contiguous().T for table in case["state"].rope)
    assert not strided[0].is_contiguous()
    check_decode([ops.decode_attention], case | {"state": replace(case["state"], rope=strided)})
