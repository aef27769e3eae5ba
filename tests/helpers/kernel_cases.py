"""Random arguments of the operations, and what they have to give: in float64, or in plain Python.

Whatever must not be read is poison: NaN in floats, 255 in records (then scales and zero points are
NaN too). Whatever may be strided is.
"""

import ctypes
import functools
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.config.cache_layout import CacheLayout, split_slots
from flexgen_h2o.config.layers import DEFAULT_VARIANT, AttentionVariant
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.h2o.eviction import EMPTY, Cut, Eviction, EvictionState
from flexgen_h2o.h2o.key_smoothing import KeySmoothing
from flexgen_h2o.kernels import ops, torch_ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix, VariantArguments
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.reference import attention as reference
from helpers import selection

BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Error of prefill's outputs: attention weights may be rounded. Decode rounds none."""
FORMS = [torch.float32, torch.bfloat16, torch.float16, 8, 4]
MIXED = [(8, 4), (4, 8)]
"""Forms of keys and of values that differ."""
HUGE = 2.0**27
"""An attention score to which float32 cannot add what one query gives: scores stay exact whole
numbers."""


def is_built() -> bool:
    """Whether the C++ kernels were built."""
    return cpu_library.missing() is None


BUILT = pytest.mark.skipif(not is_built(), reason="the C++ kernels were not built")
AVAILABLE = () if cpu_library.missing() else cpu_library.available_sets()
"""Instruction sets that this machine can run, or can be made to choose as."""


def tested_sets(sets: Sequence[str]) -> tuple[str, ...]:
    """Return `sets` with --all, else the best of them that this CPU really has."""
    real = [name for name in sets if name != cpu_library.EMULATED]
    return tuple(sets if selection.every_case else real[-1:])


SETS = tested_sets(AVAILABLE)
TILED = [name for name in AVAILABLE if name.startswith("amx")]
"""Sets with AMX tiles or their emulation."""
EPSILON = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative rounding errors of matmuls; in float32, of their sums."""

MXFP4, COMPACT = 4.25, 4.5
"""Bit widths that mean MXFP4, and 4 bits with compact scales."""
MATRIX_SHAPES = [(1, 1, 64), (16, 64, 64), (33, 200, 64), (50, 576, 64), (32, 130, 32), (97, 8, 8),
                 (40, 96, 16), (7, 72, 24)]
"""Outputs, inputs, group: neither, either or both fill up their tiles and groups."""


def matrix_layout(outputs: int, inputs: int, bits: float, group: int = 64) -> MatrixLayout:
    """Return a layout of bits, `MXFP4` or `COMPACT`. With 6 bits, groups are multiples of 16."""
    if bits == MXFP4:
        return MatrixLayout(outputs, inputs, 4, 32, mxfp4=True)
    return MatrixLayout(outputs, inputs, int(bits), -(-group // 16) * 16 if bits == 6 else group,
                        compact=bits == COMPACT)


def quantized(weight: torch.Tensor, bits: float, group: int = 64, activation_bits: int = 16
              ) -> QuantizedMatrix:
    """Return a quantized matrix."""
    layout = matrix_layout(*weight.shape, bits, group)
    return QuantizedMatrix(ops.quantize_matrix(weight, layout), layout, activation_bits)


@functools.cache
def packaging() -> dict[str, Any]:
    """What setup.py defines; `--name` has it build nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["setup.py", "-q", "--name"])
        patch.chdir(Path(__file__).parents[2])
        return runpy.run_path("setup.py")


def sets_of(source: str) -> tuple[str, ...]:
    """Return the tested sets that a source of the kernels (its name without .cpp) is compiled for.
    """
    compiled = packaging()["SOURCES"].get(source, packaging()["VECTORS"])
    return tested_sets([name for name in AVAILABLE if name in compiled])


@contextmanager
def using(name: str | None):
    """The kernels and the choices of one of `SETS`; None: as the machine has them."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setenv("FLEXGEN_H2O_ISA", name)
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    """That many threads of PyTorch's and the kernels'."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors are full of NaN, and so is what C gets from malloc where that is glibc's."""
    perturb = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    perturb(-6, 0x100)  # M_PERTURB: fresh bytes are the complement of the argument's low byte
    try:
        yield
    finally:
        perturb(-6, 0)
        torch.use_deterministic_algorithms(before)


