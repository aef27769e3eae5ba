"""Text of a stream as it comes, on a terminal that may not hold it. No torch."""

from __future__ import annotations

from typing import Any

from flexgen_h2o.engine.detokenization import Detokenizer, IncrementalDetokenizer
from flexgen_h2o.files.terminal import show


class Printer:
    """Prints each character once it is complete; a streamer in transformers' form.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._detokenizer = Detokenizer(tokenizer)
        self._text = IncrementalDetokenizer(self._detokenizer)

    def put(self, value: Any) -> None:
        """Print the text of token ids, a tensor of any shape."""
        show("".join(map(self._text.step, value.flatten().tolist())), end="")

    def end(self) -> None:
        """Print a line's end after the last token of a turn."""
        self._text = IncrementalDetokenizer(self._detokenizer)
        show("")
