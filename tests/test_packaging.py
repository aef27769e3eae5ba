"""What is published beside the code: names, types, the changelog, the sdist's contents.

`make test-wheel` builds, installs and runs for real.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import flexgen_h2o
from flexgen_h2o import flex_opt

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def tool(name: str) -> ModuleType:
    """A program of tools/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reference() -> ModuleType:
    return tool("api_reference")


@pytest.fixture
def wheel() -> ModuleType:
    return tool("check_wheel")


def test_the_readmes_table_of_names_is_what_docstrings_say(reference):
    text = README.read_text(encoding="utf-8")
    assert text == reference.put_into(text), "python tools/api_reference.py --write"


def test_the_table_has_all_that_the_package_exports(reference):
    assert {*reference.PUBLIC[""], "__version__"} == set(flexgen_h2o.__all__)
    for module, names in reference.PUBLIC.items():
        imported = importlib.import_module(f"flexgen_h2o.{module}".rstrip("."))
        assert all(hasattr(imported, name) for name in names), module


def test_functions_and_classes_in_the_table(reference):
    tree = ast.parse('''
class Thing:
    """A thing.

    More of it."""
    def __init__(self, hidden): ...
    @property
    def size(self) -> int:
        """a | b"""
    def turn(self, angle, /, far=1, *more, fast=False, **others):
        """Turn it."""
    @classmethod
    def make(cls, *, big):
        """Make one."""
    def _inner(self): ...
''').body[0]
    assert reference.summary(tree) == "A thing."
    assert list(reference.members(tree)) == [
        ("size", r"a \| b"), ("turn(angle, far, *more, fast, **others)", "Turn it."),
        ("make(*, big)", "Make one.")]


def test_what_has_no_docstring_or_no_place_is_told(reference):
    with pytest.raises(LookupError, match="bare has no docstring"):
        reference.summary(ast.parse("def bare(): ...").body[0])
    with pytest.raises(LookupError, match="config.py has no Nothing"):
        reference.definition("config", "Nothing")
    with pytest.raises(ValueError, match="no lines"):
        reference.put_into(f"{reference.END} {reference.BEGIN}")
    assert reference.main(["--what"]) == 2


def test_the_table_needs_nothing_installed():
    program = ROOT / "tools" / "api_reference.py"
    done = subprocess.run([sys.executable, "-I", "-S", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in README.read_text(encoding="utf-8")


def test_each_module_that_a_user_imports_from_is_checked_by_mypy(reference):
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.mypy]")[2]
    checked = {ROOT / path for path in re.findall(r'^    "(.+\.py)",$', settings, re.MULTILINE)}
    assert len(checked) > 10 and all(path.is_file() for path in checked)
    public = {reference.source(module) for module in reference.PUBLIC}
    # Workload stands in a module whose inside is not annotated to the end.
    assert public - checked == {reference.source("planning.rows")}
    assert (ROOT / "flexgen_h2o" / "py.typed").is_file()


def test_the_changelog_knows_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert [name for name in versions if name != "Unreleased"][0] == flexgen_h2o.__version__


def test_usage_names_the_command_as_it_was_called(monkeypatch):
    for called, shown in (("/usr/bin/flexgen-h2o", "flexgen-h2o"),
                          ("/src/flexgen_h2o/flex_opt.py", "python -m flexgen_h2o.flex_opt")):
        monkeypatch.setattr(sys, "argv", [called])
        assert flex_opt.build_parser().format_usage().startswith(f"usage: {shown} [--model")


def test_the_installed_command_is_the_command_line(wheel):
    script = f"{flex_opt.SCRIPT}=flexgen_h2o.flex_opt:main"
    assert script in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert wheel.SCRIPT == flex_opt.SCRIPT


def test_the_manifest_covers_what_the_sdist_has_to_have(wheel):
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


def test_what_a_distribution_lacks_or_has_too_much_stops_the_check(wheel):
    wheel.check_contents("wheel", ["a.py", "b.py"], {"a.py"})
    with pytest.raises(SystemExit, match="the wheel lacks c.py"):
        wheel.check_contents("wheel", ["a.py"], {"a.py", "c.py"})
    with pytest.raises(SystemExit, match="the sdist has x/__pycache__/a.pyc"):
        wheel.check_contents("sdist", ["a.py", "x/__pycache__/a.pyc"], {"a.py"})


def test_a_command_that_fails_stops_the_check_with_what_it_said(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "leads back")
    code = "import os; print(os.environ.get('PYTHONPATH'), os.getcwd())"
    assert wheel.run(sys.executable, "-c", code, folder=tmp_path).split() == [
        "None", str(tmp_path.resolve())]
    with pytest.raises(SystemExit, match="(?s)mended.*failed with status 3"):
        wheel.run(sys.executable, "-c", "print('mended?'); raise SystemExit(3)", folder=tmp_path)


def test_the_tiny_model_is_one_that_is_supported(wheel, tmp_path):
    from flexgen_h2o.models.spec import from_transformers

    assert from_transformers(wheel.TINY, "tiny").num_layers == 2
