"""The kernels on other CPUs: no instruction set's code in another's, and aarch64 under QEMU."""

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import kernel_internals
from helpers.kernel_cases import (
    BUILT,
    FORMS,
    MIXED,
    MXFP4,
    decode_case,
    packaging,
    prefill_case,
    quantized,
    select_case,
    stored_as,
    using,
)

from flexgen_h2o.config.cache_layout import GroupLayout, IndexLayout, split_slots
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.h2o.eviction import Cut, Eviction
from flexgen_h2o.h2o.policies import policy_named
from flexgen_h2o.kernels import abi, ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.kernels.cpu import experts as native_experts
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native

ROOT = Path(__file__).parents[2]
ARM = "aarch64-linux-gnu"
OPERATIONS = {"prefill_attention", "select_heavy_hitters", "decode_attention", "quantize_groups",
              "dequantize_groups", "quantize_matrix", "unpack_rows", "linear_quantized",
              "linear_skinny", "linear_float32", "norm", "rotate", "activate", "route", "experts",
              "index_keys", "select_keys", "recall_attention", "assign_slots"}
"""Those that read and write memory alone: all but fetch_tokens, which reads a file."""


def needs(*programs: str):
    lacking = [name for name in programs if shutil.which(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"needs {', '.join(lacking)} (Debian: "
                              "g++, binutils, g++-aarch64-linux-gnu, qemu-user)")


def run(*command: object, **extra) -> str:
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, **extra)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("way", [
    "build_editable", pytest.param("build_wheel", marks=pytest.mark.full)])
