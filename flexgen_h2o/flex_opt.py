"""The mission's command, ``python -m flexgen_h2o.flex_opt``: what `tasks.generate` does."""

import sys

from flexgen_h2o.tasks.generate import main, parse_args

__all__ = ["main", "parse_args"]

if __name__ == "__main__":
    sys.exit(main())
