"""The module that torchrun starts, ``python -m flexgen_h2o.batch``: what `tasks.batch` does."""

import sys

from flexgen_h2o.tasks.batch import main

if __name__ == "__main__":
    sys.exit(main())
