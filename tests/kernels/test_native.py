"""The C++ library: instruction sets, threads, memory, and missing or damaged builds."""

import functools
import logging
import os
import resource
import runpy
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import kernel_internals
from helpers.kernel_cases import (
    AVAILABLE,
    BOUND,
    BUILT,
    FORMS,
    MIXED,
    SETS,
    check_decode,
    check_prefill,
    check_select,
    copied,
    decode_case,
    poisoned_memory,
    prefill_case,
    same,
    select_case,
    threads,
    using,
)
from helpers.selection import examples, full
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.eviction import Cut, Eviction
from flexgen_h2o.kernels import abi, ops
from flexgen_h2o.kernels.arguments import EvictionArguments, QuantizedMatrix
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.kernels.reference import matrix as reference_matrix


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    monkeypatch.delenv("FLEXGEN_H2O_KERNELS", raising=False)
    with poisoned_memory():
        yield


@pytest.mark.source("prefill")
@BUILT
def test_prefill_restores_flush_to_zero(isa):
    """Kernels may take them for zeros; what follows them may not."""
    tiny = torch.full((64,), 2.0**-130)
    for count in (1, 2):
        with threads(count):
            native.prefill_attention(**prefill_case([70], dtype=torch.bfloat16) | {
                "key_lengths": [70]})
            assert ((tiny * 0.5) * 2.0**120 == 2.0**-11).all()


@BUILT
@given(dim=st.integers(1, 140).map(lambda half: 2 * half), bits=st.sampled_from([4, 8]),
       size=st.sampled_from([1.0, 1e-6, 3e-8, 1e5]), offset=st.sampled_from([0, 0, 3.5, -9e4]),
       dtype=st.sampled_from(list(BOUND)), name=st.sampled_from(SETS or ("none",)),
       seed=st.integers(0, 999))
@settings(max_examples=examples(200))
def test_quantized_groups_equal_the_reference(dim, bits, size, offset, dtype, name, seed):
    torch.default_generator.manual_seed(seed)
    layout = GroupLayout(dim, bits)
    x = (torch.randn(3, 5, dim + 3) * size + offset).to(dtype)[..., :dim].transpose(0, 1)
    x[0] = x[0, 0, 0]
    with using(name):
        records = ops.quantize_groups(x, layout)
        out = ops.dequantize_groups(records, layout)
    assert same(records, reference.quantize_groups(x, layout))
    assert same(out, reference.dequantize_groups(records, layout))
    wide = torch.full((5, 3, layout.nbytes + 3), 255, dtype=torch.uint8)
    strided = wide[..., 1 : 1 + layout.nbytes].copy_(records)
    with using(name):
        assert same(ops.dequantize_groups(strided, layout), out)


@BUILT
def test_unknown_kernels_are_named(monkeypatch):
    for name in {"avx1024", *cpu_library.SETS} - {*cpu_library.cpu_sets()}:
        monkeypatch.setenv("FLEXGEN_H2O_ISA", name)
        with pytest.raises(UserError, match=f"FLEXGEN_H2O_ISA={name}: this machine has portable"):
            ops.prefill_attention(**prefill_case([3]))
    monkeypatch.setenv("FLEXGEN_H2O_ISA", "")
    assert cpu_library.instruction_set() in AVAILABLE
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "native")
    with pytest.raises(UserError, match="FLEXGEN_H2O_KERNELS=native: it must be reference"):
        ops.prefill_attention(**prefill_case([3]))


def test_unbuilt_isa_is_never_chosen(monkeypatch):
    def mask(*names):
        return lambda: sum(1 << cpu_library.SETS.index(name) for name in names)

    class Library:
        h2o_isa_cpu = staticmethod(mask("portable", "avx2", "avx512", "avx512vnni"))
        h2o_isa_built = staticmethod(mask("portable", "avx2", "avx512bf16"))
        h2o_isa_available = staticmethod(mask("portable", "avx2"))

    kernel_internals.load_library(monkeypatch, Library)
    monkeypatch.delenv("FLEXGEN_H2O_ISA", raising=False)
    assert cpu_library.instruction_set() == "avx2"
    monkeypatch.setenv("FLEXGEN_H2O_ISA", "avx512")
    with pytest.raises(UserError, match="built for portable, avx2, avx512bf16; reinstall with "
                                        "FLEXGEN_H2O_BUILD=all"):
        cpu_library.instruction_set()
    monkeypatch.setenv("FLEXGEN_H2O_ISA", "avx512bf16")
    with pytest.raises(UserError, match="this machine has portable, avx2, avx512, avx512vnni$"):
        cpu_library.instruction_set()


