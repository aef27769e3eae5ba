"""The generation loop: the requests of a call go through the model block by block.

`LLM` begins a `Run` for each call, and `Engine.step` computes its next block: the queue forms the
block, the runner computes it, the consumer of logits samples or scores. Only one call at a time
uses a model: `exclusive`.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.distributed.control_messages import Close, ControlChannel, Generate, Step
from flexgen_h2o.distributed.heartbeat import PipelineFailure
from flexgen_h2o.engine.batch import BlockQueue, Request
from flexgen_h2o.engine.progress import RunBars
from flexgen_h2o.engine.runner import Runner
from flexgen_h2o.engine.sampling import DecodeScorer, LogitsConsumer, OnLogits, PrefillScorer
from flexgen_h2o.engine.tokenizer import Prompts
from flexgen_h2o.engine.workspace import Workspace, WorkspaceSize
from flexgen_h2o.errors import InsufficientMemory, UserError
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.outputs import Scored
from flexgen_h2o.storage.tiers import lacks_memory

_log = logging.getLogger(__name__)


class MemoryCheck(Protocol):
    """The memory plan of a model: see `planning.memory_plan.MemoryCheck`."""

    def check_fits(self, policy: Policy, cache: CacheOptions, workload: Workload, *,
               loaded_bytes: int | None) -> None:
        """Raise `UserError` for a run that does not fit in memory."""


class Run:
    """The requests of one call, on their way through blocks.

    Parameters
    ----------
    runner : Runner
    requests : list of Request
    new_tokens : mapping of int to int
        The most tokens that are appended to each request, by its key.
    consumer : LogitsConsumer
        Samples or scores their logits.
    gen_len : int
        The most tokens of a request, for the memory plan.

    Attributes
    ----------
    stats : RunStats
        Figures of the blocks so far. Tokens are those of finished requests.
    workspace : Workspace or None
        The memory for its blocks, from the first block on.
    queue : BlockQueue or None
        Requests that wait, and those of the current block; None once the run is closed.
    """

    def __init__(self, runner: Runner, requests: list[Request], new_tokens: Mapping[int, int],
                 consumer: LogitsConsumer, *, gen_len: int):
        self.runner, self.requests, self.consumer = runner, requests, consumer
        self.gen_len = gen_len
        # Scores of a prefill are of each request's own rows: no batch shares equal prompts.
        self.queue: BlockQueue | None = runner.queue(
            requests, new_tokens, share_prompts=not isinstance(consumer, PrefillScorer))
        self.stats = runner.new_stats()
        self.workspace: Workspace | None = None
        self.halved = False  # out of memory made its blocks smaller
        self._bars: RunBars | None = None

    @property
    def finished(self) -> bool:
        """True if all requests have finished; never of a run that was closed before."""
        return self.queue is not None and not self.queue.left

    def size(self) -> tuple[WorkspaceSize, Workload]:
        """Return the size of a workspace for all waiting requests, and their workload."""
        assert self.queue is not None
        runner = self.runner
        size = WorkspaceSize.of(self.queue, runner.args.cache.h2o, runner.stage_config.num_layers)
        return size, Workload(
            prompt_len=self.queue.longest, gen_len=self.gen_len,
            gpu_batch_size=size.cache.sequences, num_gpu_batches=size.cache.batches)

    def compute_block(self) -> list[Request]:
        """Compute the next block in the workspace. Return the requests that it finished."""
        assert self.queue is not None and self.workspace is not None
        self._bars = self._bars or self.runner.bars()
        block = self.queue.next()
        stats = self.runner.run(self.workspace, block, self.consumer, bars=self._bars)
        self.stats = self.stats.followed_by(stats)
        return [request for batch in block for request in batch.requests if request.finish_reason]

    def halve(self, error: BaseException) -> None:
        """Restart the last block's requests, in blocks of half as many sequences.

        Raises
        ------
        InsufficientMemory
            A block has one sequence only.
        """
        assert self.queue is not None
        reason = _one_line(error) or "out of memory"
        requests = self.queue.halve()
        if requests is None:
            raise InsufficientMemory(
                f"there is too little memory for one sequence alone ({reason}): use shorter "
                "prompts, fewer new tokens, or slower tiers") from error
        for request in requests:
            request.restart()
            self.consumer.restart(request)
        self.halved = True
        _log.warning("too little memory (%s): trying again with blocks of %d x %d sequences",
                     reason, self.queue.size.gpu_batch_size, self.queue.size.num_gpu_batches)

    def close_workspace(self) -> None:
        """Wait for transfers in the workspace, and free it."""
        workspace, self.workspace = self.workspace, None
        if workspace is not None:
            workspace.close()

    def close(self) -> None:
        """Free everything that the run holds; a second call is a no-op."""
        self.queue = None
        if self._bars is not None:
            self._bars.close()
        self.close_workspace()


class Engine:
    """Begins runs and computes their blocks, on all ranks of a pipeline.

    It does not refer to its `LLM`, so that one without references is closed at once.

    Parameters
    ----------
    runner : Runner
        Of the loaded model.
    prompts : Prompts
    control : ControlChannel
        To other ranks.
    memory : MemoryCheck
    cache : CacheOptions
        Of all layers of the model.

    Attributes
    ----------
    runner : Runner
        Computes the blocks of runs to come.
    stats : RunStats or None
        Figures of the latest run.
    """

    def __init__(self, runner: Runner, prompts: Prompts, control: ControlChannel,
                 memory: MemoryCheck, cache: CacheOptions):
        self.runner = runner
        self.stats: RunStats | None = None
        self._prompts, self._control = prompts, control
        self._memory, self._cache = memory, cache
        self._closed = False
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._spares: list[Workspace] = []
        """Workspaces of ended runs. Memory that has been touched is faster than fresh memory."""

    def begin_generation(self, prompts: Sequence[str | Sequence[int]],
                         params: Sequence[SamplingParams], *, cut_gen_len: int | None = None,
                         special: bool = True) -> Run:
        """Begin a run that continues prompts, on all ranks.

        Parameters
        ----------
        prompts : sequence of str or of token id sequences
        params : sequence of SamplingParams
            Of each prompt.
        cut_gen_len : int, optional
            Generate at most so many tokens, whatever the parameters say.
        special : bool
            Put the tokenizer's special tokens in front of texts.

        Raises
        ------
        UserError
            A prompt is empty or too long, or a parameter does not go with the model.
        """
        _ = self._prompts.tokenizer  # a damaged one must raise before the work, and not after it
        requests = [Request(key, self._prompts.encode(prompt, key, continues=not special),
                            seed=own.seed, params=own)
                    for key, (prompt, own) in enumerate(zip(prompts, params, strict=True))]
        self._prompts.check_lengths(
            requests, {key: own.max_new_tokens for key, own in enumerate(params)})
        if cut_gen_len is not None:
            check_int("cut_gen_len", cut_gen_len, low=1)
        # The prefill samples the first token: one fewer is appended.
        new = {key: min(own.max_new_tokens, cut_gen_len or own.max_new_tokens) - 1
               for key, own in enumerate(params)}
        sampler = self._prompts.generation(dict(enumerate(params)), steps=cut_gen_len)
        run = self._begin(requests, new, sampler,
                          gen_len=max((own.max_new_tokens for own in params), default=1))
        self._control.send(Generate([request.prompt for request in requests], list(params),
                                   cut_gen_len), run)
        return run

    def score(self, pairs: Sequence[tuple], *, whole: bool, on_logits: OnLogits | None = None
              ) -> list[Scored]:
        """Score continuations.

        Parameters
        ----------
        pairs : sequence of (context, continuation)
        whole : bool
            Context and continuation are one prompt; else the continuation is fed token by token.
        on_logits : callable, optional
            See `LLM.score`.

        Raises
        ------
        UserError
            A pair is not a pair of texts or token ids, or is too long.
        """
        requests, scorer, new = self._scoring(pairs, whole, on_logits)
        self.run_all(self._begin(requests, {key: count - 1 for key, count in new.items()}, scorer,
                                 gen_len=max(new.values(), default=1)))
        return scorer.scored()

    def probe(self, pairs: Sequence[tuple], attend: Callable[..., torch.Tensor]) -> list[Scored]:
        """Score continuations while `attend` computes the attention: see `LLM.probe`."""
        requests, scorer, _ = self._scoring(pairs, True, None)
        self.check_open()
        if requests:
            self.free_workspaces()
            self.stats = self.runner.probe(requests, attend, scorer)
        return scorer.scored()

    def _scoring(self, pairs: Sequence[tuple], whole: bool, on_logits: OnLogits | None
                 ) -> tuple[list[Request], DecodeScorer | PrefillScorer, dict[int, int]]:
        """Return requests for pairs, their scorer, and the tokens of each to generate, by key."""
        requests, continuations = self._prompts.encode_pairs(pairs)
        scorer: DecodeScorer | PrefillScorer = DecodeScorer(continuations, on_logits)
        new = {key: len(continuation) for key, continuation in continuations.items()}
        if whole:
            scorer, new = PrefillScorer(continuations, on_logits), dict.fromkeys(new, 1)
            requests = scorer.joined(requests)
        self._prompts.check_lengths(requests, new)
        return requests, scorer, new

    def _begin(self, requests: list[Request], new_tokens: Mapping[int, int],
               consumer: LogitsConsumer, *, gen_len: int) -> Run:
        self.check_open()
        run = Run(self.runner, requests, new_tokens, consumer, gen_len=gen_len)
        self._runs.add(run)
        return run

    def run_all(self, run: Run) -> None:
        """Compute all blocks of a run."""
        self.stats = run.stats
        while not run.finished:
            self.step(run)
        self.end(run)

    def step(self, run: Run) -> list[Request]:
        """Compute the next block of a run, on all ranks. Return the requests that it finished.

        A block that runs out of memory is computed again with half the sequences, and so are those
        after it. Results do not depend on that. After any other error the run is closed.

        Raises
        ------
        UserError
            There is no memory for the first workspace, or even for one sequence; or ranks of a
            pipeline have begun another run.
        """
        self.check_open()
        self._control.send(Step(), run)
        with self._control.working():
            try:
                while (requests := self._try_step(run)) is None:
                    pass
            except BaseException:
                run.close()
                raise
        self.stats = run.stats
        return requests

    def _try_step(self, run: Run) -> list[Request] | None:
        """Compute a block; None after it ran out of memory and was halved."""
        computing = False
        try:
            if run.workspace is None:
                run.workspace = self._workspace(run)
            computing = True
            return run.compute_block()
        except BaseException as error:
            # Transfers may be under way in the workspace, and its state is unknown.
            run.close_workspace()
            refused = run.halved and isinstance(error, UserError) and not computing
            if not (refused or lacks_memory(error)):
                raise
            if self.runner.rank is not None:  # the other ranks are in the middle of the block
                raise UserError(f"out of memory ({_one_line(error)}): use smaller batches, or "
                                "slower tiers") from error
            run.halve(error)
            return None

    def _workspace(self, run: Run) -> Workspace:
        """Return a spare workspace that is large enough for a run, or allocate one.

        Raises
        ------
        InsufficientMemory
            A new one does not fit, on this rank or on another.
        """
        size, workload = run.size()
        spare = next((spare for spare in self._spares if spare.size.covers(size)), None)
        if spare is not None:
            self._spares.remove(spare)
        self.free_workspaces()

        def check() -> None:
            if spare is None:
                self._memory.check_fits(self.runner.args.policy, self._cache, workload,
                                    loaded_bytes=self.runner.loaded_bytes)

        self._control.check_all_fit(check)  # other ranks may need a new one
        return run.runner.workspace(size) if spare is None else spare

    def end(self, run: Run) -> None:
        """Close a run, and keep its workspace for another one."""
        workspace, run.workspace = run.workspace, None
        run.close()
        if workspace is not None:
            self._spares.append(workspace)

    def free_workspaces(self) -> None:
        """Free the workspaces that no run uses."""
        while self._spares:
            self._spares.pop().close()

    def check_open(self) -> None:
        """Raise `UserError` if the engine has been closed."""
        if self._closed:
            raise UserError("this LLM has been closed: make a new one")

    def close(self) -> None:
        """Let other ranks stop following, and close all runs; a second call is a no-op."""
        if not self._closed:
            self._closed = True
            with suppress(PipelineFailure):
                self._control.send(Close())
        self.close_runs()

    def close_runs(self) -> None:
        """Close all runs and free all workspaces."""
        for run in self._runs:
            run.close()
        self.free_workspaces()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


# Exclusive use of a model.

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="Session")
_first_process: int | None = None


class CallLock:
    """The lock that the current call on a model holds, and the process of the model."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.held = False
        self.process = os.getpid()

    def check_process(self) -> None:
        """Raise `UserError` in a forked child, which lacks the threads of its parent."""
        _check_process(self.process)


