"""``python -m flexgen_h2o.flex_opt``: `generate`, by the name of FlexGen's command."""

import sys

from flexgen_h2o.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
