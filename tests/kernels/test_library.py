"""The operations as PyTorch's custom ops: opcheck, tensors without data, and compiled graphs."""

import pytest
import torch
from kernel_cases import copied, decode_case, of_form, prefill_case, select_case

from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.h2o.eviction import Cut, Eviction
from flexgen_h2o.kernels import library
from flexgen_h2o.kernels.arguments import EvictionArguments, FormArguments
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.reference import attention as reference

pytestmark = pytest.mark.skipif(cpu_library.missing() is not None,
                                reason="the C++ kernels were not built")


def arguments(form=torch.float32, *, state=True, rolls=True):
    """Of every custom op, its arguments."""
    dtype, layout = of_form(form, 16)
    case = decode_case([9, 3], full=(0,), form=form, eviction=Eviction(), rotary=8 * rolls)
    kept = case["state"]
    eviction = EvictionArguments.of(kept if state else None)
    cut = select_case([Cut(9, 2, 3), Cut(2, 1, 1)], form=form, rolls=rolls)
    prompt = prefill_case([5, 2], [7, 2], dtype=dtype)
    bits = (16, 16) if layout is None else (layout.keys.bits, layout.values.bits)
    yield library.flat_prefill_attention, (
        prompt["q"], prompt["k"], prompt["v"], [5, 2], [7, 2], prompt["scores"] if state else None,
        0.9, 0.3, 2.0, 3, torch.zeros(prompt["q"].shape[1]))
    yield library.flat_select_heavy_hitters, (
        cut["k"], cut["v"], cut["scores"] if state else None, [9, 2, 3, 2, 1, 1], cut["slots"],
        *bits, cut["state"].scores, cut["state"].positions, cut["state"].ranks, True, 1)
    yield library.flat_decode_attention, (
        case["q"], case["k"], case["v"], case["slots"], case["metadata"] if state else
        case["metadata"] * torch.tensor([[1], [1], [1], [0]], dtype=torch.int32),
        *bits, *eviction, 0.3, 2.0, torch.zeros(case["q"].shape[1]),
        torch.randn(case["q"].shape[:2]))
    if layout is not None:
        yield library.quantize_groups, (prompt["q"], bits[0])
        records = reference.quantize_groups(prompt["q"], layout.keys)
        yield library.dequantize_groups, (records, bits[0], 16)


@pytest.mark.parametrize(("form", "state", "rolls"), [
    (torch.float32, True, True), (torch.bfloat16, False, False), (4, True, False),
    ((8, 4), True, True)])
def test_pytorch_checks_the_ops(form, state, rolls):
    for op, args in arguments(form, state=state, rolls=rolls):
        torch.library.opcheck(op, args)


def test_meta_tensors_have_the_right_shapes():
    for op, args in arguments(4):
        real = op(*map(copied, args))
        fake = op(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in args))
        assert type(fake) is type(real)
        for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (fake, real)),
                              strict=True):
            assert other is None or (one.device.type == "meta" and one.shape == other.shape
                                     and one.dtype == other.dtype)


def decode_with_a_struct(q, k, v, slots, metadata, key_bits, value_bits, *others):
    *eviction, scale, softcap, sink_logits, offsets = others
    return library.decode_attention(q, k, v, slots=slots, metadata=metadata,
                                    layout=CacheLayout.of(q.shape[-1], key_bits, value_bits),
                                    eviction=EvictionArguments(*eviction),
                                    form=FormArguments(scale, softcap, 0, sink_logits, offsets))


@pytest.mark.parametrize("form", [torch.bfloat16, 4, (8, 4)])
def test_compiled_graphs_hold_the_ops_whole(form):
    torch.compiler.reset()
    for op, args in arguments(form):
        mine, again = ([copied(x) for x in args] for _ in range(2))
        expected = op(*mine)
        op = decode_with_a_struct if op is library.flat_decode_attention else op
        found = torch.compile(lambda *x, op=op: op(*x), fullgraph=True, backend="aot_eager")(*again)
        for one, other in zip([found, *again], [expected, *mine], strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
