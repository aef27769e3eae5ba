"""The zig-zag block schedule as a pure generator of steps (FlexGen, section 4.1). No torch.

A block is several GPU batches that share every load of a layer's weights: for each forward pass,
for each layer, for each batch. Overlap is lookahead: loads are issued one layer (weights), two
computes (cache) or one (hidden states) ahead of their use, and the executor runs them beside
compute. Two for the cache, so that the disk has the next chunks at hand while the last ones of a
load come in.

In a pipeline each rank has a contiguous range of the layer steps, and steps of its own: for each
forward pass, for each group of GPU batches, for each layer step of its range, for each batch of the
group. While one rank has a group, the rank before has the next one (the inner iterations of
FlexGen's `dist_flex_opt`). What it needs of another rank it receives, and what others need it
sends: hidden states from rank to rank, and the tokens of a forward pass from the last to all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from flexgen_h2o.config.parallel import Stage, split_batches


class Kind(Enum):
    """The kinds of steps."""

    LOAD_WEIGHTS = auto()
    RELEASE_WEIGHTS = auto()
    LOAD_CACHE = auto()
    STORE_CACHE = auto()
    LOAD_HIDDEN = auto()
    STORE_HIDDEN = auto()
    RECEIVE_HIDDEN = auto()
    SEND_HIDDEN = auto()
    RECEIVE_TOKENS = auto()
    TAKE_TOKENS = auto()
    SEND_TOKENS = auto()
    ATTEND = auto()
    COMPUTE = auto()


MOVES = frozenset({Kind.LOAD_WEIGHTS, Kind.RELEASE_WEIGHTS, Kind.LOAD_CACHE, Kind.STORE_CACHE,
                   Kind.LOAD_HIDDEN, Kind.STORE_HIDDEN})
"""Steps that move tensors between the tiers of a rank."""


class LayerStep(NamedTuple):
    """One thing to do: issue a load or a store, start attention, or compute.

    A receive makes ready for a message, which the compute that needs it waits for; tokens are
    waited for by TAKE_TOKENS. A send does not wait either.

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
             split_from: int | None = None, sep_layer: bool = False, keeps: bool = False,
             stage: Stage | None = None, groups: int = 1, no_ops: Collection[Kind] = ()
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
    stage : Stage, optional
        The layers of the rank whose steps these are; None: all, on one rank.
    groups : int
        Into so many groups the batches are cut, the same on all ranks. The weights of a layer step
        are loaded for each of them.
    no_ops : collection of Kind
        Kinds of steps that are left out because the data is resident.
    """
    stage = stage or Stage.whole(num_layers)
    run = _Run(num_passes, num_layers, tuple(split_batches(num_batches, groups)), overlap,
               split_from,
               sep_layer, keeps, stage)
    if run.alone and MOVES.issubset(no_ops):
        return map(run.compute, range(run.count))
    return (step for step in _steps(run) if step.kind not in no_ops)


def _steps(run: _Run) -> Iterator[LayerStep]:
    """All steps of a run."""
    overlap = run.overlap
    loaded = 0  # computes of which the cache has been asked for
    yield from run.load_weights(0)
    for number in range(run.count):
        current, following = run.compute(number), run.compute(number + 1)
        # With one batch the next hidden states are what the current compute is about to make.
        beside = overlap and following is not None and following.batch != current.batch
        early = run.splits(number + 1)
        if overlap:
            yield from run.load_weights(run.next_layer_step(number))
        if beside:
            yield from run.load_hidden(following)
        # Where attention starts a compute early, so does what it needs. What the last forward pass
        # has to store first is not asked for.
        reach = min(number + (2 + early if overlap else 0), number + run.period - 1)
        for other in range(loaded, reach + 1):
            yield from run.load_cache(run.compute(other))
        loaded = max(loaded, reach + 1)
        if early:
            yield following._replace(kind=Kind.ATTEND)
            yield from run.store_cache(following)
        if not run.ready_ahead(number):
            yield from run.arrivals(current)
        if run.ready_ahead(number + 1):
            yield from run.arrivals(following)
        yield from run.receive_tokens(current)
        yield current
        yield from run.departures(current)
        yield from run.store_hidden(current)
        if not run.splits(number):
            yield from run.store_cache(current)
        if run.ends_layer_step(number):
            yield current._replace(kind=Kind.RELEASE_WEIGHTS, batch=None)
        if not overlap:
            yield from run.load_weights(number + 1)
        if not beside:
            yield from run.load_hidden(following)
    yield from run.last_tokens()


@dataclass(frozen=True)
class _Run:
    """All computes of a run by number, in their order, and what goes with each (None: nothing)."""

    passes: int
    num_layers: int
    groups: tuple[range, ...]
    overlap: bool
    split_from: int | None
    sep_layer: bool
    keeps: bool
    stage: Stage

    @cached_property
    def _own(self) -> range:
        """The layer steps of the rank."""
        return self.stage.layer_steps(self.sep_layer)

    @cached_property
    def _order(self) -> list[tuple[int, int, int]]:
        """(group, layer step, batch) of the computes of a forward pass."""
        return [(group, layer, batch) for group, batches in enumerate(self.groups)
                for layer in self._own for batch in batches]

    @property
    def alone(self) -> bool:
        """True if there are but computes and `MOVES`: one rank, and no attention ahead."""
        return self.stage.ranks == 1 and (self.split_from is None or not self.overlap)

    @cached_property
    def period(self) -> int:
        """Computes of a forward pass."""
        return len(self._order)

    @cached_property
    def count(self) -> int:
        """All computes."""
        return self.passes * self.period

    def compute(self, number: int) -> LayerStep | None:
        """The compute of a number; None past the last."""
        if number >= self.count:
            return None
        forward_pass, place = divmod(number, self.period)
        _, layer, batch = self._order[place]
        return LayerStep(Kind.COMPUTE, forward_pass, layer, batch)

    def _group(self, number: int) -> int:
        return self._order[number % self.period][0]

    def _begins(self, number: int) -> bool:
        """True if a compute is the first of a layer step's, for the batches of its group."""
        _, _, batch = self._order[number % self.period]
        return batch == self.groups[self._group(number)].start

    def next_layer_step(self, number: int) -> int:
        """The first compute of the next layer step, for one that begins one; else past the last."""
        if not self._begins(number):
            return self.count
        return number + len(self.groups[self._group(number)])

    def _changes(self, number: int) -> bool:
        """True if a compute needs other weights than the one before it."""
        return number == 0 or (self._begins(number) and len(self._own) > 1)

    def ends_layer_step(self, number: int) -> bool:
        """True if the weights of a compute are not those of the next."""
        return number + 1 == self.count or self._changes(number + 1)

    def load_weights(self, number: int) -> Iterator[LayerStep]:
        """The weights of a compute, if it is the first that needs them."""
        if number < self.count and self._changes(number):
            yield self.compute(number)._replace(kind=Kind.LOAD_WEIGHTS, batch=None)

    def attends(self, compute: LayerStep | None) -> bool:
        """True if it is one of a decoder layer, and of the half that attends."""
        last = num_layer_steps(self.num_layers, self.sep_layer) - 1
        return (compute is not None and 0 < compute.layer < last
                and not (self.sep_layer and compute.layer % 2 == 0))

    def splits(self, number: int) -> bool:
        """True if a compute's attention starts early: there is another batch to compute meanwhile,
        and its hidden states do not come from another rank."""
        compute = self.compute(number)
        if self.split_from is None or not self.overlap or number == 0 or not self.attends(compute):
            return False
        return (compute.forward_pass >= self.split_from and not self._enters(compute)
                and self.compute(number - 1).batch != compute.batch)

    def load_cache(self, compute: LayerStep | None) -> Iterator[LayerStep]:
        if self.attends(compute):
            yield compute._replace(kind=Kind.LOAD_CACHE)

    def store_cache(self, compute: LayerStep) -> Iterator[LayerStep]:
        """Stores of the cache; those of the last pass are read only if the cache is kept."""
        if self.attends(compute) and (self.keeps or compute.forward_pass < self.passes - 1):
            yield compute._replace(kind=Kind.STORE_CACHE)

    def load_hidden(self, compute: LayerStep | None) -> Iterator[LayerStep]:
        """Hidden states come out of the embedding, or from the rank before."""
        if compute is not None and compute.layer > self._own[0]:
            yield compute._replace(kind=Kind.LOAD_HIDDEN)

    def store_hidden(self, compute: LayerStep) -> Iterator[LayerStep]:
        """The head makes none, and those for the next rank go there."""
        if compute.layer < self._own[-1]:
            yield compute._replace(kind=Kind.STORE_HIDDEN)

    def _enters(self, compute: LayerStep) -> bool:
        """True if hidden states come from the rank before."""
        return not self.stage.is_first_stage and compute.layer == self._own[0]

    def ready_ahead(self, number: int) -> bool:
        """True if what a compute gets of other ranks is asked for before the one before it.

        Not where the tokens may be waiting for that compute, nor by the first rank, which would
        wait for them: they come when the rest of the pipeline has them done.
        """
        if not self.overlap or number == 0 or number >= self.count:
            return False
        compute, before = self.compute(number), self.compute(number - 1)
        apart = self._group(number) != self._group(number - 1)
        return self._enters(compute) and (apart or before.forward_pass == compute.forward_pass)

    def arrivals(self, compute: LayerStep) -> Iterator[LayerStep]:
        """Receives from other ranks before a forward pass of a batch begins here: of the tokens of
        the pass before, by which a batch may have ended, and of hidden states."""
        if compute.layer != self._own[0]:
            return
        if not self.stage.is_last_stage and compute.forward_pass > 0:
            yield compute._replace(kind=Kind.TAKE_TOKENS, forward_pass=compute.forward_pass - 1)
        if self._enters(compute):
            yield compute._replace(kind=Kind.RECEIVE_HIDDEN)

    def receive_tokens(self, compute: LayerStep) -> Iterator[LayerStep]:
        """Made ready for before they can have been sent, so that no send of them ever waits."""
        if compute.layer == self._own[0] and not self.stage.is_last_stage:
            yield compute._replace(kind=Kind.RECEIVE_TOKENS)

    def departures(self, compute: LayerStep) -> Iterator[LayerStep]:
        """The send to other ranks when a forward pass of a batch ends here."""
        if compute.layer == self._own[-1] and self.stage.ranks > 1:
            kind = Kind.SEND_TOKENS if self.stage.is_last_stage else Kind.SEND_HIDDEN
            yield compute._replace(kind=kind)

    def last_tokens(self) -> Iterator[LayerStep]:
        """The tokens of the last forward pass."""
        if not self.stage.is_last_stage:
            for batch in range(self.groups[-1].stop):
                yield LayerStep(Kind.TAKE_TOKENS, self.passes - 1, self._own[0], batch)
