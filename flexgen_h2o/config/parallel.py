"""Pipeline parallelism: the rank of this process, and the layers of each stage. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from flexgen_h2o.config.h2o import H2OConfig, select_layers
from flexgen_h2o.errors import UserError

CONTROL_THREAD = "messages"
"""Name of threads that wait for other ranks, which nothing can interrupt."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class TorchrunEnv:
    """A rank among `ranks`, and its local rank among the `local_ranks` of its host."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1

    def within_replica(self, ranks: int) -> TorchrunEnv:
        """Return this rank among the `ranks` consecutive ranks of its replica.

        Raises `UserError` if the number of ranks is not a multiple of `ranks`.
        """
        if self.ranks % ranks:
            raise UserError(f"{self.ranks} processes cannot be divided into replicas of "
                            f"{ranks} ranks (--pipeline-parallel): start a multiple of {ranks}")
        return replace(self, rank=self.rank % ranks, ranks=ranks)


def torchrun_env(environment: Mapping[str, str] = os.environ) -> TorchrunEnv:
    """Return the rank of this process by torchrun's environment variables; without them, 0 of 1.

    Raises `UserError` if the variables are inconsistent.
    """
    variables = {name: environment[name] for name in _VARIABLES if name in environment}
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return TorchrunEnv()
    try:
        rank, ranks, port, local = (int(environment.get(name, 0)) for name in (
            "RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"))
        local_ranks = int(environment.get("LOCAL_WORLD_SIZE", local + 1))
    except ValueError:
        rank = ranks = port = local = local_ranks = -1
    if not 0 <= rank < ranks or not 0 <= local < local_ranks or ranks > 1 and (
            not 0 < port < 1 << 16 or not variables.get("MASTER_ADDR")):
        described = " ".join(f"{name}={value!r:.40}" for name, value in variables.items())
        raise UserError("the environment does not set the rank of this process correctly "
                        f"({described}): start it with torchrun")
    return TorchrunEnv(rank, ranks, local, local_ranks)


def check_world_size(ranks: int, started: int, command: str) -> None:
    """Raise `UserError` unless the number of started ranks is the one that the flags set."""
    if ranks == started:
        return
    if ranks > 1:
        raise UserError(f"--pipeline-parallel {ranks} needs {ranks} processes, and {started} "
                        f"{'was' if started == 1 else 'were'} started: torchrun "
                        f"--nproc-per-node {ranks} -m {command} --pipeline-parallel {ranks} ...")
    raise UserError(f"{started} processes were started for one rank: add "
                    f"--pipeline-parallel {started}, or start one")


@dataclass(frozen=True)
class Stage:
    """The layers that one rank of a pipeline computes.

    The first stage includes the embedding, and the last stage the head.
    """

    # The decoder layers first:last.
    first: int
    last: int
    num_layers: int  # decoder layers of the model
    rank: int = 0
    ranks: int = 1

    @classmethod
    def all_layers(cls, num_layers: int) -> Stage:
        """Return the stage of a single rank."""
        return cls(0, num_layers, num_layers)

    @classmethod
    def for_rank(cls, rank: int, bounds: Sequence[int]) -> Stage:
        """Return the stage of a rank.

        Raises `UserError` if a rank has no decoder layer.

        `bounds`: the first layer of each rank, and the number of layers.
        """
        if len(bounds) < 2 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
            raise UserError(f"a pipeline's layers must begin at 0 and ascend, got {list(bounds)}")
        return cls(bounds[rank], bounds[rank + 1], bounds[-1], rank, len(bounds) - 1)

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def is_first_stage(self) -> bool:
        """True if the stage includes the embedding."""
        return self.first == 0

    @property
    def is_last_stage(self) -> bool:
        """True if the stage includes the head."""
        return self.last == self.num_layers

    def units(self, sep_layer: bool) -> range:
        """Return the units of the stage in a forward pass (`engine.schedule`)."""
        steps = 2 if sep_layer else 1
        return range(0 if self.is_first_stage else self.first * steps + 1,
                     self.last * steps + (2 if self.is_last_stage else 1))

    def h2o(self, h2o: H2OConfig | None) -> H2OConfig | None:
        """Return an H2O configuration for the layers of the stage."""
        return select_layers(h2o, range(self.first, self.last))


def split_batches(num_batches: int, groups: int) -> list[range]:
    """Split the GPU batches of a block into groups of similar size, at most one for each batch."""
    groups = max(1, min(groups, num_batches))
    bounds = [number * num_batches // groups for number in range(groups + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


def num_batch_groups(ranks: int, *, fetched: bool) -> int:
    """Return the groups into which a pipeline splits the batches of a block, if there are enough.

    With one group for each rank, no rank waits. Twice as many also hide the latency of messages,
    but weights that are `fetched` are fetched again for each group.
    """
    return ranks if fetched else 2 * ranks


def balance_layers(seconds: Sequence[float], ranks: int) -> list[int]:
    """Return the bounds (see `Stage.for_rank`) that minimize the time of the slowest rank.

    Among equally good bounds, the first ranks get more layers.

    `seconds`: time of each decoder layer, with embedding and head in the first and the last.
    `ranks`: at most the number of layers; each rank gets at least one.
    """
    sums = [0.0, *accumulate(seconds)]

    @cache
    def least(begin: int, ranks_left: int) -> float:
        if ranks_left == 1:
            return sums[-1] - sums[begin]
        return min(max(sums[end] - sums[begin], least(end, ranks_left - 1))
                   for end in range(begin + 1, len(seconds) - ranks_left + 2))

    bounds, slowest = [0], least(0, ranks)
    for ranks_left in range(ranks - 1, 0, -1):
        begin = bounds[-1]
        bounds.append(max(end for end in range(begin + 1, len(seconds) - ranks_left + 1)
                          if sums[end] - sums[begin] <= slowest
                          and least(end, ranks_left) <= slowest))
    return [*bounds, len(seconds)]
