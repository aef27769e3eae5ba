"""The mission's command, ``python -m flexgen_h2o.flex_opt``: what `commands.generate` does."""

import sys
from collections.abc import Sequence

from flexgen_h2o.cli.command import command
from flexgen_h2o.cli.parser import parse_args
from flexgen_h2o.commands.generate import run


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run(parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
