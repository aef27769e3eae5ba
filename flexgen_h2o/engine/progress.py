"""Progress bars: bytes while loading, layers and decode steps while generating."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from flexgen_h2o.engine.blocks import GPUBatch
from flexgen_h2o.engine.schedule import Action
from flexgen_h2o.files.terminal import ProgressBar

ByteProgress = Callable[[int, int], None]
"""Called with the bytes done and all bytes."""


@contextmanager
def byte_bar(description: str, *, progress: bool | None) -> Iterator[ByteProgress]:
    """Show a bar of bytes. Yields its update. progress=None: show it on a terminal only."""
    with ProgressBar(desc=description, unit="B", unit_scale=True, disable=_disable(progress)
                     ) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


class RunBars:
    """Bars for prefill (layers) and decode (steps), whose totals grow with each block.

    Parameters
    ----------
    units : range
        Units of a forward pass on this rank.
    progress : bool or None
        Show the bars. None: on a terminal only.
    """

    def __init__(self, units: range, *, progress: bool | None):
        self._units = units
        disable = _disable(progress)
        self._prefill = ProgressBar(total=0, desc="prefill", unit="layer", disable=disable)
        self._decode = ProgressBar(total=0, desc="decode", unit="step", disable=disable)

    def begin(self, block: Sequence[GPUBatch]) -> None:
        """Add a block to the totals."""
        layout = block[0].layout
        passes = sum(layout.prefill_passes for batch in block if batch.fresh)
        self._prefill.total = self._prefill.n + len(self._units) * passes
        self._decode.total = self._decode.n + layout.new

    def show(self, block: Sequence[GPUBatch], action: Action) -> None:
        """Count a finished compute of a block."""
        if block[0].layout.in_prefill(action.forward_pass):
            self._prefill.update()
        elif action.unit == self._units[-1] and action.batch == 0:
            self._decode.update()

    def close(self) -> None:
        """Close the bars; their last state stays visible."""
        self._prefill.close()
        self._decode.close()


def _disable(progress: bool | None) -> bool | None:
    """Return tqdm's `disable`, for which None means: without a terminal."""
    return None if progress is None else not progress
