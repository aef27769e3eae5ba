"""Progress bars: bytes while loading, layers and steps while generating."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from flexgen_h2o.engine.batch import Batch
from flexgen_h2o.engine.schedule import LayerStep
from flexgen_h2o.files.terminal import ProgressBar


@contextmanager
def byte_bar(description: str, *, off: bool | None) -> Iterator[Callable[[int, int], None]]:
    """Show a bar. Yields a callback (bytes done, all bytes). off=None: only on a terminal."""
    with ProgressBar(desc=description, unit="B", unit_scale=True, disable=off) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


class RunBars:
    """Bars for prefill (layers) and decode (steps), whose totals grow with each block.

    Parameters
    ----------
    layer_steps : range
        Layer steps of a forward pass on this rank.
    off : bool or None
        None: only on a terminal.
    """

    def __init__(self, layer_steps: range, *, off: bool | None):
        self._layer_steps = layer_steps
        self._prefill = ProgressBar(total=0, desc="prefill", unit="layer", disable=off)
        self._decode = ProgressBar(total=0, desc="decode", unit="step", disable=off)

    def begin(self, block: Sequence[Batch]) -> None:
        """Add a block to the totals."""
        batch_layout = block[0].batch_layout
        passes = sum(batch_layout.prefill_passes for batch in block if batch.fresh)
        self._prefill.total = self._prefill.n + len(self._layer_steps) * passes
        self._decode.total = self._decode.n + batch_layout.new

    def show(self, block: Sequence[Batch], step: LayerStep) -> None:
        """Count a finished compute step of a block."""
        if block[0].batch_layout.in_prefill(step.forward_pass):
            self._prefill.update()
        elif step.layer == self._layer_steps[-1] and step.batch == 0:
            self._decode.update()

    def close(self) -> None:
        """Close the bars; their last state stays visible."""
        self._prefill.close()
        self._decode.close()
