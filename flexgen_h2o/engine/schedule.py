"""The zig-zag block schedule as a pure generator of steps (FlexGen, section 4.1). No torch.

A block is several GPU batches that share every load of a layer's weights: for each forward pass,
for each layer, for each batch. Overlap is lookahead: loads are issued one layer (weights), two
computes (cache) or one (hidden states) ahead of their use, and the executor runs them beside
compute. The cache is loaded two computes ahead, so that the disk is never idle between two loads.

In a pipeline each rank has a contiguous range of the layer steps, and its own schedule: for
each forward pass, for each group of GPU batches, for each layer step of the range, for each batch
of the group. While a rank computes a group, the previous rank computes the next group (the inner
iterations of FlexGen's `dist_flex_opt`). Ranks exchange hidden states with their neighbours, and
the last rank sends the tokens of a forward pass to all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from flexgen_h2o.config.parallel import Stage, split_batches


class Kind(Enum):
    """Kind of a step."""

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
"""Kinds that move tensors between the tiers of a rank."""


class LayerStep(NamedTuple):
    """One step: issue a load, a store or a message, start attention, or compute.

    Loads, stores and messages are asynchronous. A compute waits for the loads and the hidden states
    that it needs; TAKE_TOKENS waits for tokens.

    Attributes
    ----------
    kind : Kind
    forward_pass : int
        Number of the pass through all layers, from 0: one or more for the prompts, then one for
        each new token.
    layer : int
        Number of the layer step in the forward pass: 0 is the embedding, then come the decoder
        layers, and the last is the head. With `sep_layer` a decoder layer is two layer steps,
        attention and MLP.
    batch : int or None
        Index in the block; None for weights, which all batches share.
    """

    kind: Kind
    forward_pass: int
    layer: int
    batch: int | None


def num_layer_steps(num_layers: int, sep_layer: bool) -> int:
    """Return the layer steps of a forward pass: embedding, decoder layers (or halves), head."""
    return num_layers * (2 if sep_layer else 1) + 2


def schedule(num_passes: int, num_layers: int, num_batches: int, *, overlap: bool = True,
             attend_early_from: int | None = None, sep_layer: bool = False,
             keep_cache: bool = False, stage: Stage | None = None, groups: int = 1,
             no_ops: Collection[Kind] = ()) -> Iterator[LayerStep]:
    """Return the steps that take a block through the model `num_passes` times.

    Every load precedes the compute that uses the data, and every store follows the compute that
    wrote it. A load of stored data is issued after the store. At most two layer steps have their
    weights loaded at a time.

    Parameters
    ----------
    num_passes, num_layers, num_batches : int
        Forward passes, decoder layers, GPU batches in the block; all positive.
    overlap : bool
        Issue loads ahead of their use. False: issue each load just before its use.
    attend_early_from : int or None
        From this forward pass on, start attention (ATTEND) before the compute of the previous
        batch, so that the two overlap. It has no effect without `overlap` or with one batch.
        None: never.
    sep_layer : bool
        Schedule attention and MLP as separate layer steps.
    keep_cache : bool
        Another run continues with the cache, so store the tokens of the last forward pass too.
    stage : Stage, optional
        Layers of this rank; None: one rank with all layers.
    groups : int
        Number of groups of batches, the same on all ranks. The weights of a layer step are loaded
        once per group.
    no_ops : collection of Kind
        Kinds of steps to leave out, because the data is resident.

    Returns
    -------
    iterator of LayerStep
    """
    stage = stage or Stage.all_layers(num_layers)
    order = _ComputeOrder(num_passes, num_layers, tuple(split_batches(num_batches, groups)),
                          overlap, attend_early_from, sep_layer, keep_cache, stage)
    if order.has_only_moves and MOVES.issubset(no_ops):
        return map(order.compute, range(order.count))
    return (step for step in _steps(order) if step.kind not in no_ops)


def _steps(order: _ComputeOrder) -> Iterator[LayerStep]:
    """Yield all steps, around the computes in their order."""
    overlap = order.overlap
    loaded = 0  # number of computes whose cache load was issued
    yield from order.load_weights(0)
    for number in range(order.count):
        current, following = order.compute(number), order.compute(number + 1)
        # With one batch, the current compute writes the next hidden states: they cannot be loaded.
        loads_hidden_early = overlap and following is not None and following.batch != current.batch
        early = order.starts_early(number + 1)
        if overlap:
            yield from order.load_weights(order.next_layer_step(number))
        if loads_hidden_early:
            yield from order.load_hidden(following)
        # If attention starts one compute early, its cache is loaded one compute earlier too, unless
        # the current compute still needs its own cache: there are CACHE_BUFFERS buffers. What the
        # previous forward pass has not stored yet cannot be loaded.
        sooner = early and (order.starts_early(number) or not order.attends(current))
        load_end = min(number + (2 + sooner if overlap else 0), number + order.period - 1)
        for ahead in range(loaded, load_end + 1):
            yield from order.load_cache(order.compute(ahead))
        loaded = max(loaded, load_end + 1)
        if early:
            yield following._replace(kind=Kind.ATTEND)
            yield from order.store_cache(following)
        if not order.receives_early(number):
            yield from order.receives(current)
        if order.receives_early(number + 1):
            yield from order.receives(following)
        yield from order.receive_tokens(current)
        yield current
        yield from order.sends(current)
        yield from order.store_hidden(current)
        if not order.starts_early(number):
            yield from order.store_cache(current)
        if order.ends_layer_step(number):
            yield current._replace(kind=Kind.RELEASE_WEIGHTS, batch=None)
        if not overlap:
            yield from order.load_weights(number + 1)
        if not loads_hidden_early:
            yield from order.load_hidden(following)
    yield from order.last_tokens()


@dataclass(frozen=True)
class _ComputeOrder:
    """The computes of a block, numbered in their order, and the steps that each one needs.

    Methods that take a compute accept None, for a number past the last compute.
    """

    passes: int
    num_layers: int
    groups: tuple[range, ...]
    overlap: bool
    attend_early_from: int | None
    sep_layer: bool
    keep_cache: bool
    stage: Stage

    @cached_property
    def _layer_steps(self) -> range:
        """Numbers of this rank's layer steps."""
        return self.stage.layer_steps(self.sep_layer)

    @cached_property
    def _order(self) -> list[tuple[int, int, int]]:
        """(group, layer step, batch) of the computes of a forward pass."""
        return [(group, layer, batch) for group, batches in enumerate(self.groups)
                for layer in self._layer_steps for batch in batches]

    @property
    def has_only_moves(self) -> bool:
        """True if all steps are computes and `MOVES`: one rank, and no attention ahead."""
        return self.stage.ranks == 1 and (self.attend_early_from is None or not self.overlap)

    @cached_property
    def period(self) -> int:
        """Number of computes of a forward pass."""
        return len(self._order)

    @cached_property
    def count(self) -> int:
        """Number of all computes."""
        return self.passes * self.period

    def compute(self, number: int) -> LayerStep | None:
        """Return the compute with a number; None past the last."""
        if number >= self.count:
            return None
        forward_pass, index = divmod(number, self.period)
        _, layer, batch = self._order[index]
        return LayerStep(Kind.COMPUTE, forward_pass, layer, batch)

    def _group(self, number: int) -> int:
        return self._order[number % self.period][0]

    def _begins_layer_step(self, number: int) -> bool:
        """Return True if a compute is the first of its layer step and group."""
        _, _, batch = self._order[number % self.period]
        return batch == self.groups[self._group(number)].start

    def next_layer_step(self, number: int) -> int:
        """Return the first compute of the next layer step if this one begins one, else `count`."""
        if not self._begins_layer_step(number):
            return self.count
        return number + len(self.groups[self._group(number)])

    def _changes_weights(self, number: int) -> bool:
        """Return True if a compute needs other weights than the previous one."""
        return number == 0 or (self._begins_layer_step(number) and len(self._layer_steps) > 1)

    def ends_layer_step(self, number: int) -> bool:
        """Return True if the next compute needs other weights."""
        return number + 1 == self.count or self._changes_weights(number + 1)

    def load_weights(self, number: int) -> Iterator[LayerStep]:
        """Yield the load of a compute's weights, if it is the first compute that needs them."""
        if number < self.count and self._changes_weights(number):
            yield self.compute(number)._replace(kind=Kind.LOAD_WEIGHTS, batch=None)

    def attends(self, compute: LayerStep | None) -> bool:
        """Return True if a compute includes the attention of a decoder layer."""
        last = num_layer_steps(self.num_layers, self.sep_layer) - 1
        return (compute is not None and 0 < compute.layer < last
                and not (self.sep_layer and compute.layer % 2 == 0))

    def starts_early(self, number: int) -> bool:
        """Return True if a compute's attention starts before the previous compute.

        There must be another batch to compute meanwhile, and the hidden states must not come from
        another rank.
        """
        compute = self.compute(number)
        if (self.attend_early_from is None or not self.overlap or number == 0
                or not self.attends(compute)):
            return False
        return (compute.forward_pass >= self.attend_early_from
                and not self._receives_hidden(compute)
                and self.compute(number - 1).batch != compute.batch)

    def load_cache(self, compute: LayerStep | None) -> Iterator[LayerStep]:
        if self.attends(compute):
            yield compute._replace(kind=Kind.LOAD_CACHE)

    def store_cache(self, compute: LayerStep) -> Iterator[LayerStep]:
        """Yield the store of a compute's cache; in the last pass, only if the cache is kept."""
        if self.attends(compute) and (self.keep_cache or compute.forward_pass < self.passes - 1):
            yield compute._replace(kind=Kind.STORE_CACHE)

    def load_hidden(self, compute: LayerStep | None) -> Iterator[LayerStep]:
        """Yield the load of hidden states. A rank's first layer step creates or receives them."""
        if compute is not None and compute.layer > self._layer_steps[0]:
            yield compute._replace(kind=Kind.LOAD_HIDDEN)

    def store_hidden(self, compute: LayerStep) -> Iterator[LayerStep]:
        """Yield the store of hidden states. A rank's last layer step has none, or sends them."""
        if compute.layer < self._layer_steps[-1]:
            yield compute._replace(kind=Kind.STORE_HIDDEN)

    def _receives_hidden(self, compute: LayerStep) -> bool:
        """Return True if a compute's hidden states come from the previous rank."""
        return not self.stage.is_first_stage and compute.layer == self._layer_steps[0]

    def receives_early(self, number: int) -> bool:
        """Return True if the receives of a compute are issued before the previous compute.

        Not if the tokens may depend on the previous compute. Not on the first rank, which would
        wait until the rest of the pipeline has computed the tokens.
        """
        if not self.overlap or number == 0 or number >= self.count:
            return False
        compute, previous = self.compute(number), self.compute(number - 1)
        new_group = self._group(number) != self._group(number - 1)
        return self._receives_hidden(compute) and (
            new_group or previous.forward_pass == compute.forward_pass)

    def receives(self, compute: LayerStep) -> Iterator[LayerStep]:
        """Yield the receives before a batch begins a forward pass on this rank.

        They are the tokens of the previous pass, which may have ended the batch, and hidden states.
        """
        if compute.layer != self._layer_steps[0]:
            return
        if not self.stage.is_last_stage and compute.forward_pass > 0:
            yield compute._replace(kind=Kind.TAKE_TOKENS, forward_pass=compute.forward_pass - 1)
        if self._receives_hidden(compute):
            yield compute._replace(kind=Kind.RECEIVE_HIDDEN)

    def receive_tokens(self, compute: LayerStep) -> Iterator[LayerStep]:
        """Yield the receive of tokens, posted before they can be sent, so that no send waits."""
        if compute.layer == self._layer_steps[0] and not self.stage.is_last_stage:
            yield compute._replace(kind=Kind.RECEIVE_TOKENS)

    def sends(self, compute: LayerStep) -> Iterator[LayerStep]:
        """Yield the send to other ranks after a batch ends a forward pass on this rank."""
        if compute.layer == self._layer_steps[-1] and self.stage.ranks > 1:
            kind = Kind.SEND_TOKENS if self.stage.is_last_stage else Kind.SEND_HIDDEN
            yield compute._replace(kind=kind)

    def last_tokens(self) -> Iterator[LayerStep]:
        """Yield the steps that wait for the tokens of the last forward pass."""
        if not self.stage.is_last_stage:
            for batch in range(self.groups[-1].stop):
                yield LayerStep(Kind.TAKE_TOKENS, self.passes - 1, self._layer_steps[0], batch)
