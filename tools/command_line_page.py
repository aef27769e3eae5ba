"""Makes docs/command-line.md: every flag of every command, from the tables that parse them.

    python tools/command_line_page.py           prints it
    python tools/command_line_page.py --write   writes it
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from flexgen_h2o.cli.parser import Parser

PAGE = Path(__file__).resolve().parent.parent / "docs" / "command-line.md"
COMMANDS = ("flex_opt", "tasks.summarize", "tasks.stream", "tasks.stream_quality", "tasks.quality",
            "tasks.analyze")
"""Modules of the package that parse flags by `parse_args`."""

HEAD = """\
# Command line

Every command is `python -m` its module, and has `--help`; `flexgen-h2o` is `flexgen_h2o.flex_opt`.
Names are FlexGen's and the H2O fork's where those have the flag. Tasks take underscores for dashes
too. A size is a number of bytes, or `6GB`, `500MB`, `1.5GiB`.

`tools/command_line_page.py` makes this page from the tables that parse the flags."""


class _Caught(Exception):
    """Carries the parser of a command out of its `parse_args`."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser that a command makes for its flags."""
    def caught(self: argparse.ArgumentParser, *_: object) -> None:
        raise _Caught(self)

    module = importlib.import_module(f"flexgen_h2o.{command}")
    try:
        with mock.patch.object(Parser, "parse_args", caught):
            module.parse_args([])
    except _Caught as found:
        return found.args[0]
    raise LookupError(f"flexgen_h2o.{command} parses no flags by cli.Parser")


def groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Each group of flags that is not empty: its title and the flags, without ``--help``."""
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if "--help" not in each.option_strings]
        if actions:
            yield group.title or "", actions


def flags(command: str) -> list[str]:
    """The names of a command's flags, as they are shown: with dashes."""
    return [action.option_strings[0] for _, actions in groups(parser_of(command))
            for action in actions]


def row(action: argparse.Action) -> str:
    """A row of the table: the flag with its values, its default, and what it does."""
    words, _, default = (action.help or "").replace("%%", "%").rpartition(" (default: ")
    # A bar would end the table's cell.
    value = str(action.metavar or action.dest.upper()).replace("|", "/")
    value = {"?": f" [{value}]", "+": f" {value} ..."}.get(action.nargs, f" {value}")
    also = [name for name in action.option_strings[1:] if "_" not in name]
    shown = ", ".join(f"`{each}`" for each in (action.option_strings[0] + value, *also))
    return f"| {shown} | {default.removesuffix(')')} | {words.replace('_DUMMY_', '`_DUMMY_`')} |"


def page() -> str:
    """The page in markdown."""
    parts = [HEAD]
    for command in COMMANDS:
        parser = parser_of(command)
        parts += [f"## flexgen_h2o.{command}", parser.description or ""]
        for title, actions in groups(parser):
            if title != "options":
                parts.append(f"### {title[0].upper()}{title[1:]}")
            parts.append("\n".join(["| flag | default | meaning |", "|---|---|---|",
                                    *map(row, actions)]))
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str]) -> int:
    """Print the page, or write it. Returns the exit status."""
    if arguments not in ([], ["--write"]):
        print(f"usage: python {Path(__file__).name} [--write]", file=sys.stderr)
        return 2
    if arguments:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
