"""RequestSession: requests that come at any time, computed in shared blocks."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from flexgen_h2o.config.sampling import SamplingParams, sampling_params
from flexgen_h2o.config.validation import check_arguments, check_int, check_number
from flexgen_h2o.engine.blocks import OpenQueue, Request
from flexgen_h2o.engine.exclusive import CallLock, ExclusiveResource, exclusive
from flexgen_h2o.engine.generation import Engine, GenerationRun
from flexgen_h2o.engine.sampling import GenerationRules, GenerationSampler
from flexgen_h2o.errors import PromptError, UserError
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.outputs import Output

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
        self._lock = threading.Lock()  # of what follows, which other threads change
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

        Its unfinished sequences go on in the next block, together with what has been added.
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
            raise UserError("this session has been closed: open a new one")
