"""Sessions: a text of unlimited length in one cache, and requests that come at any time."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Protocol, runtime_checkable

import torch

from flexgen_h2o.config.policy import Workload
from flexgen_h2o.config.sampling import SamplingParams, mix_seed, sampling_params
from flexgen_h2o.config.validation import check_arguments, check_bool, check_int, check_number
from flexgen_h2o.engine.blocks import OpenQueue, Request, batch_of_one
from flexgen_h2o.engine.exclusive import CallLock, ExclusiveResource, exclusive
from flexgen_h2o.engine.generation import Engine, GenerationRun
from flexgen_h2o.engine.sampling import GenerationRules, GenerationSampler, LogitsConsumer
from flexgen_h2o.engine.scoring import DecodeScorer
from flexgen_h2o.engine.workspace import Workspace, WorkspaceSize
from flexgen_h2o.errors import PromptError, SessionClosed, UserError
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.budget import num_cached
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.models.positions import check_stream
from flexgen_h2o.outputs import Output

CHUNK = 256
"""Tokens of a turn that are computed together, unless the policy has a `prefill_chunk`."""

_UNLIMITED = 2**31 - 2  # positions are 32-bit


@runtime_checkable
class Streamer(Protocol):
    """Receiver of tokens as they are generated. transformers' `TextStreamer` is one."""

    def put(self, value: torch.Tensor, /) -> None:
        """Receive a turn's token ids, int64 [1, tokens], and then each new token, int64 [1]."""

    def end(self) -> None:
        """Receive the end of an answer, after its last token."""


