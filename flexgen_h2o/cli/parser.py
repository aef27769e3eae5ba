"""argparse parsers built from the table of flags. No torch."""

from __future__ import annotations

import argparse
import copy
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from flexgen_h2o.cli.flags import COMMON, GROUPS
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import OTHER_NAMES, checked, flag_name, load_yaml
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.config.version import VERSION
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.errors import UserError, did_you_mean
from flexgen_h2o.files.terminal import print_stdout
from flexgen_h2o.files.writing import check_writable

SCRIPT = "flexgen-h2o"
"""The command that the package installs."""
PACKAGE = __name__.partition(".")[0]
MODULES = ("flex_opt", "batch")
"""Commands that are modules too, ``python -m flexgen_h2o.batch``, which torchrun starts."""

_TYPES = {"int": int, "float": float, "bits": lambda text: int(text) if text.isdigit() else text}
_REWORDED = {"^argument ": "", "invalid int value:": "expected an integer, got",
             "invalid float value:": "expected a number, got",
             r"(expected [\w ]*arguments?)$": r"\1, see --help"}
_ALTERNATIVES = {("prompt", "prompts"): ("prompt", "prompts", "num_prompts", "prompt_len"),
                 ("log_file", "no_log"): ("log_file", "no_log")}
"""Alternative flags: if any flag of a key is given, it replaces these values of a config file."""
_GEN_LEN_ALIASES = ("--max-new-tokens", "--max_new_tokens", "--max-tokens", "--max_tokens")
"""Names of `--gen-len` in transformers, vLLM and OpenAI."""


class _HelpAll(argparse.Action):
    """``--help-all``: the help with the advanced flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        print_stdout(parser.format_help(everything=True).rstrip("\n"))
        parser.exit()


class Parser(argparse.ArgumentParser):
    """argparse parser whose errors are `UserError`: one line, without a usage before it.

    Parameters
    ----------
    own_flags : bool
        Add ``--version`` and ``--help-all``.

    Attributes
    ----------
    advanced : list of argparse.Action
        Flags that ``--help`` leaves out, and ``--help-all`` shows.
    """

    def __init__(self, *, own_flags: bool = True, **options: Any):
        super().__init__(**options)
        self.advanced: list[argparse.Action] = []
        if own_flags:
            self.add_argument("--help-all", action=_HelpAll, nargs=0,
                              default=argparse.SUPPRESS, help="show all flags")
            self.add_argument("--version", action="version", version=f"{PACKAGE} {VERSION}",
                              help="print the version and end")

    def format_help(self, everything: bool = False) -> str:
        """Return the text of ``--help``, or with `everything` that of ``--help-all``."""
        helps = {action: action.help for action in self.advanced}
        try:
            if not everything:
                for action in helps:
                    action.help = argparse.SUPPRESS
            text = super().format_help()
        finally:
            for action, help in helps.items():
                action.help = help
        if helps and not everything:
            text += f"\n{len(helps)} more flags: --help-all\n"
        return text

    def parse_args(self, args: Sequence[str] | None = None,  # type: ignore[override]
                   namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        """Parse like argparse; for an unknown flag, name the nearest one.

        A flag may have underscores for dashes, and one of `OTHER_NAMES`.
        """
        words = map(self._by_first_name, sys.argv[1:] if args is None else args)
        values, unknown = self.parse_known_args([*words], namespace)
        for word in unknown:
            if word.startswith("-"):
                name = word.partition("=")[0]
                known = self._option_string_actions
                meant = "--gen-len" if "--gen-len" in known and name in _GEN_LEN_ALIASES else name
                raise UserError(f"unknown flag {name}{did_you_mean(meant, known)}")
        if unknown:
            raise UserError(f"{unknown[0]!r} belongs to no flag: put texts with spaces in quotes, "
                            "and see --help")
        return values

    def _by_first_name(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        field = name[2:].replace("-", "_")
        first = flag_name(OTHER_NAMES.get(field, field))
        return first + equals + value if first in self._option_string_actions else word

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with argparse's message in the words of the other checks."""
        for pattern, replacement in _REWORDED.items():
            message = re.sub(pattern, replacement, message)
        raise UserError(message)


def _parse_bool(text: str) -> bool:
    """Return the value of a boolean flag, in the spellings that FlexGen takes."""
    words = {"true": True, "yes": True, "t": True, "y": True, "1": True,
             "false": False, "no": False, "f": False, "n": False, "0": False}
    try:
        return words[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}") from None


