"""GPU checks and timings of attention, eviction and quantized matrices.

Every new combination of dtype, bits and rows (rounded up to a power of two) is autotuned first, for
about 10 seconds. Checks share as many combinations with timings as they can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout
from flexgen_h2o.config.limits import MATRIX_TILE, MXFP4_GROUP
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.h2o.eviction import EMPTY, Cut, Eviction, EvictionState
from flexgen_h2o.h2o.policies import policy_named
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.kernels.reference import matrix as reference_matrix

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
GPU = "cuda"


class Product(NamedTuple):
    """A matmul to check."""

    dtype: torch.dtype
    rows: int
    outputs: int
    inputs: int
    form: str
    bias: bool
    add: bool


# Every value of each field, not every tuple: widths of published models, and some odd ones.
MATRICES = [
    Product(FP16, 1, 16384, 4096, "4 bits", True, False),
    Product(FP16, 1, 4096, 16384, "8 bits", False, True),
    Product(BF16, 2, 50272, 768, "4 bits", False, False),
    Product(FP32, 1, 3072, 768, "4 bits", True, True),
    Product(FP16, 3, 5632, 2048, "4 bits", False, True),
    Product(FP16, 16, 11008, 4096, "8 bits", True, True),
    Product(BF16, 16, 4096, 11008, "4 bits", True, False),
    Product(FP16, 64, 16384, 4096, "4 bits", True, True),
    Product(FP16, 50, 1001, 1003, "8 bits", False, False),
    Product(FP32, 13, 3072, 770, "8 bits", True, True),
    Product(FP16, 65, 16384, 4096, "4 bits", True, False),
    Product(BF16, 200, 1001, 1003, "8 bits", True, True),
    Product(BF16, 130, 4096, 11008, "4 bits", False, True),
    Product(FP16, 300, 11008, 4096, "4 bits", True, False),
    Product(FP16, 999, 4096, 11008, "8 bits", True, False),
    Product(FP32, 300, 768, 3072, "4 bits", False, True),
    Product(BF16, 600, 1001, 1003, "8 bits", True, True),
    Product(FP16, 1, 16384, 4096, "12 bits", True, False),
    Product(BF16, 7, 1001, 1003, "12 bits", False, True),
    Product(BF16, 65, 4096, 11008, "12 bits", True, True),
    Product(FP32, 3, 3072, 770, "12 bits", True, False),
    Product(BF16, 4, 5760, 2880, "MXFP4", True, False),
    Product(FP16, 300, 1001, 1003, "MXFP4", False, True),
]
CACHED = 200_000_000
"""Bytes of weights to rotate through: several times the L2 cache."""
FORMS = {"4 bits": {"bits": 4}, "8 bits": {"bits": 8}, "12 bits": {"bits": 12},
         "MXFP4": {"bits": 4, "group": MXFP4_GROUP, "mxfp4": True}}
"""Matrix formats: arguments of `MatrixLayout`."""


def matrix(outputs: int, inputs: int, form: str) -> QuantizedMatrix:
    """Return a matrix of random codes, with weights of both signs around 0.02."""
    layout = MatrixLayout(outputs, inputs, **FORMS[form])
    blocks = torch.randint(256, (layout.tiles, layout.groups, layout.block_bytes), device=GPU,
                           dtype=torch.uint8)
    if not layout.has_zeros:
        exponents = torch.randint(119, 123, blocks[..., :MATRIX_TILE].shape, device=GPU)
        blocks[..., :MATRIX_TILE] = exponents.to(torch.uint8)
        return QuantizedMatrix(blocks.view(-1), layout)
    scale = (torch.rand(layout.tiles, layout.groups, MATRIX_TILE,
                        device=GPU) + 0.5) * 0.08 / layout.levels
    header = torch.cat((scale, -scale * layout.levels / 2), -1).half()
    blocks[..., : 4 * MATRIX_TILE] = header.view(torch.uint8)
    return QuantizedMatrix(blocks.view(-1), layout)


def check_matrix(rows, case: Product) -> None:
    """Check a matmul against the reference in float32, and that it is deterministic."""
    weight = matrix(case.outputs, case.inputs, case.form)
    x = torch.randn(case.rows, case.inputs + 8, device=GPU).to(case.dtype)[:, : case.inputs]
    bias = torch.randn(case.outputs, device=GPU).to(case.dtype) if case.bias else None
    before = torch.randn(case.rows, case.outputs, device=GPU).to(case.dtype)
    if not case.add:
        before.fill_(float("nan"))
    expected, *results = before.float(), before.clone(), before.clone()
    reference_matrix.linear_quantized(x, weight, bias, expected, add=case.add)
    for out in results:
        ops.linear_quantized(x, weight, bias, out, add=case.add)
    wrong = error(results[0], expected) if torch.equal(*results) else float("nan")
    shape = f"{case.rows} x {case.inputs} x {case.outputs}, {case.form}"
    rows.add("check", "product", f"{shape}, bias {case.bias}, add {case.add}", case.dtype, wrong,
             "error", limit=BOUND[case.dtype])


def check_rows(rows) -> None:
    """Check that unpacked rows equal the reference, in any order."""
    for outputs, inputs, form in ((50272, 4096, "4 bits"), (49152, 576, "8 bits"),
                                  (1001, 1003, "4 bits"), (50272, 4096, "12 bits"),
                                  (1001, 1003, "12 bits"), (1001, 1003, "MXFP4")):
        weight = matrix(outputs, inputs, form)
        row_ids = torch.randint(outputs, (700,), device=GPU)
        for dtype in (FP16, FP32):
            right = reference_matrix.unpack_rows(weight.data, weight.layout, row_ids, dtype)
            wrong = (ops.unpack_rows(weight, row_ids, dtype) != right).sum().item()
            rows.add("check", "unpack", f"700 of {outputs} x {inputs}, {form}", dtype, wrong,
                     "differences", limit=0)


def _copies(size: int) -> int:
    return 1 + -(-CACHED // size)


def time_matrices(rows, timed: Callable[[list[Callable]], float], rate: float,
                  gemms: float) -> None:
    """Time quantized matmuls against PyTorch's in float16, rotating through several weights."""
    outputs, inputs = 16384, 4096
    plain = [torch.randn(outputs, inputs, device=GPU).mul_(0.02).half()
             for _ in range(_copies(2 * outputs * inputs))]
    quantized = {form: [matrix(outputs, inputs, form)
                        for _ in range(_copies(outputs * inputs * FORMS[form]["bits"] // 8))]
                 for form in ("4 bits", "8 bits", "12 bits")}
    for count in (1, 4, 16, 64, 128, 256, 512, 2048):
        x = torch.randn(count, inputs, device=GPU).half()
        out = x.new_empty(count, outputs)
        work = 2 * count * inputs * outputs / gemms
        shape = f"{count} x {inputs} x {outputs}"
        base = timed([lambda w=w, x=x: F.linear(x, w) for w in plain])
        roofline = max((plain[0].nbytes + x.nbytes + out.nbytes) / rate, work) * 1e3
        rows.add("time", "cuBLAS", shape, FP16, base, "ms", roofline_ms=roofline)
        for form, weights in quantized.items():
            seconds = timed([lambda w=w, x=x, out=out: ops.linear_quantized(x, w, None, out)
                             for w in weights])
            goal = 1.15 if count > 64 else 0.5 if count <= 16 and form == "4 bits" else None
            roofline = max((weights[0].data.nbytes + x.nbytes + out.nbytes) / rate, work) * 1e3
            rows.add("time", "product", f"{shape}, {form}", FP16, seconds, "ms",
                     limit=goal and goal * base, roofline_ms=roofline)


BOUND = {FP16: 3e-3, BF16: 2e-2, FP32: 2e-5}
"""Bounds of the relative error of outputs, by dtype."""
SCORES_BOUND = {FP16: 2e-3, BF16: 2e-3, FP32: 2e-5}

# dtype, head_dim, group, bits, rotary dimensions, slots: every value, not every tuple.
DECODES = [
    (FP16, 128, 1, 16, 0, 1024), (FP16, 64, 4, 16, 0, 1000), (BF16, 80, 1, 16, 0, 513),
    (BF16, 96, 8, 16, 0, 2048), (FP16, 256, 8, 16, 0, 777), (BF16, 128, 4, 16, 128, 1024),
    (FP16, 80, 1, 16, 20, 600), (FP16, 128, 1, 4, 0, 1024), (BF16, 128, 4, 4, 0, 1024),
    (BF16, 64, 8, 8, 0, 640), (FP16, 96, 1, 8, 0, 900), (BF16, 256, 1, 4, 0, 300),
    (FP16, 80, 4, 4, 80, 511), (FP32, 128, 1, 16, 0, 700), (FP32, 64, 4, 16, 64, 700),
    (BF16, 128, 1, 16, 0, 32768), (FP16, 128, 8, 16, 0, 32768), (BF16, 128, 4, 16, 128, 20000),
]
# dtype, head_dim, group, decay, rows of each sequence, keys of each.
PREFILLS = [
    (FP16, 128, 1, 1.0, [4096], [4096]), (BF16, 128, 4, 0.98, [4096, 77, 1, 2049], None),
    (FP16, 64, 8, 1.0, [1025, 3000], None), (BF16, 80, 1, 1.0, [2048], None),
    (FP16, 96, 4, 0.9, [1500, 600], [1500, 4096]), (BF16, 256, 1, 1.0, [1100], None),
    (FP32, 128, 1, 1.0, [1024], None), (FP16, 128, 4, 0.98, [512, 1], [4096, 4000]),
]
# dtype, head_dim, bits, length, heavy, recent, mean.
SELECTIONS = [
    (FP16, 128, 16, 32768, 1024, 128, False), (BF16, 64, 4, 4096, 409, 409, True),
    (FP16, 96, 8, 20000, 8192, 1000, False), (BF16, 256, 16, 131072, 8192, 64, True),
    (FP32, 80, 16, 777, 100, 600, False), (FP16, 80, 4, 1000, 0, 200, False),
]


def normal(*shape: int, dtype=FP32) -> torch.Tensor:
    return torch.randn(shape, device=GPU).to(dtype)


def error(x: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the 2-norm; NaN if there is a NaN."""
    return ((x.double() - expected.double()).norm() / expected.double().norm()).item()


def decode_case(dtype, dim, group, bits, rotary, slots, *, sequences=3, kv_heads=4, full=True,
                free=5) -> dict:
    """Return arguments of a decode step; scores are far apart, so rounding changes no eviction."""
    layout = CacheLayout.from_bits(dim, bits)
    shape = (sequences, kv_heads, slots)
    vectors = normal(2, *shape, dim, dtype=dtype)
    vectors = reference.pack_slots(vectors, layout)
    cached = torch.tensor([slots - free * s for s in range(sequences)], device=GPU)
    empty = (torch.arange(slots, device=GPU) >= cached[:, None])[:, None]
    vectors.masked_fill_(empty[..., None], float("nan") if layout is None else 255)
    order = torch.rand(shape, device=GPU).argsort(-1)
    positions = order.argsort(-1).int().masked_fill_(empty, EMPTY)
    ranks = positions.argsort(-1).argsort(-1).int().masked_fill_(empty, 0) if rotary else None
    scores = torch.rand(shape, device=GPU).argsort(-1) * 0.25
    angles = torch.rand(slots + 1, max(1, rotary // 2), device=GPU) * 6
    state = EvictionState(Eviction(sinks=2), scores.masked_fill_(empty, 0), positions, ranks,
                          (angles.cos(), angles.sin()) if rotary else None)
    metadata = torch.stack([cached, cached * 0 + slots + 1, cached * 0 + 9,
                            cached * 0 + int(full)]).int()
    k, v = normal(2, sequences, kv_heads, dim, dtype=dtype)
    return {"q": normal(sequences, kv_heads * group, dim, dtype=dtype), "k": k, "v": v,
            "slots": vectors, "metadata": metadata, "layout": layout, "state": state}


def twin(case: dict) -> dict:
    """Copy the arguments that a step changes."""
    state = case["state"]
    copy = EvictionState(state.eviction, state.scores.clone(), state.positions.clone(),
                         None if state.ranks is None else state.ranks.clone(), state.rope)
    return case | {"slots": case["slots"].clone(), "state": copy}


def check_decode(rows, dtype, dim, group, bits, rotary, slots) -> None:
    shape = f"d {dim}, group {group}, {bits} bits, rotary {rotary}, {slots} slots"
    for full in (True, False):
        case = decode_case(dtype, dim, group, bits, rotary, slots, full=full, free=5 if full else 7)
        if not full:
            case["metadata"][0] -= 1  # a free slot for the new token
            case["state"].scores[:, :, -1] = 0
            case["state"].positions[:, :, -1] = EMPTY
        other = twin(case)
        before = case["state"].scores.clone()
        expected, place = reference.decode_attention(**case)
        out, written = ops.decode_attention(**other)
        state, right = other["state"], case["state"]
        same = torch.equal(written, place) and torch.equal(state.positions, right.positions)
        same &= bool((other["slots"].nan_to_num() == case["slots"].nan_to_num()).all())
        same &= state.ranks is None or torch.equal(state.ranks, right.ranks)
        rows.add("check", "decode", shape, dtype, error(out, expected) if same else float("nan"),
                 "error", limit=BOUND[dtype])
        gained = state.scores - before, right.scores - before
        untouched = torch.ones_like(before, dtype=torch.bool).scatter_(-1, place[..., None], False)
        # An attention score of thousands leaves few digits for what one query adds.
        largest = (gained[0] - gained[1])[untouched].abs().max().item()
        rows.add("check", "scores", shape, dtype, largest, "largest error",
                 limit=SCORES_BOUND[dtype] * group + 2e-3 * (slots > 8192) + 2e-4)


def check_prefill(rows, dtype, dim, group, decay, lengths, keys) -> None:
    keys, kv_heads = keys or lengths, 2
    q = normal(sum(lengths), kv_heads * group, dim, dtype=dtype)
    k, v = normal(2, kv_heads, sum(keys), dim, dtype=dtype).transpose(1, 2)
    scores = torch.rand(kv_heads, sum(keys), device=GPU)
    right = scores.clone()
    expected = reference.prefill_attention(q.float(), k.float(), v.float(), lengths,
                                           key_lengths=keys, scores=right, decay=decay)
    results = []
    for _ in range(2):
        received = scores.clone()
        results.append((ops.prefill_attention(q, k, v, lengths, key_lengths=keys, scores=received,
                                              decay=decay), received))
    same = all(torch.equal(*pair) for pair in zip(*results, strict=True))
    out, received = results[0]
    shape = f"d {dim}, group {group}, decay {decay}, rows {'+'.join(map(str, lengths))}"
    rows.add("check", "prefill", shape, dtype, error(out, expected) if same else float("nan"),
             "error", limit=BOUND[dtype])
    rows.add("check", "scores", shape, dtype, error(received, right), "error",
             limit=SCORES_BOUND[dtype])


def check_selection(rows, dtype, dim, bits, length, heavy, recent, mean) -> None:
    layout, kv_heads = CacheLayout.from_bits(dim, bits), 2
    cuts = [Cut(length, heavy, recent), Cut(5, heavy, recent), Cut(length // 2, heavy // 2, 3)]
    total = sum(cut.length for cut in cuts)
    k, v = normal(2, total, kv_heads, dim, dtype=dtype)
    scores = torch.rand(kv_heads, total, device=GPU).mul(5000).round() / 7  # with ties
    slots = max(Eviction(sinks=4).num_cached(cut) for cut in cuts) + 3
    cases = []
    for module in (reference, ops):
        shape = (len(cuts), kv_heads, slots)
        eviction = Eviction(policy_named("mean" if mean else "sum"), sinks=4)
        state = EvictionState(eviction, torch.full(shape, float("nan"), device=GPU),
                              *torch.full((2, *shape), -7, dtype=torch.int32, device=GPU))
        slots_before = torch.full((2, *shape, dim if layout is None else layout.width), 77,
                                  device=GPU, dtype=dtype if layout is None else torch.uint8)
        module.select_heavy_hitters(k, v, scores, cuts=cuts, slots=slots_before, state=state,
                                    layout=layout)
        cases.append((slots_before, state.scores, state.positions, state.ranks))
    wrong = sum((a != b).sum().item() for a, b in zip(*cases, strict=True))
    rows.add("check", "select", f"d {dim}, {bits} bits, {heavy} of {length}, mean {mean}", dtype,
             wrong, "differences", limit=0)


def check_groups(rows) -> None:
    for dtype in (FP16, BF16, FP32):
        for dim in (64, 80, 96, 128, 256):
            for bits in (8, 4):
                layout = GroupLayout(dim, bits)
                x = normal(1000, 3, dim, dtype=dtype) * torch.tensor([1, 1e-6, 1e4], device=GPU)[
                    :, None].to(dtype)
                right = reference.quantize_groups(x, layout)
                wrong = (ops.quantize_groups(x, layout) != right).sum() + (
                    ops.dequantize_groups(right, layout)
                    != reference.dequantize_groups(right, layout)).sum()
                rows.add("check", "groups", f"d {dim}, {bits} bits", dtype, wrong.item(),
                         "differences", limit=0)


def time_decode(rows, timed: Callable[..., float], rate: float, sequences: int, slots: int,
                bits: int, goal: float) -> None:
    layout = CacheLayout.from_bits(128, bits)
    cases = [decode_case(FP16, 128, 1, bits, 0, slots, sequences=sequences, kv_heads=32, free=0)
             for _ in range(2)]
    milliseconds = timed([lambda case=case: ops.decode_attention(**case) for case in cases])
    roofline = cases[0]["slots"].nbytes / rate * 1e3
    shape = f"batch {sequences}, 32 heads, d 128, {slots} slots, {bits} bits"
    rows.add("time", "decode", shape, FP16, milliseconds, "ms", roofline_ms=roofline,
             limit=roofline / goal if layout is None else None)


def time_prefill(rows, timed: Callable[..., float], gemms: float, dtype) -> None:
    length, heads = 4096, 32
    q, k, v = normal(3, length, heads, 128, dtype=dtype)
    scores = torch.zeros(heads, length, device=GPU)
    flat = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    flash = timed([lambda: F.scaled_dot_product_attention(*flat, is_causal=True)])
    scored = timed([lambda: ops.prefill_attention(q, k, v, [length], scores=scores)])
    alone = timed([lambda: ops.prefill_attention(q, k, v, [length], key_lengths=[length])])
    roofline = 2 * length**2 * 128 * heads / gemms * 1e3
    shape = f"{heads} heads, d 128, s {length}"
    rows.add("time", "flash SDPA", shape, dtype, flash, "ms", roofline_ms=roofline)
    rows.add("time", "prefill", f"{shape}, no scores", dtype, alone, "ms", roofline_ms=roofline)
    rows.add("time", "prefill", f"{shape}, scores", dtype, scored, "ms", limit=1.8 * flash,
             roofline_ms=1.5 * roofline)


def time_selection(rows, timed: Callable[..., float], rate: float) -> None:
    length, heavy, kv_heads = 32768, 1024, 32
    key_value_bytes = 2 * length * kv_heads * 128 * 2
    sequences = max(1, min(8, torch.cuda.mem_get_info()[0] // (2 * key_value_bytes)))
    k, v = normal(2, sequences * length, kv_heads, 8, dtype=FP16).repeat(1, 1, 1, 16)
    scores = torch.rand(kv_heads, sequences * length, device=GPU) ** 4
    shape = (sequences, kv_heads, heavy)
    state = EvictionState(Eviction(), torch.empty(shape, device=GPU),
                          torch.empty(shape, dtype=torch.int32, device=GPU))
    slots = torch.empty((2, *shape, 128), dtype=FP16, device=GPU)
    cuts = [Cut(length, heavy, 0)] * sequences
    milliseconds = timed([lambda: ops.select_heavy_hitters(k, v, scores, cuts=cuts, slots=slots,
                                                           state=state)])
    roofline = (scores.nbytes + slots.nbytes) / rate * 1e3
    rows.add("time", "select", f"batch {sequences}, {kv_heads} heads, {heavy} of {length}", FP16,
             milliseconds, "ms", limit=2 * roofline, roofline_ms=roofline)
