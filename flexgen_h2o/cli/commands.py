"""The launcher ``flexgen-h2o COMMAND``, which is also ``python -m flexgen_h2o COMMAND``.

A command is a module of `commands` with `parser`, `parse_args`, `run` and `main`. It is imported by
name when it is called, so that it does not wait for the imports of the others.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from types import ModuleType

from flexgen_h2o.cli.entry_point import command
from flexgen_h2o.cli.parser import PACKAGE, SCRIPT, Parser, program
from flexgen_h2o.config.validation import check_choice
from flexgen_h2o.errors import UserError, did_you_mean
from flexgen_h2o.files.terminal import print_stdout

COMMANDS = {
    "generate": "generate text (the default command)",
    "batch": "run a file of requests in OpenAI's Batch format, with resume",
    "serve": "serve OpenAI's Batch and completion endpoints over HTTP",
    "plan": "choose a policy for this machine or another, or predict its speed",
    "bench": "measure throughput and latency of one run, with its roofline",
    "summarize": "summarize articles and compute ROUGE",
    "stream": "run endless conversations through a cache of fixed size",
    "cache": "list converted models and quantized weights on disk, or remove them",
    "doctor": "show what this machine has, what would be slow on it, and why",
}
"""The help of each command, in the order of ``--help``."""

EXAMPLE = "generate --model smollm2-135m --prompt 'Hello' --stream"
"""Example that is shown below the commands."""

SHELLS = ("bash", "zsh", "tcsh")
_OWN = ("-h", "--help", "--help-all", "--version", "--print-completion")
"""Flags of the program itself. Any other first flag belongs to `generate`."""


def command_module(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f"{PACKAGE}.commands.{name}")


def parser() -> Parser:
    """Return the parser of the program's own flags."""
    names = "\n".join(f"  {name:<{max(map(len, COMMANDS))}}  {text}"
                      for name, text in COMMANDS.items())
    program_parser = Parser(
        prog=program(), usage="%(prog)s COMMAND [flags]",
        description="Generate text with models that are larger than memory.\n"
        f"COMMAND --help shows the flags of a command.\n\ncommands:\n{names}\n\n"
        f"example:\n  {program()} {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS, allow_abbrev=False)
    program_parser.add_argument("--print-completion", metavar="|".join(SHELLS),
                                help="print a script that completes commands and flags in a shell")
    return program_parser


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of a command and its flags; an empty name for the program's own flags.

    Raises `UserError` for an unknown command.
    """
    first, arguments = (words[0], [*words[1:]]) if words else ("--help", [])
    if first in COMMANDS:
        return first, arguments
    if first.partition("=")[0] in _OWN:
        return "", [first, *arguments]
    if first.startswith("-"):
        return "generate", [first, *arguments]
    raise UserError(f"unknown command {first!r}{did_you_mean(first, COMMANDS)}")


def run(words: Sequence[str]) -> int | None:
    """Run a command line and return its exit status; None is 0. Raises `UserError`."""
    name, flags = split(words)
    if name:
        module = command_module(name)
        return module.run(module.parse_args(flags))
    shell = parser().parse_args(flags).print_completion
    check_choice("--print-completion", shell, SHELLS)
    print_stdout(completion(shell))
    return None


def completion(shell: str) -> str:
    """Return the script that completes commands, flags, files and values in a shell."""
    import shtab  # slow to import, and nothing else needs it

    # By the name of the script: a shell completes the words after that.
    full_parser = Parser(prog=SCRIPT, own_flags=False, parents=[parser()], add_help=False)
    commands = full_parser.add_subparsers(metavar="COMMAND")
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
    return shtab.complete(full_parser, shell=shell)


@command
def main(argv: Sequence[str] | None = None) -> int | None:
    """Run a command."""
    return run(sys.argv[1:] if argv is None else argv)
