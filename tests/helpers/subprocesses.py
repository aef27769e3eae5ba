"""The environment of subprocesses."""

import os
from pathlib import Path

import flexgen_h2o


def environment(*folders: str | Path, **variables: str) -> dict[str, str]:
    """This process's environment, and `more`; a child imports from these folders first (if none
    is named, from the one that flexgen_h2o lies in), and then from those of this one's PYTHONPATH.
    """
    repository, inherited = Path(flexgen_h2o.__file__).parents[1], os.environ.get("PYTHONPATH")
    paths = [*map(str, folders or [repository]), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
