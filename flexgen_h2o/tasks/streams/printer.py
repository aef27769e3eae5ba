"""transformers' streamer of text, on a terminal that may not hold it. Loads torch."""

from __future__ import annotations

from transformers import TextStreamer

from flexgen_h2o.files.terminal import show


class Printer(TextStreamer):
    """Prints text as soon as it is whole words; what the terminal can't show, as escapes."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print `text`, and a line's end after the last of a turn."""
        show(text, end="\n" if stream_end else "")