def check_not_forked() -> None:
    """Raise `UserError` in a child of a process that has made an LLM.

    The child would wait for torch's threads, which only its parent has.
    """
    global _first_process
    _first_process = _first_process or os.getpid()
    _check_process(_first_process)


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise UserError("an LLM cannot be used in a process forked from the one that made it, "
                        "whose threads it needs: start the child with multiprocessing's \"spawn\","
                        " and make an LLM there")


class Session(ABC):
    """A context manager for an open model or an open text.

    Attributes
    ----------
    call_lock : CallLock
        One for a model and all its texts.
    """

    call_lock: CallLock

    def __enter__(self: _Self) -> _Self:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.call_lock.process == os.getpid():  # a forked child leaves it to its parent
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Free its resources; a second call is a no-op."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `UserError` if it has been closed."""


def exclusive(method: Callable[Concatenate[_Self, _Options], _Result]
              ) -> Callable[Concatenate[_Self, _Options], _Result]:
    """Decorate a method whose calls wait for those of other threads on the same model.

    A call from within another call raises `UserError`: waiting would never end.
    """
    @functools.wraps(method)
    def call(self: _Self, *args: _Options.args, **options: _Options.kwargs) -> _Result:
        lock = self.call_lock
        lock.check_process()
        # An RLock in a plain `with`: an interrupt cannot come between taking and releasing it.
        with lock.lock:
            if lock.held:
                raise UserError(f"{method.__name__} is called from within another call on the "
                                "same LLM: call it when that one has returned")
            try:
                lock.held = True
                return method(self, *args, **options)
            finally:
                lock.held = False

    return call
