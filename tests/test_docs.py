"""README.md and docs/: links, flags, commands and names that they show."""

import importlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from helpers.programs import ROOT, program

import flexgen_h2o
from flexgen_h2o.cli import commands, parser
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.requests import request as request_fields

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINKING = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md",
           *sorted((ROOT / "benchmarks").rglob("README.md"))]
READING = ("--prompts", "--input-path", "--config", "--hardware", "-i")
"""Flags of files that have to be there before a command runs."""


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^(    |```).*$", "", text, flags=re.MULTILINE)


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Each command that a page shows: the page's name, and the command's words."""
    for page in PAGES:
        text = read(page).replace("\\\n", " ")
        for line in re.findall(r"^ {4}(?:\$ )?((?:python|make|pip|flexgen-h2o) .*)$", text,
                               re.MULTILINE):
            yield name(page), shlex.split(line, comments=True)


COMMANDS = list(shown_commands())
PROGRAMS = (["python", "-m", "flexgen_h2o"], ["flexgen-h2o"])
OURS = [(page, [f"flexgen_h2o.{rest[0]}", *rest[1:]]) for page, words in COMMANDS
        for program in PROGRAMS if words[:len(program)] == program
        and (rest := words[len(program):])[0][0] != "-"]
OURS += [(page, words[2:]) for page, words in COMMANDS
         if words[:2] == ["python", "-m"] and words[2] != "flexgen_h2o"]


@pytest.fixture(scope="module")
def flag_page():
    return program("tools/command_line_page.py")


def test_flag_reference_page_is_up_to_date(flag_page, capsys):
    assert read(flag_page.PAGE) == flag_page.page(), (
        "python tools/command_line_page.py --write")
    assert flag_page.main([]) == 0 and capsys.readouterr().out == flag_page.page()
    assert flag_page.main(["--what"]) == 2


def test_each_flag_is_explained_in_a_written_page(flag_page):
    written = "\n".join(read(page) for page in PAGES if page != flag_page.PAGE)
    named = set(re.findall(r"--[a-z0-9-]*[a-z0-9]", written))
    known = {command: set(flag_page.flags(command)) for command in flag_page.COMMANDS}
    known["the program"] = {"--version", "--print-completion"}
    assert known["generate"] == {
        flag for flag in parser.build_parser()._option_string_actions
        if flag.startswith("--")} - {"--help", "--help-all", "--version"}
    assert not {command: missing for command, flags in known.items()
                if (missing := sorted(flags - named))}


@pytest.mark.parametrize("page", LINKING, ids=name)
def test_links_resolve(page):
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", prose(read(page))):
        path, _, anchor = target.partition("#")
        file = Path(os.path.normpath(page.parent / path)) if path else page
        assert file.is_relative_to(ROOT) and file.is_file(), target
        if anchor:
            # GitHub's names of headings.
            titles = re.findall(r"^#+ (.+)$", prose(read(file)), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
                       for title in titles}
            assert anchor in anchors, target


@pytest.mark.parametrize("page, words", OURS, ids=[f"{page} {words[0]}" for page, words in OURS])
def test_shown_commands_parse(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    name = words[0].removeprefix("flexgen_h2o.")
    if name.startswith("integrations"):
        return  # its command line is the harness's
    commands.command_module("generate" if name == "flex_opt" else name).parse_args(words[1:])


def test_files_of_shown_commands_exist():
    assert len(COMMANDS) > 25
    targets = re.findall(r"^([\w-]+):", read(ROOT / "Makefile"), re.MULTILINE)
    for page, words in COMMANDS:
        read_files = [value for flag, value in zip(words, words[1:], strict=False)
                      if flag in READING]
        if words[0] == "python" and words[1] != "-m":
            read_files.append(words[1])
        for path in read_files:
            assert (ROOT / path).is_file(), f"{page}: {path}"
        if words[0] == "make":
            assert words[1] in targets, f"{page}: make {words[1]}"


def test_shown_python_compiles_and_imports():
    count = 0
    for page in PAGES:
        for block in re.findall(r"(?:^(?: {4}.*)?\n)+", read(page), re.MULTILINE):
            if "import " not in block or "python " in block:
                continue
            lines = [line[4:] for line in block.splitlines()]
            compile("\n".join(lines), name(page), "exec")
            exec("\n".join(line for line in lines if re.match("(from|import) ", line)), {})
            count += 1
    assert count >= 4


def test_files_of_the_reading_path_exist():
    page = read(ROOT / "docs" / "architecture.md")
    paths = set(re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+(?:\.py|\.cpp|/))`", page))
    assert len(paths) > 25
    assert not [path for path in sorted(paths)
                if not any((root / path).exists() for root in
                           (ROOT, ROOT / "flexgen_h2o", ROOT / "flexgen_h2o" / "kernels"))]


# --- the names that users import


def documented() -> dict[str, object]:
    """The objects that docs/api.md takes its text from, by their full names."""
    objects = {}
    for path in re.findall(r"^::: (\S+)$", read(ROOT / "docs" / "api.md"), re.MULTILINE):
        module, _, attribute = path.rpartition(".")
        objects[path] = getattr(importlib.import_module(module), attribute)
    return objects


def test_api_page_lists_all_exports():
    exported = {getattr(flexgen_h2o, name) for name in flexgen_h2o.__all__} - {
        flexgen_h2o.__version__}
    assert exported <= set(documented().values())
    for path, api in documented().items():
        assert api.__doc__, path
        assert path == f"{api.__module__}.{api.__qualname__}"  # where its source is


def test_the_site_lists_every_page_once():
    """`make docs` refuses a page that its navigation leaves out."""
    listed = re.findall(r"^ +- .+: (\S+\.md)$", read(ROOT / "mkdocs.yml"), flags=re.MULTILINE)
    results = (ROOT / "benchmarks" / "results").rglob("README.md")
    pages = [page.name for page in PAGES[1:]] + [name(page) for page in results]
    assert sorted({*pages} - {*listed}) == []
    assert len(listed) == len({*listed})


def test_each_request_field_is_in_the_compatibility_table():
    page = read(ROOT / "docs" / "compatibility.md")
    known = {*request_fields.CHAT, *request_fields.COMPLETIONS, *request_fields.IGNORED,
             *request_fields._NEUTRAL, *(spec.name for spec in fields(SamplingParams))}
    assert not [name for name in sorted(known) if f"`{name}`" not in page]
