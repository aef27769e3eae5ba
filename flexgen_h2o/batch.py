"""``python -m flexgen_h2o.batch``: the command `batch`, as a module that torchrun starts."""

import sys

from flexgen_h2o.commands.batch import main

if __name__ == "__main__":
    sys.exit(main())