# Arguments: what does not hold together is refused, and nothing is written


def by_fields(function):
    """The function with the fields of `EvictionArguments` as arguments, its scores by a name of
    their own."""
    @functools.wraps(function)
    def call(*, kept_scores, **named):
        eviction = {name: named.pop(name) for name in EvictionArguments._fields[1:]
                    if name in named}
        return function(**named, eviction=EvictionArguments(kept_scores, **eviction))

    return call


def by_bytes(function):
    """The function with the bytes and the sizes of its matrix as arguments."""
    @functools.wraps(function)
    def call(*, data, outputs, inputs, **named):
        return function(matrix=QuantizedMatrix(data, MatrixLayout(outputs, inputs, 4)), **named)

    return call


def calls():
    """Of every operation of `native`, its arguments by name."""
    prompt = prefill_case([5, 2], [7, 2])
    yield native.prefill_attention, dict(
        q=prompt["q"], k=prompt["k"], v=prompt["v"], lengths=[5, 2], key_lengths=[7, 2],
        scores=prompt["scores"], decay=0.9)
    cut = select_case([Cut(9, 2, 3), Cut(2, 1, 1)], rolls=True)
    state = cut["state"]
    yield by_fields(native.select_heavy_hitters), dict(
        k=cut["k"], v=cut["v"], scores=cut["scores"], cuts=[9, 2, 3, 2, 1, 1], slots=cut["slots"],
        layout=None, kept_scores=state.scores, positions=state.positions, ranks=state.ranks,
        sinks=1)
    case = decode_case([9, 3], full=(0,), eviction=Eviction(), rotary=8)
    state = case["state"]
    yield by_fields(native.decode_attention), dict(
        q=case["q"], k=case["k"], v=case["v"], slots=case["slots"], metadata=case["metadata"],
        layout=None, kept_scores=state.scores, positions=state.positions, ranks=state.ranks,
        cos=state.rope[0], sin=state.rope[1], decay=0.9, sinks=1)
    layout = MatrixLayout(20, 64, 4)
    weight = torch.randn(20, 64)
    data = reference_matrix.quantize_matrix(weight, layout)
    held = dict(data=data, outputs=20, inputs=64)
    yield by_bytes(native.quantize_matrix), held | dict(weight=weight, data=data.clone())
    yield by_bytes(native.unpack_rows), held | dict(rows=torch.tensor([3, 19]), dtype=torch.float32)
    yield by_bytes(native.linear_quantized), held | dict(
        x=torch.randn(3, 64), bias=torch.randn(20), out=torch.randn(3, 20), add=True)
    groups = GroupLayout(64, 4)
    yield native.quantize_groups, dict(x=torch.randn(3, 64), layout=groups)
    yield native.dequantize_groups, dict(
        packed=reference.quantize_groups(torch.randn(3, 64), groups), layout=groups)
    for function in (native.linear_skinny, native.linear_float32):
        yield function, dict(
            x=torch.randn(3, 64).bfloat16(), weight=torch.randn(20, 64).bfloat16(),
            bias=torch.randn(20).bfloat16(), out=torch.randn(3, 20).bfloat16(), add=False)


def spoiled(x):
    """A tensor that is wrong in one way: its dtype, one of its sizes, its device, its strides."""
    yield x.double() if x.is_floating_point() else x.to(torch.int16)
    yield x.to("meta")
    for dim in range(x.dim()):
        yield torch.cat([x, x.narrow(dim, 0, 1)], dim)
        if x.shape[dim] > 1:
            yield x.narrow(dim, 1, x.shape[dim] - 1)
    yield x[None]


