"""What is published beside the code: names, types, the changelog, the sdist's contents.

`make test-wheel` builds, installs and runs for real.
"""

import fnmatch
import re
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
