"""Checks of errors: one line, and for a command status 2 and an empty stdout."""

import re
from collections.abc import Callable, Sequence

import pytest

from flexgen_h2o.errors import UserError


def refused(action: Callable[[], object], *words: str, match: str | None = None) -> str:
    """The one-line message of the `UserError` that `action` raises.

    It holds all of `words`, and the regular expression `match` is found in it.
    """
    with pytest.raises(UserError, match=match) as caught:
        action()
    message = str(caught.value)
    assert message and "\n" not in message, message
    for word in words:
        assert word in message, message
    return message


def command_refused(main: Callable[[Sequence[str]], int], capture, argv: Sequence[str],
                    *words: str) -> str:
    """The one line on stderr with which a command refuses `argv`; it holds all of `words`.

    `capture` is the fixture capsys or capfd.
    """
    capture.readouterr()
    status = main([*argv])
    out, err = capture.readouterr()
    assert (status, out) == (2, ""), err
    return error_line(err, *words)


def error_line(err: str, *words: str) -> str:
    """`err`, which is one line of an error and holds all of `words`."""
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    for word in words:
        assert word in err, err
    return err
