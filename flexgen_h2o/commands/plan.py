"""Plan a run without running it: ``flexgen-h2o plan``, the same as ``generate --plan-only``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from flexgen_h2o.cli import parser as flag_parser
from flexgen_h2o.cli.command import entry_point
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.commands.generate import run

__all__ = ["main", "parse_args", "parser", "run"]

_GROUPS = ("model", "input", "batch and lengths", "policy", "planning", "cache")
EXCLUDED_FLAGS = ("plan_only", "chat", "chat_template_kwargs", "warm_up", "cut_gen_len",
                  "rank_timeout")
"""Flags of these groups without effect on a plan."""


@dataclass(frozen=True)
class PlanHelps:
    """The flags whose help differs from `generate`."""

    hardware: str | None = flag(
        "path", None, metavar="FILE.yaml", shown="this machine", group="planning",
        help="plan for the machine in this file",
    )


def parser() -> flag_parser.Parser:
    """Return the parser of the flags."""
    specs = {spec.name: spec for spec in fields(RunConfig)
             if spec.metadata["group"] in _GROUPS and spec.name not in EXCLUDED_FLAGS}
    return flag_parser.build_parser(
        (specs | {spec.name: spec for spec in fields(PlanHelps)}).values(),
        command="plan",
        usage="%(prog)s [--model NAME] [--percent auto] [--hardware FILE.yaml] [flags]",
        description="Print the policy of a run, as flags to paste, and its predicted times. "
        "--percent auto chooses the policy.")


def parse_args(argv: Sequence[str] | None = None) -> RunConfig:
    """Parse flags into a checked `RunConfig` that only plans. Raises `UserError`."""
    values = flag_parser.given_flags(parser(), argv)
    return RunConfig.from_mapping(values | {"plan_only": True})


main = entry_point(parse_args, run)
