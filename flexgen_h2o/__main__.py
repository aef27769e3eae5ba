"""``python -m flexgen_h2o COMMAND``: what the script ``flexgen-h2o`` does."""

import sys

from flexgen_h2o.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
