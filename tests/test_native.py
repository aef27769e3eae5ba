"""What is special to the C++: instruction sets, threads, memory, and what can be missing."""

import ctypes
import logging
import os
import sysconfig
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BOUND,
    FORMS,
    check_decode,
    check_prefill,
    check_select,
    copied,
    decode_case,
    poisoned_memory,
    prefill_case,
    same,
    select_case,
    tied,
)

from flexgen_h2o.kernels import library, native, ops, reference
from flexgen_h2o.kernels.eviction import Cut, Eviction
from flexgen_h2o.storage.quantization import GroupLayout

BUILT = pytest.mark.skipif(native.missing() is not None, reason="the C++ kernels were not built")
BEST = 0 if native.missing() else native._library().h2o_isa_best()


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    monkeypatch.delenv("FLEXGEN_H2O_KERNELS", raising=False)
    with poisoned_memory():
        yield


@contextmanager
def using(name: str):
    """The kernels of an instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXGEN_H2O_ISA", name)
        yield


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.skipif(
    place > BEST, reason="not on this CPU")) for place, name in enumerate(native.SETS)])
def isa(request):
    with using(request.param):
        yield request.param


# Instruction sets: a vector has 4, 8 or 16 floats, and the rests of one have their own code.


@BUILT
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 12), (4, 80), (8, 96), (3, 7), (1, 130)])
def test_prefill(isa, dtype, group, dim):
    for lengths in ([1, 2, 15, 16, 17, 31, 33], [63 // group, 64 // group + 1, 129]):
        check_prefill([ops.prefill_attention, library_prefill],
                      prefill_case(lengths, group=group, dim=dim, dtype=dtype, decay=0.97,
                                   kv_heads=2 if group < 4 else 1))
    check_prefill([library_prefill], prefill_case([40, 1], [300, 127], group=group, dim=dim,
                                                  dtype=dtype, decay=0.5))


def library_prefill(q, k, v, lengths, *, key_lengths, mass, decay):
    """The C++ also where `ops` prefers PyTorch's own kernels."""
    return library.prefill_attention(q, k, v, lengths, key_lengths or lengths, mass, decay)


@BUILT
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 12), (4, 80), (8, 96), (2, 128), (5, 256),
                                            (7, 130), (1, 6), (4, 148)])
