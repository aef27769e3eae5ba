"""The mission's command, ``python -m flexgen_h2o.flex_opt``: the sub-command `generate` alone."""

import sys

from flexgen_h2o.tasks.generate import main

if __name__ == "__main__":
    sys.exit(main())
