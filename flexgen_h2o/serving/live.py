"""Requests that a client waits for: their answer, whole or as server-sent events. No torch."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from flexgen_h2o.engine.detokenization import ReasoningParser, until, without_beginning
from flexgen_h2o.errors import short_repr
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests.request import BadRequest, Defaults, parse_request
from flexgen_h2o.requests.results import answer_body, answer_choice, answer_head, usage
from flexgen_h2o.requests.tokenizing import RequestTokenizer, TokenizedRequest
from flexgen_h2o.serving.metrics import Metrics

DONE = b"data: [DONE]\n\n"
"""Last event of a stream."""


class Stopped(Exception):
    """The server has given a request up."""


def read_live(url: str, body: Mapping[str, Any], defaults: Defaults, tokenizer: RequestTokenizer
              ) -> tuple[TokenizedRequest, ResponseOptions]:
    """Return the request of a body that is sent to `url`. Raises `BadRequest`."""
    options = ResponseOptions(body)
    fields = {name: value for name, value in body.items() if name != "stream"}
    # Without a `seed`, each request has its own.
    request = parse_request(url, fields, secrets.token_hex(8), defaults)
    return tokenizer.tokenize(request, name="of the request"), options


class ResponseOptions:
    """The fields `stream` and `stream_options` of a body.

    `include_usage`: the last event has the numbers of tokens.

    Raises
    ------
    BadRequest
        A value is of a wrong type, or there are options without a stream.
    """

    def __init__(self, body: Mapping[str, Any]):
        stream, options = body.get("stream") or False, body.get("stream_options")
        if not isinstance(stream, bool):
            raise BadRequest(f"stream must be true or false, got {short_repr(stream)}",
                             param="stream")
        if options is not None and not stream:
            raise BadRequest("stream_options have no effect without \"stream\": true",
                             param="stream_options")
        options = {} if options is None else options
        include = options.get("include_usage", False) if isinstance(options, dict) else options
        if not isinstance(options, dict) or include not in (None, False, True):
            raise BadRequest("stream_options must be an object with include_usage, got "
                             f"{short_repr(options)}", param="stream_options")
        self.stream, self.include_usage = stream, bool(include)


class LiveRequest:
    """A request in the scheduler, and its answer so far.

    Create it in the event loop that awaits the answer; the scheduler's thread calls `add_text`,
    `add_output`, `fail` and `stop`.

    `model`: name of the model in answers. `parser`: see `answer_body`.
    """

    def __init__(self, request: TokenizedRequest, model: str, parser: ReasoningParser | None,
                 metrics: Metrics):
        self.request, self._model, self._parser, self._metrics = request, model, parser, metrics
        self._created, self._began = int(time.time()), time.monotonic()
        self._key = secrets.randbits(64)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, str | Output] | Exception] = asyncio.Queue()
        self._waits = True  # for the first token

    def add_text(self, choice: int, text: str, last: bool) -> None:
        """Take the text of a new token of a choice."""
        if self._waits:
            self._waits = False
            self._metrics.first_token_seconds.observe(time.monotonic() - self._began)
        if text:
            self._put((choice, text))

    def add_output(self, request: TokenizedRequest, choice: int, output: Output) -> None:
        """Take the output of a choice."""
        self._put((choice, output))

    def fail(self, request: TokenizedRequest, error: BadRequest) -> None:
        """Take the error of a request that cannot go on."""
        self._put(error)

    def stop(self, message: str) -> None:
        """Take the reason why the server gives the request up."""
        self._put(Stopped(message))

    def _put(self, event: tuple[int, str | Output] | Exception) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def _next(self) -> tuple[int, str | Output]:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def answer(self) -> dict[str, Any]:
        """Return the body of the response. Raises `Stopped` or `BadRequest`."""
        outputs: dict[int, Output] = {}
        while len(outputs) < self.request.choices:
            choice, value = await self._next()
            if isinstance(value, Output):
                outputs[choice] = value
        return answer_body(self.request.request, self._ended(outputs), key=self._key,
                           model=self._model, created=self._created, parser=self._parser)

    def _ended(self, outputs: Mapping[int, Output]) -> list[Output]:
        self._metrics.request_seconds.observe(time.monotonic() - self._began)
        return [outputs[choice] for choice in range(self.request.choices)]

    async def events(self, options: ResponseOptions) -> AsyncIterator[bytes]:
        """Yield the server-sent events of the response. Raises `Stopped` or `BadRequest`."""
        request = self.request.request
        outputs: dict[int, Output] = {}
        head = answer_head(request, self._key, model=self._model, created=self._created)
        if request.chat:
            head["object"] += ".chunk"
        if options.include_usage:
            head["usage"] = None

        def event(*choices: Mapping[str, Any], **fields: Any) -> bytes:
            return sse(head | {"choices": choices} | fields)

        texts = [_ChoiceStream(self.request, choice, self._parser)
                 for choice in range(self.request.choices)]
        for text in texts:
            if begin := text.begin():
                yield event(begin)
        while len(outputs) < self.request.choices:
            choice, value = await self._next()
            if isinstance(value, Output):
                outputs[choice] = value
                for part in texts[choice].end(value):
                    yield event(part)
            elif new := texts[choice].add(value):
                yield event(new)
        ended = self._ended(outputs)
        if options.include_usage:
            yield event(usage=usage(request, ended))
        yield DONE


class _ChoiceStream:
    """One choice of a streamed answer: turns the text so far into deltas."""

    def __init__(self, request: TokenizedRequest, choice: int, parser: ReasoningParser | None):
        self._request, self._choice, self._parser = request.request, choice, parser
        self._text = ""
        self._sent = {"content": "", "reasoning_content": ""}
        # Marks of reasoning that are special tokens are not in the text: it is split at its end.
        self._sent_at_end = parser is None or self._request.chat and parser.has_hidden_marks
        self._before = ""
        if parser is not None and self._request.chat:
            self._before = parser.before(request.prompts[choice // self._request.n])

    def begin(self) -> dict[str, Any] | None:
        """Return the first choice: the role, or the echo of the prompt."""
        if self._request.chat:
            return self._part({"role": "assistant", "content": ""})
        if self._request.echo:
            prompt = self._request.prompts[self._choice // self._request.n]
            self._sent["content"] = str(prompt)
            return self._part({"content": prompt})
        return None

    def add(self, text: str) -> dict[str, Any] | None:
        """Return a choice with the new text for the client; None without new text."""
        self._text += text
        if self._sent_at_end:
            return None
        stops, content, reasoning = self._request.stops, self._text, ""
        if self._request.chat and self._parser is not None:
            content, reasoning = self._parser.split_beginning(self._text, self._before)
        elif self._request.echo:
            content = str(self._request.prompts[self._choice // self._request.n]) + content
        return self._new(**{
            name: without_beginning(until(part, stops), stops)
            for name, part in (("content", content), ("reasoning_content", reasoning))})

    def _new(self, **texts: str) -> dict[str, Any] | None:
        """Return a choice with the ends of texts that have not been sent."""
        delta = {}
        for name, text in texts.items():
            if len(text) > len(self._sent[name]) and text.startswith(self._sent[name]):
                delta[name] = text[len(self._sent[name]):]
                self._sent[name] = text
        return self._part(delta) if delta else None

    def end(self, output: Output) -> list[dict[str, Any]]:
        """Return the last choices: the rest of the text, and the reason of the end."""
        answer = answer_choice(self._request, self._choice, output, self._parser)
        message = answer.pop("message", None) or {"content": answer.pop("text", "")}
        rest = self._new(**{name: text for name in self._sent if (text := message.get(name))})
        last = self._part({}) | answer
        return [last] if rest is None else [rest, last]

    def _part(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        part: dict[str, Any] = {"index": self._choice, "logprobs": None, "finish_reason": None}
        if self._request.chat:
            return part | {"delta": delta}
        return part | {"text": delta.get("content", "")}


def sse(value: object) -> bytes:
    """Return a server-sent event with a value as JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
