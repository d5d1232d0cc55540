"""The process that listens, until a signal ends it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from h2o_cpp.model.arguments import check_int

_TO_SEND_SECONDS = 5  # what is left for clients that read slowly


class Server(uvicorn.Server):
    """Uvicorn, whose requests may go on for `grace` seconds after SIGTERM or SIGINT.

    Then they are cancelled, and their clients are told so.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        host: str,
        port: int,
        grace: int,
        on_start: Callable[[str], None] = lambda address: None,
    ) -> None:
        """port: 0 is a free one; on_start: called with the address, http://HOST:PORT, once it
        listens. Raises ValueError for numbers out of range.
        """
        config = uvicorn.Config(
            app,
            host=host,
            port=check_int("port", port, 0, 65535),
            server_header=False,
            timeout_graceful_shutdown=check_int("grace", grace, 0) + _TO_SEND_SECONDS,
        )
        super().__init__(config)
        self._app = app
        self._grace = grace
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_start(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and end."""
        ending = asyncio.ensure_future(self._end_texts())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def serve_until_signal(self) -> bool:
        """Listen; returns whether that succeeded."""
        with suppress(KeyboardInterrupt, SystemExit):  # uvicorn exits where the port is taken
            self.run()
        return bool(self.started)

    async def _end_texts(self) -> None:
        await asyncio.sleep(self._grace)
        engine = self._app.state.service.engine
        await asyncio.to_thread(engine.close)  # which waits for a step
