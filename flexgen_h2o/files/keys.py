"""Keys of a YAML file, checked against those that it may have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from flexgen_h2o.errors import UserError


def check_keys(values: Mapping, known: Iterable[str], where: str) -> None:
    """Raise `UserError` for a key that is not known, with the one that is near."""
    known = list(known)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f": did you mean {near[0]}?" if near else f": it takes {', '.join(known)}"
            raise UserError(f"{where}: unknown key {name!r}{hint}")
