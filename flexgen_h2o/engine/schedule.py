"""The zig-zag block schedule as a pure generator of steps (FlexGen, section 4.1). No torch.

A block is several GPU batches that share every load of a layer's weights: for each forward pass,
for each layer, for each batch. Overlap is lookahead: loads are issued one layer (weights), two
computes (cache) or one (hidden states) ahead of their use, and the executor runs them beside
compute. Two for the cache, so that the disk has the next chunks at hand while the last ones of a
load come in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto


class Kind(Enum):
    """The kinds of steps."""

    LOAD_WEIGHTS = auto()
    RELEASE_WEIGHTS = auto()
    LOAD_CACHE = auto()
    STORE_CACHE = auto()
    LOAD_HIDDEN = auto()
    STORE_HIDDEN = auto()
    ATTEND = auto()
    COMPUTE = auto()


@dataclass(frozen=True)
class LayerStep:
    """One thing to do: issue a load or a store, start attention, or compute.

    forward_pass counts the passes through all layers from 0: one or more for the prompts, then one
    for each new token. layer counts the layer steps of a forward pass: 0 embeds, then come the
    decoder layers, and the last is the head. With `sep_layer` a decoder layer is two layer steps,
    attention and MLP. batch is the index within the block, or None for weights, which all batches
    share.
    """

    kind: Kind
    forward_pass: int
    layer: int
    batch: int | None


def num_layer_steps(num_layers: int, sep_layer: bool) -> int:
    """Layer steps of a forward pass: the embedding, the decoder layers (or twice as many halves),
    the head."""
    return num_layers * (2 if sep_layer else 1) + 2


def schedule(num_passes: int, num_layers: int, num_batches: int, *, overlap: bool = True,
             split_from: int | None = None, sep_layer: bool = False, keeps: bool = False
             ) -> Iterator[LayerStep]:
    """Steps that take a block through the network `num_passes` times.

    Every load precedes the compute that needs it, every store follows the compute that made it,
    and a load of what an earlier compute stored is issued after that store. The weights of at most
    two layer steps are live at a time.

    Parameters
    ----------
    num_passes, num_layers, num_batches : int
        Forward passes, decoder layers, GPU batches in the block; all positive.
    overlap : bool
        Issue loads ahead. Without, each load is issued just before its use.
    split_from : int or None
        The forward pass from which on every attention is started (ATTEND) before the compute of the
        batch that precedes it, and ended by its own. It takes overlap and several batches: with one
        there is nothing to do meanwhile.
    sep_layer : bool
        Attention and MLP are layer steps of their own.
    keeps : bool
        Another run goes on with the cache, so that what the last forward pass adds is stored too.
    """
    # With one batch the next hidden states are what the current compute is about to make.
    beside = overlap and num_batches > 1
    run = _Run(num_passes, num_layer_steps(num_layers, sep_layer), num_batches,
               split_from if beside else None, sep_layer, keeps)
    loaded = 0  # computes of which the cache has been asked for
    yield from run.load_weights(run.compute(0))
    for number in range(len(run)):
        current, following = run.compute(number), run.compute(number + 1)
        early = run.splits(following)
        if overlap and current.batch == 0:
            yield from run.load_weights(run.compute(number + num_batches))
        if beside:
            yield from run.load_hidden(following)
        # Where attention starts a compute early, so does what it needs.
        reach = number + (2 + early if overlap else 0)
        for other in range(loaded, reach + 1):
            yield from run.load_cache(run.compute(other))
        loaded = reach + 1
        if early:
            yield replace(following, kind=Kind.ATTEND)
            yield from run.store_cache(following)
        yield current
        yield from run.store_hidden(current)
        if not run.splits(current):
            yield from run.store_cache(current)
        if current.batch == num_batches - 1:
            yield replace(current, kind=Kind.RELEASE_WEIGHTS, batch=None)
        if not overlap:
            yield from run.load_weights(following)
        if not beside:
            yield from run.load_hidden(following)


@dataclass(frozen=True)
class _Run:
    """All computes of a run by number, in their order, and what goes with each (None: nothing)."""

    passes: int
    layer_steps: int
    batches: int
    split_from: int | None
    sep_layer: bool
    keeps: bool

    def __len__(self) -> int:
        return self.passes * self.layer_steps * self.batches

    def compute(self, number: int) -> LayerStep | None:
        """The compute of a number; None past the last."""
        if number >= len(self):
            return None
        forward_pass, rest = divmod(number, self.layer_steps * self.batches)
        return LayerStep(Kind.COMPUTE, forward_pass, *divmod(rest, self.batches))

    def attends(self, compute: LayerStep | None) -> bool:
        """True if it is one of a decoder layer, and of the half that attends."""
        return (compute is not None and 0 < compute.layer < self.layer_steps - 1
                and not (self.sep_layer and compute.layer % 2 == 0))

    def splits(self, compute: LayerStep | None) -> bool:
        """True if its attention starts early."""
        return (self.split_from is not None and self.attends(compute)
                and compute.forward_pass >= self.split_from)

    def load_weights(self, compute: LayerStep | None) -> Iterator[LayerStep]:
        """A layer step's weights, for the first batch that uses them."""
        if compute is not None and compute.batch == 0:
            yield replace(compute, kind=Kind.LOAD_WEIGHTS, batch=None)

    def load_cache(self, compute: LayerStep | None) -> Iterator[LayerStep]:
        if self.attends(compute):
            yield replace(compute, kind=Kind.LOAD_CACHE)

    def store_cache(self, compute: LayerStep) -> Iterator[LayerStep]:
        """Stores of the cache; those of the last pass are read only if the cache is kept."""
        if self.attends(compute) and (self.keeps or compute.forward_pass < self.passes - 1):
            yield replace(compute, kind=Kind.STORE_CACHE)

    def load_hidden(self, compute: LayerStep | None) -> Iterator[LayerStep]:
        """Hidden states come out of the embedding."""
        if compute is not None and compute.layer > 0:
            yield replace(compute, kind=Kind.LOAD_HIDDEN)

    def store_hidden(self, compute: LayerStep) -> Iterator[LayerStep]:
        """The head makes none."""
        if compute.layer < self.layer_steps - 1:
            yield replace(compute, kind=Kind.STORE_HIDDEN)