def test_install_without_a_compiler_has_no_kernels(way, tmp_path):
    cxx, copy = str(tmp_path / "no-compiler"), tmp_path / "copy"
    copy.mkdir()
    shutil.copytree(ROOT / "flexgen_h2o", copy / "flexgen_h2o",
                    ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    done = subprocess.run(
        [sys.executable, "-c", f"from setuptools import build_meta as b; b.{way}('dist')"],
        cwd=copy, capture_output=True, text=True, env=os.environ | {"CC": cxx, "CXX": cxx})
    assert done.returncode == 0, done.stderr
    assert "the CPU kernels were not built, plain PyTorch will be used: " in (
        done.stdout + done.stderr)
    assert list(copy.glob("dist/*.whl")) and not list(copy.rglob("*.so"))


# One library, several instruction sets


def test_compiler_version_is_in_the_build_fingerprint(tmp_path):
    """Also one of the same name, after an update: its objects are not linked with older ones."""
    compiler, results = tmp_path / "c++", set()
    command = packaging()["compiler_command"](SimpleNamespace(
        compiler_so=["cc"], compiler_so_cxx=[str(compiler), "-O3"]))
    for version in ("12.2.0", "13.1.0"):
        compiler.write_text(f"#!/bin/sh\necho $1 $2 {version}\n")
        compiler.chmod(0o755)
        description = packaging()["described"](command)
        assert f"-O3 --version {version}" in description
        results.add(packaging()["fingerprint"](packaging()["Extension"]("e", []), [], description))
    assert len(results) == 2
    compiler.unlink()
    assert packaging()["described"](command) == f"{command}\n"


def test_sets_to_build_are_refused_by_name():
    setup = packaging()
    assert setup["requested_sets"]("native") is None
    assert setup["requested_sets"]("none") == ()
    assert setup["requested_sets"]("all") == tuple(setup["INSTRUCTION_SETS"])
    assert setup["requested_sets"]("portable") == ("portable",)
    with pytest.raises(SystemExit, match="^FLEXGEN_H2O_BUILD=avx9,portable: avx9 is unknown; .*"):
        setup["requested_sets"]("avx9,portable")


@pytest.mark.full
@needs("g++", "nm")
def test_library_of_one_isa_links(tmp_path):
    """A symbol of a set that was not built would keep the library from loading."""
    setup = packaging()
    (tmp_path / "abi.h").write_text(abi.header(), encoding="utf-8")
    sources = [path.stem for path in (ROOT / setup["CPP_FOLDER"]).glob("*.cpp")]
    names = [*setup["INSTRUCTION_SETS"]]
    assert names == [*cpu_library.SETS] or names == ["portable"]
    for name in names:
        sets = setup["with_fallbacks"]([name])
        mask, object_file = sum(1 << names.index(isa) for isa in sets), tmp_path / f"{name}.o"
        run("g++", *setup["FLAGS"], "-fPIC", f"-DH2O_SETS={mask}", '-DH2O_BUILD=""',
            f"-I{tmp_path}", "-c", ROOT / setup["CPP_FOLDER"] / "dispatch.cpp", "-o", object_file)
        undefined = re.findall(r"_ZN(\d+)(\w+)", run("nm", "--undefined-only", object_file))
        used = {text[:int(length)] for length, text in undefined}
        built = {isa for isa in sets if any(
            isa in setup["SOURCES"].get(source, setup["VECTORS"]) for source in sources)}
        assert used == built == {*sets}, name


@pytest.mark.full
@needs("g++", "nm")
def test_no_function_is_shared_between_instruction_sets(tmp_path):
    """Of functions of one name the linker keeps one, maybe that of a CPU that is not there.

    Without optimisation every inline function is one that the linker sees.
    """
    made_by = packaging()
    (tmp_path / "abi.h").write_text(abi.header(), encoding="utf-8")
    sources = [path for path in (ROOT / made_by["CPP_FOLDER"]).glob("*.cpp")
               if path.stem != "dispatch"]

    def shared(job) -> set[str]:
        isa, source = job
        object_file = tmp_path / f"{isa}-{source.stem}.o"
        run("g++", *made_by["FLAGS"], *made_by["INSTRUCTION_SETS"][isa], "-O0", "-fPIC",
            f"-DISA={isa}", f"-I{tmp_path}", "-c", source, "-o", object_file)
        symbols = [line.split() for line in
                   run("nm", "--format=posix", "--extern-only", "--defined-only",
                       object_file).splitlines()]
        assert any(f"{len(isa)}{isa}" in name for name, *_ in symbols), "the set's own"
        # DW.ref.*: a pointer, not code
        return {name for name, kind, *_ in symbols
                if f"{len(isa)}{isa}" not in name and not name.startswith("DW.ref.")}

    def extremes(source) -> set[str]:
        """The least and the most: what lies between them compiles the same functions."""
        names = [name for name in made_by["SOURCES"].get(source.stem, made_by["VECTORS"])
                 if name in made_by["INSTRUCTION_SETS"]]
        tiled = {name for name in names if name.startswith("amx")}
        return {names[0], [name for name in names if name not in tiled][-1]} | tiled

    jobs = [(isa, source) for source in sources for isa in extremes(source)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert set().union(*pool.map(shared, jobs)) == set()


# Another CPU


@pytest.fixture(scope="module")
def arm_library(tmp_path_factory) -> Path:
    """The library for aarch64, as setup.py builds it."""
    folder = tmp_path_factory.mktemp("aarch64")
    run(sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder,
        "--build-temp", folder / "objects", env=os.environ | {
            "_PYTHON_HOST_PLATFORM": "linux-aarch64", "CC": f"{ARM}-gcc", "CXX": f"{ARM}-g++",
            "LDSHARED": f"{ARM}-gcc -shared"})
    return folder / "flexgen_h2o" / "kernels" / "_cpu.so"


@pytest.mark.full
@needs(f"{ARM}-g++", f"{ARM}-nm")
def test_the_kernels_build_for_aarch64(arm_library):
    functions = {line.split()[-1] for line in run(f"{ARM}-nm", "-D", arm_library).splitlines()}
    assert {f"h2o_{name}" for name in OPERATIONS | {"fetch_tokens", "program"}} <= functions


@dataclass
class Call:
    """A call of the library: its struct, and the memory that it points into, before and after.

    A pointer: where it stands (buffer, -1 for the struct, and place there), and to what (buffer and
    place). Buffers of pointers have no dtype.
    """

    name: str
    record: bytes
    dtypes: list[torch.dtype | None]
    before: list[bytes]
    after: list[bytes]
    pointers: list[tuple[int, int, int, int]]

    def packed(self) -> bytes:
        """As replay_kernels.cpp reads it."""
        def number(value: int) -> bytes:
            return struct.pack("<q", value)

        def text(value: bytes) -> bytes:
            return number(len(value)) + value

        return b"".join([
            text(f"h2o_{self.name}".encode()), text(self.record),
            number(len(self.before)), *map(text, self.before),
            number(len(self.pointers)), *(number(value) for pointer in self.pointers
                                          for value in pointer)])


def places(kind: type[ctypes.Structure], start: int = 0):
    """Where a struct has pointers."""
    for name, field in kind._fields_:
        place = start + getattr(kind, name).offset
        if field is ctypes.c_void_p:
            yield place
        elif issubclass(field, ctypes.Structure):
            yield from places(field, place)


@pytest.fixture
def calls(monkeypatch) -> list[Call]:
    """Every call of the library from here on, with the portable kernels."""
    # By address: bytes, and of what.
    regions: dict[int, tuple[int, torch.dtype | None]] = {}
    results: list[Call] = []
    address = torch.Tensor.data_ptr
    expert = cpu_library.STRUCTS["Expert"]

    def data_ptr(x):
        storage = x.untyped_storage()
        regions[storage.data_ptr()] = storage.nbytes(), x.dtype
        return address(x)

    def keep(array):
        regions[ctypes.addressof(array)] = ctypes.sizeof(array), torch.int64

    def recorded(call, name, kind, **fields):
        record = bytes(cpu_library.STRUCTS[kind](**fields, threads=2))
        starts: list[int] = []
        pointers = []

        def follow(buffer, content, spots):
            for place in spots:
                pointer, = struct.unpack_from("<Q", content, place)
                start = next((start for start, (size, _) in reversed(regions.items())
                              if start <= pointer < start + size), None)
                assert (start is None) == (pointer == 0), "memory that no tensor told of"
                if start is not None:
                    if start not in starts:
                        starts.append(start)
                    pointers.append((buffer, place, starts.index(start), pointer - start))

        if table := fields.get("experts"):
            regions[table] = ctypes.sizeof(expert) * fields["num_experts"], None
        follow(-1, record, places(cpu_library.STRUCTS[kind]))
        if table:
            follow(starts.index(table), ctypes.string_at(table, regions[table][0]),
                   [place for number in range(fields["num_experts"])
                    for place in places(expert, ctypes.sizeof(expert) * number)])
        memory = [(start, regions[start][0]) for start in starts]
        before = [ctypes.string_at(*region) for region in memory]
        call(name, kind, **fields)
        after = [ctypes.string_at(*region) for region in memory]
        results.append(Call(name, record, [regions[start][1] for start in starts], before, after,
                          pointers))
        regions.clear()

    monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
    kernel_internals.before_arrays(monkeypatch, keep)
    kernel_internals.before_calls(monkeypatch, recorded)
    monkeypatch.delenv("FLEXGEN_H2O_KERNELS", raising=False)
    with using("portable"):
        yield results


def make_calls() -> None:
    """Each operation, in each stored, with rests of vectors and grouped queries."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for lengths in ([1, 17, 33], [70]):
            case = prefill_case(lengths, group=3, dim=22, dtype=dtype, decay=0.97)
            native.prefill_attention(case["q"], case["k"], case["v"], lengths, lengths,
                                      case["scores"], case["decay"])
        torch.default_generator.manual_seed(0)
        weight, rows = torch.randn(33, 200).to(dtype), torch.tensor([3, 0, 32])
        for bits in (4, 8):
            layout = MatrixLayout(33, 200, bits, 64)
            matrix = QuantizedMatrix(ops.quantize_matrix(weight, layout), layout)
            ops.unpack_rows(matrix, rows, dtype)
            for count in (1, 5, 20):
                x = torch.randn(count, 200).to(dtype)
                native.linear_quantized(x, matrix, x.new_ones(33), x.new_zeros(count, 33))
            for length in (24, 130):
                groups = GroupLayout(length, bits)
                ops.dequantize_groups(ops.quantize_groups(torch.randn(5, length).to(dtype), groups),
                                      groups)
    for stored in (*FORMS, *MIXED):
        ops.select_heavy_hitters(**select_case([Cut(64, 20, 3), Cut(7, 9, 9)], stored=stored,
                                               dim=20, rolls=True, eviction=Eviction(sinks=2)))
        for rotary in (0, 8):
            ops.decode_attention(**decode_case(
                [0, 7, 66], full=(2,), stored=stored, group=3, dim=20, rotary=rotary,
                eviction=Eviction(policy_named("mean" if rotary else "sum"), sinks=1)))


def make_layer_calls() -> None:
    """Likewise what stands between attentions, and experts, of which one is missing."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for centered in (True, False):
            x = torch.randn(3, 37).to(dtype)
            native.norm(x, torch.randn(37).to(dtype), torch.randn(37).to(dtype),
                        torch.zeros_like(x), eps=1e-5, centered=centered)
        native.rotate(torch.randn(3, 2, 21).to(dtype), torch.randn(3, 9), torch.randn(3, 9))
        for function in abi.ACTIVATIONS:
            native.activate(torch.randn(3, 37).to(dtype), function, torch.randn(3, 37).to(dtype))
    for dtype, product in ((torch.bfloat16, native.linear_skinny),
                           (torch.bfloat16, native.linear_float32),
                           (torch.float16, native.linear_float32)):
        for count in (1, 5, 20):
            product(torch.randn(count, 131).to(dtype), torch.randn(35, 131).to(dtype),
                    torch.randn(35).to(dtype), torch.zeros(count, 35).to(dtype), False)
    for bits, activation_bits in ((8, 8), (4, 8), (MXFP4, 8), (MXFP4, 16), (12, 16)):
        matrix = replace(random_matrix(40, 70, bits), activation_bits=activation_bits)
        x = torch.randn(5, 70).bfloat16()
        native.linear_quantized(x, matrix, None, x.new_zeros(5, 40))
    for bits in (16, 8, 4, MXFP4):
        experts = [[random_matrix(*shape, bits) for shape in ((40, 70), (40, 70), (70, 40))]
                for _ in range(3)]
        x = torch.randn(7, 70).bfloat16()
        ids, shares = native_experts.route(x, torch.randn(4, 70).bfloat16(), per_token=2,
                                           normalize=True)
        table = native_experts.ExpertTable(4)
        for number, matrices in enumerate(experts):
            table.put(number, *matrices)
        native_experts.experts(x, ids, shares, table, torch.zeros(7, 70), function="silu",
                               max_rows=7)


def random_matrix(outputs: int, inputs: int, bits: float) -> torch.Tensor | QuantizedMatrix:
    weight = (torch.randn(outputs, inputs) / inputs**0.5).bfloat16()
    if bits == 16:
        return weight
    return quantized(weight, bits, 32)


def make_recall_calls() -> None:
    """Likewise recall's, for two sequences, of which one has fewer tokens."""
    tokens, dim = 40, 24
    metadata = torch.tensor([[tokens, 33], [9, 5]], dtype=torch.int32)
    spans = torch.stack([metadata[0] * 0, metadata[0] * 0, metadata[0]])
    for bits, stored in ((4, torch.float32), (2, torch.bfloat16), (4, torch.float16), (2, 8),
                         (4, 4), (2, (8, 4))):
        dtype, records = stored_as(stored, dim)
        q, k, v = (torch.randn(2, heads, dim).to(dtype) for heads in (6, 2, 2))
        slots = torch.randn(2, 2, 2, tokens + 1, dim).to(dtype)
        slots = ops.pack_slots(slots, records)
        layout = IndexLayout(dim, bits)
        index = torch.zeros(2, 2, layout.tiles(tokens), layout.tile_bytes, dtype=torch.uint8)
        ops.index_keys(split_slots(slots, records)[0], index, spans, layout=layout,
                       key_layout=None if records is None else records.keys)
        log_weights = torch.zeros(2, 2, tokens, dtype=torch.int32)
        selected = ops.select_keys(q, k, index=index, metadata=metadata, layout=layout, top_k=10,
                                   log_weights=log_weights)
        ops.recall_attention(q, k, v, slots=slots, selected=selected, metadata=metadata,
                             layout=records)
        ops.assign_slots(selected, metadata[0] - 3, slot_of=torch.full((4, tokens), -1).int(),
                         token_of=torch.full((4, 20), -1).int(),
                         log_weights=log_weights.flatten(0, 1), newest=8)


@pytest.mark.full
@BUILT
@needs(f"{ARM}-g++", "qemu-aarch64")
def test_aarch64_results_equal_the_portable_kernels(calls, arm_library, tmp_path):
    make_calls()
    make_layer_calls()
    make_recall_calls()
    assert {call.name for call in calls} == OPERATIONS
    assert all(call.before != call.after for call in calls)
    run(f"{ARM}-g++", "-std=c++17", "-O1", ROOT / "tests" / "helpers" / "replay_kernels.cpp", "-o",
        tmp_path / "replay", "-ldl", "-Wl,--no-as-needed", "-lgomp")
    (tmp_path / "calls").write_bytes(
        struct.pack("<q", len(calls)) + b"".join(call.packed() for call in calls))
    run("qemu-aarch64", "-L", f"/usr/{ARM}", tmp_path / "replay", arm_library, tmp_path / "calls",
        tmp_path / "results")
    results, place = (tmp_path / "results").read_bytes(), 0
    for call in calls:
        assert struct.unpack_from("<q", results, place) == (0,), call.name
        place += 8
        for dtype, expected in zip(call.dtypes, call.after, strict=True):
            actual = results[place:place + len(expected)]
            place += len(expected)
            if dtype is None:
                continue
            # Operation by operation the same arithmetic; e^x and powers are the C library's.
            torch.testing.assert_close(
                torch.frombuffer(bytearray(actual), dtype=dtype),
                torch.frombuffer(bytearray(expected), dtype=dtype), equal_nan=True,
                msg=lambda text, name=call.name: f"{name}: {text}")
    assert place == len(results)