def linear_case(rows, inputs, outputs, *, bias=True, dtype=torch.bfloat16):
    """x and out as slices of wider tensors, out poisoned."""
    # torch.manual_seed would format a stack for each kind of device that is not there, too.
    torch.default_generator.manual_seed(rows + inputs + outputs)
    x = torch.randn(rows, inputs + 6).to(dtype)[:, :inputs]
    weight = torch.randn(outputs, inputs).to(dtype)
    out = torch.full((rows, outputs + 3), float("nan")).to(dtype)
    return x, weight, torch.randn(outputs).to(dtype) if bias else None, out


def check_linear(function, rows, inputs, outputs, *, bias=True, add=False, dtype=torch.bfloat16):
    """A product of 16-bit weights against float64; nothing behind the outputs is written."""
    x, weight, bias, wide = linear_case(rows, inputs, outputs, bias=bias, dtype=dtype)
    out = wide[:, :outputs]
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    if add:
        out.copy_(torch.randn(rows, outputs))
        expected += out.double()
    function(x, weight, bias, out, add=add)
    bound = torch.finfo(dtype).eps / 2 * expected.abs() + 1e-5 * inputs
    assert ((out.double() - expected).abs() <= bound).all()
    assert wide[:, outputs:].isnan().all()


def check_quantized_linear(function, matrix, values, rows, *, dtype, bias=True, add=False,
                           offset=0, unpacked=False, rounded=torch.Tensor.double):
    """Check a product with a quantized matrix, whose values are given, against float64.

    offset: the largest zero point, which is added after sums of codes. unpacked: weights are
    rounded to the dtype. rounded: maps x to the float64 values that are multiplied.
    """
    torch.default_generator.manual_seed(rows)
    outputs, inputs = values.shape
    x = torch.full((rows, inputs + 3), float("nan")).to(dtype)[:, :inputs]
    x.copy_(torch.randn(rows, inputs))
    bias = torch.randn(outputs).to(dtype) if bias else None
    wide = torch.full((rows, outputs + 2), float("nan")).to(dtype)
    out = wide[:, :outputs]
    if add:
        out.copy_(torch.randn(rows, outputs))
    seen = rounded(x)
    product = seen @ values.double().T + (0 if bias is None else bias.double())
    expected = product + (out.double() if add else 0)
    function(x, matrix, bias, out, add=add)
    terms = seen.abs() @ values.double().abs().T
    bound = 1.01 * EPSILON[dtype] * expected.abs() + 1e-5 * (
        terms + offset * seen.abs().sum(1, keepdim=True))
    if unpacked:  # each weight is rounded, and the product before it is accumulated
        bound += 1.01 * EPSILON[dtype] * (terms + product.abs())
    assert ((out.double() - expected).abs() <= bound).all()
    assert wide[:, outputs:].isnan().all()


def stored_as(stored, dim: int) -> tuple[torch.dtype, CacheLayout | None]:
    """The dtype of vectors and the layout of slots, of one of `FORMS` or `MIXED`."""
    if isinstance(stored, torch.dtype):
        return stored, None
    bits = stored if isinstance(stored, tuple) else (stored,)
    return torch.bfloat16, CacheLayout.from_bits(dim, *bits)


def views(slots, layout):
    """Keys and values in slots, each with the layout of its records."""
    return zip(split_slots(slots, layout),
               (None, None) if layout is None else (layout.keys, layout.values), strict=True)


def copied(x):
    """A copy with the same strides, whatever lies between the elements; of an eviction state
    too."""
    if isinstance(x, EvictionState):
        return replace(x, **{name: copied(getattr(x, name)) for name in
                             ("scores", "positions", "ranks")})
    if not isinstance(x, torch.Tensor):
        return x
    if not x.numel():
        return x.clone()
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1,), (1,)).clone().as_strided(x.shape, x.stride())


