"""Packaging. Every dependency stands with the reason for it and for its minimum version."""

import ast
import hashlib
import os
import runpy
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).parent
KERNELS = Path("flexgen_h2o", "kernels", "cpu")

INSTALL = [
    # tensors and kernels; torch.load(weights_only=True) is safe from 2.6 on, and 2.7 knows custom
    # ops' arguments of collections.abc's types
    "torch>=2.7",
    "numpy>=1.26",  # arrays of what is read and counted; first for Python 3.12
    "transformers>=5.0",  # configs, tokenizers and logits processors, in the spelling of version 5
    "huggingface_hub>=1.0",  # downloads checkpoints by repo id; what transformers 5 builds on
    # splits digits in the tokenizer of a .gguf file; what transformers 5 builds on, and bounds
    "tokenizers>=0.22",
    "gguf>=0.10",  # transformers reads that tokenizer with it, and asks for 0.10
    "filelock>=3.12",  # one process makes a converted model, others wait; PyTorch brings it, too
    "jinja2>=3.1.6",  # chat templates; escapes from the sandbox of older ones are known
    "tqdm>=4.66",  # progress bars of loading, prefill and decode
    "psutil>=5.9",  # free memory, for the plan that is made before anything is allocated
    # the linear programmes of --percent auto, ranks of commands.analyze; 1.11 has Python 3.12
    # wheels
    "scipy>=1.11",
    # holds files and flags against types, for config.validation; it loads in 20 ms, and needs
    # nothing
    # else; 0.19 has the first wheels for Python 3.13
    "msgspec>=0.19",
    # checksums of weights on disk (--verify), at the speed of memory and without the interpreter
    # lock; 3.0 brought XXH3's one-shot functions, 3.4 the wheels for Python 3.13
    "xxhash>=3.4",
    "shtab>=1.7",  # flexgen-h2o --print-completion: scripts for shells, from argparse's parsers
    "pyyaml>=6.0.1",  # --config and the resolved configs; 6.0.1 has the first wheels for 3.12
]

EXTRAS = {
    "sentencepiece": [
        "sentencepiece>=0.2",  # reads a tokenizer.model that has no tokenizer.json beside it
    ],
    "test": [
        "pytest>=8",  # runs the tests
        "pytest-xdist>=3.6",  # runs them on several cores: each file's in one process
        "hypothesis>=6.100",  # property tests of placement, schedule and parsing
        "safetensors>=0.4.3",  # the checkpoints' own library, beside this package's reader
        "accelerate>=1.0",  # transformers' own GGUF loading and its offloading need it
        "matplotlib>=3.8",  # the plots of tasks and benchmarks are drawn once
        "rouge-score>=0.1.2",  # the scores of commands.summarize, beside values worked out by hand
        "lm_eval>=0.4.13",  # integrations.lm_eval is a model of it, and runs within it
        "ray[data]>=2.51",  # integrations.ray and batch --ray run on a cluster of one machine
        "ruff>=0.9",  # lints, as part of `make test`
        "mypy>=1.15",  # checks the types of what users import, as part of `make test`
        "types-PyYAML>=6.0.12",  # PyYAML's types, which mypy asks for
        "build>=1.2",  # makes the sdist and the wheel that `make test-wheel` tries
        # the GPU kernels run under its interpreter; where PyTorch brings its own, that one stays
        "triton>=3.4; platform_system == 'Linux' and platform_machine == 'x86_64'",
    ],
    # Each for a system that benchmarks/compare.py sets beside this one, whose row says if it lacks.
    "bench-accelerate": [
        "accelerate>=1.0",  # offloads transformers' models to disk
    ],
    "bench-deepspeed": [
        "deepspeed>=0.19",  # ZeRO-Inference; the first whose CPU accelerator was tried
        "ninja>=1.11",  # builds DeepSpeed's async_io when parameters are first on NVMe
    ],
    "bench-flexgen": [
        "flexgen==0.1.8",  # the paper's own, at rest since; its command line is called
    ],
    "bench-llama-cpp": [
        # llama.cpp's own functions, which change from release to release: this one was tried. PyPI
        # has its sources only, which are built for the instructions of the machine's CPU
        # (GGML_NATIVE); pip fetches CMake and ninja for that where there are none
        "llama-cpp-python==0.3.36",
    ],
    # In an environment of its own, as it wants another transformers; benchmarks/studies/policies.py
    # sets its presses beside this engine's policies, and leaves its rows out where it is missing.
    "bench-kvpress": [
        "kvpress==0.5.5",  # the release that was measured
        "transformers<5.3",  # what it asks for
        "protobuf>=5",  # without which these versions read no tokenizer of a GGUF file
    ],
    "fuzz": [
        "atheris>=2.3",  # tools/fuzz.py --atheris: libFuzzer; 2.3 has wheels for Python 3.11
    ],
    "docs": [
        "mkdocs>=1.6",  # `make docs`: the site; 1.6 checks anchors and takes generated files
        "mkdocs-material>=9.7",  # its theme; 9.7 is the first with all features free
        "mkdocstrings[python]>=1.0",  # the page of the API, from docstrings; the one that was tried
    ],
    "summarize": [
        "rouge-score>=0.1.2",  # summarize: Google's ROUGE, which papers report; the last one
    ],
    "plot": [
        # --plot of the tasks, benchmarks/plots.py; 3.7 brought "outside" legends, 3.8 Python 3.12
        "matplotlib>=3.8",
    ],
    "ray": [
        # replicas on several machines: batch --ray, integrations.ray; 2.51 made
        # compute=ActorPoolStrategy the way to say how many, older ones are told in the older way
        "ray[data]>=2.51",
    ],
    "eval": [
        # the harness that measures quality by cache budget; integrations.lm_eval uses the registry
        # and the command line of 0.4.13
        "lm_eval>=0.4.13",
    ],
}

