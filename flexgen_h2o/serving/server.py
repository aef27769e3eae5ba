"""The HTTP server around the application, in a thread beside the one that computes."""

from __future__ import annotations

import asyncio
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress

import uvicorn
from starlette.types import ASGIApp

from flexgen_h2o.serving.guard import MAX_HEADERS
from flexgen_h2o.serving.scheduler import Scheduler

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
