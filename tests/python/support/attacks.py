"""Hostile clients of a server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count

_BYTES = 4_000_000  # body size, just below the server's limit
_PART = 65536
_PAUSE = 0.5  # seconds before reconnecting
_UNIQUE = b"########"  # in a body: replaced by another number in each request


@dataclass(frozen=True)
class Attack:
    """Connections that send requests repeatedly, or part of one and then stall."""

    what: str
    n_connections: int
    body: Callable[[], bytes]
    path: str = "/v1/completions"
    has_key: bool = True
    n_sent: int | None = None  # bytes of the request to send; None: all, repeatedly


@cache
def _values() -> bytes:
    return b'{"a":[' + b",".join([b"{}"] * (_BYTES // 3)) + b"]}"


@cache
def _ids() -> bytes:
    return b'{"prompt":[' + b",".join([b"5"] * (_BYTES // 2)) + b"]}"


@cache
def _text() -> bytes:
    return json.dumps({"prompt": "It was a dark, stormy night. " * (_BYTES // 30)}).encode()


@cache
def _chat() -> bytes:
    content = "It was a dark, stormy night. " * (_BYTES // 30)
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def _constrained(name: str, value: object) -> bytes:
    return json.dumps({"prompt": "A ship", "max_tokens": 8, name: value}).encode()


@cache
def _grammar() -> bytes:
    return _constrained("grammar", f'start: /a+/ /a+/ "x"\n// {_UNIQUE.decode()}\n')


@cache
def _regex() -> bytes:
    return _constrained("guided_regex", "a?b*" * 20_000 + _UNIQUE.decode())


@cache
def _schema() -> bytes:
    names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4_000)}
    last = {"d4000": {"const": _UNIQUE.decode()}}
    return _constrained("guided_json", {"$ref": "#/$defs/d0", "$defs": {**names, **last}})


ATTACKS = {
    "no key": Attack("100 bodies of 4 MB of objects, without the key", 100, _values, has_key=False),
    "objects": Attack("100 bodies of 4 MB of objects", 100, _values),
    "ids": Attack("40 bodies of 4 MB of token ids", 40, _ids),
    "prompts": Attack("40 prompts of 3.9 MB", 40, _text),
    "chats": Attack("40 messages of 3.9 MB", 40, _chat, path="/v1/chat/completions"),
    "idle": Attack("1500 idle connections", 1500, _values, n_sent=0),
    "grammars": Attack("20 grammars without end, each another one", 20, _grammar),
    "regexes": Attack("20 regular expressions of 80 KB", 20, _regex),
    "schemas": Attack("20 schemas of 4000 references", 20, _schema),
    "slow": Attack("300 bodies that stop half way", 300, _values, n_sent=_BYTES // 2),
}


async def run_attack(port: int, attack: Attack, key: str, seen: Counter[str]) -> None:
    """Attack until cancelled. `seen` counts statuses, and connections closed without one."""
    body = attack.body()
    lines = [
        f"POST {attack.path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *([f"Authorization: Bearer {key}"] if attack.has_key else []),
    ]
    request = memoryview("".join(f"{line}\r\n" for line in [*lines, ""]).encode() + body)
    sent = request if attack.n_sent is None else request[: attack.n_sent]

    numbers = count()

    def numbered() -> memoryview:
        if _UNIQUE not in body:
            return sent
        return memoryview(bytes(sent).replace(_UNIQUE, b"%08d" % next(numbers)))

    async def connection() -> None:
        while True:
            status = b""
            with suppress(OSError):
                status = await _send(port, numbered())
            seen[status.decode() or "cut"] += 1
            if attack.n_sent is not None or not status:
                await asyncio.sleep(_PAUSE)

    await asyncio.gather(*(connection() for _ in range(attack.n_connections)))


async def _send(port: int, request: memoryview) -> bytes:
    """The status, b"" without one; returns when the server has closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = asyncio.ensure_future(reader.readline())
    try:
        for at in range(0, len(request), _PART):
            if head.done():  # rejected before it was sent
                break
            writer.write(request[at : at + _PART])
            await writer.drain()
        status = await head
        await reader.read()
        return status.split()[1] if status else b""
    finally:
        head.cancel()
        writer.transport.abort()