# Other sizes of these may go: nothing else says how many there are, or they fill up the same tiles.
FREE = {("unpack_rows", "rows"), ("quantize_groups", "x"), ("dequantize_groups", "packed"),
        ("quantize_matrix", "weight")}


@BUILT
def test_invalid_tensors_raise_and_write_nothing():
    refused = 0
    for function, arguments in calls():
        name = function.__name__
        function(**{key: copied(x) for key, x in arguments.items()})  # valid arguments are accepted
        for key, x in arguments.items():
            for bad in spoiled(x) if isinstance(x, torch.Tensor) else ():
                if (name, key) in FREE and bad.dtype == x.dtype and bad.is_cpu:
                    continue
                changed = {other: copied(y) for other, y in arguments.items()} | {key: bad}
                before = {other: copied(y) for other, y in changed.items()}
                with pytest.raises((ValueError, UserError)):
                    function(**changed)
                refused += 1
                assert all(same(y, before[other]) for other, y in changed.items()
                           if isinstance(y, torch.Tensor) and y.is_cpu)
    assert refused > 200


@BUILT
@pytest.mark.parametrize(("name", "change"), [
    ("prefill_attention", dict(lengths=[5, 3])), ("prefill_attention", dict(key_lengths=[2, 7])),
    ("prefill_attention", dict(lengths=[-1, 8])),
    ("select_heavy_hitters", dict(cuts=[9, 2, 3, 2, 1])),
    ("select_heavy_hitters", dict(cuts=[9, 99, 3, 2, 1, 1], sinks=0)),
    ("select_heavy_hitters", dict(cuts=[9, -2, 3, 2, 1, 1])),
    ("select_heavy_hitters", dict(layout=CacheLayout.from_bits(16, 8))),
    ("decode_attention", dict(layout=CacheLayout.from_bits(16, 8, 4))),
    ("decode_attention", dict(layout=CacheLayout.from_bits(18, 4))),
    ("decode_attention", dict(positions=None)), ("decode_attention", dict(cos=None)),
    ("quantize_matrix", dict(weight=torch.randn(33, 64))), ("linear_quantized", dict(inputs=128)),
    ("linear_quantized", dict(outputs=40)),
    ("unpack_rows", dict(rows=torch.tensor([20]))), ("unpack_rows", dict(rows=torch.tensor([-1]))),
    ("dequantize_groups", dict(layout=GroupLayout(66, 4)))])
def test_wrong_values_raise(name, change):
    function, arguments = next(one for one in calls() if one[0].__name__ == name)
    with pytest.raises((ValueError, UserError), match=f"{name}|cannot quantize"):
        function(**arguments | change)


@pytest.mark.source("decode")
@BUILT
@pytest.mark.parametrize("metadata", [
    [(-1, 3), (10, 10), (3, 3), (0, 0)],  # fewer than none are cached
    [(1 << 20, 3), (10, 10), (3, 3), (0, 0)],
    ["full", (10, 10), (3, 3), (0, 0)],  # no slot is free, and nothing is evicted
    [(0, 3), (10, 10), (3, 3), (1, 0)],  # there is nothing to evict
])
def test_decode_metadata_out_of_range_is_an_error(isa, metadata):
    case = decode_case([9, 3], eviction=Eviction())
    slots, state = case["slots"], case["state"]
    cached = (slots.shape[3], 3) if metadata[0] == "full" else metadata[0]
    case["metadata"] = torch.tensor([cached, *metadata[1:]], dtype=torch.int32)
    before = copied(slots), copied(state)
    for held in (state, None):
        if held is None and metadata[3][0]:
            continue  # without an eviction state nothing is evicted
        with pytest.raises(ValueError, match="out of range"):
            ops.decode_attention(**case | {"state": held})
    assert same(slots, before[0]) and same(state.scores, before[1].scores)


@BUILT
def test_ranks_out_of_range_are_errors():
    for rank in (-1, 1 << 20):
        case = decode_case([9, 3], eviction=Eviction(), rotary=8)
        case["state"].ranks[1, 0, 2] = rank
        with pytest.raises(ValueError, match="out of range"):
            ops.decode_attention(**case)


# Threads


