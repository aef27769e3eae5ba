"""Forms of attention (scale, soft cap, window, sinks) in every kernel, beside float64."""

from __future__ import annotations

import pytest
import torch
from helpers.error_cases import refused
from helpers.kernel_cases import (
    BUILT,
    FORMS,
    MIXED,
    blockwise_prefill,
    check_decode,
    check_prefill,
    decode_case,
    prefill_case,
)
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.h2o.eviction import Eviction
from flexgen_h2o.kernels import ops, torch_ops
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.reference import attention as reference

FUNCTIONS = [reference.prefill_attention, ops.prefill_attention]
DECODE = [reference.decode_attention, ops.decode_attention]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.source("prefill")
@pytest.mark.parametrize("window", [2, 31, 64, 130, 300, 399])
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_long_prefill_in_windows_of_every_size(isa, window, dtype):
    variant = AttentionVariant(window=window, softcap=3.0, sinks=True)
    check_prefill(FUNCTIONS, prefill_case([400], group=2, dim=32, dtype=dtype, attention=variant))


@pytest.mark.source("prefill")
@pytest.mark.parametrize("window", [None, 40, 200])
def test_prefill_with_more_keys_than_the_cpu_cache(isa, window):
    """In AMX tiles more queries meet them at a time, of which some see none of a chunk's keys."""
    variant = AttentionVariant(window=window, sinks=True)
    for group in (1, 3):
        check_prefill(FUNCTIONS, prefill_case([150], [1500], group=group, dim=250, kv_heads=1,
                                              dtype=torch.bfloat16, attention=variant))


@settings(max_examples=examples(25))
@given(lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 200)), min_size=1, max_size=3),
       variant=st.builds(AttentionVariant, scale=st.sampled_from((None, 0.05, 1.0)),
                      softcap=st.sampled_from((0.0, 1.0, 30.0)),
                      window=st.none() | st.integers(2, 200), sinks=st.booleans()),
       group=st.integers(1, 5), dim=st.sampled_from((2, 6, 16, 40)),
       decay=st.sampled_from((1.0, 0.95)), dtype=st.sampled_from(FLOATS))
def test_any_prefill(lengths, variant, group, dim, decay, dtype):
    rows = [length for length, _ in lengths]
    keys = [length + before for length, before in lengths]
    check_prefill([ops.prefill_attention, blockwise_prefill], prefill_case(
        rows, keys, group=group, dim=dim, decay=decay, dtype=dtype, attention=variant))


@pytest.mark.parametrize("lengths", [[300], [40, 40], [5, 700]])
@pytest.mark.parametrize("window", [None, 3, 290])
def test_sdpa(lengths, window):
    variant = AttentionVariant(scale=0.3, window=window)
    case = prefill_case(lengths, group=2, attention=variant)
    out = torch_ops.sdpa_prefill_attention(case["q"], case["k"], case["v"], lengths,
                                           variant=variant)
    wanted = reference.prefill_attention(case["q"], case["k"], case["v"], lengths, variant=variant)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-5)
    assert not torch_ops.sdpa_supports(AttentionVariant(softcap=1.0))
    assert not torch_ops.sdpa_supports(AttentionVariant(sinks=True))


@pytest.mark.source("decode")
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("variant",
                         [AttentionVariant(0.3, 2.0), AttentionVariant(window=200, sinks=True)],
                         ids=str)
@pytest.mark.parametrize("stored", [4, *MIXED])
def test_decode_of_grouped_queries_over_many_records(isa, stored, variant, group):
    eviction = Eviction(window=variant.window or 0)
    for dim, cached in ((64, [300, 192]), (128, [600])):
        check_decode(DECODE, decode_case(cached, group=group, dim=dim, full=[0], stored=stored,
                                         eviction=eviction, attention=variant, offsets=True))


@settings(max_examples=examples(25))
@given(cached=st.lists(st.integers(3, 80), min_size=1, max_size=3), window=st.integers(0, 90),
       cap=st.sampled_from((0.0, 5.0)), sinks=st.booleans(),
       stored=st.sampled_from([*FORMS, *MIXED]), group=st.integers(1, 5))
def test_any_decode(cached, window, cap, sinks, stored, group):
    variant = AttentionVariant(softcap=cap, sinks=sinks)
    check_decode([ops.decode_attention], decode_case(
        cached, stored=stored, group=group, full=[0], eviction=Eviction(window=window),
        attention=variant))


def test_the_default_form_gives_the_same_bits():
    case = prefill_case([70, 3], group=2, dim=24)
    plain = ops.prefill_attention(**case | {"scores": None})
    wide = AttentionVariant(window=70)  # as wide as the longest prompt: no window
    assert torch.equal(plain, ops.prefill_attention(**case | {"scores": None, "variant": wide}))
    case = decode_case([70, 3])
    assert torch.equal(ops.decode_attention(**case)[0],
                       ops.decode_attention(**case | {"variant": wide})[0])


@BUILT
def test_arguments_are_checked():
    variant = AttentionVariant(sinks=True)
    case = prefill_case([4], attention=variant) | {"sinks": torch.zeros(3)}
    with pytest.raises(ValueError, match="sinks must be"):
        ops.prefill_attention(**case)
    with pytest.raises(ValueError, match="a window needs the positions"):
        native.decode_attention(**{
            name: x for name, x in decode_case([4]).items() if name in ("q", "k", "v", "slots",
                                                                        "metadata")},
            layout=None, eviction=ops.EvictionArguments(window=3))


@pytest.mark.parametrize(("options", "words"), [
    ({"scale": 0.0}, "scale"), ({"scale": float("inf")}, "scale"), ({"softcap": -1.0}, "soft cap"),
    ({"window": 1}, "window"), ({"window": 2.5}, "window"), ({"sinks": 1}, "sinks")])
def test_forms_are_checked(options, words):
    refused(lambda: AttentionVariant(**options), match=words)