CLASSIFIERS = [
    "Development Status :: 4 - Beta",
    "Environment :: Console",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: C++",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.10",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]

FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-Wall",
         "-Wextra", "-Werror",
         "-Wno-psabi",  # vectors as arguments have no stable ABI, and all such calls are inlined
         "-g0"]  # Python's flags ask for what debuggers read: nine tenths of the library
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_VNNI = [*AVX512, "-mavx512vnni"]
AVX512_BF16 = [*AVX512_VNNI, "-mavx512bf16"]  # no CPU has it without the one before
INSTRUCTION_SETS = {"portable": []}
if sysconfig.get_platform().endswith(("x86_64", "amd64")):  # what is built for, if not here
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
"""The instruction sets that a source has kernels of its own for, `VECTORS` where it is not named:
for the others it would come out the same. dispatch.cpp says whose kernels those use."""
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-g", "-O1",
            "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
"""With FLEXGEN_H2O_SANITIZE in the environment (`make test-asan`). GCC 12 then warns of what its
own AVX-512 intrinsics leave undefined."""


class BuildKernels(build_ext):
    """Builds the CPU kernels: every source once per instruction set that it differs in, all into
    one library.

    Which set is used is decided at run time. Where that fails, for want of a compiler, the package
    is installed without: plain PyTorch then does the same, slowly, and says so. With
    FLEXGEN_H2O_OBJECTS in the environment, a folder, what was compiled from the same bytes by the
    same compiler and command is linked again: the Makefile installs and packages within one such
    folder.
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
    """How C++ is compiled here, before the flags of a source; empty for a compiler of another kind.

    Releases of setuptools differ in which of these a compiler has.
    """
    for name in ("compiler_so_cxx", "compiler_so"):
        if command := getattr(compiler, name, None):
            return list(command)
    return []


def described(command: list[str]) -> str:
    """A compiler's command, and what it says of its version if it can be asked."""
    try:
        told = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    except OSError:
        told = ""  # building will tell that it is missing
    return f"{command}\n{told}"


def fingerprint(ext: Extension, jobs: list[tuple[str, str, list[str]]], compiler: str) -> str:
    """Tells builds of the kernels apart: by the bytes of all sources, and by how they are compiled.

    Rates that were measured with one build are not kept for another.
    """
    compiled = [(Path(source).name, flags) for source, _, flags in jobs]
    digest = hashlib.sha256(repr((compiler, compiled)).encode())
    for path in sorted({*ext.sources, *ext.depends}):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]


def version() -> str:
    """The version of the package, read without importing it."""
    tree = ast.parse((ROOT / "flexgen_h2o" / "config" / "version.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "VERSION":
            return ast.literal_eval(node.value)
    raise RuntimeError("flexgen_h2o/config/version.py has no VERSION")


setup(
    name="flexgen_h2o",
    version=version(),
    description="Generate text with models larger than memory, with a heavy-hitter KV cache",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords=["LLM", "offloading", "throughput", "KV cache", "FlexGen", "H2O"],
    classifiers=CLASSIFIERS,
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["flexgen_h2o", "flexgen_h2o.*"]),
    package_data={"flexgen_h2o": ["py.typed"]},  # type checkers may trust the annotations
    entry_points={"console_scripts": ["flexgen-h2o=flexgen_h2o.cli.commands:main"]},
    ext_modules=[Extension("flexgen_h2o.kernels._cpu", optional=True,
                           sources=sorted(map(str, KERNELS.glob("*.cpp"))),
                           depends=[*sorted(map(str, KERNELS.glob("*.h"))),
                                    str(KERNELS.parent / "abi.py"),
                                    str(Path("flexgen_h2o", "config", "limits.py"))])],
    cmdclass={"build_ext": BuildKernels},
    install_requires=INSTALL,
    extras_require=EXTRAS,
)
