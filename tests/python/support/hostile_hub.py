"""A hub that answers what a test wants, however wrong: of the repository org/name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple

import pytest

from support.hub import at

COMMIT = "a" * 40


class Answer(NamedTuple):
    """A response; a body without Content-Length ends with the connection."""

    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    body: Iterable[bytes] = ()


def whole(data: bytes, **headers: str) -> Answer:
    """A response of a length that is told."""
    return Answer(200, {"Content-Length": str(len(data)), **headers}, [data])


def sibling(name: str, data: bytes, **changed: object) -> dict[str, Any]:
    """A file's entry in the listing; changed: other values of it."""
    lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
    return {"rfilename": name, "size": len(data), "blobId": "b" * 40, "lfs": lfs, **changed}


def listing(*siblings: object, sha: object = COMMIT) -> Answer:
    """The listing of a repository with these entries."""
    info = {"id": "org/name", "sha": sha, "siblings": list(siblings)}
    return whole(json.dumps(info).encode())


class HostileHub:
    """Attributes: `listing`, the answer for the list of files; `file`, what makes the answer for a
    file, given the first wanted byte and the request's headers; `asked`, the paths of requests."""

    def __init__(self) -> None:
        self.listing = listing()
        self.file: Callable[[int], Answer] = lambda begin: Answer(404)
        self.asked: list[str] = []

    def has(self, name: str, data: bytes, **changed: object) -> None:
        """Have one file, which is sent as told."""
        self.listing = listing(sibling(name, data, **changed))
        self.file = lambda begin: whole(data)

    def answer(self, path: str, headers: Any) -> Answer:
        self.asked.append(path)
        if path.startswith("/api/models/"):
            return self.listing
        return self.file(int(headers.get("Range", "bytes=0-")[6:-1]))


@contextmanager
def hostile_hub(patch: pytest.MonkeyPatch) -> Iterator[HostileHub]:
    """Run a HostileHub as the Hub of this process, and of those that it starts."""
    hub = HostileHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = hub.answer(self.path, self.headers)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the client has enough
                for data in answer.body:
                    self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    at(f"http://127.0.0.1:{server.server_port}", patch)
    patch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()