def same(one, other) -> bool:
    """Whether tensors are equal to the bit, NaN for NaN."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    return True


# prefill_attention


def sinks_of(attention: AttentionVariant, heads: int) -> torch.Tensor | None:
    """Return learned sinks of heads; the first one exceeds all logits of its head."""
    if not attention.sinks:
        return None
    sinks = torch.randn(heads) * 2
    sinks[0] = 40
    return sinks


def weights64(products, hidden, *, dim, variant, sink):
    """Attention's weights of a variant, in float64: products [..., keys], hidden likewise, the
    one sink of the head."""
    logits = products * variant.scale_for(dim)
    if variant.softcap:
        logits = variant.softcap * (logits / variant.softcap).tanh()
    logits = logits.masked_fill(hidden, float("-inf"))
    sink_logit = torch.full((*logits.shape[:-1], 1), float("-inf") if sink is None else float(sink))
    return torch.cat((logits, sink_logit.double()), dim=-1).softmax(-1)[..., :-1]


def prefill_case(lengths, key_lengths=None, *, group=1, kv_heads=2, dim=16, decay=1.0,
                 dtype=torch.float32, attention=None):
    """q and v as slices of something wider, k as a transposed cache, attention score as a part of a
    wider one.

    Keys lie an even number of elements apart for even sums of lengths, an odd one for odd sums.
    """
    key_lengths = key_lengths or lengths
    torch.default_generator.manual_seed(sum(lengths) + 7 * sum(key_lengths) + group + dim)
    rows, keys = sum(lengths), sum(key_lengths)
    odd = (rows + dim) % 2
    q = torch.randn(rows, kv_heads * group, dim + 3).to(dtype)[..., :dim]
    k = torch.randn(kv_heads, keys, dim + odd).to(dtype).transpose(0, 1)[..., odd:]
    v = torch.randn(keys, kv_heads, dim + 1).to(dtype)[..., 1:]
    scores = torch.full((kv_heads, keys + 5), float("nan"))
    scores[:, :keys] = torch.rand(kv_heads, keys) * 3
    case = dict(q=q, k=k, v=v, lengths=lengths, key_lengths=key_lengths, scores=scores[:, :keys],
                decay=decay)
    if attention is not None:
        case |= {"variant": attention, "sinks": sinks_of(attention, q.shape[1])}
    return case


def prefill64(q, k, v, *, lengths, key_lengths, scores, decay, variant=DEFAULT_VARIANT, sinks=None):
    """Output and attention score in float64, head by head."""
    out, after = q.double(), scores.double()
    group = q.shape[1] // k.shape[1]
    parts = zip(lengths, out.split(lengths), k.double().split(key_lengths),
                v.double().split(key_lengths), after.split(key_lengths, dim=1), strict=True)
    for rows, queries, keys, values, received in parts:
        tokens = len(keys)
        hidden = ~torch.ones(rows, tokens, dtype=torch.bool).tril(tokens - rows)
        if variant.window is not None:
            hidden |= torch.ones(rows, tokens, dtype=torch.bool).tril(
                tokens - rows - variant.window)
        weights = decay ** torch.arange(rows - 1, -1, -1).double()
        received *= decay**rows
        for head in range(q.shape[1]):
            probabilities = weights64(queries[:, head] @ keys[:, head // group].T, hidden,
                                      dim=q.shape[-1], variant=variant,
                                      sink=None if sinks is None else sinks[head])
            queries[:, head] = probabilities @ values[:, head // group]
            received[head // group] += weights @ probabilities
    return out, after


def check_prefill(functions, case):
    """Each function has `reference.prefill_attention`'s signature."""
    expected, wanted = prefill64(**case)
    for function in functions:
        actual = {name: copied(x) for name, x in case.items()}
        keys = case["k"].shape[0]
        held = torch.full((wanted.shape[0], keys + 5), float("nan"))
        actual["scores"] = held[:, :keys].copy_(case["scores"])
        alone = case | {"scores": None, "decay": 1.0}
        if case["lengths"] == case["key_lengths"]:
            alone["key_lengths"] = actual["key_lengths"] = None
        for arguments in (actual, alone):
            out = function(**arguments)
            assert out.dtype == case["q"].dtype
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=BOUND[case["q"].dtype])
        torch.testing.assert_close(actual["scores"].double(), wanted, rtol=2e-5, atol=1e-7)
        assert held[:, keys:].isnan().all()
        for name in "qkv":
            assert same(actual[name], case[name])


def library_prefill(q, k, v, lengths, *, key_lengths, scores, decay, variant=DEFAULT_VARIANT,
                    sinks=None):
    """The C++ kernel, also where `ops` prefers PyTorch's own."""
    return native.prefill_attention(q, k, v, lengths, key_lengths or lengths, scores, decay,
                                    VariantArguments.from_variant(variant, sinks))


def blockwise_prefill(q, k, v, lengths, *, key_lengths, scores, decay, variant=DEFAULT_VARIANT,
                      sinks=None):
    """Matmuls of PyTorch, which `ops` chooses on some GPUs."""
    return torch_ops.blockwise_prefill_attention(
        q, k, v, lengths, key_lengths or lengths, scores, decay,
        VariantArguments.from_variant(variant, sinks))


# select_heavy_hitters


