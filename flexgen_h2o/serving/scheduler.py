"""The loop that computes: live requests and lines of batches share its blocks. No torch.

Live requests come first. Batches share the remaining slots: the oldest one has half of them,
the next one half of the rest, and so on. At most `_WINDOW_BLOCKS` blocks of the requests of batches
are in memory.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flexgen_h2o.engine.detokenization import ReasoningParser
from flexgen_h2o.errors import (
    PromptError,
    PromptMemoryError,
    SessionClosed,
    UserError,
    lacks_memory,
)
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests.request import BadRequest
from flexgen_h2o.requests.results import failure_reason
from flexgen_h2o.requests.tokenizing import RequestTokenizer, TokenizedRequest
from flexgen_h2o.serving.batches import BatchRun, InvalidInput
from flexgen_h2o.serving.live import LiveRequest
from flexgen_h2o.serving.metrics import Metrics, Rate
from flexgen_h2o.serving.store import Batch, Store

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM

_WINDOW_BLOCKS, _MIN_WINDOW = 8, 64
"""Blocks of sequences of batches that wait in memory, and the least number of these sequences."""
_FEED_SECONDS = 0.25  # of tokenizing between two blocks
_RETRY_SECONDS = 30.0  # until a batch goes on whose files could not be written
_LONGEST_PAUSE = 60.0  # seconds until the engine is tried again after errors
_RATE_SECONDS = 10.0  # over which tokens/s are counted

_log = logging.getLogger(__name__)


class Unavailable(Exception):
    """A request cannot be accepted at this time."""


class QueueFull(Unavailable):
    """Too many live requests wait."""


class _Owner(NamedTuple):
    """The request and the choice that a sequence computes, and who gets its output."""

    receiver: BatchRun | LiveRequest
    request: TokenizedRequest
    choice: int


class Scheduler:
    """Computes requests in a thread of its own. Methods may be called from any thread.

    Parameters
    ----------
    max_model_len : int
        Maximum number of tokens of a prompt and its continuation.
    block_seconds : float
        Maximum time of a block.
    max_queue : int
        Maximum number of sequences of live requests.
    """

    def __init__(self, llm: LLM, store: Store, tokenizer: RequestTokenizer, metrics: Metrics, *,
                 max_model_len: int, block_seconds: float, max_queue: int):
        self._llm, self._store, self._tokenizer, self.metrics = llm, store, tokenizer, metrics
        self._open_session: Callable[[], Any] = partial(
            llm.open_session, max_model_len=max_model_len, block_seconds=block_seconds)
        self._max_queue = max_queue
        self._block = llm.policy.gpu_batch_size * llm.policy.num_gpu_batches
        self._window = max(_MIN_WINDOW, _WINDOW_BLOCKS * self._block)
        self.parser = None if llm.tokenizer is None else ReasoningParser(llm.tokenizer)
        self._session = self._open_session()
        self._lock = threading.Lock()  # of the two below, and of adding to the session
        self._owners: dict[int, _Owner] = {}
        self._live = 0  # sequences of live requests
        self._largest = 0  # tokens of a finished request
        self._runs: list[BatchRun] = []  # oldest first
        self._opened: queue.SimpleQueue[BatchRun] = queue.SimpleQueue()
        self._cancelled: set[str] = set()
        self._retries: dict[str, float] = {}  # when to open a batch again
        self._files = ThreadPoolExecutor(1, "batch files")
        self._wake = threading.Event()
        self._stopping = False
        self._failures, self._error = 0, ""
        self._tokens = Rate(_RATE_SECONDS)

    def start(self) -> None:
        """Compute one token, then begin with the batches that are left.

        Raises `UserError` if the longest requests do not fit in memory.
        """
        self._session.add([0], max_new_tokens=1, eos_token_id=-1)
        self._session.step()
        for batch in self._store.active_batches():
            if batch.status == "cancelling":
                self._cancelled.add(batch.id)
            self.open_batch(batch.id)

    def run(self) -> None:
        """Compute blocks until `stop`. Errors fail live requests, and batches go on later.

        Call it in the thread that opened the LLM: OpenMP keeps threads for each thread that
        computes, and these would be more than the CPUs.
        """
        failure: Exception | None = None
        try:
            while not self._stopping:
                try:
                    if failure is not None:
                        self._recover(failure)
                        failure = None
                        continue  # the server may have been stopped meanwhile
                    self._update_runs()
                    self._feed()
                    if self._session.unfinished:
                        self._step()
                        self._failures, self._error = 0, ""
                    else:
                        self._wake.wait(1.0)
                        self._wake.clear()
                except Exception as error:
                    failure = error
        finally:
            self._stopping = True
            self._give_up("the server is stopping")

    def stop(self) -> None:
        """Let `run` return after the current block."""
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """Close the files of batches, which go on when the server is started again."""
        self._files.shutdown(cancel_futures=True)
        with suppress(queue.Empty):
            while True:
                self._opened.get_nowait().close()
        self._session.close()

    def status(self) -> dict[str, Any]:
        """Return the state of the server as plain values.

        `state` is ok, stopping or error; `error` is the reason. `running`, `waiting` and `live` are
        sequences. `tokens_per_second` is of the last ten seconds. `batches` has the progress of
        running ones, by id.
        """
        with self._lock:
            live, sequences = self._live, len(self._owners)
            tokens_per_second = self._tokens.sample(self._session.generated_tokens)
            batches = {run.id: run.progress() for run in [*self._runs]}
        return {
            "state": "stopping" if self._stopping else "error" if self._error else "ok",
            "error": self._error, "live": live, "running": min(sequences, self._block),
            "waiting": max(0, sequences - self._block), "block_sequences": self._block,
            "tokens_per_second": tokens_per_second, "batches": batches,
        }

    # Live requests.

    def submit(self, live: LiveRequest) -> list[int]:
        """Add a live request, which the next block computes. Return the keys of its choices.

        Raises
        ------
        QueueFull, Unavailable
            There are too many, or the server stops or has an error.
        BadRequest
            The request is not possible.
        """
        request, keys = live.request, []
        with self._lock:
            if self._stopping or self._error:
                raise Unavailable(self._error or "the server is stopping")
            if self._live and self._live + request.choices > self._max_queue:
                raise QueueFull(f"{self._live} sequences are waiting: try again later")
            hurry = self._live < self._block
            try:
                for choice, (prompt, params) in enumerate(request.sequences()):
                    on_text = None if self.parser is None else partial(live.add_text, choice)
                    key = self._session.add(prompt, params, priority=1, on_text=on_text)
                    self._owners[key] = _Owner(live, request, choice)
                    keys.append(key)
                    self._live += 1
            except UserError as error:
                self._abort(keys)
                if isinstance(error, SessionClosed):  # the engine has just failed
                    raise Unavailable("the engine has failed: try again") from None
                raise BadRequest(str(error)) from None
        if hurry:
            self._session.interrupt()  # the block of batches makes room
        self._wake.set()
        return keys

    def abort(self, keys: Sequence[int]) -> None:
        """Drop the choices of a live request that nobody waits for."""
        with self._lock:
            self._abort(keys)

    def _abort(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._pop(key)
            self._session.abort(key)

    def _pop(self, key: int) -> _Owner | None:
        owner = self._owners.pop(key, None)
        if owner is not None and isinstance(owner.receiver, LiveRequest):
            self._live -= 1
        return owner

    # Batches.

    def open_batch(self, id: str) -> None:
        """Begin or resume a batch of the store."""
        self._in_background(id, self._open_batch, id)

    def cancel_batch(self, id: str) -> None:
        """End a batch whose status in the store is cancelling."""
        self._cancelled.add(id)
        if id in self._retries:
            self._retries[id] = 0.0  # do not wait for it
        self._session.interrupt()
        self._wake.set()

    def _in_background(self, id: str, work: Callable[..., None], *arguments: Any) -> None:
        """Work on files of a batch in another thread; open the batch again if that fails."""
        def guarded() -> None:
            try:
                work(*arguments)
            except Exception as error:
                self._retry_later(id, error)

        with suppress(RuntimeError):  # the server has stopped
            self._files.submit(guarded)

    def _retry_later(self, id: str, error: Exception) -> None:
        _log.warning("batch %s: %s; trying again in %.0f s", id, error, _RETRY_SECONDS,
                     exc_info=None if isinstance(error, UserError) else error)
        self._retries[id] = time.monotonic() + _RETRY_SECONDS

    def _open_batch(self, id: str) -> None:
        batch = self._store.get(Batch, id)
        if batch is None or not batch.active:
            return
        try:
            run = BatchRun(self._store, batch, self._tokenizer, self.parser)
        except InvalidInput as error:
            self._store.update_batch(id, status="failed", errors=error.errors)
            return
        try:
            self._store.update_batch(id, only_if=("validating",), status="in_progress")
            self._store.update_batch(id, request_counts=run.counts)
        except BaseException:
            run.close()  # its files are locked
            raise
        self._opened.put(run)
        self._wake.set()

    def _drop(self, run: BatchRun) -> None:
        """Take the sequences of a batch out of the session."""
        self._runs.remove(run)
        with self._lock:
            self._abort([key for key, owner in self._owners.items() if owner.receiver is run])

    def _update_runs(self) -> None:
        """Take in opened batches, and end those that are finished, cancelled or expired."""
        with suppress(queue.Empty):
            while True:
                self._runs.append(self._opened.get_nowait())
        self._runs.sort(key=lambda run: run.created_at)
        for run in [*self._runs]:
            status = ("cancelled" if run.id in self._cancelled else
                      "completed" if run.finished else
                      "expired" if time.time() >= run.expires_at else None)
            if status is not None:
                self._drop(run)
                self._cancelled.discard(run.id)
                self._in_background(run.id, self._end, run, status)
        now = time.monotonic()
        for id in [id for id, when in [*self._retries.items()] if when <= now]:
            del self._retries[id]
            self.open_batch(id)
        self.metrics.batches.set(len(self._runs))

    def _end(self, run: BatchRun, status: str) -> None:
        with run:
            if status == "cancelled":
                self._cancelled.add(run.id)  # if an error comes in between
            run.end(status)
            self._cancelled.discard(run.id)

    def _feed(self) -> None:
        """Read lines of batches until enough sequences wait."""
        until = time.monotonic() + _FEED_SECONDS
        waiting = [run for run in self._runs if not run.exhausted]
        free = self._window - sum(run.sequences for run in self._runs)
        if free < self._window // 2 and all(run.outstanding for run in waiting):
            return
        for place, run in enumerate(waiting):
            share = free if place == len(waiting) - 1 else (free + 1) // 2
            try:
                requests = run.read(max(share, 1), until)
                for request in requests:
                    self._add(run, request)
                run.flush()  # the failures
            except UserError as error:
                self._suspend(run, error)
                continue
            free = max(0, free - sum(request.choices for request in requests))

    def _add(self, run: BatchRun, request: TokenizedRequest) -> None:
        keys: list[int] = []
        with self._lock:
            try:
                for choice, (prompt, params) in enumerate(request.sequences()):
                    key = self._session.add(prompt, params)
                    self._owners[key] = _Owner(run, request, choice)
                    keys.append(key)
            except SessionClosed:  # no fault of the request
                raise
            except UserError as error:
                self._abort(keys)
                run.fail(request, BadRequest(str(error)))

    def _suspend(self, run: BatchRun, error: Exception) -> None:
        """Close a batch whose files cannot be used, and open it again later."""
        self._drop(run)
        run.close()
        self._retry_later(run.id, error)

    # The engine.

    def _step(self) -> None:
        """Compute a block and hand out the finished requests."""
        status = self.status()
        self.metrics.running.set(status["running"])
        self.metrics.waiting.set(status["waiting"])
        began = time.monotonic()
        try:
            outputs: Mapping[int, Output] = self._session.step()
        except PromptError as error:
            self._fail(error)
            return
        finally:
            self.metrics.running.set(0)
            self.metrics.waiting.set(0)
        stats = self._session.stats
        if stats is not None:
            self.metrics.count_block(stats, time.monotonic() - began)
        with self._lock:
            finished = [(self._pop(key), output) for key, output in outputs.items()]
        for owner, output in finished:
            if owner is not None:  # None: aborted during the block
                self._largest = max(self._largest, owner.request.max_tokens())
                owner.receiver.add_output(owner.request, owner.choice, output)
                self.metrics.count(len(output.prompt_token_ids), len(output.token_ids),
                                   output.finish_reason)
        self._flush()

    def _fail(self, error: PromptError) -> None:
        """Fail a request that cannot go on.

        Memory was enough for a session of the longest requests. If it is too small for one that is
        not larger than all that have finished, other processes have it: then a batch goes on later,
        and a client is told to try again.
        """
        with self._lock:
            owner = self._pop(error.key)
            if owner is not None:
                self._abort([key for key, other in self._owners.items()
                             if other.request is owner.request])
        if owner is None:  # aborted during the block
            pass
        elif not isinstance(error, PromptMemoryError) or (
                0 < self._largest < owner.request.max_tokens()):
            owner.receiver.fail(owner.request, failure_reason(error))
        elif isinstance(owner.receiver, BatchRun):
            self._suspend(owner.receiver, error)
        else:
            owner.receiver.stop(str(error))
        self._flush()

    def _flush(self) -> None:
        """Write the new result lines of batches."""
        for run in [*self._runs]:
            try:
                run.flush()
            except UserError as error:
                self._suspend(run, error)

    def _recover(self, error: Exception) -> None:
        """Begin again with another session after an error of the engine."""
        self._failures += 1
        pause = min(_LONGEST_PAUSE, 2.0 ** min(self._failures, 10))
        self._error = f"the engine has failed, and is tried again in {pause:.0f} s: {error}"
        known = isinstance(error, UserError) or lacks_memory(error)
        _log.error("%s", self._error, exc_info=None if known else error)
        runs = [run.id for run in self._runs]
        self._give_up(self._error)
        with suppress(Exception):
            self._session.close()
        until = time.monotonic() + pause
        while not self._stopping and time.monotonic() < until:
            time.sleep(0.05)
        if not self._stopping:
            try:
                self._session, self._tokens = self._open_session(), Rate(_RATE_SECONDS)
            finally:  # also if it fails, and `run` tries again
                for id in runs:
                    self.open_batch(id)
            self._error = ""

    def _give_up(self, message: str) -> None:
        """Fail live requests, and close batches."""
        with self._lock:
            receivers = {id(owner.receiver): owner.receiver for owner in self._owners.values()}
            self._owners.clear()
            self._live = 0
        for receiver in receivers.values():
            if isinstance(receiver, LiveRequest):
                receiver.stop(message)
        for run in self._runs:
            run.close()
        self._runs.clear()
