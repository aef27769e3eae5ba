"""Lines of results in the form of OpenAI's Batch API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from flexgen_h2o.engine.stop_strings import until
from flexgen_h2o.outputs import Output, TokenLogProb
from flexgen_h2o.tasks.jobs.fields import BadRequest
from flexgen_h2o.tasks.jobs.requests import JobRequest
from flexgen_h2o.tasks.jobs.results import PREFIX

_LOWEST = -9999.0  # in place of an infinity, which JSON has not

Decode = Callable[[int], str]
"""The text of a token."""


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
           decode: Decode | None) -> bytes:
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
    decode : callable, optional
        The text of a token; None where the model has no tokenizer: choices have `token_ids` then.
    """
    choices = [_choice(request, place, output, decode) for place, output in enumerate(outputs)]
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::request.n])
    new = sum(len(output.token_ids) for output in outputs)
    body = {
        "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{key:016x}",
        "object": "chat.completion" if request.chat else "text_completion",
        "created": created, "model": model, "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
    }
    return _line(key, request.custom_id, _response(key, 200, body), None)


def _line(key: int, custom_id: str | None, response: Mapping[str, Any] | None,
          error: Mapping[str, Any] | None) -> bytes:
    return msgspec.json.encode({"id": f"{PREFIX}{key:016x}", "custom_id": custom_id,
                                "response": response, "error": error})


def _response(key: int, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{key:016x}", "body": body}


def _choice(request: JobRequest, place: int, output: Output, decode: Decode | None
            ) -> dict[str, Any]:
    text = until(output.text or "", request.stops)
    found: dict[str, Any] = {"index": place}
    if request.chat:
        found["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        found["text"] = text
    found["logprobs"] = None
    if request.params.logprobs is not None:
        word = decode or "token_id:{}".format
        log_probs = output.log_probs or []
        found["logprobs"] = (_chat_log_probs if request.chat else _log_probs)(log_probs, word)
    if decode is None:
        found["token_ids"] = output.token_ids
    return found | {"finish_reason": output.finish_reason}


def _chat_log_probs(tokens: Sequence[TokenLogProb], word: Decode) -> dict[str, Any]:
    def one(token: int, log_prob: float) -> dict[str, Any]:
        text = word(token)
        return {"token": text, "logprob": max(log_prob, _LOWEST), "bytes": list(text.encode())}

    return {"content": [one(each.token_id, each.log_prob)
                        | {"top_logprobs": [one(*top) for top in each.top]} for each in tokens],
            "refusal": None}


def _log_probs(tokens: Sequence[TokenLogProb], word: Decode) -> dict[str, Any]:
    words = [word(each.token_id) for each in tokens]
    offsets, end = [], 0
    for text in words:
        offsets.append(end)
        end += len(text)
    return {"tokens": words, "token_logprobs": [max(each.log_prob, _LOWEST) for each in tokens],
            "top_logprobs": [{word(token): max(log_prob, _LOWEST) for token, log_prob in each.top}
                             for each in tokens],
            "text_offset": offsets}
