"""What is published beside the code: names, types, the changelog, the sdist's contents.

`make test-wheel` builds, installs and runs for real.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from types import ModuleType

import pytest
from helpers.programs import ROOT, program

import flexgen_h2o
from flexgen_h2o.cli import parser


@pytest.fixture
def wheel() -> ModuleType:
    return program("tools/check_wheel.py")


def test_the_changelog_knows_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert [name for name in versions if name != "Unreleased"][0] == flexgen_h2o.__version__


def test_the_installed_command_is_the_command_line(wheel):
    script = f'{parser.SCRIPT} = "flexgen_h2o.cli.commands:main"'
    assert script in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert wheel.SCRIPT == parser.SCRIPT


def test_manifest_covers_the_sources(wheel):
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()
             if line and not line.startswith("#")]
    # setuptools adds these by itself.
    patterns = ["flexgen_h2o/*.py", "flexgen_h2o/py.typed", "LICENSE", "README.md", "setup.py",
                "pyproject.toml"]
    for kind, *words in lines:
        match kind:
            case "include":
                patterns += words
            case "graft":
                patterns += [f"{word}/*" for word in words]
            case "recursive-include":
                patterns += [f"{words[0]}/{word}" for word in words[1:]]
            case _:
                raise AssertionError(f"MANIFEST.in: {kind}")
    missing = {path for path in wheel.sources()
               if not any(fnmatch.fnmatch(path, pattern) for pattern in patterns)}
    assert not missing
    assert {"flexgen_h2o/kernels/cpu/dispatch.cpp", "configs/demo.yaml"} <= wheel.sources()


def test_missing_or_extra_files_stop_the_check(wheel):
    wheel.check_contents("wheel", ["a.py", "b.py"], {"a.py"})
    with pytest.raises(SystemExit, match="the wheel lacks c.py"):
        wheel.check_contents("wheel", ["a.py"], {"a.py", "c.py"})
    with pytest.raises(SystemExit, match="the sdist has x/__pycache__/a.pyc"):
        wheel.check_contents("sdist", ["a.py", "x/__pycache__/a.pyc"], {"a.py"})


def test_wheel_check_refuses_a_newer_glibc(wheel):
    report = 'is consistent with the following platform tag:\n"manylinux_2_{}_x86_64".'
    wheel.check_platform(report.format(27))
    with pytest.raises(SystemExit, match="newer glibc"):
        wheel.check_platform(report.format(34))
    with pytest.raises(SystemExit, match="newer glibc"):
        wheel.check_platform("linux_x86_64")


def test_wheel_check_shows_output_of_failed_commands(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "leads back")
    code = "import os; print(os.environ.get('PYTHONPATH'), os.getcwd())"
    assert wheel.run(sys.executable, "-c", code, folder=tmp_path).split() == [
        "None", str(tmp_path.resolve())]
    with pytest.raises(SystemExit, match="(?s)mended.*failed with status 3"):
        wheel.run(sys.executable, "-c", "print('mended?'); raise SystemExit(3)", folder=tmp_path)


def test_the_tiny_model_is_one_that_is_supported(wheel, tmp_path):
    from flexgen_h2o.models.registry import from_transformers

    assert from_transformers(wheel.TINY, "tiny").num_layers == 2
