"""The mission's command, ``python -m flexgen_h2o.flex_opt``: what `tasks.generate` does."""

import sys
from collections.abc import Sequence

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import parse_args
from flexgen_h2o.tasks.generate import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 2 for a user's error, 130 for Ctrl-C."""
    return exit_status(lambda: run(parse_args(argv)), last=argv is None)


if __name__ == "__main__":
    sys.exit(main())
