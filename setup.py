"""Build of the CPU kernels. The metadata of the package is in pyproject.toml.

FLEXGEN_H2O_BUILD selects the instruction sets that are compiled: ``native`` (the default: the best
one of this CPU with its fallbacks), ``all``, ``none``, or names separated by commas. The portable
set is always among them.
"""

import ctypes
import hashlib
import os
import runpy
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

CPP_FOLDER = Path("flexgen_h2o", "kernels", "cpu")

FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-Wall",
         "-Wextra", "-Werror",
         "-Wno-psabi",  # vector arguments have no stable ABI, but all such calls are inlined
         "-g0"]  # Python's flags include -g: debug information is nine tenths of the library
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_VNNI = [*AVX512, "-mavx512vnni"]
AVX512_BF16 = [*AVX512_VNNI, "-mavx512bf16"]  # every CPU with AVX512_BF16 has VNNI
INSTRUCTION_SETS = {"portable": []}
if sysconfig.get_platform().endswith(("x86_64", "amd64")):  # the target platform
    # Only CPUs from before 2013 run the portable kernels: -O1 halves the time to compile them.
    INSTRUCTION_SETS |= {"portable": ["-O1"], "avx2": AVX2,
                         "avxvnni": [*AVX2, "-mavxvnni"],
                         "avx512": AVX512, "avx512vnni": AVX512_VNNI,
                         "avx512bf16": AVX512_BF16,
                         "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
                         "amx_emulated": [*AVX2, "-DH2O_EMULATE"]}
VECTORS = ("portable", "avx2", "avx512")
MATMULS = (*VECTORS, "avx512bf16", "amx", "amx_emulated")
SOURCES = {"decode": (*VECTORS, "amx", "amx_emulated"),
           "int8_linear": (*VECTORS, "avxvnni", "avx512vnni", "amx_emulated"),
           "linear": MATMULS, "prefill": MATMULS, "quantized_linear": MATMULS,
           "select_keys": (*VECTORS, "avx512vnni")}
"""Instruction sets that each source is compiled for; `VECTORS` for sources not listed.

dispatch.cpp chooses the kernels of the other instruction sets from these.
"""
AT_O2 = ("elementwise", "quantize_matrix", "recall_attention")
"""Sources that are compiled with -O2: in half to two thirds of the time, and on a Zen 3 their
kernels take 0.84 to 1.02 times as long as with -O3. Matmuls and prefill attention take 1.3 to 4."""
FALLBACKS = {"avx2": "portable", "avxvnni": "avx2", "avx512": "portable", "avx512vnni": "avx512",
             "avx512bf16": "avx512vnni", "amx": "avx512vnni", "amx_emulated": "avx2"}
