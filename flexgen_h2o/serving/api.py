"""The endpoints: files, batches, completions and models as in OpenAI's API, and their server."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, BinaryIO, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flexgen_h2o.errors import UserError, check_text, short_repr
from flexgen_h2o.requests.request import URLS, BadRequest, Defaults
from flexgen_h2o.requests.tokenizing import RequestTokenizer
from flexgen_h2o.serving.batches import check_endpoint
from flexgen_h2o.serving.guard import (
    JSON,
    MAX_HEADERS,
    ApiError,
    ClosedConnections,
    Guard,
    read_json,
)
from flexgen_h2o.serving.live import DONE, LiveRequest, ResponseOptions, Stopped, read_live, sse
from flexgen_h2o.serving.scheduler import QueueFull, Scheduler, Unavailable
from flexgen_h2o.serving.store import INPUT, Batch, Counts, File, Store, StoreError, new_id

MAX_ACTIVE_BATCHES = 100
"""Batches with work left. Each has the index of its input in memory."""
_WINDOW = re.compile(r"([1-9]\d{0,4})([mhd])")  # of completion
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_CREATE = ("input_file_id", "endpoint", "completion_window", "metadata")
_Record = TypeVar("_Record", File, Batch)
_log = logging.getLogger(__name__)


class Api:
    """The endpoints of a server.

    `defaults`: values of fields that live requests do not give, and the names of the model.
    `model`: name of the model in answers. `max_file`: maximum bytes of an uploaded file.
    """

    def __init__(self, store: Store, scheduler: Scheduler, tokenizer: RequestTokenizer,
                 defaults: Defaults, *, model: str, max_model_len: int, max_file: int):
        self._store, self._scheduler, self._tokenizer = store, scheduler, tokenizer
        self._defaults, self._model, self._max_file = defaults, model, max_file
        self._models = {name: {"id": name, "object": "model", "created": int(time.time()),
                               "owned_by": "flexgen_h2o", "max_model_len": max_model_len}
                        for name in [model, *sorted({*defaults.models} - {model})]}

    def app(self, *, key: str | None, host: str, origins: Sequence[str],
            pages: Sequence[Route] = ()) -> Starlette:
        """Return the ASGI application, with the routes `pages`; other parameters as in `Guard`."""
        def route(path: str, method: str, endpoint: Callable[[Request], Awaitable[Response]]
                  ) -> Route:
            return Route(path, endpoint, methods=[method])

        routes = [
            route("/v1/files", "POST", self._upload),
            route("/v1/files", "GET", self._list_files),
            route("/v1/files/{id}", "GET", self._get_file),
            route("/v1/files/{id}", "DELETE", self._delete_file),
            route("/v1/files/{id}/content", "GET", self._file_content),
            route("/v1/batches", "POST", self._create_batch),
            route("/v1/batches", "GET", self._list_batches),
            route("/v1/batches/{id}", "GET", self._get_batch),
            route("/v1/batches/{id}/cancel", "POST", self._cancel_batch),
            *(route(url, "POST", self._complete) for url in URLS),
            route("/v1/models", "GET", self._list_models),
            route("/v1/models/{id:path}", "GET", self._get_model),
            route("/health", "GET", self._health),
            route("/metrics", "GET", self._metrics),
            *pages,
        ]
        cors = [Middleware(CORSMiddleware, allow_origins=[*origins], allow_methods=["*"],
                           allow_headers=["*"])] if origins else []
        guard = Middleware(Guard, key=key, host=host, origins=origins, max_file=self._max_file)
        layers = [Middleware(ClosedConnections), *cors, guard]
        return Starlette(routes=routes, middleware=layers, exception_handlers={
            error: _handle for error in (ApiError, BadRequest, StoreError, Unavailable, Stopped,
                                         ClientDisconnect, HTTPException, Exception)})

    # Files.

    async def _upload(self, request: Request) -> Response:
        try:
            async with request.form(max_files=1, max_fields=8) as form:
                upload, purpose = form.get("file"), form.get("purpose")
                if not isinstance(upload, UploadFile):
                    raise BadRequest("the form has no file: send multipart/form-data with file and "
                                     "purpose", param="file")
                if purpose != INPUT:
                    raise BadRequest(f"purpose must be {INPUT}, got {short_repr(purpose)}",
                                     param="purpose")
                for name in form.keys() - {"file", "purpose"}:
                    raise BadRequest(f"the field {short_repr(name)} is not supported: leave it out",
                                     param=name[:80], code="unsupported_parameter")
                if not upload.size:
                    raise BadRequest("the file is empty", param="file")
                if upload.size > self._max_file:
                    raise ApiError(413, f"the file has more than {self._max_file} bytes: split it",
                                   param="file", code="file_too_large")
                file = await run_in_threadpool(self._keep, upload.file, upload.filename or "")
        except OSError as error:
            raise StoreError(f"the file cannot be stored: {error.strerror}") from None
        return JSON(file.public())

    def _keep(self, source: BinaryIO, filename: str) -> File:
        path = self._store.new_upload()
        try:
            with open(path, "xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            return self._store.add_upload(path, filename)
        except BaseException:
            self._store.discard_upload(path)
            raise

    async def _list_files(self, request: Request) -> Response:
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("order must be asc or desc", param="order")
        return await self._page(request, File, most=10000, default=10000,
                                descending=order == "desc",
                                purpose=request.query_params.get("purpose"))

    async def _get_file(self, request: Request) -> Response:
        return JSON((await self._find(request, File)).public())

    async def _file_content(self, request: Request) -> Response:
        file = await self._find(request, File)
        path = self._store.path(file.id)
        if not os.path.exists(path):
            raise ApiError(404, "the file's bytes are no longer in the data directory", param="id")
        return _Content(path, media_type="application/octet-stream", filename=f"{file.id}.jsonl",
                        headers={"X-Content-Type-Options": "nosniff"})

    async def _delete_file(self, request: Request) -> Response:
        file = await self._find(request, File)
        if not await run_in_threadpool(self._store.delete_file, file.id):
            raise ApiError(409, "a batch reads the file: cancel it first", code="file_in_use")
        return JSON({"id": file.id, "object": "file", "deleted": True})

    # Batches.

    async def _create_batch(self, request: Request) -> Response:
        batch = await run_in_threadpool(self._new_batch, read_json(await request.body()))
        self._scheduler.open_batch(batch.id)
        return JSON(batch.public())

    def _new_batch(self, body: Mapping[str, Any]) -> Batch:
        for name, value in body.items():
            if name not in _CREATE and value is not None:
                raise BadRequest(f"the field {short_repr(name)} is not supported: leave it out",
                                 param=name[:80], code="unsupported_parameter")
        endpoint, now = check_endpoint(body.get("endpoint")), int(time.time())
        window, file_id = body.get("completion_window"), body.get("input_file_id")
        match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
        if match is None or not isinstance(window, str):
            raise BadRequest("completion_window must be a time such as 24h or 7d, got "
                             f"{short_repr(window)}", param="completion_window")
        if len(self._store.active_batches()) >= MAX_ACTIVE_BATCHES:
            raise QueueFull(f"{MAX_ACTIVE_BATCHES} batches have work left: try again later")
        batch = Batch(
            id=new_id("batch_"), endpoint=endpoint, model=self._model, input_file_id=str(file_id),
            completion_window=window, output_file_id=new_id("file-"),
            error_file_id=new_id("file-"), created_at=now, request_counts=Counts(),
            expires_at=now + int(match[1]) * _SECONDS[match[2]],
            metadata=_metadata(body.get("metadata")))
        if not isinstance(file_id, str) or not self._store.add_batch(batch):
            raise ApiError(400, f"there is no file {short_repr(file_id)}: upload it first",
                           param="input_file_id", code="invalid_input_file")
        return batch

    async def _list_batches(self, request: Request) -> Response:
        return await self._page(request, Batch, most=100, default=20)

    async def _get_batch(self, request: Request) -> Response:
        return JSON((await self._find(request, Batch)).public())

    async def _cancel_batch(self, request: Request) -> Response:
        batch = await self._find(request, Batch)
        batch = await run_in_threadpool(self._store.update_batch, batch.id,
                                        only_if=("validating", "in_progress"), status="cancelling")
        if batch.status != "cancelling":
            raise ApiError(409, f"the batch is {batch.status}, and cannot be cancelled")
        self._scheduler.cancel_batch(batch.id)
        return JSON(batch.public())

    # Records.

    async def _find(self, request: Request, record_type: type[_Record]) -> _Record:
        id = request.path_params["id"]
        record = await run_in_threadpool(self._store.get, record_type, id)
        if record is None:
            raise ApiError(404, f"there is no {record_type.__name__.lower()} {short_repr(id)}",
                           param="id")
        return record

    async def _page(self, request: Request, record_type: type[File] | type[Batch], *, most: int,
                    default: int, **options: Any) -> Response:
        text, after = (request.query_params.get(name) for name in ("limit", "after"))
        if text is not None and not (text.isascii() and text.isdigit()
                                     and 1 <= int(text[:9]) <= most):
            raise BadRequest(f"limit must be 1 to {most}, got {short_repr(text)}", param="limit")
        try:
            records, has_more = await run_in_threadpool(
                self._store.page, record_type, after=after, limit=int(text or default), **options)
        except KeyError:
            raise BadRequest(f"there is no {record_type.__name__.lower()} {short_repr(after)}",
                             param="after") from None
        ids = [record.id for record in records]
        return JSON({"object": "list", "data": [record.public() for record in records],
                     "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None,
                     "has_more": has_more})

    # Completions.

    async def _complete(self, request: Request) -> Response:
        tokenized, options = await run_in_threadpool(
            read_live, request.scope["path"], read_json(await request.body()), self._defaults,
            self._tokenizer)
        live = LiveRequest(tokenized, self._model, self._scheduler.parser,
                           self._scheduler.metrics)
        keys = await run_in_threadpool(self._scheduler.submit, live)
        if options.stream:
            return StreamingResponse(self._events(live, keys, options),
                                     media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache"})
        tasks = [asyncio.ensure_future(live.answer()), asyncio.ensure_future(_disconnect(request))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return JSON(tasks[0].result()) if tasks[0].done() else Response(status_code=499)
        finally:
            for task in tasks:
                task.cancel()
            self._scheduler.abort(keys)  # no-op for finished ones

    async def _events(self, live: LiveRequest, keys: Sequence[int], options: ResponseOptions
                      ) -> AsyncIterator[bytes]:
        try:
            async for event in live.events(options):
                yield event
        except (Stopped, BadRequest) as error:
            yield sse(_api_error(error).fields())
            yield DONE
        finally:
            self._scheduler.abort(keys)

    # The rest.

    async def _list_models(self, request: Request) -> Response:
        return JSON({"object": "list", "data": [*self._models.values()]})

    async def _get_model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name not in self._models:
            raise ApiError(404, f"there is no model {short_repr(name)}", param="model",
                           code="model_not_found")
        return JSON(self._models[name])

    async def _health(self, request: Request) -> Response:
        status = self._scheduler.status()
        return JSON({"status": status["state"]}, 200 if status["state"] == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self._scheduler.metrics.text(), media_type="text/plain; version=0.0.4")


class _Content(FileResponse):
    """The bytes of a file. A read error ends the connection, so that the client notices it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        except OSError as error:
            _log.error("cannot read %s: %s", self.path, error.strerror)


