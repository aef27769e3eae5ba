"""Orders from the first rank of a pipeline to the others: what to load, and what to run.

Only the first rank has prompts and takes answers. What the others need they are told in JSON. With
one rank there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec

from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.config.stage import Stage, balanced_bounds, num_groups
from flexgen_h2o.distributed.heartbeat import IDLE, WORKING
from flexgen_h2o.distributed.pipeline import Pipeline
from flexgen_h2o.engine.runner import RankContext
from flexgen_h2o.errors import TooLittleMemory, UserError, shown
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.storage.tiers import Device


class Generate(msgspec.Struct, tag=True):
    """Begin a run: prompts as token ids, and the sampling parameters of each."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    cut_gen_len: int | None = None


class Step(msgspec.Struct, tag=True):
    """Run the next block of the run that was begun last."""


class Close(msgspec.Struct, tag=True):
    """There is no more to do."""


class _Layout(msgspec.Struct):
    """The spread of a model over ranks: see `RankContext`."""

    bounds: list[int]
    groups: int
    workload: Workload | None


Order = Generate | Step | Close


class Orders:
    """The part of an `LLM` that has to do with other ranks.

    Parameters
    ----------
    pipeline : Pipeline or None
        None: there are none.
    """

    def __init__(self, pipeline: Any):
        if not (pipeline is None or isinstance(pipeline, Pipeline)):
            raise UserError(f"pipeline must be a Pipeline, got {shown(pipeline)}")
        self._pipeline: Pipeline | None = pipeline
        self._latest: object = None

    def device(self, name: str) -> str:
        """The name of this rank's device: of several GPUs of a host its own."""
        if self._pipeline is None or name not in ("auto", "cuda"):
            return name
        import torch

        return f"cuda:{self._pipeline.local_rank}" if torch.cuda.is_available() else name

    def rank_context(self, model: ModelConfig, policy: Policy, device: Device, *, form: str,
             bounds: Sequence[int] | None, workload: Workload | None) -> RankContext | None:
        """This rank's place, by what the first rank says.

        Parameters
        ----------
        form : str
            All that has to be the same on all ranks, in words.
        bounds : sequence of int or None
            Of the layers; None: each rank gets about as many weights that a token meets.
        workload : Workload or None
            What the first rank expects to run.

        Raises
        ------
        UserError
            There are more ranks than layers, or ranks load different models.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return None
        if pipeline.ranks > model.num_layers:
            raise UserError(f"{model.name} has {model.num_layers} layers, too few for "
                            f"{pipeline.ranks} ranks")
        forms = pipeline.agree(form.encode())
        for rank, each in enumerate(forms):
            if each != forms[0]:
                raise UserError(f"{pipeline.watch.names[rank]} loads {each.decode()} and rank 0 "
                                f"{forms[0].decode()}: start all ranks with the same flags")
        pipeline.use(device.torch)
        if pipeline.rank == 0:
            fetched = policy.fetches(device.separate)
            found = _Layout(list(bounds or balanced_bounds(_weights(model), pipeline.ranks)),
                            num_groups(pipeline.ranks, fetched=fetched), workload)
            pipeline.order(msgspec.json.encode(found))
        else:
            found = msgspec.json.decode(pipeline.listen(), type=_Layout)
        if len(found.bounds) != pipeline.ranks + 1 or found.bounds[-1] != model.num_layers:
            raise UserError(f"bounds {found.bounds} are not of {pipeline.ranks} ranks and "
                            f"{model.num_layers} layers")
        return RankContext(pipeline, Stage.of_rank(pipeline.rank, found.bounds), found.groups,
                    found.workload)

    def check(self, call: str) -> None:
        """Raise `UserError` for a call by the user on a rank that only follows."""
        if self._pipeline is not None and self._pipeline.rank > 0:
            raise UserError(f"rank {self._pipeline.rank} does what the first rank says: call "
                            f"follow() here, and {call} there")

    def refuse(self, call: str) -> None:
        """Raise `UserError` for a call that there is not for several ranks."""
        if self._pipeline is not None:
            raise UserError(f"{call} is for one rank: load the model without a pipeline")

    def give(self, order: Order, run: object = None) -> None:
        """Let all other ranks do what this one is about to. `run` is the one that is meant.

        Raises `UserError` if another one has been begun since.
        """
        if self._pipeline is None or self._pipeline.rank > 0:
            return
        if isinstance(order, Generate):
            self._latest = run
        elif isinstance(order, Step) and run is not self._latest:
            raise UserError("in a pipeline one call is run at a time: end an iterator over blocks "
                            "before the next call")
        self._pipeline.order(msgspec.json.encode(order))

    def take(self) -> Order:
        """The next order of the first rank."""
        assert self._pipeline is not None
        with self._pipeline.watch.state(IDLE):
            return msgspec.json.decode(self._pipeline.listen(), type=Order)

    def working(self) -> Any:
        """A context manager for what has to get on, or the ranks are ended."""
        return nullcontext() if self._pipeline is None else self._pipeline.watch.state(WORKING)

    def agree_to_fit(self, check: Callable[[], None]) -> None:
        """Raise `TooLittleMemory` on all ranks if `check` does on one."""
        if self._pipeline is None:
            check()
            return
        words = b""
        try:
            check()
        except TooLittleMemory as error:
            words = str(error).encode()
        for rank, each in enumerate(self._pipeline.agree(words)):
            if each:
                raise TooLittleMemory(f"rank {rank}: {each.decode()}")


def _weights(model: ModelConfig) -> list[float]:
    """The weights of each decoder layer that a token meets, with the last the head's."""
    layers = [float(model.layer_parameters(layer)) for layer in range(model.num_layers)]
    layers[-1] += model.vocab_size * model.embed_dim
    return layers
