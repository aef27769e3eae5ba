"""Flags of a task: its own, which are fields of its options, and some of `flex_opt`'s. No torch.

Every flag may be written with dashes or, as in the H2O repository, with underscores.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, fields

from flexgen_h2o.cli.parser import Parser, arguments, program
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import checked, flag_name
from flexgen_h2o.config.formats import AUTO
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.errors import UserError

ENGINE = ("path", "device", "dtype", "percent", "weight_bits", "activation_bits",
          "weight_cache", "no_weight_cache", "calibration", "cache_bits", "key_bits", "value_bits",
          "offload_dir", "verify", "memory_limit", "device_memory_limit")
"""Flags of `flex_opt` that say how a model runs, beside its name."""

# Where what `flex_opt` says of a flag is not so here.
_HELP = {
    "percent": "percent of weights on gpu, cpu; of cache on gpu, cpu; of activations on gpu, cpu "
    "(100 0 if left out); the rest is on disk",
    "seed": "seed of sampling and random weights",
}
_SHOWN = {"weight_bits": AUTO, "cache_bits": 16, "gpu_batch_size": Policy.gpu_batch_size,
          "num_gpu_batches": Policy.num_gpu_batches}
# What the H2O repository calls them.
_ALSO = {"model": "--model-name", "gpu_batch_size": "--batch-size"}


def own_fields(options: type) -> list[Field]:
    """The fields of a task's options that are flags."""
    return [spec for spec in fields(options) if "kind" in spec.metadata]


def check_own(options: object) -> None:
    """Check every flag of a frozen dataclass of options, and put its value into one form.

    Raises `UserError`.
    """
    for spec in own_fields(type(options)):
        object.__setattr__(options, spec.name, checked(spec, getattr(options, spec.name)))


def build_parser(options: type, shared: Collection[str], *, name: str, description: str,
                 defaults: Mapping[str, object], helps: Mapping[str, str] | None = None) -> Parser:
    """The parser of a task.

    Parameters
    ----------
    options : type
        Dataclass of the task's own flags.
    shared : collection of str
        Fields of `RunConfig` that are flags here, beside `model`.
    name, description : str
        The task's name among the commands, and what ``--help`` says of it.
    defaults : mapping
        What ``--help`` shows as defaults of shared flags where they are not `RunConfig`'s.
    helps : mapping, optional
        And what it says of them.
    """
    parser = Parser(prog=program(name), description=description, allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    for spec in fields(RunConfig):
        if spec.name == "model" or spec.name in shared:
            words = _shared_arguments(spec, _SHOWN | {**defaults}, _HELP | {**(helps or {})})
            parser.add_argument(*_spellings(spec), **words)
    for spec in own_fields(options):
        parser.add_argument(*_spellings(spec), **arguments(spec))
    return parser


def parse(argv: Sequence[str] | None, parser: Parser, options: type
          ) -> tuple[dict[str, object], dict[str, object]]:
    """The flags that were given: values of the options' own fields, and of `RunConfig`'s.

    `argv` None is the process's; `parser` is that of `options`. Raises `UserError` for a flag that
    is unknown, lacks its value or has one of a wrong type.
    """
    given = vars(parser.parse_args(argv))
    own = {spec.name for spec in own_fields(options)} & given.keys()
    return ({name: given[name] for name in given if name in own},
            {name: given[name] for name in given if name not in own})


def _shared_arguments(spec: Field, defaults: Mapping[str, object], helps: Mapping[str, str]
                      ) -> dict[str, object]:
    """argparse's keywords for a field of `RunConfig`, with what is said of it here."""
    words = arguments(spec)
    text, _, shown = words["help"].rpartition(" (default: ")
    text = helps.get(spec.name, text)
    if spec.name in defaults:
        shown = f"{defaults[spec.name]})"
    return words | {"help": f"{text} (default: {shown}"}


def _spellings(spec: Field) -> list[str]:
    """Its names, with dashes, and with underscores where that differs."""
    names = [flag_name(spec.name), *([_ALSO[spec.name]] if spec.name in _ALSO else [])]
    return list(dict.fromkeys(
        each for name in names for each in (name, "--" + name[2:].replace("-", "_"))))


def check_from_csv(given: Collection[str]) -> None:
    """Raise `UserError` when ``--from-csv``, which runs nothing, is given beside flags of a run.

    Only ``--plot`` goes with it.
    """
    if "from_csv" in given:
        refuse(given, {*given} - {"from_csv", "plot"},
               "has no effect with --from-csv: leave it out")


def refuse(given: Iterable[str], names: Collection[str], why: str) -> None:
    """Raise `UserError` when one of `names` is among the flags that were given."""
    for name in given:
        if name in names:
            raise UserError(f"{flag_name(name)} {why}")


def check_placed(config: RunConfig) -> None:
    """Raise `UserError` for ``--percent auto``: a plan is for batches, and a task is not one."""
    if config.percent == AUTO:
        raise UserError("--percent auto plans for batches of prompts: give percentages here")


def check_files(options: object, names: Iterable[str],
                others: Iterable[tuple[str, str]] = ()) -> None:
    """Raise `UserError` when two of these fields name the same file.

    `others` are names of fields and of more files that come of them.
    """
    seen: dict[str, str] = {}
    for name, path in (*((name, getattr(options, name)) for name in names), *others):
        if path is not None:
            other = seen.setdefault(os.path.realpath(path), name)
            if other != name:
                raise UserError(f"{flag_name(other)} and {flag_name(name)} name the same file")
