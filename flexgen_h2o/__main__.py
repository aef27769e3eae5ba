"""``python -m flexgen_h2o COMMAND``, the same as the script ``flexgen-h2o``."""

import sys

from flexgen_h2o.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
