"""The page of a server: its files, and the status that it shows as server-sent events. No torch."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from flexgen_h2o.serving.live import sse
from flexgen_h2o.serving.scheduler import Scheduler
from flexgen_h2o.serving.store import INPUT, Batch, File, Store, StoreError

INTERVAL = 0.5
"""Seconds between two looks at the status."""
SHOWN = 100
"""Files, and batches beside those that run, that the page shows: the newest ones."""

_HEARTBEAT = 15.0  # seconds of silence after which a comment shows whether the client is there
_INDEX, _STATIC = "index.html", ("page.css", "page.js", "uplot/uPlot.iife.min.js",
                                 "uplot/uPlot.min.css")
_NAMES = {"gpu": "GPU", "cpu": "memory", "disk": "disk"}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy":
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # ask with the ETag: a new version is shown at once
}


class Dashboard:
    """The page at ``/``, its files, and its events.

    `model`: name of the model. `plan`: sentences about the policy. `memory`: planned bytes on each
    tier.
    """

    def __init__(self, store: Store, scheduler: Scheduler, *, model: str, plan: Sequence[str],
                 memory: Mapping[str, int]):
        self._store, self._scheduler, self._memory = store, scheduler, memory
        self._fixed = {"model": model, "plan": [*plan]}
        self._pages = {name.rpartition("/")[2]: _page(name) for name in (_INDEX, *_STATIC)}
        self._lock = asyncio.Lock()  # of the two below, which all clients share
        self._latest: dict[str, Any] = {}
        self._expires = 0.0

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [Route("/", self._file), Route("/static/{name}", self._file),
                Route("/events", self._events)]

    async def _file(self, request: Request) -> Response:
        name = request.path_params.get("name", _INDEX)
        if name not in self._pages:
            raise HTTPException(404)
        headers, content = self._pages[name]
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(self._changes(), media_type="text/event-stream",
                                 headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def _changes(self) -> AsyncIterator[bytes]:
        """Yield the status, then the fields that have changed, until the server stops."""
        sent: dict[str, Any] = {}
        sent_at = time.monotonic()
        while sent.get("state") != "stopping":
            status = await self._read()
            changes = {name: value for name, value in status.items()
                       if name not in sent or sent[name] != value}
            if changes or time.monotonic() - sent_at > _HEARTBEAT:
                sent, sent_at = status, time.monotonic()
                yield sse(changes) if changes else b":\n\n"
            await asyncio.sleep(INTERVAL)

    async def _read(self) -> dict[str, Any]:
        """Return the status, not older than `INTERVAL`."""
        async with self._lock:
            if time.monotonic() >= self._expires:
                self._latest = await run_in_threadpool(self._collect)
                self._expires = time.monotonic() + INTERVAL
            return self._latest

    def _collect(self) -> dict[str, Any]:
        status = self._fixed | self._scheduler.status() | self._machine()
        active = status.pop("batches")
        status["tokens_per_second"] = _rounded(status["tokens_per_second"])
        try:
            inputs, _ = self._store.page(File, limit=SHOWN, purpose=INPUT)
            batches, _ = self._store.page(Batch, limit=SHOWN)
            older = active.keys() - {batch.id for batch in batches}
            batches += filter(None, (self._store.get(Batch, id) for id in sorted(older)))
        except StoreError as error:
            return status | {"state": "error", "error": str(error)}
        return status | {
            "files": [file.public() for file in inputs],
            "batches": [batch.public() | {
                name: _rounded(value) for name, value in active.get(batch.id, {}).items()}
                for batch in batches]}

    def _machine(self) -> dict[str, Any]:
        """Return the figures of tiers and caches, as of the last block."""
        values = self._scheduler.metrics.values
        links = values("flexgen_h2o:link_bytes", "link")

        def moved(end: int, tier: str) -> int:
            return int(sum(total for (link,), total in links.items()
                           if link.split("->")[end] == tier))

        return {
            "tiers": [{"name": _NAMES[tier], "holds_bytes": held, "read_bytes": moved(0, tier),
                       "written_bytes": moved(1, tier)} for tier, held in self._memory.items()],
            "rates": self._scheduler.metrics.shares(),
            **{name: int(sum(values(f"vllm:{name}").values()))
               for name in ("prompt_tokens", "generation_tokens")}}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _page(name: str) -> tuple[dict[str, str], bytes]:
    """Return the headers and the content of a file of the page."""
    content = files("flexgen_h2o.serving").joinpath(f"page/{name}").read_bytes()
    content_type = _TYPES[name.rpartition(".")[2]]
    return {**_HEADERS, "Content-Type": f"{content_type}; charset=utf-8",
            "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}, content
