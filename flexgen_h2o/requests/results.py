"""Result lines in the format of OpenAI's Batch API, and the files that a job resumes from.

The `id` of a line contains the key of the request that it answers.
"""

from __future__ import annotations

import errno
import fcntl
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from flexgen_h2o.engine.detokenization import (
    Detokenizer,
    IncrementalDetokenizer,
    ReasoningParser,
    until,
)
from flexgen_h2o.errors import NonFiniteLogits, PromptError, PromptMemoryError, UserError
from flexgen_h2o.files.readers import pread_all
from flexgen_h2o.files.rows import escape_line_breaks
from flexgen_h2o.files.writing import catch_write_errors, check_writable, sync
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests.input import JobInput
from flexgen_h2o.requests.request import BadRequest, JobRequest

PREFIX = "batch_req_"
"""Prefix of a line's `id`. 16 hexadecimal digits of the request's key follow."""
_LINE_START = b'{"id":"' + PREFIX.encode()
_MIN_LOGPROB = -9999.0  # replaces an infinity, which JSON does not have


class _Status(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    id: str
    response: _Status | None


_DECODER = msgspec.json.Decoder(_Line)


class ResultsFile:
    """File of result lines, locked against other jobs. It is created if it is missing.

    Added lines are on disk when `add` returns. An incomplete last line, which a killed job leaves,
    is truncated when the file is opened. If it is not the start of a result line, it stays, and
    `answered` raises. `answered` also truncates lines that a power loss has left incomplete.

    Raises `UserError` if the file cannot be written, or another job writes it.

    `flag` and `path`: the flag that names the file, and the file.
    """

    def __init__(self, flag: str, path: str):
        check_writable(flag, path, hint=": name one, for the same command to go on with")
        self.flag, self.path = flag, path
        with catch_write_errors(flag, path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            with catch_write_errors(flag, path):
                sync(os.path.dirname(path) or ".")  # a new file's name
                self._truncate_incomplete_line()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            # The lock ends with the process, however that ends.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(f"{self.flag} {self.path} is being written by another job: wait "
                                "for it, or choose another file") from None
            raise UserError(f"cannot lock {self.flag} {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Close the file, and remove it if it is empty."""
        with suppress(OSError):
            status = os.fstat(self._file)
            # If it has been removed, another job may have a file with this name.
            if not status.st_size and os.path.samestat(status, os.stat(self.path)):
                os.unlink(self.path)
        os.close(self._file)

    def clear(self) -> None:
        """Remove all lines. Raises `UserError` if that fails."""
        with catch_write_errors(self.flag, self.path):
            os.ftruncate(self._file, 0)

    @property
    def empty(self) -> bool:
        """Whether the file has no lines."""
        return os.fstat(self._file).st_size == 0

    def _truncate_incomplete_line(self) -> None:
        end = self._complete_bytes()
        if _LINE_START.startswith(pread_all(self._file, len(_LINE_START), end)):
            os.ftruncate(self._file, end)

    def _complete_bytes(self) -> int:
        """Return the bytes up to the end of the last complete line."""
        end = os.fstat(self._file).st_size
        while end:
            start = max(0, end - (1 << 20))
            newline = pread_all(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def add(self, lines: Sequence[bytes]) -> None:
        """Add all lines, without line ends, or none. Raises `UserError` if that fails."""
        if not lines:
            return
        with catch_write_errors(self.flag, self.path):
            if os.fstat(self._file).st_nlink == 0:
                raise OSError(errno.ENOENT, "it has been removed while the job runs")
            start = os.fstat(self._file).st_size
            try:
                data = memoryview(b"".join(line + b"\n" for line in lines))
                while data:
                    data = data[os.write(self._file, data):]
                os.fsync(self._file)
            except BaseException:
                os.ftruncate(self._file, start)
                raise

    def answered(self, source: JobInput) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the input's lines with results, and of those that only failed.

        Failures of lines that are no longer in the input are ignored.

        Raises `UserError` if a line is not a result, or answers a request that the input does not
        have.
        """
        keys, success = array("Q"), array("B")
        torn, end = False, 0  # whether a line is torn, and the bytes before it
        with catch_write_errors(self.flag, self.path), open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                torn = torn or _is_torn(line)
                if torn and b"\0" in line:
                    continue
                columns = self._parse(line, number)
                if not torn:
                    end += len(line)
                    for column, value in zip((keys, success), columns, strict=True):
                        column.append(value)
            if torn:  # the lines from there on belong to an `add` that has not returned
                os.ftruncate(self._file, end)
        indices = source.find(np.frombuffer(keys, np.uint64)) if keys else np.empty(0, np.int64)
        succeeded = np.frombuffer(success, np.uint8) == 1
        unknown = np.flatnonzero((indices < 0) & succeeded)
        if len(unknown):
            raise UserError(f"{self.flag} {self.path} line {unknown[0] + 1} answers a request that "
                            f"--input {source.path} does not have: choose another file, or "
                            "--overwrite this one")
        known = indices[indices >= 0]
        return np.unique(known), np.setdiff1d(known, indices[succeeded])

    def _parse(self, line: bytes, number: int) -> tuple[int, bool]:
        try:
            return request_key(line)
        except (ValueError, RecursionError):
            raise UserError(f"{self.flag} {self.path} line {number} is not a line of results: "
                            "choose another file, or --overwrite this one") from None


def _is_torn(line: bytes) -> bool:
    """Return whether a power loss has left zeros in a result line.

    It may keep a later page of a write and not an earlier one, which is zeros then.
    """
    begin, zeros, _ = line.partition(b"\0\0")
    return bool(zeros) and (begin.startswith(_LINE_START) or _LINE_START.startswith(begin))


def request_key(line: bytes) -> tuple[int, bool]:
    """Return the key of the request that a line answers, and whether the request succeeded.

    Raises `ValueError` or `RecursionError` if it is not a result line.
    """
    result = _DECODER.decode(line)
    if not result.id.startswith(PREFIX):
        raise ValueError("not an id of a result")
    key = int(result.id.removeprefix(PREFIX), 16)
    if not 0 <= key < 2**64:
        raise ValueError("not a key")
    return key, result.response is not None and result.response.status_code == 200


def failure_line(error: BadRequest, *, key: int, number: int, custom_id: str | None) -> bytes:
    """Return the result line of a request that cannot run; `number` is that of its input line.

    The error of a line that is no request of the job is in `error`. A request that the API would
    refuse has a response with status 400.
    """
    message = f"line {number}: {error}"
    detail = {"message": message, "type": "invalid_request_error", "param": error.param,
              "code": error.code}
    if error.code in ("invalid_json_line", "missing_required_parameter", "duplicate_custom_id",
                      "mismatched_model", "batch_cancelled", "batch_expired"):
        return _line(key, custom_id, None, {"code": error.code, "message": message,
                                            "param": error.param, "line": number})
    return _line(key, custom_id, _response(key, 400, {"error": detail}), None)


def failure_reason(error: PromptError) -> BadRequest:
    """Return why a request that was accepted cannot be computed to its end."""
    if isinstance(error, NonFiniteLogits):
        return BadRequest("the model's logits are not finite for this request: try another --dtype",
                          code="logits_not_finite")
    if isinstance(error, PromptMemoryError):
        return BadRequest(str(error), code="insufficient_memory")
    return BadRequest(str(error).removeprefix(f"prompt {error.key} "), param="structured_outputs")


def answer_line(request: JobRequest, outputs: Sequence[Output], *, key: int, model: str,
                created: int, parser: ReasoningParser | None) -> bytes:
    """Return the result line of a request that has run. See `answer_body` for parameters."""
    body = answer_body(request, outputs, key=key, model=model, created=created, parser=parser)
    return _line(key, request.custom_id, _response(key, 200, body), None)


def answer_body(request: JobRequest, outputs: Sequence[Output], *, key: int, model: str,
                created: int, parser: ReasoningParser | None) -> dict[str, Any]:
    """Return the body of the response to a request that has run.

    Parameters
    ----------
    outputs : sequence of Output
        One for each choice: `n` of the first prompt, then `n` of the next one.
    key : int
        Key of the request.
    model : str
        Name of the model.
    created : int
        Seconds since 1970.
    parser : ReasoningParser or None
        None if the model has no tokenizer. Choices then have `token_ids`.
    """
    body: dict[str, Any] = {
        **answer_head(request, key, model=model, created=created),
        "choices": [answer_choice(request, index, output, parser)
                    for index, output in enumerate(outputs)],
        "usage": usage(request, outputs)}
    if request.chat and request.return_token_ids:
        body["prompt_token_ids"] = outputs[0].prompt_token_ids
    return body


def answer_head(request: JobRequest, key: int, *, model: str, created: int) -> dict[str, Any]:
    """Return the fields of a response that do not depend on its text."""
    return {"id": f"{'chatcmpl' if request.chat else 'cmpl'}-{key:016x}",
            "object": "chat.completion" if request.chat else "text_completion",
            "created": created, "model": model}


def usage(request: JobRequest, outputs: Sequence[Output]) -> dict[str, int]:
    """Return the numbers of tokens of a response."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::request.n])
    new = sum(len(output.token_ids) for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _line(key: int, custom_id: str | None, response: Mapping[str, Any] | None,
          error: Mapping[str, Any] | None) -> bytes:
    line = msgspec.json.encode({"id": f"{PREFIX}{key:016x}", "custom_id": custom_id,
                                "response": response, "error": error})
    return escape_line_breaks(line.decode()).encode()


def _response(key: int, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{key:016x}", "body": body}


def answer_choice(request: JobRequest, index: int, output: Output,
                  parser: ReasoningParser | None) -> dict[str, Any]:
    """Return choice number `index` of a response."""
    text = output.text or ""
    fields: dict[str, Any] = {"index": index}
    if request.chat:
        content, reasoning = (text, None) if parser is None else parser.split(output)
        fields["message"] = {"role": "assistant", "content": until(content, request.stops),
                             "refusal": None}
        if reasoning is not None:
            fields["message"]["reasoning_content"] = until(reasoning, request.stops)
    else:
        prompt = request.prompts[index // request.n] if request.echo else ""
        fields["text"] = f"{prompt}{until(text, request.stops)}"
    fields["logprobs"] = None
    if request.params.logprobs is not None:
        detokenizer = None if parser is None else parser.detokenizer
        fields["logprobs"] = (_chat_log_probs if request.chat else _log_probs)(output, detokenizer)
    if request.return_token_ids or parser is None:
        fields["token_ids"] = output.token_ids
    if request.return_token_ids and not request.chat:
        fields["prompt_token_ids"] = output.prompt_token_ids
    return fields | {"finish_reason": output.finish_reason}


def _chat_log_probs(output: Output, detokenizer: Detokenizer | None) -> dict[str, Any]:
    def entry(token: int, log_prob: float) -> dict[str, Any]:
        text, data = _token_text(token, detokenizer)
        return {"token": text, "logprob": max(log_prob, _MIN_LOGPROB), "bytes": list(data)}

    return {"content": [entry(scored.token_id, scored.log_prob)
                        | {"top_logprobs": [entry(*top) for top in scored.top]}
                        for scored in output.log_probs or ()],
            "refusal": None}


def _log_probs(output: Output, detokenizer: Detokenizer | None) -> dict[str, Any]:
    def word(token: int) -> str:
        text, data = _token_text(token, detokenizer)
        return text if text.encode() == data else f"bytes:{text}"

    tokens, end = output.log_probs or (), 0
    top: list[dict[str, float]] = []
    offsets = []
    step = word if detokenizer is None else IncrementalDetokenizer(
        detokenizer, output.prompt_token_ids).step
    for scored in tokens:
        offsets.append(end)
        end += len(step(scored.token_id))
        top.append({})  # the sampled token is always included, as in the API
        for token, log_prob in (*scored.top, (scored.token_id, scored.log_prob)):
            top[-1].setdefault(word(token), max(log_prob, _MIN_LOGPROB))
    return {"tokens": [word(scored.token_id) for scored in tokens],
            "token_logprobs": [max(scored.log_prob, _MIN_LOGPROB) for scored in tokens],
            "top_logprobs": top, "text_offset": offsets}


def _token_text(token: int, detokenizer: Detokenizer | None) -> tuple[str, bytes]:
    """Return a token's text and bytes; invalid UTF-8 is escaped in the text."""
    data = b"" if detokenizer is None else detokenizer.token_bytes(token)
    data = data or f"token_id:{token}".encode()
    return data.decode("utf-8", "backslashreplace"), data
