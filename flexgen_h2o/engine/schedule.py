"""The zig-zag block schedule as a pure generator of steps (FlexGen, section 4.1). No torch.

A block is several GPU batches that share every load of a layer's weights: for each sweep, for
each layer, for each batch. Overlap is lookahead: loads are issued one layer (weights) or one
compute (cache, hidden states) ahead of their use, and the executor runs them beside compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto


class Kind(Enum):
    """What a step does."""

    LOAD_WEIGHTS = auto()
    RELEASE_WEIGHTS = auto()
    LOAD_CACHE = auto()
    STORE_CACHE = auto()
    LOAD_HIDDEN = auto()
    STORE_HIDDEN = auto()
    COMPUTE = auto()


@dataclass(frozen=True)
class Step:
    """One thing to do: issue a load or a store, or compute.

    sweep counts the passes through all layers from 0: one or more for the prompts, then one for
    each new token. Layer 0 embeds, 1 to num_layers are the decoder layers, num_layers + 1 is the
    head; batch is the index within the block, or None for weights, which all batches share.
    """

    kind: Kind
    sweep: int
    layer: int
    batch: int | None


def schedule(num_sweeps: int, num_layers: int, num_batches: int, *, overlap: bool = True
             ) -> Iterator[Step]:
    """Steps that take a block through the network `num_sweeps` times.

    Every load precedes the compute that needs it, every store follows the compute that made it,
    and a load of what an earlier compute stored is issued after that store. At most two layers'
    weights are live at a time.

    Parameters
    ----------
    num_sweeps, num_layers, num_batches : int
        Sweeps, decoder layers, GPU batches in the block; all positive.
    overlap : bool
        Issue loads ahead. Without, each load is issued just before its use.
    """
    order = _computes(num_sweeps, num_layers, num_batches)
    current = next(order)
    yield from _weights(current)
    yield from _states(current, num_layers)
    while current is not None:
        following = next(order, None)
        ahead = list(_lookahead(current, following, num_sweeps, num_layers)) if overlap else []
        yield from ahead
        yield current
        yield from _stores(current, num_sweeps, num_layers)
        if current.batch == num_batches - 1:
            yield Step(Kind.RELEASE_WEIGHTS, current.sweep, current.layer, None)
        if following is not None:
            late = [] if overlap else list(_weights(following))
            late += [s for s in _states(following, num_layers) if s not in ahead]
            yield from late
        current = following


def _computes(num_sweeps: int, num_layers: int, num_batches: int) -> Iterator[Step]:
    for sweep in range(num_sweeps):
        for layer in range(num_layers + 2):
            for batch in range(num_batches):
                yield Step(Kind.COMPUTE, sweep, layer, batch)


def _weights(compute: Step) -> Iterator[Step]:
    """The load of a layer's weights, for the first batch that uses them."""
    if compute.batch == 0:
        yield Step(Kind.LOAD_WEIGHTS, compute.sweep, compute.layer, None)


def _states(compute: Step, num_layers: int) -> Iterator[Step]:
    """The loads of cache and hidden states that a compute needs."""
    sweep, layer, batch = compute.sweep, compute.layer, compute.batch
    if 1 <= layer <= num_layers:
        yield Step(Kind.LOAD_CACHE, sweep, layer, batch)
    if layer > 0:
        yield Step(Kind.LOAD_HIDDEN, sweep, layer, batch)


def _stores(compute: Step, num_sweeps: int, num_layers: int) -> Iterator[Step]:
    """The stores of what a compute made; nobody reads what the last sweep adds to the cache."""
    sweep, layer, batch = compute.sweep, compute.layer, compute.batch
    if layer <= num_layers:
        yield Step(Kind.STORE_HIDDEN, sweep, layer, batch)
    if 1 <= layer <= num_layers and sweep < num_sweeps - 1:
        yield Step(Kind.STORE_CACHE, sweep, layer, batch)


def _lookahead(current: Step, following: Step | None, num_sweeps: int, num_layers: int
               ) -> Iterator[Step]:
    """Loads to issue before `current` computes: the next layer's weights, the next states."""
    if current.batch == 0:
        layer, sweep = current.layer + 1, current.sweep
        if layer > num_layers + 1:
            layer, sweep = 0, sweep + 1
        if sweep < num_sweeps:
            yield Step(Kind.LOAD_WEIGHTS, sweep, layer, None)
    if following is None:
        return
    for step in _states(following, num_layers):
        # With one batch the next hidden states are what `current` is about to compute.
        if step.kind is Kind.LOAD_CACHE or following.batch != current.batch:
            yield step
