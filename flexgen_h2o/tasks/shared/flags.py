"""Flags of a task: its own, which are fields of its options, and some of `flex_opt`'s. No torch.

Every flag may be written with dashes or, as in the H2O repository, with underscores.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields

from flexgen_h2o.cli import Parser, arguments
from flexgen_h2o.errors import UserError
from flexgen_h2o.flag_values import checked, flag_name
from flexgen_h2o.plan_flags import AUTO
from flexgen_h2o.run_config import RunConfig

ENGINE = ("path", "device", "dtype", "percent", "weight_bits", "cache_bits", "offload_dir",
          "memory_limit", "device_memory_limit")
"""Flags of `flex_opt` that say how a model runs, beside its name."""

# Where what `flex_opt` says of a flag is not so here.
_HELP = {
    "percent": "percent of weights on gpu, cpu; of cache on gpu, cpu; of activations on gpu, cpu "
    "(100 0 if left out); the rest is on disk",
    "sink_tokens": "first tokens of the stream to keep always",
    "seed": "seed of sampling and random weights",
    "gen_len": "most tokens to generate for each turn",
}
_SHOWN = {"weight_bits": 16, "cache_bits": 16}


def flag(kind: str, default: object, *, help: str, **rules: object):
    """A field and the metadata of its flag, as `RunConfig` describes them."""
    return field(default=default, metadata={"kind": kind, "help": help, **rules})


def own_fields(options: type) -> list[Field]:
    """The fields of a task's options that are flags."""
    return [spec for spec in fields(options) if "kind" in spec.metadata]


def check_own(options: object) -> None:
    """Check every flag of a frozen dataclass of options, and put its value into one form.

    Raises `UserError`.
    """
    for spec in own_fields(type(options)):
        object.__setattr__(options, spec.name, checked(spec, getattr(options, spec.name)))


def parse(argv: Sequence[str] | None, options: type, shared: Collection[str], *, prog: str,
          description: str, defaults: Mapping[str, object]
          ) -> tuple[dict[str, object], dict[str, object]]:
    """The flags that were given: values of the options' own fields, and of `RunConfig`'s.

    Parameters
    ----------
    argv : sequence of str, optional
        Default: those of the process.
    options : type
        Dataclass of the task's own flags.
    shared : collection of str
        Fields of `RunConfig` that are flags here. ``--model-name`` stands for `model`, always.
    prog, description : str
        What ``--help`` shows.
    defaults : mapping
        What ``--help`` shows as defaults of shared flags where they are not `RunConfig`'s.

    Raises
    ------
    UserError
        A flag is unknown, lacks its value or has one of a wrong type.
    """
    parser = Parser(prog=prog, description=description, allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    for spec in fields(RunConfig):
        if spec.name == "model":
            _add(parser, spec, "--model-name", defaults)
        elif spec.name in shared:
            _add(parser, spec, flag_name(spec.name), _SHOWN | {**defaults})
    for spec in own_fields(options):
        parser.add_argument(*_spellings(flag_name(spec.name)), **arguments(spec))
    given = vars(parser.parse_args(argv))
    own = {spec.name for spec in own_fields(options)} & given.keys()
    return ({name: given[name] for name in given if name in own},
            {name: given[name] for name in given if name not in own})


def _add(parser: argparse.ArgumentParser, spec: Field, name: str,
         defaults: Mapping[str, object]) -> None:
    """A flag in both spellings, with what is said of it here."""
    words = arguments(spec)
    text, _, shown = words["help"].rpartition(" (default: ")
    if spec.name in _HELP:
        text = _HELP[spec.name]
    if spec.name in defaults:
        shown = f"{defaults[spec.name]})"
    words["help"] = f"{text} (default: {shown}"
    parser.add_argument(*_spellings(name), **words)


def _spellings(name: str) -> list[str]:
    """With dashes, and with underscores where that differs."""
    return list(dict.fromkeys((name, "--" + name[2:].replace("-", "_"))))


def refuse(given: Iterable[str], names: Collection[str], why: str) -> None:
    """Raise `UserError` when one of `names` is among the flags that were given."""
    for name in given:
        if name in names:
            raise UserError(f"{flag_name(name)} {why}")


def open_llm(config: RunConfig, **options: object):
    """The `LLM` of a checked config. Loads torch. Raises `UserError`."""
    from flexgen_h2o.llm import LLM  # only now: bad flags answer at once

    return LLM(config.model, path=config.path, policy=config.policy(), h2o=config.h2o(),
               weight_bits=config.resolved_weight_bits, cache_bits=config.resolved_cache_bits,
               device=config.device, dtype=config.dtype, offload_dir=config.offload_dir,
               seed=config.seed, memory_limit=config.memory_limit,
               device_memory_limit=config.device_memory_limit, **options)


def check_placed(config: RunConfig) -> None:
    """Raise `UserError` for ``--percent auto``: a plan is for batches, and a task is not one."""
    if config.percent == AUTO:
        raise UserError("--percent auto plans for batches of prompts: give percentages here")


def check_files(options: object, names: Iterable[str]) -> None:
    """Raise `UserError` when two of these fields name the same file."""
    seen: dict[str, str] = {}
    for name in names:
        path = getattr(options, name)
        if path is not None:
            other = seen.setdefault(os.path.realpath(path), name)
            if other != name:
                raise UserError(f"{flag_name(other)} and {flag_name(name)} name the same file")