def tied(*shape):
    """Few scores, of both signs, and both zeros."""
    return torch.randint(-3, 4, shape) * torch.tensor([0.5, -0.5])[torch.randint(2, shape)]


def select_case(cuts, *, stored=torch.float32, dim=16, kv_heads=2, eviction=None, rolls=False,
                draw=torch.randn):
    torch.default_generator.manual_seed(len(cuts) + sum(cut.length for cut in cuts) + dim)
    eviction = eviction or Eviction()
    dtype, layout = stored_as(stored, dim)
    rows, n = sum(cut.length for cut in cuts), max(map(eviction.num_cached, cuts)) + 2
    k = torch.randn(rows, kv_heads, dim + 2).to(dtype)[..., :dim]
    v = torch.randn(kv_heads, rows, dim).to(dtype).transpose(0, 1)
    scores = None if draw is None else draw(kv_heads, rows + 3)[:, :rows]
    shape, ranks = (len(cuts), kv_heads, n), None
    if rolls:
        ranks = torch.full(shape, -7, dtype=torch.int32)
    state = EvictionState(eviction, torch.full(shape, float("nan")),
                          torch.full(shape, -7, dtype=torch.int32), ranks)
    kinds, width, kind = (2, dim, dtype) if layout is None else (
        layout.kinds, layout.width, torch.uint8)
    slots = torch.full((kinds, *shape[:2], n + 1, width), 77.0).to(kind)[:, :, :, :n]
    return dict(k=k, v=v, scores=scores, cuts=cuts, slots=slots, state=state, layout=layout)


def kept_by_hand(scores: torch.Tensor, cut: Cut, eviction: Eviction) -> list[int]:
    """The tokens of one KV head that stay; attention score is float32 [length]."""
    if cut.length <= eviction.sinks + cut.heavy + cut.recent:
        return list(range(cut.length))
    if eviction.mean:
        scores = scores / torch.arange(cut.length, 0, -1, dtype=torch.float32)
    values, last = scores.tolist(), cut.length - cut.recent
    heaviest = sorted(range(eviction.sinks, last), key=lambda i: (values[i], i), reverse=True)
    return [*range(eviction.sinks), *sorted(heaviest[: cut.heavy]), *range(last, cut.length)]


def check_select(functions, case):
    """Each function has `reference.select_heavy_hitters`'s signature."""
    k, v, cuts, layout = (case[name] for name in ("k", "v", "cuts", "layout"))
    eviction, lengths = case["state"].eviction, [cut.length for cut in cuts]
    scores = torch.zeros(k.shape[1], len(k)) if case["scores"] is None else case["scores"]
    wanted = {name: copied(case[name]) for name in ("slots", "state")}
    state = wanted["state"]
    rows = zip(cuts, k.split(lengths), v.split(lengths), scores.split(lengths, dim=1), strict=True)
    for s, (cut, keys, values, of_rows) in enumerate(rows):
        for head in range(k.shape[1]):
            kept = kept_by_hand(of_rows[head], cut, eviction)
            n = len(kept)
            for (held, records), x in zip(views(wanted["slots"], layout), (keys, values),
                                          strict=True):
                new = x[kept, head]
                new = new if records is None else reference.quantize_groups(new, records)
                held[s, head, :n] = new
            state.scores[s, head] = torch.nn.functional.pad(of_rows[head, kept],
                                                            (0, state.scores.shape[-1] - n))
            state.positions[s, head] = EMPTY
            state.positions[s, head, :n] = torch.tensor(kept)
            if state.ranks is not None:
                state.ranks[s, head] = 0
                state.ranks[s, head, :n] = torch.arange(n)
    for function in functions:
        actual = {name: copied(x) for name, x in case.items()}
        function(**actual)
        assert same(actual["state"].positions, state.positions)
        assert same(actual["state"].scores, state.scores)
        assert state.ranks is None or same(actual["state"].ranks, state.ranks)
        assert same(actual["slots"], wanted["slots"])
        for name in ("k", "v", "scores"):
            assert case[name] is None or same(actual[name], case[name])


# decode_attention


