"""The commands of ``flexgen-h2o``, and of ``python -m flexgen_h2o``, which is the same.

A command is a module of `commands` with `parser`, `parse_args` and `run`. Each is found by its name
when it is called, so that this module need not stand above all of them, and one command does not
wait for the imports of the others.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from types import ModuleType

from flexgen_h2o.cli.command import command
from flexgen_h2o.cli.parser import PACKAGE, SCRIPT, Parser, program
from flexgen_h2o.config.validation import check_choice
from flexgen_h2o.errors import UserError, did_you_mean
from flexgen_h2o.files.terminal import show

COMMANDS = {
    "generate": "generate text: the command where none is named",
    "batch": "run a file of requests, as OpenAI's Batch API has them, and go on where it stopped",
    "plan": "choose a policy for this machine or another, or predict what one does",
    "bench": "throughput and latency of one configuration, beside its roofline",
    "summarize": "summaries of articles, and their ROUGE",
    "stream": "conversations without end through one cache of fixed size",
    "doctor": "what this machine has, and what would be slow on it and why",
}
"""What each command is for, in the order of ``--help``."""

SHELLS = ("bash", "zsh", "tcsh")
_OWN = ("-h", "--help", "--help-all", "--version", "--print-completion")
"""Flags of the program itself. Any other begins those of `generate`."""


def command_module(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"{PACKAGE}.commands.{name}")


def parser() -> Parser:
    """The parser of the program's own flags."""
    names = "\n".join(f"  {name:<{max(map(len, COMMANDS))}}  {text}"
                      for name, text in COMMANDS.items())
    found = Parser(
        prog=program(), usage="%(prog)s COMMAND [flags]",
        description="Generate text with a model larger than memory, and what belongs to it.\n"
        "COMMAND --help tells the flags of a command.",
        epilog=f"commands:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS, allow_abbrev=False)
    found.add_argument("--print-completion", metavar="|".join(SHELLS),
                       help="print a script that completes commands and flags in a shell")
    return found


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """A command's name and its flags; the name is empty for the program's own flags.

    Raises `UserError` for a name that is none.
    """
    first, rest = (words[0], [*words[1:]]) if words else ("--help", [])
    if first in COMMANDS:
        return first, rest
    if first.partition("=")[0] in _OWN:
        return "", [first, *rest]
    if first.startswith("-"):
        return "generate", [first, *rest]
    raise UserError(f"unknown command {first!r}{did_you_mean(first, COMMANDS)}")


def run(words: Sequence[str]) -> int | None:
    """Run the command that these words call. Returns its exit status; None is 0.

    Raises `UserError`.
    """
    name, flags = split(words)
    if name:
        module = command_module(name)
        return module.run(module.parse_args(flags))
    shell = parser().parse_args(flags).print_completion
    check_choice("--print-completion", shell, SHELLS)
    show(completion(shell))
    return None


def completion(shell: str) -> str:
    """The script that completes commands, flags, files and values in one of `SHELLS`."""
    import shtab  # only now: nothing else needs it

    # By the name of the script: a shell completes the words after that.
    whole = Parser(prog=SCRIPT, own_flags=False, parents=[parser()], add_help=False)
    commands = whole.add_subparsers(metavar="COMMAND")
    for name, text in COMMANDS.items():
        added = commands.add_parser(name, help=text, parents=[command_module(name).parser()],
                                    add_help=False, own_flags=False)
        for action in added._actions:
            value = str(action.metavar or "")
            if value.startswith(("FILE", "DIR")):  # the attribute is shtab's
                action.complete = (  # type: ignore[attr-defined]
                    shtab.FILE if value.startswith("FILE") else shtab.DIRECTORY)
            elif re.fullmatch(r"[\w-]+(\|[\w-]+)+", value):
                action.choices = value.split("|")
    return shtab.complete(whole, shell=shell)


@command
def main(argv: Sequence[str] | None = None) -> int | None:
    """Run a command."""
    return run(sys.argv[1:] if argv is None else argv)
