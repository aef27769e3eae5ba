"""The work of one call on a model: requests and a consumer of their logits."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flexgen_h2o.config.policy import Workload
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.distributed.control_messages import ControlChannel, Step
from flexgen_h2o.engine.batch import BlockQueue, Request
from flexgen_h2o.engine.progress import RunBars
from flexgen_h2o.engine.runner import Runner
from flexgen_h2o.engine.sampling import DecodeScorer, LogitsConsumer, OnLogits, PrefillScorer
from flexgen_h2o.engine.tokenizer import Prompts
from flexgen_h2o.engine.workspace import Workspace, WorkspaceSize
from flexgen_h2o.errors import TooLittleMemory, UserError
from flexgen_h2o.storage.tiers import lacks_memory


@dataclass(frozen=True, eq=False)
class CallWork:
    """Requests, and what becomes of them.

    Attributes
    ----------
    requests : list of Request
    new : int or mapping
        Up to so many tokens are appended to each, or so many as it has by key.
    consumer : LogitsConsumer
    planned : int
        The most tokens that a request may get, by the memory plan.
    """

    requests: list[Request]
    new: int | Mapping[int, int]
    consumer: LogitsConsumer
    planned: int


@dataclass(frozen=True, eq=False)
class ScoringWork(CallWork):
    """The work of scoring continuations."""

    consumer: DecodeScorer | PrefillScorer


def generation_work(prompts: Prompts, given: Sequence[str | Sequence[int]],
                    params: Sequence[SamplingParams], steps: int | None, *,
                    special: bool = True) -> CallWork:
    """The work of continuing prompts, each by its own parameters.

    Parameters
    ----------
    prompts : Prompts
    given : sequence of str or of token id sequences
    params : sequence of SamplingParams
    steps : int or None
        Tokens at most, whatever the parameters say.
    special : bool
        Put the tokenizer's special tokens in front of texts.

    Raises
    ------
    UserError
        A prompt is empty or too long, or a parameter does not go with the model.
    """
    _ = prompts.tokenizer  # a damaged one must show now and not after the work
    requests = [Request(key, prompts.encode(prompt, key, goes_on=not special), seed=each.seed,
                        params=each)
                for key, (prompt, each) in enumerate(zip(given, params, strict=True))]
    prompts.check_lengths(requests, {key: each.max_new_tokens for key, each in enumerate(params)})
    if steps is not None:
        check_int("cut_gen_len", steps, low=1)
    new = {key: min(each.max_new_tokens, steps or each.max_new_tokens) - 1
           for key, each in enumerate(params)}
    return CallWork(requests, new, prompts.generation(dict(enumerate(params)), steps=steps),
                    planned=max((each.max_new_tokens for each in params), default=1))


def scoring_work(prompts: Prompts, pairs: Sequence[tuple], *, whole: bool,
                 on_logits: OnLogits | None = None) -> ScoringWork:
    """The work of scoring continuations.

    Parameters
    ----------
    prompts : Prompts
    pairs : sequence of (context, continuation)
    whole : bool
        Context and continuation are one prompt; else the continuation is fed token by token.
    on_logits : callable, optional
        As of the consumers.

    Raises
    ------
    UserError
        A pair is no such thing, or too long.
    """
    requests, continuations = prompts.encode_pairs(pairs)
    consumer: DecodeScorer | PrefillScorer = DecodeScorer(continuations, on_logits)
    new = {key: len(tail) for key, tail in continuations.items()}
    if whole:
        consumer, new = PrefillScorer(continuations, on_logits), dict.fromkeys(new, 1)
        requests = consumer.joined(requests)
    prompts.check_lengths(requests, new)
    return ScoringWork(requests, {key: count - 1 for key, count in new.items()}, consumer,
                       planned=max(new.values(), default=1))


# The requests of one call on their way through blocks, one block after the other.


_log = logging.getLogger(__name__)


class BlockRun:
    """Runs requests block by block, in a workspace that is its own until `end`.

    Parameters
    ----------
    runtime : Runner
    work : CallWork
    shares : bool
        A batch computes equal prompts once.

    Attributes
    ----------
    stats : RunStats
        The figures of the blocks so far; tokens are those of requests that have ended.
    """

    def __init__(self, runtime: Runner, work: CallWork, *, shares: bool):
        self._runtime, self._consumer = runtime, work.consumer
        self._queue: BlockQueue | None = runtime.queue(work.requests, work.new, shares=shares)
        self._planned = work.planned
        self.stats = runtime.new_stats()
        self._workspace: Workspace | None = None
        self._bars: RunBars | None = None
        self._halved = self._began = False

    @property
    def done(self) -> bool:
        """True if all blocks have been run. Of a run that was ended before, it never is."""
        return self._queue is not None and not self._queue.left

    def step(self, enter: Callable[[WorkspaceSize, Workload], Workspace]) -> list[Request]:
        """Run the next block. Returns the requests that have ended with it.

        The first block asks `enter` for a workspace. One for which memory can't be had is run
        again from its beginning with half the sequences, and so are those after it; results do not
        depend on that. Whatever else goes wrong closes the workspace.

        Raises
        ------
        UserError
            There is no memory even for one sequence, or `enter` refuses the first workspace.
        """
        while True:
            try:
                return self._run_block(enter)
            except BaseException as error:
                self._close()  # work may be under way in the workspace, and its state is unknown
                refused = self._halved and isinstance(error, UserError) and not self._began
                if not (refused or lacks_memory(error)):
                    self.end()
                    raise
                if self._runtime.rank is not None:  # the other ranks are in the middle of the block
                    self.end()
                    raise UserError(f"out of memory ({_line(error)}): use smaller batches, or "
                                    "slower tiers") from error
                self._halve(error)

    def _run_block(self, enter: Callable[[WorkspaceSize, Workload], Workspace]) -> list[Request]:
        self._began = False
        if self._workspace is None:
            self._workspace = enter(*self._largest())
        self._began = True
        self._bars = self._bars or self._runtime.bars()
        block = self._queue.next()
        stats = self._runtime.run(self._workspace, block, self._consumer, bars=self._bars)
        self.stats = self.stats.followed_by(stats)
        return [request for batch in block for request in batch.requests if request.finish_reason]

    def _halve(self, error: BaseException) -> None:
        """Begin the block anew with half the sequences, on account of an error."""
        text = _line(error) or "out of memory"
        requests = self._queue.halve()
        if requests is None:
            self.end()
            raise TooLittleMemory(f"there is too little memory for one sequence alone ({text}): "
                                  "use shorter prompts, fewer new tokens, or slower tiers"
                                  ) from error
        for request in requests:
            request.restart()
            self._consumer.restart(request)
        self._halved = True
        size = self._queue.size
        _log.warning("too little memory (%s): trying again with blocks of %d x %d sequences", text,
                     size.gpu_batch_size, size.num_gpu_batches)

    def _largest(self) -> tuple[WorkspaceSize, Workload]:
        """Sizes that hold every block."""
        settings = self._runtime.settings
        size = WorkspaceSize.of(self._queue, settings.cache.h2o, self._runtime.own.num_layers)
        return size, Workload(
            prompt_len=self._queue.longest, gen_len=self._planned,
            gpu_batch_size=size.cache.sequences, num_gpu_batches=size.cache.batches)

    def leave(self) -> Workspace | None:
        """End, but give the workspace to the caller."""
        workspace, self._workspace = self._workspace, None
        self.end()
        return workspace

    def end(self) -> None:
        """Close what is open; a second call does nothing."""
        self._queue = None
        if self._bars is not None:
            self._bars.close()
        self._close()

    def _close(self) -> None:
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


# The runs of an `LLM` that are open, and the workspaces that ended ones have left.


class BlockRuns:
    """Begins and ends runs, and runs their blocks on all ranks.

    A run takes a workspace with its first block: one that another run has left, if it is large
    enough.

    Parameters
    ----------
    control : ControlChannel
    """

    def __init__(self, control: ControlChannel):
        self._control = control
        self._open: weakref.WeakSet[BlockRun] = weakref.WeakSet()
        self._spares: list[Workspace] = []  # of runs that have ended

    def begin(self, runtime: Runner, work: CallWork) -> BlockRun:
        """A run of all the requests of a call."""
        run = BlockRun(runtime, work, shares=not isinstance(work.consumer, PrefillScorer))
        self._open.add(run)
        return run

    def step(self, run: BlockRun, runtime: Runner, refuse: Callable[[Workload], None]
             ) -> list[Request]:
        """Run the next block of a run, on all ranks. Returns what has ended with it.

        Parameters
        ----------
        run : BlockRun
        runtime : Runner
            Makes a workspace if none is left that is large enough.
        refuse : callable
            Raises `TooLittleMemory` if there is no room for a new workspace.

        Raises
        ------
        UserError
            As of `BlockRun.step`; or another run has been begun on several ranks.
        """
        self._control.send(Step(), run)
        with self._control.working():
            return run.step(partial(self._enter, runtime, refuse))

    def _enter(self, runtime: Runner, refuse: Callable[[Workload], None], size: WorkspaceSize,
               workload: Workload) -> Workspace:
        """The room for a run: one that is there if it is large enough, else a new one."""
        found = next((spare for spare in self._spares if spare.size.covers(size)), None)
        if found is not None:
            self._spares.remove(found)
        self.free()  # what is left of several runs would only take memory
        # Other ranks may have a room where this one has none.
        self._control.check_all_fit(lambda: None if found is not None else refuse(workload))
        return runtime.workspace(size) if found is None else found

    def leave(self, run: BlockRun) -> None:
        """End a run, and keep its workspace for another."""
        workspace = run.leave()
        if workspace is not None:
            self._spares.append(workspace)

    def free(self) -> None:
        """Close the workspaces that no run is in."""
        while self._spares:
            self._spares.pop().close()

    def close(self) -> None:
        """End all runs, and close all workspaces."""
        for run in self._open:
            run.end()
        self.free()
