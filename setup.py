"""Build of the CPU kernels. The metadata of the package is in pyproject.toml."""

import hashlib
import os
import runpy
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

KERNELS = Path("flexgen_h2o", "kernels", "cpu")

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
    INSTRUCTION_SETS |= {"avx2": AVX2, "avxvnni": [*AVX2, "-mavxvnni"],
                         "avx512": AVX512, "avx512vnni": AVX512_VNNI,
                         "avx512bf16": AVX512_BF16,
                         "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
                         "amx_emulated": [*AVX2, "-DH2O_EMULATE"]}
VECTORS = ("portable", "avx2", "avx512")
PRODUCTS = (*VECTORS, "avx512bf16", "amx", "amx_emulated")
SOURCES = {"choose": (*VECTORS, "avx512vnni"),
           "decode": (*VECTORS, "amx", "amx_emulated"),
           "linear": PRODUCTS, "prefill": PRODUCTS, "product": PRODUCTS,
           "rounded_product": (*VECTORS, "avxvnni", "avx512vnni", "amx_emulated")}
"""Instruction sets that each source is compiled for; `VECTORS` for sources not listed.

dispatch.cpp chooses the kernels of the other instruction sets from these.
"""
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-g", "-O1",
            "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
"""Flags with FLEXGEN_H2O_SANITIZE set (`make test-asan`). GCC 12 warns about its own intrinsics."""


class BuildKernels(build_ext):
    """Build the CPU kernels: each source once per instruction set, all in one library.

    The instruction set is chosen at run time. Without a compiler, the package is installed without
    kernels: PyTorch does the same, slowly, and a warning says so. FLEXGEN_H2O_OBJECTS names a
    folder that keeps object files; they are reused for the same sources, compiler and flags.
    """

    def build_extension(self, ext: Extension) -> None:
        flags = FLAGS + (SANITIZE if os.environ.get("FLEXGEN_H2O_SANITIZE") else [])
        jobs = [(source, name, [*flags, *more, f"-DISA={name}"])
                for source in ext.sources for name, more in INSTRUCTION_SETS.items()
                if Path(source).stem != "dispatch"
                and name in SOURCES.get(Path(source).stem, VECTORS)]
        build = fingerprint(ext, jobs, described(compiler_command(self.compiler)))
        jobs.append((str(KERNELS / "dispatch.cpp"), "", [*flags, f'-DH2O_BUILD="{build}"']))
        kept = os.environ.get("FLEXGEN_H2O_OBJECTS")
        folder = Path(kept, build) if kept else Path(self.build_temp)
        whole = folder / "whole"
        reused = kept and whole.exists()
        folder.mkdir(parents=True, exist_ok=True)
        abi = runpy.run_path(str(KERNELS.parent / "abi.py"))
        (folder / "abi.h").write_text(abi["header"](), encoding="utf-8")

        def compiled(job: tuple[str, str, list[str]]) -> str:
            source, name, arguments = job
            output = str(folder / name)
            (path,) = self.compiler.object_filenames([source], output_dir=output)
            if not reused:
                self.compiler.compile([source], output_dir=output, include_dirs=[str(folder)],
                                      extra_postargs=arguments, depends=ext.depends)
            return path

        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compiled, jobs))
            self.compiler.link_shared_object(
                objects, self.get_ext_fullpath(ext.name), target_lang="c++",
                extra_postargs=[flag for flag in flags if flag.startswith(("-fopenmp", "-fsan"))])
            if kept:
                whole.touch()
        except (BaseError, CCompilerError, OSError) as error:
            self.warn(f"the CPU kernels were not built, plain PyTorch will be used: {error}")


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
                           sources=sorted(map(str, KERNELS.glob("*.cpp"))),
                           depends=[*sorted(map(str, KERNELS.glob("*.h"))),
                                    str(KERNELS.parent / "abi.py"),
                                    str(Path("flexgen_h2o", "config", "limits.py"))])],
    cmdclass={"build_ext": BuildKernels},
)
