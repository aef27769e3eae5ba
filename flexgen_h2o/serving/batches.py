"""A batch that runs: which lines of its input are left, and its files of results. No torch.

A result line is on disk before the line counts as answered. A batch that is opened again, after a
restart or an error, goes on with the lines without a result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from flexgen_h2o.engine.detokenization import ReasoningParser
from flexgen_h2o.errors import UserError
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests.input import VALID, JobInput, UnreadableInput
from flexgen_h2o.requests.request import URLS, BadRequest, read_object, request_id
from flexgen_h2o.requests.results import ResultsFile, answer_line, failure_line
from flexgen_h2o.requests.tokenizing import FailedRequest, RequestTokenizer, TokenizedRequest
from flexgen_h2o.serving.metrics import Rate
from flexgen_h2o.serving.store import Batch, Counts, Store

MAX_ERRORS = 100
"""Errors of a refused input that a batch shows."""
_RATE_SECONDS = 60.0  # over which progress is measured
_LINES = 1024  # result lines that are written together when a batch ends early


class InvalidInput(Exception):
    """The input file of a batch is not a file of requests. `errors` is as in the API."""

    def __init__(self, errors: list[dict[str, Any]]):
        super().__init__(errors[0]["message"])
        self.errors = errors


class BatchRun:
    """The lines of a batch on their way to results; a context manager.

    Parameters
    ----------
    parser : ReasoningParser or None
        See `answer_line`.

    Attributes
    ----------
    counts : Counts
        Requests that have result lines.
    outstanding : dict of int to TokenizedRequest
        Requests that have been read and have no result, by their index in the input.

    Raises
    ------
    InvalidInput
        A line is not JSON, or has no unique `custom_id`.
    UserError
        A file cannot be read or written.
    """

    def __init__(self, store: Store, batch: Batch, tokenizer: RequestTokenizer,
                 parser: ReasoningParser | None):
        self.id, self.created_at, self.expires_at = batch.id, batch.created_at, batch.expires_at
        self._store, self._batch, self._tokenizer, self._parser = store, batch, tokenizer, parser
        self.outstanding: dict[int, TokenizedRequest] = {}
        self._tokens, self._answered_since = 0, 0
        self._rates = Rate(_RATE_SECONDS), Rate(_RATE_SECONDS)
        self._lines: dict[ResultsFile, list[bytes]] = {}
        path = store.path(batch.input_file_id)
        with ExitStack() as files:
            try:
                self._source = files.enter_context(JobInput(path))
            except UserError as error:
                if isinstance(error, UnreadableInput) and os.path.exists(path):
                    raise  # the disk may be well again when it is tried again
                message = str(error).replace(f"--input {path}", "the input file")
                raise InvalidInput([{"code": "invalid_file", "line": None, "message": message,
                                     "param": None}]) from None
            self._check_lines()
            self._output, self._errors = (
                files.enter_context(ResultsFile(name, store.path(id))) for name, id in
                (("the output file", batch.output_file_id), ("the error file",
                                                             batch.error_file_id)))
            indices, failed = self._answered()
            self._remaining = np.setdiff1d(np.arange(len(self._source)), indices)
            self.counts = Counts(len(self._source), len(indices) - len(failed), len(failed))
            self._next = 0
            self._files = files.pop_all()

    def __enter__(self) -> BatchRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._files.close()

    def _check_lines(self) -> None:
        source, errors = self._source, []
        for index in np.flatnonzero(source.kinds != VALID)[:MAX_ERRORS]:
            failed = self._tokenizer.read(source, int(index))
            assert isinstance(failed, FailedRequest)
            errors.append({"code": failed.error.code, "line": int(source.numbers[index]),
                           "message": str(failed.error), "param": failed.error.param})
        if errors:
            raise InvalidInput(errors)

    def _answered(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of lines with results, and of those that failed."""
        done, _ = self._output.answered(self._source)
        failed, _ = self._errors.answered(self._source)
        failed = np.setdiff1d(failed, done)
        return np.union1d(done, failed), failed

    @property
    def exhausted(self) -> bool:
        """Whether all lines have been read."""
        return self._next == len(self._remaining)

    @property
    def finished(self) -> bool:
        """Whether all lines have results."""
        return self.exhausted and not self.outstanding

    @property
    def sequences(self) -> int:
        """The number of sequences of outstanding requests."""
        return sum(request.choices for request in self.outstanding.values())

    def read(self, sequences: int, until: float) -> list[TokenizedRequest]:
        """Return the next requests that can run; those that cannot get result lines.

        `sequences`: about how many sequences to return. `until`: `time.monotonic` after which to
        return the requests so far.
        """
        requests: list[TokenizedRequest] = []
        while sequences > 0 and not self.exhausted:
            index = int(self._remaining[self._next])
            self._next += 1
            request = self._tokenizer.read(self._source, index)
            if isinstance(request, TokenizedRequest) and (
                    request.request.chat != (self._batch.endpoint == "/v1/chat/completions")):
                request = FailedRequest(index, request.request.custom_id, BadRequest(
                    f"url must be the batch's endpoint, {self._batch.endpoint}", param="url",
                    code="invalid_url"))
            if isinstance(request, FailedRequest):
                self._fail(index, request.custom_id, request.error)
            else:
                requests.append(request)
                self.outstanding[index] = request
                sequences -= request.choices
            if time.monotonic() > until:
                break
        # Similar lengths share a batch, as in `BlockQueue`; a session keeps the order of adding.
        requests.sort(key=lambda request: (-max(request.limits).bit_length(),
                                           -max(map(len, request.prompts))))
        return requests

    def add_output(self, request: TokenizedRequest, choice: int, output: Output) -> None:
        """Keep the output of a choice. The last one of a request makes its result line."""
        request.outputs[choice] = output
        self._tokens += len(output.token_ids)
        if request.finished:
            del self.outstanding[request.index]
            self._lines.setdefault(self._output, []).append(answer_line(
                request.request, [request.outputs[index] for index in range(request.choices)],
                key=self._key(request.index), model=self._batch.model, created=int(time.time()),
                parser=self._parser))
            self.counts.completed += 1
            self._answered_since += 1

    def progress(self) -> dict[str, float | None]:
        """Return the tokens/s of finished sequences, and the seconds that are left at this rate."""
        tokens, requests = (rate.sample(total) for rate, total in zip(
            self._rates, (self._tokens, self._answered_since), strict=True))
        left = self.counts.total - self.counts.completed - self.counts.failed
        return {"tokens_per_second": tokens, "seconds_left": left / requests if requests else None}

    def fail(self, request: TokenizedRequest, error: BadRequest) -> None:
        """Give a request that cannot go on its result line."""
        del self.outstanding[request.index]
        self._fail(request.index, request.request.custom_id, error)

    def _fail(self, index: int, custom_id: str | None, error: BadRequest) -> None:
        self._lines.setdefault(self._errors, []).append(failure_line(
            error, key=self._key(index), number=int(self._source.numbers[index]),
            custom_id=custom_id))
        self.counts.failed += 1

    def _key(self, index: int) -> int:
        return int(self._source.keys[index])

    def flush(self) -> None:
        """Write the new result lines, then the counts. Raises `UserError` if that fails."""
        if self._lines:
            for file, lines in self._lines.items():
                file.add(lines)
            self._lines = {}
            self._store.update_batch(self.id, request_counts=self.counts)

    def end(self, status: str) -> None:
        """Fail the lines without results, if any, and end the batch with a status.

        Raises `UserError` if a file cannot be written.
        """
        word = "cancelled" if status == "cancelled" else "expired"
        error = BadRequest(f"the batch was {word} before this request had run",
                           code=f"batch_{word}")
        if status == "completed":
            self._store.update_batch(self.id, status="finalizing")
        left: Sequence[int] = [*self.outstanding, *self._remaining[self._next:].tolist()]
        for start in range(0, len(left), _LINES):
            for index in left[start:start + _LINES]:
                line = self._source.line(index)
                custom_id = request_id(read_object(line), int(self._source.numbers[index]))
                self._fail(index, custom_id, error)
            self.flush()
        self.flush()
        self.close()
        self._store.finish_batch(self._batch, status)


def check_endpoint(endpoint: object) -> str:
    """Return the endpoint of a batch. Raises `BadRequest`."""
    if not isinstance(endpoint, str) or endpoint not in URLS:
        raise BadRequest(f"endpoint must be {' or '.join(URLS)}", param="endpoint")
    return endpoint
