"""The module that torchrun starts, ``python -m flexgen_h2o.batch``: what `commands.batch` does."""

import sys

from flexgen_h2o.commands.batch import main

if __name__ == "__main__":
    sys.exit(main())
