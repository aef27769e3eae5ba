"""The harness's command line with our model in it: ``python -m flexgen_h2o.integrations.lm_eval``.

All arguments are the harness's own; ``--model flexgen_h2o`` need not be given.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from flexgen_h2o.cli import exit_status
from flexgen_h2o.errors import UserError

_MODEL = ("--model", "-M")
_FLAGS_WITH_MODELS = ("--config", "-C")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness. Returns the exit status: 0, 2 for a user's error, 130 for Ctrl-C.

    What the harness itself refuses it refuses in its own way.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_status(lambda: _run(arguments), last=argv is None)


def _run(arguments: list[str]) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("this needs the evaluation harness: pip install 'flexgen_h2o[eval]'")
    from lm_eval.__main__ import cli_evaluate

    from flexgen_h2o.integrations.lm_eval.model import NAME

    before = sys.argv
    sys.argv = [before[0], *_with_model(arguments, NAME)]  # which the harness reads, and changes
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def _with_model(arguments: list[str], name: str) -> list[str]:
    """The arguments, with our model where an evaluation names none."""
    runs = bool(arguments) and (arguments[0] == "run" or arguments[0].startswith("-"))
    names = {argument.split("=")[0] for argument in arguments}
    if not runs or names & {*_MODEL, *_FLAGS_WITH_MODELS, "-h", "--help"}:
        return arguments
    return [*arguments, "--model", name]


if __name__ == "__main__":
    sys.exit(main())
