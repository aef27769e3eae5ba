"""Plan a run without running it: ``flexgen-h2o plan``, the same as ``generate --plan-only``."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_h2o.cli.entry_point import entry_point
from flexgen_h2o.cli.parser import Parser, build_parser, command_flags, given_flags
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands.generate import run

__all__ = ["main", "parse_args", "parser", "run"]

_GROUPS = ("model", "input", "batch and lengths", "policy", "planning", "cache")
EXCLUDED_FLAGS = ("plan_only", "chat", "chat_template_kwargs", "warm_up", "cut_gen_len",
                  "rank_timeout")
"""Flags of these groups without effect on a plan."""


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        command_flags(groups=_GROUPS, without=EXCLUDED_FLAGS,
                      hardware={"help": "plan for the machine in this file"}),
        command="plan",
        usage="%(prog)s [--model NAME] [--percent auto] [--hardware FILE.yaml] [flags]",
        description="Print the policy of a run, as flags to paste, and its predicted times. "
        "--percent auto chooses the policy.")


def parse_args(argv: Sequence[str] | None = None) -> RunConfig:
    """Parse flags into a checked `RunConfig` that only plans. Raises `UserError`."""
    return RunConfig.from_mapping(given_flags(parser(), argv) | {"plan_only": True})


main = entry_point(parse_args, run)
