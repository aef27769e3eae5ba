"""Build the sdist and from it the wheel, install the wheel and run it: ``make test-wheel``.

The wheel has the kernels of all instruction sets and fits any Python 3. auditwheel checks which
versions of Linux it runs on. It is installed into a fresh environment and runs there without a
compiler. Its dependencies (PyTorch alone is gigabytes) come from the environment of the interpreter
that runs this program, through a `.pth` file. Python does not read `.pth` files in folders that a
`.pth` file adds, so an editable install there stays invisible.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flexgen_h2o"
SCRIPT = "flexgen-h2o"
LIBRARY = f"{PACKAGE}/kernels/_cpu.so"
"""The kernels; without them the wheel would be a slow one."""

BESIDE = ("CHANGELOG.md", "LICENSE", "Makefile", "README.md", "SECURITY.md", "mkdocs.yml",
          "pyproject.toml", "setup.py")
"""Files of the sdist that stand beside the package."""

TINY = {"model_type": "opt", "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "ffn_dim": 128, "max_position_embeddings": 64,
        "word_embed_proj_dim": 64, "torch_dtype": "float32"}
"""A config.json; weights are random."""

PROBE = f"""
import sys
from importlib.metadata import version
from importlib.resources import files
import {PACKAGE}
from {PACKAGE}.kernels.cpu import library as cpu_library
home = {PACKAGE}.__file__
assert home.startswith(sys.prefix), f"{{home}} is not what was installed"
assert version("{PACKAGE}") == {PACKAGE}.__version__
assert files("{PACKAGE}").joinpath("py.typed").is_file(), "no py.typed"
assert cpu_library.missing() is None, cpu_library.missing()
assert {{*cpu_library.cpu_sets()}} <= {{*cpu_library.built_sets()}}, "a set of this CPU is missing"
with open("/proc/self/maps") as maps:
    openmp = {{line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line}}
assert len(openmp) == 1, f"one thread pool, not {{openmp}}"
print({PACKAGE}.__version__, cpu_library.instruction_set(), *openmp)
"""
"""Checks of the installed package, run by the fresh environment's interpreter."""


CROSS = {"aarch64": {"_PYTHON_HOST_PLATFORM": "linux-aarch64", "CC": "aarch64-linux-gnu-gcc",
                     "CXX": "aarch64-linux-gnu-g++", "LDSHARED": "aarch64-linux-gnu-gcc -shared"}}
"""Environment variables that build for another architecture."""


def run(*command: object, folder: Path, **variables: str) -> str:
    """Run a command in a folder and return its stdout; stop this program if it fails."""
    # Nothing that leads back to the sources.
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("PYTHON", "FLEXGEN_H2O_"))
                   or name == "FLEXGEN_H2O_OBJECTS"}  # told apart by a fingerprint: see setup.py
    done = subprocess.run([*map(str, command)], cwd=folder, env=environment | variables, text=True,
                          capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
                 f"failed with status {done.returncode}")
    return done.stdout


def build(folder: Path, cross: str | None = None) -> tuple[Path, Path]:
    """Build the sdist from the sources, and the wheel from the sdist, into a folder."""
    variables = CROSS[cross] if cross else {}
    if cross and not shutil.which(variables["CXX"]):
        sys.exit(f"{variables['CXX']} is not installed (Debian: apt install g++-aarch64-linux-gnu)")
    tag = f"manylinux_2_28_{cross or os.uname().machine}"
    run(sys.executable, "-m", "build", "--outdir", folder, f"-C--build-option=--plat-name={tag}",
        ROOT, folder=folder, FLEXGEN_H2O_BUILD="all", **variables)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    if not wheel.name.endswith(f"-py3-none-{tag}.whl"):
        sys.exit(f"{wheel.name} is not for any Python 3 on {tag}")
    return sdist, wheel


def check_platform(report: str) -> None:
    """Stop this program unless auditwheel's report allows manylinux_2_28 or an older one."""
    versions = re.findall(r'platform tag:\s+"manylinux_2_(\d+)_', report)
    if not versions or int(versions[0]) > 28:
        sys.exit(f"{report}\nthe wheel needs a newer glibc than manylinux_2_28 has: avoid the "
                 "symbols that are named above, or build it with an older one (wheels.yml)")


