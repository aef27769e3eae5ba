"""The rank of this process among those that torchrun or a similar launcher has started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

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

    def within(self, ranks: int) -> TorchrunEnv:
        """Return this rank among the `ranks` consecutive ranks of its replica.

        Raises
        ------
        UserError
            The number of ranks is not a multiple of `ranks`.
        """
        if self.ranks % ranks:
            raise UserError(f"{self.ranks} processes are no whole replicas of --pipeline-parallel "
                            f"{ranks}: start a multiple of {ranks}")
        return replace(self, rank=self.rank % ranks, ranks=ranks)


def torchrun_env(environment: Mapping[str, str] = os.environ) -> TorchrunEnv:
    """Return the rank of this process by torchrun's environment variables; without them, 0 of 1.

    Raises
    ------
    UserError
        The variables are inconsistent.
    """
    given = {name: environment[name] for name in _VARIABLES if name in environment}
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return TorchrunEnv()
    try:
        rank, ranks, port, local = (int(environment.get(name, 0)) for name in (
            "RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"))
        local_ranks = int(environment.get("LOCAL_WORLD_SIZE", local + 1))
    except ValueError:
        rank = ranks = port = local = local_ranks = -1
    if not 0 <= rank < ranks or not 0 <= local < local_ranks or ranks > 1 and (
            not 0 < port < 1 << 16 or not given.get("MASTER_ADDR")):
        told = " ".join(f"{name}={value!r:.40}" for name, value in given.items())
        raise UserError(f"these variables do not say which rank this process is ({told}): start "
                        "it with torchrun")
    return TorchrunEnv(rank, ranks, local, local_ranks)


def check_world_size(wanted: int, started: int, command: str) -> None:
    """Raise `UserError` unless the number of started ranks is the one that the flags set."""
    if wanted == started:
        return
    if wanted > 1:
        raise UserError(f"--pipeline-parallel {wanted} is of {wanted} processes, and {started} "
                        f"{'has' if started == 1 else 'have'} been started: torchrun "
                        f"--nproc-per-node {wanted} -m {command} --pipeline-parallel {wanted} ...")
    raise UserError(f"{started} processes have been started to do the same: add "
                    f"--pipeline-parallel {started}, or start one")
