"""argparse parsers made of the table of flags."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

from flexgen_h2o.cli.flags import GROUPS
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag_name, load_yaml
from flexgen_h2o.config.version import VERSION
from flexgen_h2o.errors import UserError, did_you_mean

SCRIPT = "flexgen-h2o"
"""The command that setup.py installs."""
PACKAGE = __name__.partition(".")[0]
FLEX_OPT = f"python -m {PACKAGE}.flex_opt"
VERSION_HELP = "print the version and end"

_KINDS = {"int": int, "float": float, "bits": lambda text: int(text) if text.isdigit() else text}
_ALTERNATIVES = {("prompt", "prompts"): ("prompt", "prompts", "num_prompts", "prompt_len"),
                 ("log_file", "no_log"): ("log_file", "no_log")}
"""Flags of which one says in another way what the others say, and what they replace."""
_GEN_LEN_ELSEWHERE = ("--max-new-tokens", "--max_new_tokens", "--max-tokens", "--max_tokens")
"""What transformers, vLLM and OpenAI call `--gen-len`."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are `UserError`, one line like all others, with no usage before.

    `version` is what ``--help`` says of the flag ``--version``; None: there is none.
    """

    def __init__(self, *, version: str | None = VERSION_HELP, **options: Any):
        super().__init__(**options)
        if version is not None:
            self.add_argument("--version", action="version", version=f"{PACKAGE} {VERSION}",
                              help=version)

    def parse_args(self, args: Sequence[str] | None = None,  # type: ignore[override]
                   namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        """Parse as argparse does, and name the nearest flag for an unknown one."""
        found, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                name = word.partition("=")[0]
                known = self._option_string_actions
                meant = "--gen-len" if "--gen-len" in known and name in _GEN_LEN_ELSEWHERE else name
                raise UserError(f"unknown flag {name}{did_you_mean(meant, known)}")
        if unknown:
            raise UserError(f"{unknown[0]!r} belongs to no flag: see --help")
        return found

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parse_bool(text: str) -> bool:
    """A flag's optional value, with the words that FlexGen takes."""
    words = {"true": True, "yes": True, "t": True, "y": True, "1": True,
             "false": False, "no": False, "f": False, "n": False, "0": False}
    try:
        return words[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}") from None


def arguments(spec: Field[Any]) -> dict[str, Any]:
    """argparse's keywords for one field."""
    rules, kind = spec.metadata, spec.metadata["kind"]
    default: Any = spec.default
    shown = rules.get("shown", " ".join(map(str, default)) if isinstance(default, tuple)
                      else str(default).lower() if kind == "bool" else default)
    text = f"{rules['help']} (default: {shown})"
    options: dict[str, Any] = {"help": text.replace("%", "%%"), "dest": spec.name}
    if kind == "bool":
        options |= {"type": _parse_bool, "nargs": "?", "const": True, "metavar": "true|false"}
    elif kind == "texts":
        options |= {"action": "append"}
    elif kind == "shares":
        options |= {"nargs": 3}
    elif kind in ("percent", "ratios", "words"):
        options |= {"nargs": "+"}
    elif kind == "numbers":
        options |= {"nargs": "+", "type": float}
    elif kind in _KINDS:
        options |= {"type": _KINDS[kind], "metavar": "N" if kind == "int" else "X"}
    if "const" in rules:
        options |= {"nargs": "?", "const": rules["const"]}
    if "choices" in rules:
        # Shown, not given to argparse: `checked` checks it, in its own words.
        options["metavar"] = "|".join(map(str, rules["choices"]))
    if "metavar" in rules:
        options["metavar"] = rules["metavar"]
    return options


def program(command: str = "") -> str:
    """A command's name for its usage: as it was called, by script, by package or by module.

    Without a command, the name of the program that has all of them.
    """
    called = Path(sys.argv[0])
    if called.name == SCRIPT:
        return f"{SCRIPT} {command}".rstrip()
    if not command or (called.parent.name, called.name) == (PACKAGE, "__main__.py"):
        return f"python -m {PACKAGE} {command}".rstrip()
    return f"python -m {PACKAGE}.{command}"


def build_parser(
    specs: Iterable[Field[Any]] = fields(RunConfig), *, prog: str = FLEX_OPT,
    usage: str = "%(prog)s [--model NAME] [--prompts FILE] [--percent P P P P] [flags]",
    description: str = "Generate text with a model larger than memory: weights, KV cache and "
    "activations spread over device, host memory and disk.",
    version: str = argparse.SUPPRESS,
) -> Parser:
    """The parser of some flags, in their groups. A flag that is not given stays unset.

    Parameters
    ----------
    specs : fields of dataclasses
        What `values.flag` made, each with one of `GROUPS`. By default all of `flex_opt`, whose
        other defaults are its own as well.
    prog, usage, description, version : str
        What ``--help`` shows.
    """
    parser = Parser(
        prog=prog,
        usage=usage,
        description=description,
        version=version,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=32, width=min(100, shutil.get_terminal_size().columns)
        ),
    )
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for spec in specs:
        short = [spec.metadata["short"]] if "short" in spec.metadata else []
        groups[spec.metadata["group"]].add_argument(flag_name(spec.name), *short,
                                                    **arguments(spec))
    return parser


def parse_args(argv: Sequence[str] | None = None, parser: Parser | None = None) -> RunConfig:
    """Flags, of `flex_opt` by default, as a checked `RunConfig`. Raises `UserError`."""
    return RunConfig.from_mapping(given_flags(parser or build_parser(), argv))


def given_flags(parser: Parser, argv: Sequence[str] | None) -> dict[str, Any]:
    """Values of the flags that were given, over those of ``--config``. Raises `UserError`."""
    given = vars(parser.parse_args(argv))
    values = load_yaml(given["config"]) if "config" in given else {}
    # The command line's replace the file's, in whichever way each gives them.
    for flags, replaced in _ALTERNATIVES.items():
        if not given.keys().isdisjoint(flags):
            values = {k: v for k, v in values.items() if k not in replaced}
    return values | given
