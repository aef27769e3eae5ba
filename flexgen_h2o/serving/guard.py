"""Checks before a request is handled: key, host, origin, and limits of its body."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import h11
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexgen_h2o.requests.request import BadRequest

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts that only this machine reaches."""
MAX_BODY = 8 << 20
"""Bytes of a body that is not a file."""
MAX_DEPTH = 100
"""Depth of nested arrays and objects in JSON."""
MAX_HEADERS = 1 << 16
"""Bytes of all headers."""
_FORM = 1 << 16  # bytes of a form beside its file
_HOST = re.compile(r"(\[[\da-f:.]+\]|[\w.-]+)(?::\d+)?", re.ASCII)
_PUBLIC = re.compile("/|/health|/static/.*")  # paths that need no key


class JSON(Response):
    """A response with a value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of a value."""
        return msgspec.json.encode(content)


class ApiError(Exception):
    """An error of the API: an HTTP status, and the fields of the error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None,
                 code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def fields(self) -> dict[str, Any]:
        """Return the error object."""
        error_type = ("server_error" if self.status >= 500 else
                      "rate_limit_error" if self.status == 429 else "invalid_request_error")
        return {"error": {"message": str(self), "type": error_type, "param": self.param,
                          "code": self.code}}

    def response(self) -> Response:
        """Return the response."""
        return JSON(self.fields(), self.status, headers=self.headers)


class ClosedConnections:
    """ASGI middleware that ends requests whose connection the server has closed.

    If the rest of a body is not HTTP, uvicorn answers 400 and closes the connection, while the
    request is handled.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        try:
            await self._app(scope, receive, send)
        except h11.LocalProtocolError:
            while (await receive())["type"] != "http.disconnect":
                pass


class Guard:
    """ASGI middleware that refuses requests.

    Without a key, it takes no requests of web pages from other servers, also not through a name
    that they have for this machine (DNS rebinding).

    Parameters
    ----------
    key : str or None
        The key that requests must have.
    host : str
        The host that the server listens on.
    origins : sequence of str
        Other origins whose pages may send requests.
    max_file : int
        Maximum bytes of an uploaded file.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, host: str, origins: Sequence[str],
                 max_file: int):
        self._app, self._origins, self._max_file = app, origins, max_file
        self._key = None if key is None else f"Bearer {key}".encode()
        self._hosts: Collection[str] = {*LOOPBACK, host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        is_file = scope["path"] == "/v1/files"
        limit = self._max_file + _FORM if is_file else MAX_BODY
        try:
            self._check(connection)
            length = connection.headers.get("content-length", "0")
            if not length.isascii() or not length.isdigit() or int(length[:20]) > limit:
                raise _too_large(limit)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, _bounded(receive, limit), send)

    def _check(self, connection: HTTPConnection) -> None:
        headers = connection.headers
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADERS:
            raise ApiError(431, f"the headers have more than {MAX_HEADERS >> 10} KiB")
        if self._key is not None:
            key = headers.get("authorization", "").encode()
            path = connection.scope["path"]  # not connection.url, which Host is a part of
            if not (_PUBLIC.fullmatch(path) or hmac.compare_digest(key, self._key)):
                raise ApiError(401, "the API key is missing or wrong: send the server's --api-key "
                               "as \"Authorization: Bearer KEY\"", code="invalid_api_key",
                               headers={"WWW-Authenticate": "Bearer"})
            return
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _HOST.fullmatch(host)
        if name is None or name[1].strip("[]") not in self._hosts:
            raise ApiError(403, f"Host {host!r:.80} is not allowed: use one of "
                           f"{', '.join(sorted(self._hosts))}, or start it with --api-key")
        if origin not in (None, f"http://{host}", f"https://{host}", *self._origins):
            raise ApiError(403, f"pages of {origin!r:.80} may not use the server: start it with "
                           "--cors-origin")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit >> 20} MiB", code="body_too_large")


def _bounded(receive: Receive, limit: int) -> Receive:
    """Return `receive` of a body with at most `limit` bytes."""
    left = limit

    async def bounded() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            error = _too_large(limit)
            raise HTTPException(error.status, str(error))
        return message

    return bounded


def read_json(body: bytes) -> dict[str, Any]:
    """Parse a body, which must be a JSON object. Raises `BadRequest`."""
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise BadRequest(f"the body is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body is not a JSON object")
    layer: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        layer = [inner for outer in layer
                 for inner in (outer.values() if isinstance(outer, dict) else outer)
                 if isinstance(inner, (dict, list))]
        if not layer:
            return value
    raise BadRequest(f"the body is nested more than {MAX_DEPTH} times")
