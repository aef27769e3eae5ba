"""Lines of results in the form of OpenAI's Batch API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flexgen_h2o.commands.batch.requests import BadRequest, JobRequest
from flexgen_h2o.commands.batch.results import PREFIX
from flexgen_h2o.engine.detokenization import (
    Detokenizer,
    IncrementalDetokenizer,
    ReasoningParser,
    until,
)
from flexgen_h2o.files.rows import escape_line_breaks
from flexgen_h2o.outputs import Output

_LOWEST = -9999.0  # in place of an infinity, which JSON has not


def failure(error: BadRequest, *, key: int, number: int, custom_id: str | None) -> bytes:
    """The line of a request that is not run, whose line has a number.

    A line that is no request of the job has its error under `error`, and one that the API would
    refuse has a response of status 400.
    """
    message = f"line {number}: {error}"
    detail = {"message": message, "type": "invalid_request_error", "param": error.param,
              "code": error.code}
    if error.code in ("invalid_json_line", "missing_required_parameter", "duplicate_custom_id",
                      "mismatched_model"):
        return _line(key, custom_id, None, {"code": error.code, "message": message,
                                            "param": error.param, "line": number})
    return _line(key, custom_id, _response(key, 400, {"error": detail}), None)


def answer(request: JobRequest, outputs: Sequence[Output], *, key: int, model: str, created: int,
           parser: ReasoningParser | None) -> bytes:
    """The line of a request that has been run.

    Parameters
    ----------
    outputs : sequence of Output
        Of each choice, `n` of one prompt after those of another.
    key : int
    model : str
        What to call it.
    created : int
        Seconds since 1970.
    parser : ReasoningParser, optional
        None where the model has no tokenizer: choices have `token_ids` then.
    """
    choices = [_choice(request, place, output, parser) for place, output in enumerate(outputs)]
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::request.n])
    new = sum(len(output.token_ids) for output in outputs)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{key:016x}",
        "object": "chat.completion" if request.chat else "text_completion",
        "created": created, "model": model, "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
    }
    if request.chat and request.return_token_ids:
        body["prompt_token_ids"] = outputs[0].prompt_token_ids
    return _line(key, request.custom_id, _response(key, 200, body), None)


def _line(key: int, custom_id: str | None, response: Mapping[str, Any] | None,
          error: Mapping[str, Any] | None) -> bytes:
    line = msgspec.json.encode({"id": f"{PREFIX}{key:016x}", "custom_id": custom_id,
                                "response": response, "error": error})
    return escape_line_breaks(line.decode()).encode()


def _response(key: int, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{key:016x}", "body": body}


def _choice(request: JobRequest, place: int, output: Output, parser: ReasoningParser | None
            ) -> dict[str, Any]:
    text = output.text or ""
    found: dict[str, Any] = {"index": place}
    if request.chat:
        content, reasoning = (text, None) if parser is None else parser.split(output)
        found["message"] = {"role": "assistant", "content": until(content, request.stops),
                            "refusal": None}
        if reasoning is not None:
            found["message"]["reasoning_content"] = until(reasoning, request.stops)
    else:
        prompt = request.prompts[place // request.n] if request.echo else ""
        found["text"] = f"{prompt}{until(text, request.stops)}"
    found["logprobs"] = None
    if request.params.logprobs is not None:
        detokenizer = None if parser is None else parser.detokenizer
        found["logprobs"] = (_chat_log_probs if request.chat else _log_probs)(output, detokenizer)
    if request.return_token_ids or parser is None:
        found["token_ids"] = output.token_ids
    if request.return_token_ids and not request.chat:
        found["prompt_token_ids"] = output.prompt_token_ids
    return found | {"finish_reason": output.finish_reason}


def _chat_log_probs(output: Output, detokenizer: Detokenizer | None) -> dict[str, Any]:
    def one(token: int, log_prob: float) -> dict[str, Any]:
        text, data = _spelled(token, detokenizer)
        return {"token": text, "logprob": max(log_prob, _LOWEST), "bytes": list(data)}

    return {"content": [one(each.token_id, each.log_prob)
                        | {"top_logprobs": [one(*top) for top in each.top]}
                        for each in output.log_probs or ()],
            "refusal": None}


def _log_probs(output: Output, detokenizer: Detokenizer | None) -> dict[str, Any]:
    def word(token: int) -> str:
        text, data = _spelled(token, detokenizer)
        return text if text.encode() == data else f"bytes:{text}"

    tokens, end = output.log_probs or (), 0
    likeliest: list[dict[str, float]] = []
    offsets = []
    step = word if detokenizer is None else IncrementalDetokenizer(
        detokenizer, output.prompt_token_ids).step
    for each in tokens:
        offsets.append(end)
        end += len(step(each.token_id))
        likeliest.append({})  # the sampled token is always included, as in the API
        for token, log_prob in (*each.top, (each.token_id, each.log_prob)):
            likeliest[-1].setdefault(word(token), max(log_prob, _LOWEST))
    return {"tokens": [word(each.token_id) for each in tokens],
            "token_logprobs": [max(each.log_prob, _LOWEST) for each in tokens],
            "top_logprobs": likeliest, "text_offset": offsets}


def _spelled(token: int, detokenizer: Detokenizer | None) -> tuple[str, bytes]:
    """Return a token's text and bytes; invalid UTF-8 is escaped in the text."""
    data = b"" if detokenizer is None else detokenizer.token_bytes(token)
    data = data or f"token_id:{token}".encode()
    return data.decode("utf-8", "backslashreplace"), data
