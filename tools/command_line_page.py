"""Makes docs/command-line.md: every flag of every command, from the tables that parse them.

    python tools/command_line_page.py           prints it
    python tools/command_line_page.py --write   writes it
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from flexgen_h2o.cli.commands import COMMANDS, command_module

PAGE = Path(__file__).resolve().parent.parent / "docs" / "command-line.md"
LIKE_GENERATE = ("plan", "bench", "batch", "serve")
"""Commands whose tables have only the flags that differ from `generate`'s."""

HEAD = """\
# Command line

Every command is `flexgen-h2o NAME` or `python -m flexgen_h2o NAME`, and has `--help` (the common
flags), `--help-all` and `--version`. `flexgen-h2o` with flags alone is `generate`, as is
`python -m flexgen_h2o.flex_opt`; torchrun starts `-m flexgen_h2o.batch`. Flags that
FlexGen or the H2O repository also have keep their names. A flag may have underscores for dashes;
`--model-name` is `--model`, `--batch-size` `--gpu-batch-size`, `--fetch-chosen` `--selective-fetch`
and `--fast-set` `--hot-set`. A size is a number of bytes, or `6GB`, `500MB`, `1.5GiB`. The script
that `flexgen-h2o --print-completion bash` (`zsh`, `tcsh`) prints completes all of this in a shell.

`tools/command_line_page.py` makes this page from the tables that parse the flags."""


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command's flags."""
    return command_module(name).parser()


def groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yield the title and flags of each group, without empty groups and flags of all commands."""
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.option_strings
                   and not {"--help", "--help-all", "--version"} & {*action.option_strings}]
        if actions:
            yield group.title or "", actions


def flags(command: str) -> list[str]:
    """Return the names of a command's flags, with dashes."""
    return [action.option_strings[0] for _, actions in groups(parser_of(command))
            for action in actions]


def row(action: argparse.Action) -> str:
    """Return a row of the table: the flag with its values, its default and its help."""
    words, _, default = (action.help or "").replace("%%", "%").rpartition(" (default: ")
    # A bar would end the table's cell.
    value = str(action.metavar or action.dest.upper()).replace("|", "/")
    value = {"?": f" [{value}]", "+": f" {value} ..."}.get(action.nargs, f" {value}")
    name, *also = action.option_strings
    shown = ", ".join(f"`{flag}`" for flag in (name + value, *also))
    return f"| {shown} | {default.removesuffix(')')} | {words.replace('_DUMMY_', '`_DUMMY_`')} |"


def section(name: str) -> Iterator[str]:
    """Return the section of one command."""
    parser, same = parser_of(name), set()
    yield f"## {name}"
    yield parser.description or ""
    if name in LIKE_GENERATE:
        same = {row(action) for _, actions in groups(parser_of("generate")) for action in actions}
        shared = [action.option_strings[0] for _, actions in groups(parser) for action in actions
                  if row(action) in same]
        yield f"As in [generate](#generate): {', '.join(f'`{action}`' for action in shared)}."
    for title, actions in groups(parser):
        rows = [action for action in map(row, actions) if action not in same]
        if rows:
            if title != "options":
                yield f"### {title[0].upper()}{title[1:]}" if not same else f"{title.capitalize()}:"
            yield "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows])


def page() -> str:
    """Return the page in markdown."""
    return "\n\n".join([HEAD, *(part for name in COMMANDS for part in section(name))]) + "\n"


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