def decode_case(cached: Sequence[int], *, stored=torch.float32, group=1, kv_heads=2, dim=16, n=None,
                full=(), recent=2, eviction: Eviction | None = None, rotary=0, ties=False,
                attention=None, smoothed=False, offsets=False):
    """A step of sequences with `cached` slots each; those numbered in `full` need a victim.

    ties: scores are integers from 1 to 3, times `HUGE`. smoothed: cached keys are smoothed.
    offsets: something is added to the products of each query.
    """
    torch.default_generator.manual_seed(len(cached) + sum(cached) + group + dim)
    (dtype, layout), n = stored_as(stored, dim), n or max(cached) + 3
    shape = (len(cached), kv_heads, n)
    q = torch.randn(shape[0], kv_heads * group, dim + 2).to(dtype)[..., :dim]
    k = torch.randn(kv_heads, shape[0], dim).to(dtype).transpose(0, 1)
    v = torch.randn(*shape[:2], dim + 1).to(dtype)[..., 1:]
    held = torch.randn(2, *shape, dim).to(dtype)
    held = reference.pack_slots(held, layout)
    filled = (torch.arange(n) < torch.tensor(cached)[:, None])[:, None]
    slots = torch.full((len(held), *shape[:2], n + 4, held.shape[-1]),
                       float("nan") if layout is None else 255, dtype=held.dtype)[:, :, :, :n]
    slots.copy_(torch.where(filled[..., None], held, slots))
    tokens = [c + 1 + 5 * (s in full) for s, c in enumerate(cached)]
    metadata = torch.tensor([cached, tokens, [recent] * shape[0],
                             [int(s in full) for s in range(shape[0])]], dtype=torch.int32)
    state = None
    if eviction is not None:
        scores = torch.rand(shape).masked_fill(~filled, 0)
        positions = torch.full(shape, EMPTY, dtype=torch.int32)
        ranks = torch.zeros(shape, dtype=torch.int32) if rotary else None
        for s, c in enumerate(cached):
            for head in range(kv_heads):
                order = torch.randperm(tokens[s] - 1)[:c]
                positions[s, head, :c] = order
                if ties:
                    seen = tokens[s] - order if eviction.mean else 1
                    scores[s, head, :c] = HUGE * seen * torch.randint(1, 4, (c,))
                if rotary:
                    ranks[s, head, :c] = order.argsort().argsort().int()
        angles = torch.rand(n + 1, rotary // 2) * 6
        state = EvictionState(eviction, scores, positions, ranks,
                              (angles.cos(), angles.sin()) if rotary else None,
                              smoothing_of(kv_heads, dim) if smoothed else None)
    case = dict(q=q, k=k, v=v, slots=slots, metadata=metadata, layout=layout, state=state)
    if attention is not None:
        case |= {"variant": attention, "sinks": sinks_of(attention, q.shape[1])}
    if offsets:
        case["offsets"] = torch.randn(q.shape[:2]) * 5
    return case


def smoothing_of(kv_heads, dim):
    """Return smoothing constants of keys with large means and deviations in some channels."""
    return KeySmoothing(torch.randn(kv_heads, dim), torch.rand(kv_heads, dim) + 0.5)


def rotated(x, position, tables):
    """x [..., d] at its position, rotated in float64 as complex numbers."""
    half = tables[0].shape[1]
    x = x.double()
    angle = torch.complex(*(table[position].double() for table in tables))
    parts = torch.complex(x[..., :half], x[..., half : 2 * half]) * angle
    return torch.cat([parts.real, parts.imag, x[..., 2 * half :]], dim=-1)


def decode64(*, q, k, v, slots, metadata, layout, state, variant=DEFAULT_VARIANT, sinks=None,
             offsets=None):
    """Output and what each slot and, last, the new token received; float64, head by head."""
    _, sequences, kv_heads, n, _ = slots.shape
    group = q.shape[1] // kv_heads
    slots = reference.unpack_slots(slots, layout)
    out, received = q.double(), torch.zeros(sequences, kv_heads, n + 1).double()
    for s, cached in enumerate(metadata[0].tolist()):
        for head in range(q.shape[1]):
            kv_head = head // group
            query, new = q[s, head].double(), k[s, kv_head].double()
            keys, values = slots[:, s, kv_head, :cached].double()
            if state is not None and state.ranks is not None:
                if state.smoothing is not None:
                    keys = state.smoothing.restored(
                        slots[0, s, :, :cached])[kv_head].double()
                keys = rotated(keys, state.ranks[s, kv_head, :cached], state.rope)
                query, new = (rotated(x, cached, state.rope) for x in (query, new))
            hidden = torch.zeros(cached + 1, dtype=torch.bool)
            if state is not None and state.eviction.window:
                place = int(metadata[1, s]) - 1
                hidden[:-1] = state.positions[s, kv_head, :cached] <= place - state.eviction.window
            offset = 0 if offsets is None else offsets[s, head].double()
            probabilities = weights64(torch.cat([keys, new[None]]) @ query + offset, hidden,
                                      dim=q.shape[-1], variant=variant,
                                      sink=None if sinks is None else sinks[head])
            out[s, head] = probabilities @ torch.cat([values, v[s, kv_head].double()[None]])
            received[s, kv_head, :cached] += probabilities[:-1]
            received[s, kv_head, n] += probabilities[-1]
    return out, received


def check_victims(taken, score, state, metadata):
    """The lowest score; of those that rounding cannot tell from it any, of equal ones the oldest.

    score is [sequences, kv_heads, slots]: float64, or float32 where it is exact.
    """
    cached, tokens, recent, full = metadata.tolist()
    for s, head in torch.cartesian_prod(*map(torch.arange, taken.shape)).tolist():
        slot = int(taken[s, head])
        if not full[s]:
            assert slot == cached[s]
            continue
        slack = 2e-5 if score.dtype == torch.float64 else 0
        window = state.eviction.window
        outside = [p <= tokens[s] - window if window else False
                   for p in state.positions[s, head].tolist()]
        scores = score[s, head].tolist()
        may = {t: (-1.0 if outside[t] else scores[t], p)
               for t, p in enumerate(state.positions[s, head, : cached[s]].tolist())
               if state.eviction.sinks <= p < tokens[s] - recent[s]}
        lowest = min(may.values())
        near = [t for t, (x, _) in may.items() if x <= lowest[0] + slack * (1 + abs(lowest[0]))]
        if slack == 0:
            near = [t for t in near if may[t] == lowest]
        assert slot in near


def check_decode(functions, case, *, ties=False, bound=2e-5):
    """Each function has `reference.decode_attention`'s signature."""
    state, metadata, layout = case["state"], case["metadata"], case["layout"]
    cached, tokens, _, full = metadata.long()
    expected, received = decode64(**case)
    rounding = torch.finfo(case["q"].dtype).eps / 2
    for function in functions:
        actual = {name: copied(x) for name, x in case.items()}
        out, taken = function(**actual)
        assert out.dtype == case["q"].dtype
        torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=bound)
        assert taken.shape == case["k"].shape[:2] and taken.dtype == torch.int64
        slots, place = copied(case["slots"]), taken[..., None]
        smoothing = None if state is None or state.ranks is None else state.smoothing
        for kind, ((held, records), new) in enumerate(zip(
                views(slots, layout), (case["k"], case["v"]), strict=True)):
            if smoothing is not None and kind == 0:
                new = smoothing.keys(new).to(new.dtype)
            new = new if records is None else reference.quantize_groups(new, records)
            held.scatter_(2, place[..., None].expand(-1, -1, 1, held.shape[-1]), new[:, :, None])
        if smoothing is None:
            assert same(actual["slots"], slots)
        else:  # sums in another order may be rounded to another code
            got, wanted = (reference.unpack_slots(
                x.gather(3, place[None, ..., None].expand(len(x), -1, -1, 1, x.shape[-1])), layout)
                for x in (actual["slots"], slots))
            step = (wanted.amax() - wanted.amin()) / layout.keys.levels
            assert ((got - wanted).abs() <= 1.01 * step).all()
        for name in "qkv":
            assert same(actual[name], case[name])
        assert same(actual["metadata"], metadata)
        if state is None:
            assert same(taken, cached[:, None].expand_as(taken).contiguous())
            continue
        scores = state.scores.double() * state.eviction.decay + received[..., :-1]
        score = state.scores * state.eviction.decay if ties else scores
        if state.eviction.mean:
            score = score / (tokens[:, None, None] - state.positions).clamp(min=1)
        check_victims(taken, score, state, metadata)
        after = actual["state"]
        torch.testing.assert_close(after.scores.double(),
                                   scores.scatter(2, place, received[..., -1:]), rtol=2e-5,
                                   atol=1e-7)
        new = (tokens - 1)[:, None, None].expand_as(place).int()
        assert same(after.positions, state.positions.scatter(2, place, new))
        if state.ranks is not None:
            for s, head in torch.cartesian_prod(*map(torch.arange, taken.shape)).tolist():
                held = range(int(cached[s] + 1 - full[s]))
                order = sorted(held, key=after.positions[s, head].tolist().__getitem__)
                assert after.ranks[s, head, order].tolist() == list(held)
            assert (after.ranks.masked_fill(after.positions != EMPTY, 0) == 0).all()
