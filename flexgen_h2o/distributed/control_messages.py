"""Control messages from the first rank of a pipeline to the others, which load and run the same.

Only the first rank has prompts and returns outputs. The other ranks follow its messages, which are
JSON. With a single rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import torch

from flexgen_h2o.config.parallel import Stage, balance_layers, num_batch_groups
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.distributed.heartbeat import IDLE, WORKING
from flexgen_h2o.distributed.pipeline import Pipeline, RankContext
from flexgen_h2o.errors import InsufficientMemory, UserError, short_repr
from flexgen_h2o.storage.device import Device


class Generate(msgspec.Struct, tag=True):
    """Begin a run: prompts as token ids, and the sampling parameters of each."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    cut_gen_len: int | None = None


class RunBlock(msgspec.Struct, tag=True):
    """Run the next block of the latest run."""


class Close(msgspec.Struct, tag=True):
    """End: the first rank closes its `LLM`."""


ControlMessage = Generate | RunBlock | Close


class _Layout(msgspec.Struct):
    """Layers, groups and workload of all ranks; see `RankContext`."""

    bounds: list[int]
    groups: int
    workload: Workload | None


class ControlChannel:
    """Coordination of an `LLM` with the other ranks of its pipeline.

    Parameters
    ----------
    pipeline : Pipeline or None
        None: there is one rank, and every method is a no-op.
    """

    def __init__(self, pipeline: Any):
        if not (pipeline is None or isinstance(pipeline, Pipeline)):
            raise UserError(f"pipeline must be a Pipeline, got {short_repr(pipeline)}")
        self._pipeline: Pipeline | None = pipeline
        self._latest_run: object = None

    def device_name(self, name: str) -> str:
        """Return the device of this rank: each rank of a host has its own GPU."""
        if self._pipeline is None or name not in ("auto", "cuda"):
            return name
        return f"cuda:{self._pipeline.local_rank}" if torch.cuda.is_available() else name

    def rank_context(self, policy: Policy, device: Device, *, layer_costs: Sequence[float],
                     fingerprint: str, bounds: Sequence[int] | None, workload: Workload | None
                     ) -> RankContext | None:
        """Return the layers of this rank, which the first rank decides; None for a single rank.

        Parameters
        ----------
        layer_costs : sequence of float
            Relative cost of each decoder layer.
        fingerprint : str
            Description of everything that must be the same on all ranks.
        bounds : sequence of int or None
            First layer of each rank and the number of layers; None: balance `layer_costs`.
        workload : Workload or None
            Workload that the first rank expects.

        Raises
        ------
        UserError
            There are more ranks than layers, or ranks load different models.
        """
        pipeline, num_layers = self._pipeline, len(layer_costs)
        if pipeline is None:
            return None
        if pipeline.ranks > num_layers:
            raise UserError(f"the model has {num_layers} layers, too few for {pipeline.ranks} "
                            "ranks: start fewer")
        fingerprints = pipeline.all_gather(fingerprint.encode())
        for rank, other in enumerate(fingerprints):
            if other != fingerprints[0]:
                raise UserError(f"{pipeline.monitor.names[rank]} loads {other.decode()} and rank 0 "
                                f"{fingerprints[0].decode()}: start all ranks with the same flags")
        pipeline.use_device(device.torch_device)
        if pipeline.rank == 0:
            fetched = policy.fetches(device.is_gpu)
            layout = _Layout(list(bounds or balance_layers(layer_costs, pipeline.ranks)),
                             num_batch_groups(pipeline.ranks, fetched=fetched), workload)
            pipeline.broadcast(msgspec.json.encode(layout))
        else:
            layout = msgspec.json.decode(pipeline.receive_broadcast(), type=_Layout)
        if len(layout.bounds) != pipeline.ranks + 1 or layout.bounds[-1] != num_layers:
            raise UserError(f"bounds {layout.bounds} do not fit {pipeline.ranks} ranks and "
                            f"{num_layers} layers")
        return RankContext(pipeline, Stage.for_rank(pipeline.rank, layout.bounds), layout.groups,
                           layout.workload)

    def check_first_rank(self, call: str) -> None:
        """Raise `UserError` for a call by the user on a rank that follows another one."""
        if self._pipeline is not None and self._pipeline.rank > 0:
            raise UserError(f"rank {self._pipeline.rank} follows the first rank: call follow() "
                            f"here, and {call} there")

    def check_single_rank(self, call: str) -> None:
        """Raise `UserError` for a call that several ranks do not support."""
        if self._pipeline is not None:
            raise UserError(f"{call} is for one rank: load the model without a pipeline")

    def send(self, message: ControlMessage, run: object = None) -> None:
        """Send a message about a run from the first rank to all others; on other ranks a no-op.

        Raise `UserError` for a `RunBlock` of a run that is not the latest one.
        """
        if self._pipeline is None or self._pipeline.rank > 0:
            return
        if isinstance(message, Generate):
            self._latest_run = run
        elif isinstance(message, RunBlock) and run is not self._latest_run:
            raise UserError("in a pipeline one call is run at a time: end an iterator over blocks "
                            "before the next call")
        self._pipeline.broadcast(msgspec.json.encode(message))

    def receive(self) -> ControlMessage:
        """Wait for the next message of the first rank."""
        assert self._pipeline is not None
        with self._pipeline.monitor.state(IDLE):
            return msgspec.json.decode(self._pipeline.receive_broadcast(), type=ControlMessage)

    def working(self) -> AbstractContextManager[None]:
        """Return a context manager for work that must make progress, or the ranks are ended."""
        return nullcontext() if self._pipeline is None else self._pipeline.monitor.state(WORKING)

    def check_all_fit(self, check: Callable[[], None]) -> None:
        """Raise `InsufficientMemory` on all ranks if `check` raises it on one."""
        if self._pipeline is None:
            check()
            return
        message = b""
        try:
            check()
        except InsufficientMemory as error:
            message = str(error).encode()
        for rank, other in enumerate(self._pipeline.all_gather(message)):
            if other:
                raise InsufficientMemory(f"rank {rank}: {other.decode()}")