"""The instruction set from which dispatch.cpp takes the kernels that a set lacks."""
SANITIZE = {kind: [f"-fsanitize={kind}", "-fno-sanitize-recover", "-g", "-O1",
                   "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
            for kind in ("address,undefined", "thread")}
"""Flags by FLEXGEN_H2O_SANITIZE (`make test-asan`, `make test-tsan`). GCC 12 warns about its own
intrinsics."""
TSAN_OPENMP = Path("tests", "helpers", "tsan_openmp.cpp")


class BuildKernels(build_ext):
    """Build the CPU kernels: each source once per instruction set, all in one library.

    The instruction set is chosen at run time. Without a compiler, the package is installed without
    kernels: PyTorch does the same, slowly, and a warning says so. FLEXGEN_H2O_OBJECTS names a
    folder that keeps object files; they are reused for the same sources, compiler and flags.
    """

    def get_ext_filename(self, fullname: str) -> str:
        """Return a file name without a Python version: the C ABI needs none."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        choice = requested_sets(os.environ.get("FLEXGEN_H2O_BUILD") or "native")
        if choice == ():
            return
        sanitizer = os.environ.get("FLEXGEN_H2O_SANITIZE", "")
        flags = FLAGS + SANITIZE.get(sanitizer, [])
        at_o2 = [] if sanitizer else ["-O2"]
        if sanitizer == "thread":
            ext.depends.append(str(TSAN_OPENMP))
        jobs = [(source, name, [*flags, *at_o2 * (Path(source).stem in AT_O2), *more,
                                f"-DISA={name}"])
                for source in ext.sources for name, more in INSTRUCTION_SETS.items()
                if Path(source).stem != "dispatch"
                and name in SOURCES.get(Path(source).stem, VECTORS)]
        build = fingerprint(ext, jobs, described(compiler_command(self.compiler)))
        folder = Path(os.environ.get("FLEXGEN_H2O_OBJECTS") or self.build_temp, build)
        folder.mkdir(parents=True, exist_ok=True)
        abi = runpy.run_path(str(CPP_FOLDER.parent / "abi.py"))
        (folder / "abi.h").write_text(abi["header"](), encoding="utf-8")

        def compiled(job: tuple[str, str, list[str]]) -> str:
            source, name, arguments = job
            kept = folder / name / f"{Path(source).stem}.o"
            if not kept.exists():
                kept.parent.mkdir(exist_ok=True)
                # Under another name until it is whole: this build can be killed, and others share
                # the folder.
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    (path,) = self.compiler.compile(
                        [source], output_dir=output, include_dirs=[str(folder)],
                        extra_postargs=arguments, depends=ext.depends)
                    os.replace(path, kept)
            return str(kept)

        def dispatch(sets: tuple[str, ...]) -> str:
            mask = sum(1 << list(INSTRUCTION_SETS).index(name) for name in sets)
            return compiled((str(CPP_FOLDER / "dispatch.cpp"), f"dispatch-{mask}",
                             [*flags, f'-DH2O_BUILD="{build}"', f"-DH2O_SETS={mask}"]))

        def link(objects: list[str], path: str, *more: str) -> None:
            sanitize = [flag for flag in flags if flag.startswith("-fsan")]
            self.compiler.link_shared_object(objects, path, target_lang="c++",
                                             extra_postargs=[*sanitize, *more])

        def native_set() -> str:
            """Return the best instruction set of this CPU, by the library's own rule."""
            if len(INSTRUCTION_SETS) == 1:  # maybe a cross compiler, whose code does not run here
                return "portable"
            with tempfile.TemporaryDirectory(dir=folder) as output:
                link([dispatch(())], str(Path(output, "probe.so")), "-fopenmp")
                mask = ctypes.CDLL(str(Path(output, "probe.so"))).h2o_isa_cpu()
            return [name for number, name in enumerate(INSTRUCTION_SETS)
                    if mask >> number & 1 and name != "amx_emulated"][-1]

        try:
            if choice is None:
                choice = (native_set(),)
            sets = with_fallbacks(choice)
            self.announce(f"building the CPU kernels for {', '.join(sets)}", level=2)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compiled, (job for job in jobs if job[1] in sets)))
            if sanitizer == "thread":
                objects.append(compiled((str(TSAN_OPENMP), "openmp", FLAGS)))
            # Without -fopenmp: PyTorch's library has the symbols of OpenMP, see library.py.
            link([*objects, dispatch(sets)], self.get_ext_fullpath(ext.name))
        except (BaseError, CCompilerError, OSError) as error:
            self.warn(f"the CPU kernels were not built, plain PyTorch will be used: {error}")


class PlatformWheel(bdist_wheel):
    """Tag the wheel for any Python 3: the library is loaded by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def requested_sets(text: str) -> tuple[str, ...] | None:
    """Return the instruction sets of FLEXGEN_H2O_BUILD; None for ``native``."""
    if text in ("all", "none", "native"):
        return {"all": tuple(INSTRUCTION_SETS), "none": (), "native": None}[text]
    names = tuple(text.split(","))
    if unknown := set(names) - set(INSTRUCTION_SETS):
        raise SystemExit(
            f"FLEXGEN_H2O_BUILD={text}: {', '.join(sorted(unknown))} is unknown; choose native, "
            f"all, none or some of {', '.join(INSTRUCTION_SETS)}")
    return names


def with_fallbacks(names: Iterable[str]) -> tuple[str, ...]:
    """Return instruction sets with all that they fall back to, in ascending order."""
    needed = {"portable"}
    for name in names:
        while name not in needed:
            needed.add(name)
            name = FALLBACKS[name]
    return tuple(name for name in INSTRUCTION_SETS if name in needed)


def compiler_command(compiler: object) -> list[str]:
    """Return the C++ compiler command; empty if setuptools has another kind of compiler.

    Releases of setuptools differ in the name of the attribute.
    """
    for name in ("compiler_so_cxx", "compiler_so"):
        if command := getattr(compiler, name, None):
            return list(command)
    return []


def described(command: list[str]) -> str:
    """Return a compiler command with the output of its ``--version``."""
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    except OSError:
        version = ""  # the build will report that it is missing
    return f"{command}\n{version}"


def fingerprint(ext: Extension, jobs: list[tuple[str, str, list[str]]], compiler: str) -> str:
    """Return a fingerprint of a build: the bytes of all sources, the compiler and its flags.

    Measured rates of one build are not used for another.
    """
    compiled = [(Path(source).name, flags) for source, _, flags in jobs]
    digest = hashlib.sha256(repr((compiler, compiled)).encode())
    for path in sorted({*ext.sources, *ext.depends}):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]


setup(
    ext_modules=[Extension("flexgen_h2o.kernels._cpu", optional=True,
                           sources=sorted(map(str, CPP_FOLDER.glob("*.cpp"))),
                           depends=[*sorted(map(str, CPP_FOLDER.glob("*.h"))),
                                    str(CPP_FOLDER.parent / "abi.py"),
                                    str(Path("flexgen_h2o", "config", "limits.py"))])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
