"""The one exception that a user's input causes, and its kinds that a caller may go on after."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

_LONGEST = 4000  # characters of a message: several paths
_SHORT = reprlib.Repr()  # without the end of what is long, and what is nested deeply
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 80


class UserError(Exception):
    """A problem that the user can mend, in one line: what is wrong and what to do.

    `flex_opt` prints it as ``error: ...`` on stderr and exits with status 2. What a file or a
    library has put into the message is one line of printable characters then, and not without end.
    """

    def __init__(self, message: str):
        line = " ".join(message.split())
        if not line.isprintable():
            line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
        half = _LONGEST // 2
        super().__init__(line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}")


class InsufficientMemory(UserError):
    """A run for which there is too little memory; one of fewer or shorter sequences may fit."""


class NonFiniteLogits(UserError):
    """Logits that hold NaN or infinity, of the prompt at place `key` of a call."""

    def __init__(self, message: str, key: int = 0):
        super().__init__(message)
        self.key = key


def check_text(name: str, value: object) -> None:
    """Raise `UserError` unless `value` is text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise UserError(f"{name} must be text, got {short_repr(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not text in UTF-8: character {error.start} is "
                        f"{value[error.start]!a}, half of a surrogate pair or a byte that stands "
                        "for none; mend it") from None


def short_repr(value: object) -> str:
    """A wrong value for a message: in one line, not too long."""
    return f"{' '.join(_SHORT.repr(value).split()):.80}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "see --help for the names"
                 ) -> str:
    """The end of a message on an unknown name: the known one that is most like it, or `otherwise`.
    """
    names = {each.lstrip("-"): each for each in known}
    near = difflib.get_close_matches(name.lstrip("-"), names, n=1)
    return f": did you mean {names[near[0]]}?" if near else f": {otherwise}"