def arguments(spec: Field[Any]) -> dict[str, Any]:
    """Return the keywords of `add_argument` for one field."""
    rules, flag_type = spec.metadata, spec.metadata["type"]
    default: Any = spec.default
    shown = rules.get("shown", " ".join(map(str, default)) if isinstance(default, tuple)
                      else str(default).lower() if flag_type == "bool" else default)
    text = f"{rules['help']} (default: {shown})"
    options: dict[str, Any] = {"help": text.replace("%", "%%"), "dest": spec.name}
    if flag_type == "bool":
        options |= {"type": _parse_bool, "nargs": "?", "const": True, "metavar": "true|false"}
    elif flag_type == "texts":
        options |= {"action": "append"}
    elif flag_type == "shares":
        options |= {"nargs": 3}
    elif flag_type in ("percent", "ratios", "words", "paths"):
        options |= {"nargs": "+"}
    elif flag_type == "numbers":
        options |= {"nargs": "+", "type": float}
    elif flag_type in _TYPES:
        options |= {"type": _TYPES[flag_type], "metavar": "N" if flag_type == "int" else "X"}
    if "const" in rules:
        options |= {"nargs": "?", "const": rules["const"]}
    if "choices" in rules:
        # Shown, not given to argparse: `checked` checks it, in its own words.
        options["metavar"] = "|".join(map(str, rules["choices"]))
    if "metavar" in rules:
        options["metavar"] = rules["metavar"]
    return options


def program(command: str = "") -> str:
    """Return the name of a command for its usage line, as the user called it.

    Without a command, the name of the program.
    """
    called = Path(sys.argv[0])
    if called.name == SCRIPT:
        return f"{SCRIPT} {command}".rstrip()
    if called.parent.name == PACKAGE and called.stem in MODULES:
        return f"python -m {PACKAGE}.{called.stem}"
    return f"python -m {PACKAGE} {command}".rstrip()


def changed_flag(name: str, **rules: object) -> Any:
    """Return the field of a flag of `generate` with other rules, such as `help` and `shown`.

    `default` is its default.
    """
    spec = copy.copy(RunConfig.__dataclass_fields__[name])
    spec.default = rules.pop("default", spec.default)
    spec.metadata = MappingProxyType({**spec.metadata, **rules})
    return spec


def flag_fields(options: type) -> list[Field[Any]]:
    """Return the fields of a dataclass of options that are flags."""
    return [spec for spec in fields(options) if "type" in spec.metadata]


def command_flags(options: type | None = None, *, groups: Collection[str] = (),
                  names: Collection[str] = (), without: Collection[str] = (),
                  **changes: Mapping[str, object]) -> list[Field[Any]]:
    """Return the flags of a command: some of `generate`'s, and its own.

    Parameters
    ----------
    options : type, optional
        Dataclass of the command's own flags.
    groups, names, without : collection of str
        Groups and names of `generate`'s flags, beside `model`, and names to leave out.
    **changes : mapping
        Rules of `generate`'s flags that differ here.
    """
    specs = {spec.name: changed_flag(spec.name, **changes[spec.name]) if spec.name in changes
             else spec for spec in fields(RunConfig)
             if (spec.metadata["group"] in groups or spec.name in ("model", *names))
             and spec.name not in without}
    return [*(specs | {
        spec.name: spec for spec in (flag_fields(options) if options else ())}).values()]


def build_parser(
    specs: Iterable[Field[Any]] = fields(RunConfig), *, command: str = "generate",
    prog: str | None = None, usage: str | None = None, description: str | None = None,
    show_all: bool = False,
) -> Parser:
    """Return the parser of some flags, in their groups. A flag that is not given stays unset.

    Parameters
    ----------
    specs : fields of dataclasses
        Made by `values.flag`. By default all flags of `generate`.
    command, prog, usage, description : str
        The texts of ``--help``; `prog` is the name of the program if it is no command.
    show_all : bool
        ``--help`` shows all flags, not only those in `COMMON` and the command's own.
    """
    parser = Parser(
        prog=prog or program(command),
        usage=usage,
        description=description,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=32, width=min(100, shutil.get_terminal_size().columns)
        ),
    )
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for spec in specs:
        short = [spec.metadata["short"]] if "short" in spec.metadata else []
        group = groups.get(spec.metadata.get("group", ""), parser)
        action = group.add_argument(flag_name(spec.name), *short, **arguments(spec))
        if not show_all and spec in fields(RunConfig) and spec.name not in COMMON:
            parser.advanced.append(action)
    return parser