def results(function, case) -> list[torch.Tensor]:
    """All that a call returns or changes."""
    arguments = {name: copied(x) for name, x in case.items()}
    out = function(**arguments)
    state = arguments.get("state")
    outputs = list(out) if isinstance(out, tuple) else [out]
    outputs += [arguments.get("slots"), arguments.get("scores")]
    outputs += [] if state is None else [state.scores, state.positions, state.ranks]
    return [x for x in outputs if x is not None]


def some_calls():
    """Calls that are large enough for several threads, in each stored."""
    for dtype in BOUND:
        for lengths in (([1100],), ([9, 1, 150, 33],), ([100], [400])):
            yield ops.prefill_attention, prefill_case(*lengths, group=3, dtype=dtype, dim=24)
    for number, stored in enumerate((*FORMS, *MIXED)):
        for cached in ([1000], [70, 300, 5]):
            yield ops.decode_attention, decode_case(cached, full=(0,), stored=stored,
                                                    rotary=8 * (number % 2), kv_heads=1, n=1100,
                                                    group=3, eviction=Eviction(decay=0.9))
        cuts = [Cut(700, 90, 80), Cut(3, 1, 1), Cut(90, 9, 9)]
        yield ops.select_heavy_hitters, select_case(cuts, stored=stored, rolls=True)
    for stored, heads in ((torch.float32, 5), (8, 16)):
        yield ops.decode_attention, decode_case([2000, 300], stored=stored, n=2100, kv_heads=heads,
                                                dim=12, eviction=Eviction())
    for stored in (torch.bfloat16, 4):
        yield ops.decode_attention, decode_case([1000, 3, 40, 0] * 20, stored=stored)
    for bits in (4, 8):
        yield ops.quantize_groups, {"x": torch.randn(999, 96), "layout": GroupLayout(96, bits)}


@BUILT
def test_results_do_not_depend_on_threads(isa):
    for function, case in some_calls():
        with threads(1):
            alone = results(function, case)
        for count in (2, 3):
            with threads(count):
                for one, other in zip(alone, results(function, case), strict=True):
                    assert same(one, other)


@BUILT
def test_results_do_not_depend_on_other_calls(isa):
    calls = [*some_calls()][::4]
    expected = [results(*call) for call in calls]
    with ThreadPoolExecutor(3) as pool:
        for outputs, alone in zip(pool.map(lambda call: results(*call), calls), expected,
                                strict=True):
            assert all(map(same, outputs, alone))


# Memory


