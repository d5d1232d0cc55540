"""A stand-in for the Hugging Face Hub: a server with one repository, org/name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from support.scripted_opt import scripted_opt

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The requests of huggingface_hub and `pull`.

    Attributes: `files`, by name; `asked`, requests as "GET /path"; `ranges`, requested bytes;
        `cuts`: after how many bytes of a file each of the next connections breaks.
    """

    files: ClassVar[dict[str, bytes]]
    asked: ClassVar[list[str]]
    ranges: ClassVar[list[str | None]]
    cuts: ClassVar[list[int]]
    knows_ranges: ClassVar[bool]

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path, _, query = self.path.partition("?")
        self.asked.append(f"{self.command} {path}")
        if not path.startswith(("/api/models/org/name", "/org/name/")):
            return self.send(401, b"", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/"):
            revision = path.removeprefix("/api/models/org/name").removeprefix("/revision/")
            if revision not in ("", "main", COMMIT):
                return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            siblings = [self.describe(name, blobs="blobs" in query) for name in self.files]
            info = {"id": "org/name", "sha": COMMIT, "siblings": siblings}
            return self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        revision, _, name = path.removeprefix("/org/name/resolve/").partition("/")
        if revision not in ("main", COMMIT):
            return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if name not in self.files:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        return self.send_file(self.files[name])

    def describe(self, name: str, *, blobs: bool) -> dict[str, object]:
        """A file in the listing of a repository."""
        if not blobs:
            return {"rfilename": name}
        data = self.files[name]
        sha256 = hashlib.sha256(data).hexdigest()
        lfs = {"sha256": sha256, "size": len(data), "pointerSize": 1}
        return {"rfilename": name, "size": len(data), "blobId": "b" * 40, "lfs": lfs}

    def send_file(self, data: bytes) -> None:
        """Send the file from the requested byte on."""
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if self.command == "HEAD":
            return self.send(200, data, headers)
        wanted = self.headers["Range"]
        self.ranges.append(wanted)
        status = 200
        if wanted is not None and self.knows_ranges:
            begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            data, status = data[begin:], 206
        return self.send(status, data, headers, self.cuts.pop(0) if self.cuts else None)

    def send(
        self, status: int, data: bytes, headers: dict[str, str], n_bytes: int | None = None
    ) -> None:
        """Send a response, truncated to `n_bytes`."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:n_bytes])

    def log_message(self, format: str, *args: object) -> None:
        pass


def at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_ENDPOINT, which huggingface_hub reads at import."""
    from huggingface_hub import constants

    url = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)


@contextmanager
def local_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """The Hub at HF_ENDPOINT with a model and its projector; caches are in `folder`."""
    from huggingface_hub import constants

    model = scripted_opt([]).write(folder / "model.gguf").read_bytes()

    class Local(Hub):
        files: ClassVar = {"README.md": b"#", "small.gguf": model, "mmproj.gguf": b"no model"}
        asked: ClassVar = []
        ranges: ClassVar = []
        cuts: ClassVar = []
        knows_ranges = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Local)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    at(endpoint, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("H2O_MODELS", str(folder / "models"))
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield Local
    server.shutdown()
    thread.join()
    server.server_close()