def modules() -> set[str]:
    """Return the paths in a wheel of the package's modules, page and marker of types."""
    paths = [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / PACKAGE / "serving/page").rglob("*.*"),
             ROOT / PACKAGE / "py.typed"]
    return {path.relative_to(ROOT).as_posix() for path in paths}


def sources() -> set[str]:
    """Return the paths that the sdist must have to build, document and test the package."""
    patterns = (f"{PACKAGE}/kernels/cpu/*.cpp", f"{PACKAGE}/kernels/cpu/*.h", "configs/**/*.*",
                "docs/**/*.*", "examples/*.py", "examples/data/*.*", "requirements/*.txt",
                "tests/**/*.py", "tests/fixtures/releases/*/*.*", "tools/*.py")
    files = {path.relative_to(ROOT).as_posix() for pattern in patterns
             for path in ROOT.glob(pattern)}
    return files | modules() | set(BESIDE)


def check_contents(kind: str, names: Iterable[str], needed: set[str]) -> None:
    """Stop this program if a distribution lacks something, or if there is too much in it."""
    names = set(names)
    if missing := needed - names:
        sys.exit(f"the {kind} lacks {', '.join(sorted(missing))}: see MANIFEST.in and setup.py")
    if stray := {name for name in names if "__pycache__" in name or name.endswith(".pyc")}:
        sys.exit(f"the {kind} has {', '.join(sorted(stray))}")


def names_of(sdist: Path) -> set[str]:
    """Return the paths in an sdist, without the folder that it unpacks to."""
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel into a fresh environment. Returns the folder of its commands."""
    home = folder / "environment"
    # Links, as copies of some interpreters don't find their library.
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install",
        "--no-deps", "--no-index", wheel, folder=folder)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
               folder=folder).strip()
    others = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    Path(site, "dependencies.pth").write_text("\n".join(others), encoding="utf-8")
    return home / "bin"


def try_out(commands: Path, folder: Path) -> None:
    """Import, run --help and doctor, and run a tiny model with the kernels, without a compiler."""
    bare = {"PATH": str(commands)}
    print("installed:", run(commands / "python", "-c", PROBE, folder=folder, **bare).strip())
    usage = run(commands / SCRIPT, "--help", folder=folder, **bare)
    if f"usage: {SCRIPT} " not in usage:
        sys.exit(f"{SCRIPT} --help says something else:\n{usage}")
    run(commands / "python", "-W", "error", "-m", PACKAGE, "plan", "--version", folder=folder,
        **bare)
    print(run(commands / SCRIPT, "doctor", "--offload-dir", folder, folder=folder, **bare))
    model = folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    run(commands / SCRIPT, "--model", model, "--path", "_DUMMY_", "--device", "cpu",
        "--prompt-len", 16, "--gen-len", 4, "--gpu-batch-size", 2, "--hh-ratio", 0.2,
        "--cache-bits", 8, "--offload-dir", folder / "offload", "--no-log", "--verbose", 0,
        "--output", folder / "out.jsonl", folder=folder, **bare)
    lines = (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()
    lengths = [len(json.loads(line)["token_ids"]) for line in lines]
    if lengths != [4, 4]:
        sys.exit(f"2 sequences of 4 tokens were requested, and {lengths} came")


def main() -> None:
    """Build, check, install and run; keep the distributions with --out."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, help="folder to keep the sdist and the wheel in")
    parser.add_argument("--cross", choices=CROSS, help="build for this architecture; do not run it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        sdist, wheel = build(folder, arguments.cross)
        check_contents("sdist", names_of(sdist), sources())
        with zipfile.ZipFile(wheel) as archive:
            check_contents("wheel", archive.namelist(), modules() | {LIBRARY})
        check_platform(run(sys.executable, "-m", "auditwheel", "show", wheel, folder=folder))
        if not arguments.cross:
            try_out(install(wheel, folder), folder)
        if arguments.out:
            arguments.out.mkdir(exist_ok=True)
            for file in (sdist, wheel):
                shutil.copy(file, arguments.out)
        print(f"{sdist.name} and {wheel.name} are as they should be")


if __name__ == "__main__":
    main()
