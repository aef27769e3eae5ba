"""`UserError`, the exception for problems that the user can fix, and helpers for messages."""

from __future__ import annotations

import difflib
import errno
import reprlib
from collections.abc import Iterable

_LONGEST = 4000  # characters of a message, enough for several paths
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")
"""Messages of errors without their own class: PyTorch's CPU allocator; CUDA and Triton; cuBLAS
and cuDNN, which allocate outside of PyTorch."""
_SHORT = reprlib.Repr()  # shortens long and deeply nested values
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 80


class UserError(Exception):
    """A problem that the user can fix, in one line: the problem, then the remedy.

    Commands print it to stderr as ``error: ...`` and exit with status 2. Text from files and
    libraries in the message is shortened to one line of printable characters.
    """

    def __init__(self, message: str):
        line = " ".join(message.split())
        if not line.isprintable():
            line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
        half = _LONGEST // 2
        super().__init__(line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}")


class InsufficientMemory(UserError):
    """A run does not fit in memory; one with fewer or shorter sequences may."""


class SessionClosed(UserError):
    """A session takes no more requests: it has been closed, by the user or by an error."""


class PromptError(UserError):
    """An error of prompt number `key` of a call, without which the other prompts may run."""

    def __init__(self, message: str, key: int = 0):
        super().__init__(message)
        self.key = key


class PromptMemoryError(PromptError):
    """Memory is too small for a prompt's sequence alone."""


class NonFiniteLogits(PromptError):
    """NaN or infinity in the logits of a prompt."""


class StructureError(PromptError):
    """A text cannot be continued in the form of its `StructuredOutputs`."""


def lacks_memory(error: BaseException) -> bool:
    """Return True for out-of-memory errors of the system and of PyTorch, on any device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and any(message in str(error) for message in _OUT_OF_MEMORY))


def check_text(name: str, value: object) -> None:
    """Raise `UserError` unless `value` is text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise UserError(f"{name} must be text, got {short_repr(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not text in UTF-8: character {error.start} is "
                        f"{value[error.start]!a}, half of a surrogate pair or an undecodable "
                        "byte; fix it") from None


def short_repr(value: object) -> str:
    """Return a value for an error message: one short line."""
    return f"{' '.join(_SHORT.repr(value).split()):.80}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "see --help for the names"
                 ) -> str:
    """Return the end of a message on an unknown name: the nearest known name, or `otherwise`."""
    names = {flag.lstrip("-"): flag for flag in known}
    near = difflib.get_close_matches(name.lstrip("-"), names, n=1)
    return f": did you mean {names[near[0]]}?" if near else f": {otherwise}"
