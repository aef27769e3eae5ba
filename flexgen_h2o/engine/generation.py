"""Runs: the requests of one call, computed block by block.

`LLM` begins a `GenerationRun` for each call, and `Engine.run_block` computes its next block: the
queue forms the block, the runner computes it, and a `LogitsConsumer` samples or scores. Only one
call at a time uses a model: `engine.exclusive`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from flexgen_h2o.cache.alternatives import ProbedCache
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.config.validation import check_bool, check_int
from flexgen_h2o.distributed.control_messages import Close, ControlChannel, Generate, RunBlock
from flexgen_h2o.distributed.heartbeat import PipelineFailure
from flexgen_h2o.engine.blocks import BlockQueue, OpenQueue, Request
from flexgen_h2o.engine.draft_model import new_drafter
from flexgen_h2o.engine.output_processor import OnText, OutputProcessor
from flexgen_h2o.engine.runner import RunBars, Runner
from flexgen_h2o.engine.sampling import GenerationSampler, LogitsConsumer
from flexgen_h2o.engine.scoring import DecodeScorer, OnLogits, PrefillScorer
from flexgen_h2o.engine.tokenizer import InputProcessor
from flexgen_h2o.engine.workspace import Workspace, WorkspaceSize
from flexgen_h2o.errors import (
    InsufficientMemory,
    PromptError,
    PromptMemoryError,
    UserError,
    lacks_memory,
)
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.outputs import Scored

_log = logging.getLogger(__name__)

SESSION_CHUNK = 512
"""Tokens of a prompt in a forward pass of a session, unless the policy has a `prefill_chunk`."""


class GenerationRun:
    """The requests of one call, and their progress.

    Parameters
    ----------
    queue : BlockQueue
        The requests again, in blocks.
    consumer : LogitsConsumer
        Samples or scores.
    gen_len : int
        Maximum number of generated tokens of a request, for the memory plan.

    Attributes
    ----------
    stats : RunStats
        Statistics of the blocks so far. Token counts include finished requests only.
    workspace : Workspace or None
        Memory of the blocks, allocated before the first one.
    queue : BlockQueue or None
        Waiting requests, and requests of the current block; None once the run is closed.
    should_end : callable () -> bool
        See `Runner.run_block`.
    """

    def __init__(self, runner: Runner, requests: list[Request], queue: BlockQueue,
                 consumer: LogitsConsumer, *, gen_len: int):
        self.runner, self.requests, self.consumer = runner, requests, consumer
        self.gen_len = gen_len
        self.queue: BlockQueue | None = queue
        self.should_end: Callable[[], bool] = lambda: False
        self.stats = runner.new_stats()
        self._drafter = None
        if isinstance(consumer, GenerationSampler):
            self._drafter = new_drafter(runner,
                                        max_tokens=max(map(sum, queue.sizes), default=1))
        self.workspace: Workspace | None = None
        self.halved = False  # blocks were made smaller when memory ran out
        self._tried_alone = False  # the block has one sequence, for which memory has run out
        self._bars: RunBars | None = None

    @property
    def finished(self) -> bool:
        """True if all requests have finished; False for a run that was closed before."""
        return self.queue is not None and not self.queue.left

    def size(self) -> tuple[WorkspaceSize, Workload]:
        """Return the size of a workspace for all waiting requests, and their workload."""
        assert self.queue is not None
        runner = self.runner
        size = WorkspaceSize.from_queue(self.queue, runner.h2o, runner.cached_config.num_layers)
        return size, Workload(
            prompt_len=self.queue.longest, gen_len=self.gen_len,
            gpu_batch_size=size.cache.sequences, num_gpu_batches=size.cache.batches)

    def compute_block(self) -> list[Request]:
        """Compute the next block in the workspace. Return the requests that it finished."""
        assert self.queue is not None and self.workspace is not None
        self._bars = self._bars or self.runner.bars()
        block = self.queue.next()
        stats = self.runner.run_block(self.workspace, block, self.consumer, bars=self._bars,
                                      drafter=self._drafter, should_end=self.should_end)
        self.stats = self.stats.merge(stats)
        self._tried_alone = False
        return [request for batch in block for request in batch.requests if request.finish_reason]

    def halve(self, error: BaseException) -> None:
        """Restart the last block's requests, in blocks of half as many sequences.

        A block of one sequence is tried again once: other processes may have had the memory.

        Raises
        ------
        InsufficientMemory
            A block has one sequence only. In a session: a `PromptMemoryError`, unless the workspace
            does not fit.
        """
        assert self.queue is not None
        reason = _one_line(error) or "out of memory"
        requests = self.queue.requeue()
        self.restart(requests)
        if not self.queue.halve():
            if not self._tried_alone:
                self._tried_alone = True
                return
            message = (f"there is too little memory for one sequence alone ({reason}): use shorter "
                       "prompts, fewer new tokens, or slower tiers")
            if isinstance(self.queue, OpenQueue) and requests:  # none: no workspace
                raise PromptMemoryError(message, requests[0].key) from error
            raise InsufficientMemory(message) from error
        self.halved = True
        _log.warning("too little memory (%s): trying again with blocks of %d x %d sequences",
                     reason, self.queue.size.gpu_batch_size, self.queue.size.num_gpu_batches)

    def fail(self, error: BaseException) -> None:
        """Close the run. In a session the error of one request only restarts the block."""
        if isinstance(error, PromptError) and isinstance(self.queue, OpenQueue):
            self.restart(self.queue.requeue())
        else:
            self.close()

    def restart(self, requests: Sequence[Request]) -> None:
        """Discard the generated tokens of requests."""
        for request in requests:
            request.restart()
            self.consumer.restart(request)
            if self._drafter is not None:
                self._drafter.forget(request)

    def discard(self, request: Request) -> None:
        """Drop a request of a session: see `OpenQueue.discard`."""
        assert isinstance(self.queue, OpenQueue) and isinstance(self.consumer, GenerationSampler)
        self.queue.discard(request)
        self.consumer.discard(request)
        if self._drafter is not None:
            self._drafter.forget(request)

    def close_workspace(self) -> None:
        """Wait for transfers in the workspace, and free it."""
        workspace, self.workspace = self.workspace, None
        if workspace is not None:
            workspace.close()

    def close(self) -> None:
        """Free everything that the run holds; a second call is a no-op."""
        self.queue = None
        if self._drafter is not None:
            self._drafter.close()
        if self._bars is not None:
            self._bars.close()
        self.close_workspace()


class Engine:
    """Begins runs and computes their blocks, on all ranks of a pipeline.

    It has no reference to its `LLM`, so that an unreferenced LLM is closed at once.

    Parameters
    ----------
    runner : Runner
        Runner of the loaded model.
    control : ControlChannel
        Control messages to other ranks.
    check_fits : callable
        `planning.memory_plan.MemoryCheck.check_fits`.
    cache : CacheOptions
        Options of the KV cache in all layers of the model, on any rank.

    Attributes
    ----------
    runner : Runner
        Computes the blocks of new runs.
    outputs : OutputProcessor
    stats : RunStats or None
        Statistics of the latest run.
    """

    def __init__(self, runner: Runner, inputs: InputProcessor, control: ControlChannel,
                 check_fits: Callable[..., None], cache: CacheOptions):
        self.runner, self.inputs, self.outputs = runner, inputs, OutputProcessor(inputs)
        self.check_fits = check_fits
        self.stats: RunStats | None = None
        self._control, self._cache = control, cache
        self._closed = False
        self._runs: weakref.WeakSet[GenerationRun] = weakref.WeakSet()
        self._spares: list[Workspace] = []
        """Workspaces of ended runs, for reuse: fresh memory costs page faults."""

    def begin_generation(self, prompts: Sequence[str | Sequence[int]],
                         params: Sequence[SamplingParams], *, cut_gen_len: int | None = None,
                         add_special_tokens: bool = True, on_text: OnText | None = None
                         ) -> GenerationRun:
        """Begin a run that continues prompts, on all ranks.

        Parameters
        ----------
        params : sequence of SamplingParams
            Sampling parameters of each prompt.
        cut_gen_len : int, optional
            Generate at most this many tokens, also if the parameters allow more.
        add_special_tokens, on_text
            See `LLM.generate`.

        Raises
        ------
        UserError
            A prompt is empty or too long, or a parameter does not go with the model.
        """
        check_bool("add_special_tokens", add_special_tokens)
        if cut_gen_len is not None:
            check_int("cut_gen_len", cut_gen_len, ge=1)
        _ = self.inputs.tokenizer  # a damaged tokenizer must raise before the work
        requests = [
            Request(key, self.inputs.encode(prompt, key, add_special_tokens=add_special_tokens),
                    seed=prompt_params.seed, params=prompt_params)
            for key, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True))]
        lengths = {request.key: request.params.max_new_tokens for request in requests}
        self.inputs.check_lengths(requests, lengths)
        # The prefill samples the first token: one fewer is appended.
        new = {key: min(length, cut_gen_len or length) - 1 for key, length in lengths.items()}
        sampler = self.outputs.sampler(
            dict(enumerate(params)), max_tokens=cut_gen_len,
            on_token=None if on_text is None else self.outputs.text_callback(on_text))
        run = self._begin(requests, new, sampler, gen_len=max(lengths.values(), default=1))
        prompt_ids = [request.prompt for request in requests]
        self._control.send(Generate(prompt_ids, list(params), cut_gen_len), run)
        return run

    def score(self, pairs: Sequence[tuple], on_logits: OnLogits | None = None) -> list[Scored]:
        """Score continuations of contexts: see `LLM.score`.

        If predictions depend on the state of the cache, the continuation is fed token by token.
        """
        cache = self._cache
        as_one_prompt = cache.is_unquantized_full and cache.attn_sparsity == 1 and not cache.recalls
        requests, scorer, new = self._scoring(pairs, as_one_prompt, on_logits)
        self.run_all(self._begin(requests, {key: count - 1 for key, count in new.items()}, scorer,
                                 gen_len=max(new.values(), default=1)))
        return scorer.scored()

    def probe(self, pairs: Sequence[tuple], attend: Callable[..., torch.Tensor]) -> list[Scored]:
        """Score continuations with `attend` as the attention: see `LLM.probe`."""
        requests, scorer, _ = self._scoring(pairs, True, None)
        self.check_open()
        if requests:
            self.free_workspaces()
            self.runner.set_rope_lengths(requests, 0)
            self.stats = self.runner.run_prompts(requests, ProbedCache(attend), scorer)
        return scorer.scored()

    def _scoring(self, pairs: Sequence[tuple], as_one_prompt: bool, on_logits: OnLogits | None
                 ) -> tuple[list[Request], DecodeScorer | PrefillScorer, dict[int, int]]:
        """Return requests for pairs, their scorer, and the tokens to generate by request key."""
        requests, continuations = self.inputs.encode_pairs(pairs)
        scorer: DecodeScorer | PrefillScorer = DecodeScorer(continuations, on_logits)
        new = {key: len(continuation) for key, continuation in continuations.items()}
        if as_one_prompt:
            scorer, new = PrefillScorer(continuations, on_logits), dict.fromkeys(new, 1)
            requests = scorer.joined(requests)
        self.inputs.check_lengths(requests, new)
        return requests, scorer, new

    def _begin(self, requests: list[Request], new_tokens: Mapping[int, int],
               consumer: LogitsConsumer, *, gen_len: int) -> GenerationRun:
        self.check_open()
        # A prefill scorer needs the rows of every request, so equal prompts are not shared.
        queue = self.runner.queue(requests, new_tokens,
                                  share_prompts=not isinstance(consumer, PrefillScorer))
        run = GenerationRun(self.runner, requests, queue, consumer, gen_len=gen_len)
        self._runs.add(run)
        return run

    def begin_session(self, max_len: int, sampler: GenerationSampler) -> GenerationRun:
        """Begin a run with an `OpenQueue`, and allocate its memory.

        Parameters
        ----------
        max_len : int
            Maximum number of tokens of a prompt and its continuation.
        sampler : GenerationSampler
            Gets the rules of each request before its first block.

        Raises
        ------
        UserError
            Blocks of the policy's size with sequences of this length do not fit in memory, or
            batch invariance does not go with prompts in chunks.
        """
        self.check_open()
        runner, workload = self.session_runner(max_len)
        run = GenerationRun(runner, [], runner.open_queue(max_len), sampler,
                            gen_len=workload.gen_len)
        run.workspace = self._workspace(run)
        self._runs.add(run)
        return run

    def session_runner(self, max_len: int) -> tuple[Runner, Workload]:
        """Return the runner of `begin_session`, and the workload that needs the most memory."""
        policy = self.runner.args.policy
        policy = replace(policy, prefill_chunk=policy.prefill_chunk or SESSION_CHUNK)
        h2o, layers = self.runner.h2o, range(self.runner.cached_config.num_layers)
        # The longest prompt has the largest budget, unless generated tokens are not evicted.
        keeps_generated = h2o is not None and not all(map(h2o.evicts_generated_at, layers))
        return self.runner.with_policy(policy), Workload(
            max_len - 1, max_len - 1 if keeps_generated else 1, policy.gpu_batch_size,
            policy.num_gpu_batches)

    def run_all(self, run: GenerationRun) -> None:
        """Compute all blocks of a run."""
        self.stats = run.stats
        while not run.finished:
            self.run_block(run)
        self.end(run)

    def run_block(self, run: GenerationRun) -> list[Request]:
        """Compute the next block of a run, on all ranks. Return the requests that it finished.

        If a block runs out of memory, it is computed again with half the sequences, and so are all
        later blocks. Results do not depend on that. Any other error closes the run.

        Raises
        ------
        UserError
            Memory is too small for the first workspace or for one sequence, or the first rank of a
            pipeline has begun another run.
        """
        self.check_open()
        self._control.send(RunBlock(), run)
        with self._control.working():
            try:
                while (requests := self._try_block(run)) is None:
                    pass
            except BaseException as error:
                run.fail(error)
                raise
        self.stats = run.stats
        return requests

    def _try_block(self, run: GenerationRun) -> list[Request] | None:
        """Compute a block. Return None if memory ran out and the block was halved."""
        computing = False
        try:
            if run.workspace is None:
                run.workspace = self._workspace(run)
            computing = True
            return run.compute_block()
        except BaseException as error:
            # The state of the workspace is unknown, and transfers may be running in it.
            run.close_workspace()
            refused = run.halved and isinstance(error, UserError) and not computing
            if not (refused or lacks_memory(error)):
                raise
            if self.runner.rank is not None:  # the other ranks are in the middle of the block
                raise UserError(f"out of memory ({_one_line(error)}): use smaller batches, or "
                                "slower tiers") from error
            run.halve(error)
            return None

    def _workspace(self, run: GenerationRun) -> Workspace:
        """Return a spare workspace that is large enough for a run, or allocate one.

        Raises
        ------
        InsufficientMemory
            A new workspace does not fit, on this rank or on another.
        """
        size, workload = run.size()
        policy = run.runner.args.policy
        spare = next((spare for spare in self._spares if spare.size.covers(size)), None)
        if spare is not None:
            self._spares.remove(spare)
        self.free_workspaces()

        def check() -> None:
            if spare is None:
                self.check_fits(policy, self._cache, workload,
                                loaded_bytes=run.runner.loaded_bytes)

        self._control.check_all_fit(check)  # other ranks may need a new one
        return run.runner.workspace(size) if spare is None else spare

    def end(self, run: GenerationRun) -> None:
        """Close a run, and keep its workspace for another run."""
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
        """Stop the worker loops of other ranks, and close all runs; a second call is a no-op."""
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