class StreamingSession(ExclusiveResource):
    """A text that turns are appended to. The cache keeps its contents between turns.

    With eviction, the cache and the time of a token stay constant. A turn is computed in chunks,
    with eviction after each. `LLM.stream` opens one. While it is open, the LLM takes other calls;
    calls from several threads take turns.

    Parameters
    ----------
    engine : Engine
    call_lock : CallLock
        Lock of the LLM, which the session shares.
    max_tokens : int or None
        Maximum number of tokens of the whole text. None: no limit.
    past_context : bool
        Continue past the model's trained positions.

    Attributes
    ----------
    stats : RunStats or None
        Statistics of the latest call.
    owner : object
        The LLM that opened it. An LLM without references is closed.
    """

    owner: object = None

    def __init__(self, engine: Engine, call_lock: CallLock, *, max_tokens: int | None,
                 past_context: bool):
        if max_tokens is not None:
            check_int("max_tokens", max_tokens, ge=1)
        check_bool("past_context", past_context)
        policy = engine.runner.args.policy
        if policy.speculate is not None:
            raise UserError("a stream does not draft tokens: leave the policy's speculate out")
        self._chunk = policy.prefill_chunk or CHUNK
        runner = engine.runner.with_prefill_chunk(self._chunk)
        self._h2o = runner.h2o
        self._limit = check_stream(runner.config, self._h2o, chunk=self._chunk,
                                   max_tokens=max_tokens, past_context=past_context)
        self._layers = runner.cached_config.num_layers
        self._runner, self._inputs, self._outputs = runner, engine.inputs, engine.outputs
        self.call_lock = call_lock
        self._past = 0  # tokens that have been computed
        self._pending: list[int] = []  # the newest token, which has not
        self._turns = 0
        self.stats: RunStats | None = None
        layout = BatchLayout((max_tokens or _UNLIMITED,), 0)
        size = WorkspaceSize.of_one(layout.sizes, self._h2o, self._layers, rows=self._chunk)
        engine.check_fits(runner.args.policy, runner.args.cache, Workload(
            prompt_len=self._chunk, gen_len=max(1, max(size.cache.slots) - self._chunk + 1),
            gpu_batch_size=1, num_gpu_batches=1), loaded_bytes=runner.loaded_bytes)
        workspace = runner.workspace(size)
        workspace.begin([layout])
        self._workspace: Workspace | None = workspace

    @exclusive
    def close(self) -> None:
        """Free the cache; a second call is a no-op."""
        self.end()

    def end(self) -> None:
        """Free the cache from within a call: see `close`."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()

    @property
    def tokens(self) -> int:
        """Number of tokens of the text so far, given or generated."""
        return self._past + len(self._pending)

    @property
    def cached_tokens(self) -> int:
        """Maximum number of cached tokens of a layer."""
        return max(num_cached(self._h2o, layer, self._past, 0) for layer in range(self._layers))

    @exclusive
    @check_arguments
    def generate(self, turn: str | Sequence[int], *, streamer: Streamer | None = None,
                 **sampling: Any) -> Output:
        """Append a turn to the text, and generate its continuation.

        Parameters
        ----------
        turn : str or sequence of int
            Text or token ids. The tokenizer's special tokens are added before the first turn only.
        streamer : Streamer, optional
            Receives tokens as they are generated, such as transformers' `TextStreamer`.
        **sampling
            See `LLM.generate`. Penalties count this turn and its answer.

        Returns
        -------
        Output

        Raises
        ------
        UserError
            The turn is empty, an option is unknown, or the text would become too long.
        """
        params = sampling_params(sampling)
        params = replace(params, seed=mix_seed(params.seed, self._turns))
        ids = self._encode(turn)
        self._check_length(len(ids) + params.max_new_tokens)
        request = Request(self._turns, [*self._pending, *ids], seed=params.seed, params=params)
        on_token: Callable[[Request], None] | None = None
        if streamer is not None:
            on_token = lambda request: streamer.put(  # noqa: E731
                torch.tensor(request.generated[-1:]))
        sampler = self._outputs.sampler({self._turns: params}, on_token=on_token)
        if streamer is not None:
            streamer.put(torch.tensor([ids]))
        self._run(request, params.max_new_tokens - 1, sampler)
        if streamer is not None:
            streamer.end()
        self._turns += 1
        return self._outputs.output(request, turn, ids)

    @exclusive
    def loglikelihood(self, text: str | Sequence[int]) -> list[float]:
        """Append a text token by token (teacher forcing), and return log-probabilities.

        Returns
        -------
        list of float
            The natural log-probability of each token after all tokens before it. The first token
            of a stream has none.
        """
        ids = self._encode(text)
        self._check_length(len(ids))
        (first, *following) = [*self._pending, *ids]
        if not following:
            self._pending = [first]
            return []
        if self._past:  # the pending token comes as a generated one
            request, continuation = Request(0, [], [first]), [first, *following]
        else:
            request, continuation = Request(0, [first]), following
        scorer = DecodeScorer({0: continuation})
        self._run(request, len(continuation) - 1, scorer)
        return scorer.scores[0].log_probs

    def _check_open(self) -> None:
        if self._workspace is None:
            raise UserError("this stream has ended: open a new one")

    def _encode(self, text: str | Sequence[int]) -> list[int]:
        self._check_open()
        limit, reason = self._limit
        remaining = None if limit is None else limit - self.tokens
        return self._inputs.encode(text, self._turns, add_special_tokens=self.tokens == 0,
                                   limit=(remaining, f"the {remaining} that are left of {reason}"))

    def _check_length(self, new: int) -> None:
        """Raise `UserError` if `new` more tokens exceed the limit."""
        limit, reason = self._limit
        if limit is not None and self.tokens + new > limit:
            raise UserError(f"the stream has {self.tokens} tokens, and {new} more would exceed "
                            f"{reason}")

    def _run(self, request: Request, new: int, consumer: LogitsConsumer) -> None:
        """Compute the request's prompt, and up to `new` tokens that the consumer appends."""
        assert self._workspace is not None  # callers have checked
        batch = batch_of_one(request, new, past=self._past, chunk=self._chunk)
        try:
            self.stats = self._runner.run_block(self._workspace, [batch], consumer, keep_cache=True)
        except BaseException:
            self.end()  # the state of the cache is unknown
            raise
        self._past += len(request.prompt) + len(request.generated) - 1
        self._pending = request.generated[-1:]


