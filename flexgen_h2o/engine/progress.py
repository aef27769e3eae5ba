"""Progress bars: over bytes while loading, over layers and steps while a run computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from flexgen_h2o.engine.batch import Batch
from flexgen_h2o.engine.schedule import LayerStep


@contextmanager
def byte_bar(what: str, *, off: bool | None) -> Iterator[Callable[[int, int], None]]:
    """A bar as a callback that takes (bytes done, bytes in all). off None: only on a terminal."""
    with tqdm(desc=what, unit="B", unit_scale=True, disable=off) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextmanager
def run_bars(blocks: Sequence[Sequence[Batch]], layer_steps: int, *, off: bool | None
             ) -> Iterator[Callable[[Sequence[Batch], LayerStep], None]]:
    """Bars for prefill (layers) and decode (steps), as a callback (block, its finished compute).

    `layer_steps` are those of a forward pass through the network (`schedule.num_layer_steps`).
    """
    computes = layer_steps * sum(block[0].batch_layout.prefill_passes * len(block)
                                 for block in blocks)
    steps = sum(block[0].batch_layout.new for block in blocks)
    with tqdm(total=computes, desc="prefill", unit="layer", disable=off) as prefill, tqdm(
            total=steps, desc="decode", unit="step", disable=off) as decode:

        def show(block: Sequence[Batch], step: LayerStep) -> None:
            if block[0].batch_layout.in_prefill(step.forward_pass):
                prefill.update()
            elif step.layer == layer_steps - 1 and step.batch == 0:
                decode.update()

        yield show