def test_decode(isa, form, group, dim):
    for rotary in (0, dim // 4 * 2):
        check_decode([ops.decode_attention], decode_case(
            [0, 1, 7, 66, 131], full=(3, 4), form=form, group=group, dim=dim, rotary=rotary,
            eviction=Eviction(mean=rotary > 0, sinks=1), kv_heads=1))
    check_decode([ops.decode_attention], decode_case([19, 2], form=form, group=group, dim=dim))


@BUILT
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cached", [[257], [513, 0], [2000]], ids=str)
def test_decode_in_parts(isa, form, cached):
    for group in (1, 6):
        check_decode([ops.decode_attention], decode_case(
            cached, full=(0,), form=form, group=group, dim=64, kv_heads=1, n=2000,
            eviction=Eviction(decay=0.9)))


@BUILT
@pytest.mark.parametrize("mean", [False, True])
def test_of_equal_scores_the_oldest_goes(isa, mean):
    for cached in ([3, 15, 16, 17, 33], [700]):
        check_decode([ops.decode_attention], decode_case(
            cached, full=range(len(cached)), recent=2, kv_heads=4, ties=True,
            eviction=Eviction(mean=mean)), ties=True)


@BUILT
@pytest.mark.parametrize("scores", [torch.randn, tied, None])
@pytest.mark.parametrize("form", FORMS)
def test_select(isa, scores, form):
    cuts = [Cut(5, 1, 1), Cut(64, 20, 3), Cut(333, 100, 0), Cut(7, 9, 9)]
    check_select([ops.select_heavy_hitters],
                 select_case(cuts, form=form, dim=20, scores=scores, rolls=True,
                             eviction=Eviction(mean=form == 8, sinks=2)))


@BUILT
@given(dim=st.integers(1, 140).map(lambda half: 2 * half), bits=st.sampled_from([4, 8]),
       size=st.sampled_from([1.0, 1e-6, 3e-8, 1e5]), offset=st.sampled_from([0, 0, 3.5, -9e4]),
       dtype=st.sampled_from(list(BOUND)), name=st.sampled_from(native.SETS[: BEST + 1]),
       seed=st.integers(0, 999))
@settings(max_examples=200)
def test_records_are_the_references_to_the_byte(dim, bits, size, offset, dtype, name, seed):
    torch.manual_seed(seed)
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
def test_an_unknown_instruction_set_is_named(monkeypatch):
    for name in ("avx1024", *native.SETS[BEST + 1 :]):
        monkeypatch.setenv("FLEXGEN_H2O_ISA", name)
        with pytest.raises(ValueError, match=f"FLEXGEN_H2O_ISA={name}: this machine has portable"):
            ops.prefill_attention(**prefill_case([3]))
    monkeypatch.delenv("FLEXGEN_H2O_ISA")
    assert native.instruction_set() == native.SETS[BEST]
    assert native._library().h2o_isa_count() in (1, len(native.SETS))  # 1: no x86


# Threads


@contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def results(function, case) -> list[torch.Tensor]:
    """All that a call returns or changes."""
    mine = {name: copied(x) for name, x in case.items()}
    out = function(**mine)
    book = mine.get("book")
    found = list(out) if isinstance(out, tuple) else [out]
    found += [mine.get("slots"), mine.get("mass")]
    found += [] if book is None else [book.mass, book.positions, book.ranks]
    return [x for x in found if x is not None]


CALLS = [
    *[(ops.prefill_attention, prefill_case(*lengths, group=group, dtype=dtype, dim=24))
      for dtype in BOUND for group in (1, 3) for lengths in (
          ([1100],), ([9, 1, 150, 33],), ([100], [400]))],
    *[(ops.decode_attention, decode_case(cached, full=(0,), form=form, rotary=rotary, kv_heads=1,
                                         eviction=Eviction(decay=0.9), n=1100, group=3))
      for form in FORMS for rotary in (0, 8) for cached in ([1000], [70, 300, 5])],
    *[(ops.decode_attention, decode_case([2000, 300], form=form, n=2100, kv_heads=heads, dim=12,
                                         eviction=Eviction()))
      for form in (torch.float32, 8) for heads in (5, 16)],
    *[(ops.decode_attention, decode_case([1000, 3, 40, 0] * 20, form=form)) for form in (
        torch.bfloat16, 4)],
    *[(ops.select_heavy_hitters, select_case([Cut(700, 90, 80), Cut(3, 1, 1), Cut(90, 9, 9)],
                                             form=form, rolls=True)) for form in FORMS],
    *[(ops.quantize_groups, {"x": torch.randn(999, 96), "layout": GroupLayout(96, bits)})
      for bits in (4, 8)],
]


@BUILT
def test_the_number_of_threads_changes_no_bit(isa):
    for function, case in CALLS:
        with threads(1):
            alone = results(function, case)
        for count in (2, 3):
            with threads(count):
                for one, other in zip(alone, results(function, case), strict=True):
                    assert same(one, other)


# Memory


@contextmanager
def address_space(more: int):
    """No more than `more` bytes beyond what the process has mapped."""
    resource = pytest.importorskip("resource")
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("reads Linux's /proc")
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(status.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@BUILT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prompt_takes_little_memory(dtype):
    """All weights of one of its heads would be 256 MB. Issue 4: no more than 64 MB."""
    case = prefill_case([8192], kv_heads=1, dim=8, dtype=dtype)
    with address_space(64 << 20):
        ops.prefill_attention(**case)


@BUILT
def test_no_memory_for_a_call():
    """It is said, nothing has changed, and the next call has its memory back."""
    far = 1 << 45
    q = torch.randn(1, 1, 8)
    for dtype in BOUND:
        k = torch.randn(1, 1, 8).to(dtype).expand(far, 1, 8)
        mass = torch.zeros(1, 1).expand(1, far)
        for scores in (mass, None):
            with pytest.raises(MemoryError, match="workspace of prefill_attention"):
                native.prefill_attention(q.to(dtype), k, k, [1], [far], scores, 1.0)
        case = select_case([Cut(9, 2, 3)], form=dtype)
        before = copied(case["book"])
        with pytest.raises(MemoryError, match="workspace of select_heavy_hitters"):
            native.select_heavy_hitters(k, k, mass, [far, 2, 3], case["slots"], case["book"].mass,
                                        case["book"].positions, None, 16, False, 0)
        assert same(before.mass, case["book"].mass)
        case = decode_case([1], kv_heads=1, form=dtype)
        with pytest.raises(MemoryError, match="workspace of decode_attention"):
            native.decode_attention(
                case["q"], case["k"], case["v"], case["slots"][:, :, :, :1].expand(
                    2, 1, 1, far, 16), case["turn"], *(None,) * 5, 16, False, 1.0, 0)
        check_decode([ops.decode_attention], case)


@BUILT
def test_calls_give_their_memory_back():
    case = prefill_case([64], kv_heads=1) | {"mass": torch.zeros(1, 64)}
    wide = decode_case([3], n=1 << 16)  # a workspace of some MB a call
    with address_space(200 << 20):
        for _ in range(200):
            ops.decode_attention(**wide)
            ops.prefill_attention(**case)


# What can be missing


@pytest.fixture
def reloaded(monkeypatch, caplog):
    """A function that makes the kernels be loaded afresh, from `file`."""
    def load(file=None):
        if file is not None:
            monkeypatch.setenv("FLEXGEN_H2O_NATIVE", str(file))
        for cached in (native._library, ops._fused):
            cached.cache_clear()
        caplog.clear()

    caplog.set_level(logging.INFO)
    yield load
    monkeypatch.undo()
    load()


def hold_to_one_line(caplog, reason: str):
    """Every operation runs, as the reference, and the log has one line."""
    case = decode_case([4, 0], eviction=Eviction())
    check_decode([ops.decode_attention], case)
    check_prefill([ops.prefill_attention], prefill_case([4, 1]))
    check_select([ops.select_heavy_hitters], select_case([Cut(9, 2, 3)]))
    layout = GroupLayout(12, 4)
    ops.dequantize_groups(ops.quantize_groups(torch.randn(2, 12), layout), layout)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "\n" not in lines[0]
    assert lines[0].startswith("plain PyTorch does attention and eviction on cpu, slowly: ")
    assert reason in lines[0]


def test_no_library(reloaded, caplog, monkeypatch):
    monkeypatch.setattr(native, "_file", lambda: None)
    reloaded()
    hold_to_one_line(caplog, "the C++ kernels were not built (pip install found no working "
                             "compiler)")


@pytest.mark.parametrize("content", [b"", b"not a shared object\n" * 99, b"\x7fELF" + bytes(60)])
def test_not_a_library(reloaded, caplog, tmp_path, content):
    (tmp_path / "_cpu.so").write_bytes(content)
    reloaded(tmp_path / "_cpu.so")
    hold_to_one_line(caplog, "the C++ kernels cannot be loaded: ")


def test_a_library_that_is_not_there(reloaded, caplog, tmp_path):
    reloaded(tmp_path / "gone.so")
    hold_to_one_line(caplog, "gone.so")


def test_a_foreign_library(reloaded, caplog):
    reloaded(torch._C.__file__)
    hold_to_one_line(caplog, "h2o_sizes")


@BUILT
@pytest.mark.parametrize("place", range(len(native._STRUCTS)))
def test_a_library_built_from_other_sources(reloaded, caplog, monkeypatch, place):
    """It is told by the sizes of the structs."""
    structs = list(native._STRUCTS)
    structs[place] = type("Grown", (structs[place],), {"_fields_": [("new", ctypes.c_int64)]})
    monkeypatch.setattr(native, "_STRUCTS", structs)
    reloaded()
    hold_to_one_line(caplog, "was built from other sources: install again")


@BUILT
def test_the_library_is_found_while_another_thread_reads_pythons_configuration(
        reloaded, caplog, monkeypatch):
    monkeypatch.setattr(sysconfig, "_CONFIG_VARS", {})  # as it is in the middle of that
    reloaded()
    assert native.missing() is None


@BUILT
def test_with_the_library_nothing_is_logged(reloaded, caplog):
    reloaded()
    ops.prefill_attention(**prefill_case([4, 1]))
    assert not caplog.records