async def _disconnect(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    try:
        if not isinstance(value, dict) or len(value) > 16:
            raise UserError("metadata must be an object of at most 16 texts")
        for name, text in value.items():
            check_text("a key of metadata", name)
            check_text("each of metadata", text)
            if len(name) > 64 or len(text) > 512:
                raise UserError("metadata has keys of at most 64, and texts of at most 512 "
                                "characters")
    except UserError as error:
        raise BadRequest(str(error), param="metadata") from None
    return value


def _api_error(error: Exception) -> ApiError:
    """Return the answer to an error."""
    message = str(error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequest):
        if error.code == "mismatched_model":
            return ApiError(404, message, param=error.param, code="model_not_found")
        return ApiError(400, message, param=error.param,
                        code=None if error.code == "invalid_request_error" else error.code)
    if isinstance(error, QueueFull):
        return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "5"})
    if isinstance(error, (Unavailable, Stopped)):
        return ApiError(503, message, headers={"Retry-After": "5"})
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, StoreError):
        return ApiError(507, message, code="insufficient_storage")
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client has left")
    return ApiError(500, "the server has an error: see its log")


async def _handle(request: Request, error: Exception) -> Response:
    return _api_error(error).response()


_CONNECTIONS = 1024


class Server(uvicorn.Server):
    """An HTTP server that ends requests before it waits for their connections.

    Parameters
    ----------
    scheduler : Scheduler
        Runs with the server, in the thread that calls `run`.
    listener : socket
        Bound to the address to listen on.

    Attributes
    ----------
    url : str
        Where the server listens.
    """

    def __init__(self, app: ASGIApp, scheduler: Scheduler, listener: socket.socket):
        super().__init__(uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, h11_max_incomplete_event_size=MAX_HEADERS,
            limit_concurrency=_CONNECTIONS))
        self._scheduler, self._listener = scheduler, listener
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `end`. After an error, end at once."""
        with ThreadPoolExecutor(1, "http") as executor:
            http = executor.submit(self._listen, sockets or [self._listener])
            try:
                self._scheduler.run()
            except BaseException:
                self.force_exit = True
                raise
            finally:
                self.should_exit = True
        http.result()

    def _listen(self, sockets: list[socket.socket]) -> None:
        try:
            asyncio.run(self.serve(sockets))
        finally:
            self._scheduler.stop()

    def end(self) -> None:
        """Let `run` return after the current block. Signal handlers may call it."""
        self.should_exit = True
        with suppress(OSError):  # sys.stderr may be in the middle of a write
            os.write(2, b"stopping after the current block; a second signal stops at once\n")

    def capture_signals(self) -> AbstractContextManager[None]:
        """Leave signals to the command."""
        return nullcontext()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End requests, then connections."""
        self._scheduler.stop()
        await super().shutdown(sockets)