@contextmanager
def address_space(extra: int):
    """No more than `more` bytes beyond what the process has mapped."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("reads Linux's /proc")
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(status.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@BUILT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prompt_takes_little_memory(dtype):
    """All weights of one of its heads would be 256 MB; it takes no more than 64."""
    case = prefill_case([8192], kv_heads=1, dim=8, dtype=dtype)
    with address_space(64 << 20):
        ops.prefill_attention(**case)


@BUILT
@pytest.mark.parametrize("dtype", [torch.bfloat16, *full(torch.float32, torch.float16)])
def test_no_memory_for_a_call(dtype):
    """It is said, nothing has changed, and the next call has its memory back."""
    rows = 1 << 27  # each workspace would be 512 MB or more
    q, k = torch.randn(1, 1, 8).to(dtype), torch.randn(1, 1, 8).to(dtype).expand(rows, 1, 8)
    scores, kept = torch.zeros(1, rows), select_case([Cut(9, 2, 3)], stored=dtype, kv_heads=1)
    state, wide = kept["state"], decode_case([1], kv_heads=1, stored=dtype)
    before = copied(state)
    wide["slots"] = wide["slots"][:, :, :, :1].expand(2, 1, 1, rows, 16)
    with address_space(32 << 20):
        for given in (scores, None):
            with pytest.raises(MemoryError, match="workspace of prefill_attention"):
                native.prefill_attention(q, k, k, [1], [rows], given, 1.0)
        with pytest.raises(MemoryError, match="workspace of select_heavy_hitters"):
            native.select_heavy_hitters(
                k, k, scores, cuts=[rows, 2, 3], slots=kept["slots"][..., :8], layout=None,
                eviction=EvictionArguments.from_state(state))
        with pytest.raises(MemoryError, match="workspace of decode_attention"):
            native.decode_attention(
                wide["q"], wide["k"], wide["v"], slots=wide["slots"],
                metadata=wide["metadata"], layout=None, eviction=EvictionArguments())
    assert same(before.scores, state.scores)
    check_decode([ops.decode_attention], decode_case([1], kv_heads=1, stored=dtype))


@BUILT
def test_calls_give_their_memory_back():
    case = prefill_case([64], kv_heads=1) | {"scores": torch.zeros(1, 64)}
    wide = decode_case([3], n=1 << 16)  # a workspace of some MB a call
    with address_space(200 << 20):
        for _ in range(200):
            ops.decode_attention(**wide)
            ops.prefill_attention(**case)


# What can be missing


@pytest.fixture
def reloaded(monkeypatch, caplog):
    """Return a function that loads the kernels again, from `file`."""
    def load(file=None):
        if file is not None:
            monkeypatch.setenv("FLEXGEN_H2O_NATIVE", str(file))
        kernel_internals.forget_kernels()
        caplog.clear()

    caplog.set_level(logging.INFO)
    yield load
    monkeypatch.undo()
    load()


def check_fallback(caplog, reason: str):
    """Every operation runs, as the reference, and the log has one line."""
    case = decode_case([4, 0], eviction=Eviction())
    check_decode([ops.decode_attention], case)
    check_prefill([ops.prefill_attention], prefill_case([4, 1]))
    check_select([ops.select_heavy_hitters], select_case([Cut(9, 2, 3)]))
    layout = GroupLayout(12, 4)
    ops.dequantize_groups(ops.quantize_groups(torch.randn(2, 12), layout), layout)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "\n" not in lines[0]
    assert lines[0].startswith("attention and eviction run in plain PyTorch on cpu, slowly: ")
    assert reason in lines[0]


def test_no_library(reloaded, caplog, monkeypatch):
    kernel_internals.hide_library(monkeypatch)
    reloaded()
    check_fallback(caplog, "the C++ kernels were not built (pip install found no g++ 11 or newer "
                           "that works)")


@pytest.mark.parametrize(("content", "reason"), [
    (None, "_cpu.so"), (b"", "the C++ kernels cannot be loaded: "),
    (b"\x7fELF" + bytes(60), "the C++ kernels cannot be loaded: "),
    (Path(torch._C.__file__), "h2o_abi")])
def test_library_that_cannot_be_used(reloaded, caplog, tmp_path, content, reason):
    """A missing file, two that are no library, and one without the kernels."""
    file = content if isinstance(content, Path) else tmp_path / "_cpu.so"
    if isinstance(content, bytes):
        file.write_bytes(content)
    reloaded(file)
    check_fallback(caplog, reason)


@BUILT
def test_a_library_built_from_other_sources(reloaded, caplog, monkeypatch):
    monkeypatch.setattr(abi, "FINGERPRINT", "0123456789abcdef")
    reloaded()
    check_fallback(caplog, "was built from other sources: install again")


@pytest.mark.parametrize("file, old, new", [
    ("kernels/abi.py", "rows inputs outputs", "rows outputs inputs"),
    ("kernels/abi.py", "const void*: x weight", "void*: x weight"),
    ("config/limits.py", "SLOT_TILE = 64", "SLOT_TILE = 32")])
def test_changed_struct_or_limit_changes_the_fingerprint(tmp_path, file, old, new):
    """Also one that leaves the size of a struct as it was."""
    for name in ("kernels/abi.py", "config/limits.py"):
        source = Path(abi.__file__).parents[1].joinpath(name).read_text(encoding="utf-8")
        assert name != file or old in source
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(source.replace(old, new) if name == file else source)
    changed = runpy.run_path(str(tmp_path / "kernels" / "abi.py"))
    assert changed["FINGERPRINT"] != abi.FINGERPRINT
    assert changed["header"]() != abi.header()


@BUILT
def test_library_loads_while_sysconfig_is_being_read(reloaded, monkeypatch):
    monkeypatch.setattr(sysconfig, "_CONFIG_VARS", {})  # its value during that call
    reloaded()
    assert cpu_library.missing() is None
