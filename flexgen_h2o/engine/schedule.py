"""The zig-zag block schedule as a pure generator of actions (FlexGen, section 4.1). No torch.

The units of a model are loaded and computed one after the other: the embedding, the decoder layers
and the head. With `sep_layer`, attention and MLP of a decoder layer are two units.

A block is several GPU batches that share every load of a unit's weights: for each forward pass,
for each unit, for each batch. Overlap is lookahead: loads are issued one unit (weights), two
computes (cache) or one (hidden states) ahead of their use, and the executor runs them beside
compute. The cache is loaded two computes ahead, so that the disk is never idle between two loads.

In a pipeline each rank has a contiguous range of the units, and its own schedule: for
each forward pass, for each group of GPU batches, for each unit of the range, for each batch
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


class Op(Enum):
    """The kind of an action."""

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


MOVES = frozenset({Op.LOAD_WEIGHTS, Op.RELEASE_WEIGHTS, Op.LOAD_CACHE, Op.STORE_CACHE,
                   Op.LOAD_HIDDEN, Op.STORE_HIDDEN})
"""Ops that move tensors between the tiers of a rank."""


class Action(NamedTuple):
    """One action: issue a load, a store or a message, start attention, or compute.

    Loads, stores and messages are asynchronous. A compute waits for the loads and the hidden states
    that it needs; TAKE_TOKENS waits for tokens.

    Attributes
    ----------
    op : Op
    forward_pass : int
        Number of the pass through all layers, from 0: one or more for the prompts, then one for
        each new token.
    unit : int
        Number of the unit: 0 is the embedding, then come the decoder layers, and the last is the
        head.
    batch : int or None
        Index in the block; None for weights, which all batches share.
    """

    op: Op
    forward_pass: int
    unit: int
    batch: int | None


def num_units(num_layers: int, sep_layer: bool) -> int:
    """Return the number of units of a model."""
    return num_layers * (2 if sep_layer else 1) + 2


def schedule(num_passes: int, num_layers: int, num_batches: int, *, overlap: bool = True,
             attend_early_from: int | None = None, sep_layer: bool = False,
             keep_cache: bool = False, stage: Stage | None = None, groups: int = 1,
             no_ops: Collection[Op] = ()) -> Iterator[Action]:
    """Return the actions that take a block through the model `num_passes` times.

    Every load precedes the compute that uses the data, and every store follows the compute that
    wrote it. A load of stored data is issued after the store. At most two units have their
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
        Attention and MLP are separate units.
    keep_cache : bool
        Another run continues with the cache, so store the tokens of the last forward pass too.
    stage : Stage, optional
        Layers of this rank; None: one rank with all layers.
    groups : int
        Number of groups of batches, the same on all ranks. The weights of a unit are loaded
        once per group.
    no_ops : collection of Op
        Ops to leave out, because the data is resident.

    Returns
    -------
    iterator of Action
    """
    stage = stage or Stage.all_layers(num_layers)
    order = _ComputeOrder(num_passes, num_layers, tuple(split_batches(num_batches, groups)),
                          overlap, attend_early_from, sep_layer, keep_cache, stage)
    if order.has_only_moves and MOVES.issubset(no_ops):
        return map(order.compute, range(order.count))
    return (action for action in _actions(order) if action.op not in no_ops)


def _actions(order: _ComputeOrder) -> Iterator[Action]:
    """Yield all actions, around the computes in their order."""
    overlap = order.overlap
    loaded = 0  # number of computes whose cache load was issued
    yield from order.load_weights(0)
    for number in range(order.count):
        current, following = order.compute(number), order.compute(number + 1)
        # With one batch, the current compute writes the next hidden states: they cannot be loaded.
        loads_hidden_early = overlap and following is not None and following.batch != current.batch
        early = order.starts_early(number + 1)
        if overlap:
            yield from order.load_weights(order.next_unit(number))
        if loads_hidden_early:
            yield from order.load_hidden(following)
        # If attention starts one compute early, its cache is loaded one compute earlier too, unless
        # the current compute still needs its own cache: there are CACHE_BUFFERS buffers. A
        # cache that the previous forward pass has not stored yet cannot be loaded.
        sooner = early and (order.starts_early(number) or not order.attends(current))
        load_end = min(number + (2 + sooner if overlap else 0), number + order.period - 1)
        for ahead in range(loaded, load_end + 1):
            yield from order.load_cache(order.compute(ahead))
        loaded = max(loaded, load_end + 1)
        if early:
            yield following._replace(op=Op.ATTEND)
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
        if order.ends_unit(number):
            yield current._replace(op=Op.RELEASE_WEIGHTS, batch=None)
        if not overlap:
            yield from order.load_weights(number + 1)
        if not loads_hidden_early:
            yield from order.load_hidden(following)
    yield from order.last_tokens()


@dataclass(frozen=True)
class _ComputeOrder:
    """The computes of a block, numbered in their order, and the actions that each one needs.

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
    def _units(self) -> range:
        """Numbers of this rank's units."""
        return self.stage.units(self.sep_layer)

    @cached_property
    def _order(self) -> list[tuple[int, int, int]]:
        """(group, unit, batch) of the computes of a forward pass."""
        return [(group, unit, batch) for group, batches in enumerate(self.groups)
                for unit in self._units for batch in batches]

    @property
    def has_only_moves(self) -> bool:
        """True if all actions are computes and `MOVES`: one rank, and no attention ahead."""
        return self.stage.ranks == 1 and (self.attend_early_from is None or not self.overlap)

    @cached_property
    def period(self) -> int:
        """Number of computes of a forward pass."""
        return len(self._order)

    @cached_property
    def count(self) -> int:
        """Number of all computes."""
        return self.passes * self.period

    def compute(self, number: int) -> Action | None:
        """Return the compute with a number; None past the last."""
        if number >= self.count:
            return None
        forward_pass, index = divmod(number, self.period)
        _, unit, batch = self._order[index]
        return Action(Op.COMPUTE, forward_pass, unit, batch)

    def _group(self, number: int) -> int:
        return self._order[number % self.period][0]

    def _begins_unit(self, number: int) -> bool:
        """Return True if a compute is the first of its unit and group."""
        _, _, batch = self._order[number % self.period]
        return batch == self.groups[self._group(number)].start

    def next_unit(self, number: int) -> int:
        """Return the first compute of the next unit if this one begins one, else `count`."""
        if not self._begins_unit(number):
            return self.count
        return number + len(self.groups[self._group(number)])

    def _changes_weights(self, number: int) -> bool:
        """Return True if a compute needs other weights than the previous one."""
        return number == 0 or (self._begins_unit(number) and len(self._units) > 1)

    def ends_unit(self, number: int) -> bool:
        """Return True if the next compute needs other weights."""
        return number + 1 == self.count or self._changes_weights(number + 1)

    def load_weights(self, number: int) -> Iterator[Action]:
        """Yield the load of a compute's weights, if it is the first compute that needs them."""
        if number < self.count and self._changes_weights(number):
            yield self.compute(number)._replace(op=Op.LOAD_WEIGHTS, batch=None)

    def attends(self, compute: Action | None) -> bool:
        """Return True if a compute includes the attention of a decoder layer."""
        last = num_units(self.num_layers, self.sep_layer) - 1
        return (compute is not None and 0 < compute.unit < last
                and not (self.sep_layer and compute.unit % 2 == 0))

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

    def load_cache(self, compute: Action | None) -> Iterator[Action]:
        if self.attends(compute):
            yield compute._replace(op=Op.LOAD_CACHE)

    def store_cache(self, compute: Action) -> Iterator[Action]:
        """Yield the store of a compute's cache; in the last pass, only if the cache is kept."""
        if self.attends(compute) and (self.keep_cache or compute.forward_pass < self.passes - 1):
            yield compute._replace(op=Op.STORE_CACHE)

    def load_hidden(self, compute: Action | None) -> Iterator[Action]:
        """Yield the load of hidden states. A rank's first unit creates or receives them."""
        if compute is not None and compute.unit > self._units[0]:
            yield compute._replace(op=Op.LOAD_HIDDEN)

    def store_hidden(self, compute: Action) -> Iterator[Action]:
        """Yield the store of hidden states. A rank's last unit has none, or sends them."""
        if compute.unit < self._units[-1]:
            yield compute._replace(op=Op.STORE_HIDDEN)

    def _receives_hidden(self, compute: Action) -> bool:
        """Return True if a compute's hidden states come from the previous rank."""
        return not self.stage.is_first_stage and compute.unit == self._units[0]

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

    def receives(self, compute: Action) -> Iterator[Action]:
        """Yield the receives before a batch begins a forward pass on this rank.

        They are the tokens of the previous pass, which may have ended the batch, and hidden states.
        """
        if compute.unit != self._units[0]:
            return
        if not self.stage.is_last_stage and compute.forward_pass > 0:
            yield compute._replace(op=Op.TAKE_TOKENS, forward_pass=compute.forward_pass - 1)
        if self._receives_hidden(compute):
            yield compute._replace(op=Op.RECEIVE_HIDDEN)

    def receive_tokens(self, compute: Action) -> Iterator[Action]:
        """Yield the receive of tokens, posted before they can be sent, so that no send waits."""
        if compute.unit == self._units[0] and not self.stage.is_last_stage:
            yield compute._replace(op=Op.RECEIVE_TOKENS)

    def sends(self, compute: Action) -> Iterator[Action]:
        """Yield the send to other ranks after a batch ends a forward pass on this rank."""
        if compute.unit == self._units[-1] and self.stage.ranks > 1:
            op = Op.SEND_TOKENS if self.stage.is_last_stage else Op.SEND_HIDDEN
            yield compute._replace(op=op)

    def last_tokens(self) -> Iterator[Action]:
        """Yield the actions that wait for the tokens of the last forward pass."""
        if not self.stage.is_last_stage:
            for batch in range(self.groups[-1].stop):
                yield Action(Op.TAKE_TOKENS, self.passes - 1, self._units[0], batch)
