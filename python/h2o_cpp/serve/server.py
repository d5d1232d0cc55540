"""The HTTP server process, until a signal ends it."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from h2o_cpp.serve.connection import Connection, Connections
from h2o_cpp.serve.log import log_config
from h2o_cpp.serve.options import ServerOptions

_MAX_CONNECTIONS = 512
_TO_SEND_SECONDS = 3  # for clients that read slowly
_TO_END_SECONDS = 4.5  # after the grace period, whatever still runs


class Server(uvicorn.Server):
    """Uvicorn with a grace period: requests may finish for `grace` seconds after SIGTERM or SIGINT.

    Before it, the server goes on for `drain` seconds, in which /ready says that it will end. Then
    they are cancelled, with an error for their clients. The process ends within 5 seconds after
    that: if something still runs, faulthandler shows where, and ends it with status 1.
    """

    def __init__(
        self,
        app: FastAPI,
        options: ServerOptions,
        *,
        on_hangup: Callable[[], Awaitable[None]] | None = None,
        on_start: Callable[[str], None] = lambda address: None,
    ) -> None:
        """Configure the server; serve_until_signal() runs it.

        on_hangup: called on SIGHUP.
        on_start: called with the address, such as http://HOST:PORT, when the server listens.

        Raises ValueError for files of TLS that do not fit, and OSError.
        """
        connections = Connections(
            maximum=options.max_connections or _default_connections(),
            head_seconds=options.header_timeout,
            write_seconds=options.write_timeout,
        )
        protocol: Any = partial(Connection, shared=connections)
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            http=protocol,
            ws="none",
            timeout_keep_alive=options.keep_alive,
            server_header=False,
            log_config=log_config(options.log_format),
            headers=[("Keep-Alive", f"timeout={options.keep_alive}")],
            timeout_graceful_shutdown=options.grace + _TO_SEND_SECONDS,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
        )
        tls_cert, tls_key = options.tls_cert, options.tls_key
        for file in filter(None, (tls_cert, tls_key)):
            Path(file).open("rb").close()  # an error that names the file
        try:
            config.load()
        except ssl.SSLError:
            files = f"tls_cert={tls_cert!r}" + (f" and tls_key={tls_key!r}" if tls_key else "")
            raise ValueError(f"{files}, expected a certificate and its key in PEM files") from None
        super().__init__(config)
        self._app = app
        self._grace = options.grace
        self._drain = options.drain
        self._on_hangup = on_hangup
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            shown = f"[{host}]" if ":" in host else host
            self._follow_hangups()
            gc.freeze()  # modules and models are not searched for garbage again
            self._on_start(f"{scheme}://{shown}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = time.monotonic() + self._drain
        while time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.1)
        ending = asyncio.ensure_future(self._end_texts())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A thread of faulthandler needs neither the event loop nor Python's lock.
        seconds = self._drain + self._grace + _TO_END_SECONDS
        faulthandler.dump_traceback_later(seconds, exit=True)
        self._app.state.draining = True
        super().handle_exit(sig, frame)

    def serve_until_signal(self) -> bool:
        """Serve; returns whether the server started."""
        with suppress(KeyboardInterrupt, SystemExit):  # uvicorn exits if the port is in use
            self.run()
        return bool(self.started)

    def _follow_hangups(self) -> None:
        if self._on_hangup is not None and hasattr(signal, "SIGHUP"):
            loop, reload = asyncio.get_running_loop(), self._on_hangup
            tasks: set[asyncio.Task[None]] = set()  # the loop keeps only weak references

            def begin() -> None:
                task: asyncio.Task[None] = asyncio.ensure_future(reload())
                tasks.add(task)
                task.add_done_callback(tasks.discard)

            loop.add_signal_handler(signal.SIGHUP, begin)

    async def _end_texts(self) -> None:
        await asyncio.sleep(self._grace)
        await asyncio.to_thread(self._app.state.catalog.close_engines)


def _default_connections() -> int:
    """512, unless the limit of open files is below 1024."""
    try:
        import resource
    except ImportError:  # Windows
        return _MAX_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if files < 0 else min(_MAX_CONNECTIONS, files // 2)