def given_flags(parser: Parser, argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the values of the given flags, which override ``--config``. Raises `UserError`."""
    arguments = vars(parser.parse_args(argv))
    values = load_yaml(arguments["config"]) if "config" in arguments else {}
    for flags, replaced in _ALTERNATIVES.items():
        if not arguments.keys().isdisjoint(flags):
            values = {k: v for k, v in values.items() if k not in replaced}
    return values | arguments


def parse(argv: Sequence[str] | None, parser: Parser, options: type
          ) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the given flags: of the options' own fields, and of `RunConfig`'s.

    `argv` None is the process's. Raises `UserError` for an unknown flag, a missing value or a value
    of a wrong type.
    """
    shared = given_flags(parser, argv)
    values = {spec.name: shared.pop(spec.name) for spec in flag_fields(options)
              if spec.name in shared}
    return values, shared


ENGINE = ("path", "device", "dtype", "percent", "weight_bits", "activation_bits",
          "weight_cache", "no_weight_cache", "calibration", "cache_bits", "key_bits", "value_bits",
          "offload_dir", "verify", "memory_limit", "device_memory_limit", "batch_invariant")
"""Flags of `generate` that say how a model runs, besides its name."""
WITHOUT_PLAN: dict[str, dict[str, object]] = {
    "percent": {"help": "percent of weights on gpu, cpu; of cache on gpu, cpu; of activations on "
                "gpu, cpu (100 0 if left out); the rest is on disk"},
    "gpu_batch_size": {"shown": Policy.gpu_batch_size},
    "num_gpu_batches": {"shown": Policy.num_gpu_batches},
    "weight_bits": {"shown": AUTO}, "cache_bits": {"shown": 16},
    "seed": {"help": "seed of sampling and random weights"}}
"""Rules of flags that differ in commands without ``--percent auto`` and synthetic prompts."""


def check_flags(options: object) -> None:
    """Check and normalize every flag of a frozen dataclass of options.

    Raises `UserError`.
    """
    for spec in flag_fields(type(options)):
        object.__setattr__(options, spec.name, checked(spec, getattr(options, spec.name)))


def check_no_effect(values: Mapping[str, object], names: Collection[str], command: str) -> None:
    """Raise `UserError` for values of a file of ``--config`` without effect on a command."""
    for name, value in values.items():
        value = tuple(value) if isinstance(value, list) else value
        if name in names and value != getattr(RunConfig, name):
            raise UserError(f"{flag_name(name)} has no effect on {command}: take it out of the "
                            "file of --config")


def check_from_csv(names: Collection[str]) -> None:
    """Raise `UserError` if flags of a run are given beside ``--from-csv``, which runs nothing.

    Only ``--plot`` is allowed with it.
    """
    if "from_csv" in names:
        refuse(names, {*names} - {"from_csv", "plot"},
               "has no effect with --from-csv: leave it out")


def refuse(flags: Iterable[str], names: Collection[str], why: str) -> None:
    """Raise `UserError` if one of `names` is among the given flags."""
    for name in flags:
        if name in names:
            raise UserError(f"{flag_name(name)} {why}")


def check_placed(config: RunConfig) -> None:
    """Raise `UserError` for ``--percent auto``, which plans only for batches of prompts."""
    if config.percent == AUTO:
        raise UserError("--percent auto plans for batches of prompts: give percentages here")


def check_outputs_writable(options: object, *names: str) -> None:
    """Raise `UserError` if a file that one of these fields names cannot be written."""
    for name in names:
        if (path := getattr(options, name)) is not None:
            check_writable(flag_name(name), path)


def check_files(options: object, names: Iterable[str],
                outputs: Iterable[tuple[str, str]] = ()) -> None:
    """Raise `UserError` if two fields name the same file.

    `outputs` has more (field, file) pairs, for files that are derived from a field.
    """
    seen: dict[str, str] = {}
    for name, path in (*((name, getattr(options, name)) for name in names), *outputs):
        if path is not None:
            other = seen.setdefault(os.path.realpath(path), name)
            if other != name:
                raise UserError(f"{flag_name(other)} and {flag_name(name)} name the same file")
