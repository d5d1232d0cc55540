"""A server, its clients that read streams, and their latencies.

Load generators of others (guidellm, vllm bench) need a tokenizer of Hugging Face for their prompts,
and measure one server at a time; these clients send tokens, and two versions of a server in turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from h2o_cpp.measure.machine import status_bytes
from support.server_process import start_server

LEAST_REQUESTS = 16  # all clients together


@dataclass(frozen=True)
class Texts:
    """The workload: texts per client, and tokens per prompt and output."""

    requests: int = 2
    prompt: int = 32
    tokens: int = 32

    def body(self, seed: int, *, stream: bool = True) -> bytes:
        """A request; its prompt has tokens that exist in every vocabulary."""
        rng = random.Random(seed)
        body = {
            "prompt": [rng.randrange(3, 256) for _ in range(self.prompt)],
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "seed": seed,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body).encode()


@dataclass
class Seen:
    """Seconds to the first piece, between pieces and to the end of each output; tokens."""

    first: list[float] = field(default_factory=list)
    next: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    n_tokens: int = 0
    seconds: float = 0

    def add(self, other: Seen) -> None:
        """Add the observations of another time."""
        self.first += other.first
        self.next += other.next
        self.last += other.last
        self.n_tokens += other.n_tokens
        self.seconds += other.seconds

    def cells(self) -> dict[str, float]:
        """Tokens/s, and latencies in ms."""
        return {
            "tokens/s": self.n_tokens / self.seconds,
            "first token, ms p50": 1e3 * quantile(self.first, 0.5),
            "first, p99": 1e3 * quantile(self.first, 0.99),
            "next token, ms p50": 1e3 * quantile(self.next, 0.5),
            "next, p99": 1e3 * quantile(self.next, 0.99),
        }


@contextmanager
def serving(*words: str, python: str = sys.executable) -> Iterator[tuple[int, int]]:
    """`h2o-cpp serve` with these arguments: its port and process."""
    environment = dict(os.environ)
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # it has its own version
    server, port = start_server(
        [python, "-m", "h2o_cpp", "serve", *words, "--port", "0"], environment
    )
    try:
        yield port, server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def memory_mb(process: int, field: str = "VmRSS") -> float:
    """Megabytes of a process, as /proc/PID/status has them."""
    return status_bytes(field, process) / 1e6


async def run_clients(port: int, n_clients: int, texts: Texts, key: str = "none") -> Seen:
    """Run clients that each request an output, read it to the end and repeat.

    Raises RuntimeError for a status other than 200 or an incomplete stream.
    """
    seen = Seen()
    n_requests = max(texts.requests, -(-LEAST_REQUESTS // n_clients))

    async def client(number: int) -> None:
        for i in range(n_requests):
            await _ask(port, texts.body(number * 1000 + i), key, seen)

    begin = perf_counter()
    await asyncio.gather(*(client(i) for i in range(n_clients)))
    seen.seconds = perf_counter() - begin
    return seen


async def _ask(port: int, body: bytes, key: str, seen: Seen) -> None:
    """Read a stream. A piece counts as a token in latencies; nearly all are one."""
    begin = perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Authorization: Bearer %s\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % (key.encode(), len(body))
        + body
    )
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server answered {status.decode().strip()}")
        last = None
        async for line in reader:  # skip chunk sizes
            if line == b"data: [DONE]\n":
                seen.last.append(perf_counter() - begin)
                return
            if not line.startswith(b"data: {"):
                continue
            now = perf_counter()
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                seen.n_tokens += chunk["usage"]["completion_tokens"]
                continue
            (seen.next if last is not None else seen.first).append(now - (last or begin))
            last = now
        raise RuntimeError("a stream ended early")
    finally:
        writer.close()


def quantile(seconds: Iterable[float], q: float) -> float:
    ordered = sorted(seconds)
    return ordered[int(q * (len(ordered) - 1))]
