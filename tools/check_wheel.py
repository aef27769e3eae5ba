"""Builds the sdist, and the wheel from it; installs that where nothing of this project is, and
runs it there: ``make test-wheel``.

Everything happens in a temporary folder. The environment is a fresh one, into which only the wheel
is installed; what the wheel depends on (PyTorch alone is gigabytes) is taken from the environment
of the interpreter that runs this, through a `.pth` file. Folders that a `.pth` file adds are not
searched for further ones, so that an editable install there stays invisible here.
"""

from __future__ import annotations

import json
import os
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

BESIDE = ("CHANGELOG.md", "LICENSE", "Makefile", "README.md", "mkdocs.yml", "pyproject.toml",
          "setup.py")
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
print({PACKAGE}.__version__, cpu_library.instruction_set())
"""
"""Checks of the installed package, run by the fresh environment's interpreter."""


def run(*command: object, folder: Path) -> str:
    """Run a command in a folder. Returns its stdout; stops this program if it fails."""
    # Nothing that leads back to the sources.
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("PYTHON", "FLEXGEN_H2O_"))
                   or name == "FLEXGEN_H2O_OBJECTS"}  # told apart by a fingerprint: see setup.py
    done = subprocess.run([*map(str, command)], cwd=folder, env=environment, text=True,
                          capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
                 f"failed with status {done.returncode}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist from the sources, and the wheel from the sdist, into a folder."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def modules() -> set[str]:
    """Paths of the package's modules and its marker of types, as a wheel has them."""
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*.py")}
    return found | {f"{PACKAGE}/py.typed"}


def sources() -> set[str]:
    """Paths that the sdist has to have: all that builds, documents and tests the package."""
    patterns = (f"{PACKAGE}/kernels/cpu/*.cpp", f"{PACKAGE}/kernels/cpu/*.h", "configs/**/*.*",
                "docs/**/*.*", "examples/*.py", "examples/data/*.*", "tests/**/*.py", "tools/*.py")
    found = {path.relative_to(ROOT).as_posix() for pattern in patterns
             for path in ROOT.glob(pattern)}
    return found | modules() | set(BESIDE)


def check_contents(kind: str, names: Iterable[str], needed: set[str]) -> None:
    """Stop this program if a distribution lacks something, or if there is too much in it."""
    names = set(names)
    if missing := needed - names:
        sys.exit(f"the {kind} lacks {', '.join(sorted(missing))}: see MANIFEST.in and setup.py")
    if stray := {name for name in names if "__pycache__" in name or name.endswith(".pyc")}:
        sys.exit(f"the {kind} has {', '.join(sorted(stray))}")


def names_of(sdist: Path) -> set[str]:
    """Paths in an sdist, without the folder that it unpacks to."""
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
    """Import, --help, a look at the machine, and a run of a tiny model with the compiled kernels.
    """
    print("installed:", run(commands / "python", "-c", PROBE, folder=folder).strip())
    usage = run(commands / SCRIPT, "--help", folder=folder)
    if f"usage: {SCRIPT} " not in usage:
        sys.exit(f"{SCRIPT} --help says something else:\n{usage}")
    run(commands / "python", "-W", "error", "-m", PACKAGE, "plan", "--version", folder=folder)
    print(run(commands / SCRIPT, "doctor", "--offload-dir", folder, folder=folder))
    model = folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    run(commands / SCRIPT, "--model", model, "--path", "_DUMMY_", "--device", "cpu",
        "--prompt-len", 16, "--gen-len", 4, "--gpu-batch-size", 2, "--hh-ratio", 0.2,
        "--cache-bits", 8, "--offload-dir", folder / "offload", "--no-log", "--verbose", 0,
        "--output", folder / "out.jsonl", folder=folder)
    lines = (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()
    lengths = [len(json.loads(line)["token_ids"]) for line in lines]
    if lengths != [4, 4]:
        sys.exit(f"2 sequences of 4 tokens were asked for, and {lengths} came")


def main() -> None:
    """Build, install, try."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        sdist, wheel = build(folder)
        check_contents("sdist", names_of(sdist), sources())
        with zipfile.ZipFile(wheel) as archive:
            check_contents("wheel", archive.namelist(), modules())
        try_out(install(wheel, folder), folder)
        print(f"{sdist.name} and {wheel.name} are as they should be")


if __name__ == "__main__":
    main()