OnNewText = Callable[[str, bool], object]
"""Called with the characters that a token completes, and whether it is the last token."""


class RequestSession(ExclusiveResource):
    """Requests that are added at any time, also from other threads.

    One thread calls `step` in a loop. Requests join between blocks: each block has the sequences
    that the last one left unfinished, and waiting requests in the order of their priority and of
    adding. If there is no room for a request of a higher priority, the newest sequence of the
    lowest one waits again, and is recomputed later. Results equal `LLM.generate`'s.
    `LLM.open_session` opens a session.

    Parameters
    ----------
    engine : Engine
    call_lock : CallLock
        Lock of the LLM, which the session shares.
    max_model_len : int
        Maximum number of tokens of a prompt and its continuation.
    block_seconds : float
        A block ends with the first token after this time.

    Attributes
    ----------
    stats : RunStats or None
        Statistics of the block of the latest `step`; None if it had nothing to compute.
    generated_tokens : int
        Tokens so far, also of unfinished and aborted requests.
    owner : object
        The LLM that opened it. An LLM without references is closed.
    """

    owner: object = None

    @check_arguments
    def __init__(self, engine: Engine, call_lock: CallLock, *, max_model_len: int,
                 block_seconds: float):
        check_int("max_model_len", max_model_len, ge=2)
        check_number("block_seconds", block_seconds, gt=0)
        self._engine, self.call_lock = engine, call_lock
        self._max_len, self._block_seconds = max_model_len, block_seconds
        self._sampler = GenerationSampler({}, on_token=self._report)
        self._shared: weakref.WeakValueDictionary[SamplingParams, GenerationRules] = (
            weakref.WeakValueDictionary())
        self._has_text = engine.outputs.detokenizer is not None  # loaded before threads may race
        self._keys = count()
        self._lock = threading.Lock()  # of the attributes below, which other threads change
        self._added: list[tuple[Request, GenerationRules]] = []
        self._requests: dict[int, Request] = {}
        self._prompt_texts: dict[int, str | Sequence[int]] = {}
        self._on_token: dict[int, Callable[[], object]] = {}
        self._aborted: set[int] = set()
        self._interrupted = False
        self.stats: RunStats | None = None
        self.generated_tokens = 0
        self._run: GenerationRun | None = engine.begin_session(max_model_len, self._sampler)
        self._run.should_end = self._should_end
        self._deadline = 0.0

    def add(self, prompt: str | Sequence[int], params: SamplingParams | None = None, *,
            priority: int = 0, on_text: OnNewText | None = None,
            add_special_tokens: bool = True, **sampling: Any) -> int:
        """Add a request, which the next block may compute. Threads may call it during `step`.

        Parameters
        ----------
        prompt : str or sequence of int
        params : SamplingParams, optional
            Its `seed` determines the random numbers.
        priority : int
            Requests of a higher priority come first.
        on_text : callable (text, last), optional
            Called in the thread of `step` with the characters that each token completes, and
            whether it is the last one: once for each token, also if the sequence is recomputed.
            An aborted request gets no last call.
        add_special_tokens, **sampling
            See `LLM.generate`.

        Returns
        -------
        int
            The key of the request.

        Raises
        ------
        UserError
            The prompt is empty, or too long with its new tokens, or an option is not possible.
        """
        if params is not None and sampling:
            raise UserError(f"give params or {', '.join(sampling)}, not both")
        params = params or sampling_params(sampling)
        if on_text is not None and not self._has_text:
            raise UserError("the model has no tokenizer here, and on_text gets text: leave it out")
        key, new = next(self._keys), params.max_new_tokens
        inputs, outputs = self._engine.inputs, self._engine.outputs
        tokens = inputs.encode(prompt, key, add_special_tokens=add_special_tokens)
        if len(tokens) + new > self._max_len:
            raise UserError(f"prompt {key} has {len(tokens)} tokens, and with {new} new ones more "
                            f"than the session's {self._max_len}: shorten it, or ask for fewer")
        request = Request(key, tokens, seed=params.seed, params=params, priority=priority)
        inputs.check_lengths([request], new)
        rules = outputs.rules(params, self._shared)
        with self._lock:
            self._check_open()
            self._added.append((request, rules))
            self._requests[key], self._prompt_texts[key] = request, prompt
            if on_text is not None:
                new_text = outputs.new_text(request)
                self._on_token[key] = lambda: on_text(new_text(), bool(request.finish_reason))
        return key

    def abort(self, key: int) -> None:
        """End a request without an output, from any thread. Finished ones are ignored."""
        with self._lock:
            if key in self._requests:
                self._aborted.add(key)
                self._on_token.pop(key, None)

    def interrupt(self) -> None:
        """Let the current block end with its next token, from any thread.

        Its unfinished sequences go on in the next block, together with the added requests.
        """
        with self._lock:
            self._interrupted = True

    @property
    def unfinished(self) -> int:
        """The number of requests that have not finished."""
        with self._lock:
            return len(self._requests)

    @exclusive
    def step(self) -> dict[int, Output]:
        """Compute the next block. Return the outputs of the requests that it finished.

        Returns
        -------
        dict of int to Output
            By the keys of the requests. Empty if no request is unfinished.

        Raises
        ------
        PromptError
            The request `key` of the error cannot be computed, and has been dropped. The others of
            its block are recomputed in the next one.
        UserError
            Anything else, such as a full disk; the session is closed.
        """
        self._check_open()
        run = self._run
        assert run is not None and isinstance(run.queue, OpenQueue)
        self._begin_block(run)
        if not run.queue.left:
            self.stats = None
            return {}
        run.restart(run.queue.preempt())
        run.stats = run.runner.new_stats()
        try:
            finished = self._engine.run_block(run)
        except PromptError as error:
            self._drop(self._requests[error.key], run)
            raise
        self.stats = run.stats
        outputs = {request.key: self._engine.outputs.output(request,
                                                            self._prompt_texts[request.key])
                   for request in finished}
        for request in finished:
            self._drop(request, run)
        return outputs

    def _begin_block(self, run: GenerationRun) -> None:
        """Set the deadline, move added requests to the queue, and drop aborted ones."""
        assert isinstance(run.queue, OpenQueue)
        with self._lock:
            self._interrupted = False
            self._deadline = time.monotonic() + self._block_seconds
            added, self._added = self._added, []
            aborted, self._aborted = self._aborted, set()
        for request, rules in added:
            self._sampler.add(request.key, rules)
            new = request.params.max_new_tokens - 1  # the prefill samples the first token
            run.runner.set_rope_lengths([request], new)
            run.queue.add(request, new)
        for key in aborted:
            self._drop(self._requests[key], run)

    def _drop(self, request: Request, run: GenerationRun) -> None:
        """Forget a request."""
        run.discard(request)
        with self._lock:
            del self._requests[request.key], self._prompt_texts[request.key]
            self._aborted.discard(request.key)
            self._on_token.pop(request.key, None)

    def _report(self, request: Request) -> None:
        self.generated_tokens += 1
        on_token = self._on_token.get(request.key)
        if on_token is not None:
            on_token()

    def _should_end(self) -> bool:
        return self._interrupted or time.monotonic() > self._deadline

    @exclusive
    def close(self) -> None:
        """Free the memory, and drop all requests; a second call is a no-op."""
        self.end()

    def end(self) -> None:
        """Close the session from within a call: see `close`."""
        with self._lock:
            run, self._run = self._run, None
            self._requests.clear()
            self._prompt_texts.clear()
            self._on_token.clear()
        if run is not None:
            self._engine.end(run)

    def _check_open(self) -> None:
        if self._run is None or self._run.queue is None:
            raise SessionClosed("this session has been closed: open a new one")
