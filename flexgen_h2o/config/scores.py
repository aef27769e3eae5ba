"""The names of policies, `H2OConfig.score`: the built-in ones and those that were registered.

No torch: a policy's function is nothing that this module looks at (`h2o.policies`).
"""

from __future__ import annotations

from flexgen_h2o.errors import UserError

KERNELS = ("sum", "mean", "decay")
"""Those that the kernels know."""
BUILT_IN = (*KERNELS, "caote")

_registered: dict[str, object] = {}


def register(name: str, policy: object) -> None:
    """Keep a policy under a name; the same one may come again.

    Raises `UserError` where the name is no string that could be one, or is another's.
    """
    if not isinstance(name, str) or not name or name != name.strip():
        raise UserError(f"a policy's name must be a word, got {name!r}")
    if name in BUILT_IN or _registered.get(name, policy) != policy:
        raise UserError(f"there is another policy of the name {name!r}: choose another")
    _registered[name] = policy


def registered(name: str) -> object:
    """The policy that was registered under a name; KeyError where none was."""
    return _registered[name]


def check_score(name: object) -> None:
    """Raise `UserError` unless a policy of that name is known in this process."""
    if not isinstance(name, str) or name not in (*BUILT_IN, *_registered):
        known = ", ".join((*BUILT_IN, *_registered))
        raise UserError(f"score must be one of {known}, got {name!r}: others are registered first, "
                        "with register_policy, in each process")
