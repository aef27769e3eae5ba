"""Printer of a stream's text as tokens come. No torch."""

from __future__ import annotations

from typing import Any

from flexgen_h2o.engine.detokenization import Detokenizer, IncrementalDetokenizer
from flexgen_h2o.files.terminal import show


class Printer:
    """Streamer with transformers' interface that prints each complete character.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._detokenizer = Detokenizer(tokenizer)
        self._text = IncrementalDetokenizer(self._detokenizer)

    def put(self, value: Any) -> None:
        """Print the text of a tensor of token ids."""
        show("".join(map(self._text.step, value.flatten().tolist())), end="")

    def end(self) -> None:
        """Print a newline after the last token of a turn."""
        self._text = IncrementalDetokenizer(self._detokenizer)
        show("")
