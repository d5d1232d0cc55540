"""Many concurrent clients: correct, disconnecting, slow, non-reading and malformed.

H2O_LOAD sets their number; -s prints the results.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from h2o_cpp import Generator
from support.background import PATIENCE
from support.needs import LINUX
from support.serving import Server, events, no_text_left, serving, wait_until

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
N_CLIENTS = int(os.environ.get("H2O_LOAD", "150"))
CACHE: dict[str, Any] = {"hh": 12, "n_batch": 8, "threads": 1}
PROMPTS = [[random.Random(i).randrange(3, 61) for _ in range(1 + 2 * i)] for i in range(16)]
OPTIONS: dict[str, Any] = {"max_tokens": 30, "seed": 5, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"prompt": [5], "max_tokens": 10**9, "ignore_eos": True, "stream": True}
N_THREADS = 40 + 2  # the thread pool that validates requests, the server and its engine
GARBAGE = [b"", b"{", b"\x00\xff", b'{"prompt": 5}', b'{"prompt": [99]}', b"[" * 900]


class Clients:
    """Clients of a server, and counts of what happened to them."""

    def __init__(self, server: Server, expected: list[str]) -> None:
        self._port = server.port
        self._expected = expected
        self.counts: Counter[str] = Counter()

    async def run(self, seed: int, n: int) -> None:
        """Run n clients concurrently."""
        rng = random.Random(seed)
        kinds = [self.reads, self.reads_whole, self.reads_slowly, self.leaves, self.never_reads]
        kinds += [self.sends_garbage, self.sends_too_much, self.sends_half]
        tasks = [kinds[i % len(kinds)](random.Random(rng.random())) for i in range(n)]
        await asyncio.gather(*tasks)

    async def reads(self, rng: random.Random) -> None:
        """Read a stream, retrying while the queue is full."""
        i = rng.randrange(len(PROMPTS))
        status, body = await self._ask_again(rng, {"prompt": PROMPTS[i], "stream": True, **OPTIONS})
        *chunks, done = events(body)
        assert (status, done) == (200, "[DONE]")
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == self._expected[i]
        self.counts["correct streams"] += 1

    async def reads_whole(self, rng: random.Random) -> None:
        i = rng.randrange(len(PROMPTS))
        status, body = await self._ask_again(rng, {"prompt": PROMPTS[i], **OPTIONS})
        assert status == 200
        assert json.loads(body)["choices"][0]["text"] == self._expected[i]
        self.counts["correct responses"] += 1

    async def reads_slowly(self, rng: random.Random) -> None:
        """Read a few bytes at a time, with a small buffer."""
        i = rng.randrange(len(PROMPTS))
        body = {"prompt": PROMPTS[i], "stream": True, "kept_every": 1, **OPTIONS}
        status, answer = await self._ask_again(rng, body, n_bytes=4096, wait=0.005)
        *chunks, done = events(answer)
        assert (status, done) == (200, "[DONE]")
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == self._expected[i]
        self.counts["correct slow streams"] += 1

    async def leaves(self, rng: random.Random) -> None:
        """Disconnect after some bytes of an endless stream."""
        reader, writer = await self._send(json.dumps(ENDLESS).encode())
        await reader.read(rng.randrange(1, 5000))
        await asyncio.sleep(rng.random() / 20)
        writer.transport.abort()
        self.counts["disconnected clients"] += 1

    async def never_reads(self, rng: random.Random) -> None:
        reader, writer = await self._send(json.dumps(ENDLESS).encode())
        await reader.read(1)  # the rest fills the buffers
        await asyncio.sleep(rng.random() / 2)
        writer.transport.abort()
        self.counts["clients that stopped reading"] += 1

    async def sends_garbage(self, rng: random.Random) -> None:
        status, _ = await self._ask(rng.choice(GARBAGE))
        assert status in (400, 429)
        self.counts["malformed requests rejected"] += 1

    async def sends_too_much(self, rng: random.Random) -> None:
        try:
            status, _ = await self._ask(b" " * 60_000)
            assert status == 413
        except ConnectionResetError:
            pass  # the response and the close arrived while the body was being sent
        self.counts["oversized requests rejected"] += 1

    async def sends_half(self, rng: random.Random) -> None:
        """Send a request without its end."""
        _, writer = await self._send(b"{", n_bytes=500)
        await asyncio.sleep(rng.random() / 5)
        writer.transport.abort()
        self.counts["incomplete requests"] += 1

    async def _ask_again(
        self, rng: random.Random, body: Any, *, n_bytes: int = 65536, wait: float = 0
    ) -> tuple[int, bytes]:
        while True:
            status, answer = await self._ask(json.dumps(body).encode(), n_bytes, wait)
            if status != 429:
                return status, answer
            self.counts["status 429"] += 1
            await asyncio.sleep(rng.uniform(0.05, 0.3))

    async def _ask(self, body: bytes, n_bytes: int = 65536, wait: float = 0) -> tuple[int, bytes]:
        reader, writer = await self._send(body)
        answer = b""
        try:
            while part := await reader.read(n_bytes):
                answer += part
                await asyncio.sleep(wait)
        finally:
            writer.close()
        head, _, rest = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), rest

    async def _send(
        self, body: bytes, n_bytes: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send with HTTP/1.0, where a response ends with the connection."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        length = len(body) if n_bytes is None else n_bytes
        writer.write(
            b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % length
        )
        writer.write(body)
        return reader, writer


def resident_bytes() -> int:
    """Resident memory of this process: clients, server and model."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def n_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def idle(server: Server) -> bool:
    """Whether no client is connected, nothing is generating and no output is left."""
    stats = server.engine.stats()
    if server.n_connections or stats.n_active or stats.n_waiting:
        return False
    return no_text_left()


@LINUX  # open files are counted in /proc
def test_many_clients_leak_nothing() -> None:
    with Generator(LLAMA, **CACHE) as alone:
        expected = [alone.generate(prompt, **OPTIONS).text for prompt in PROMPTS]
    n_threads = threading.active_count()
    with (
        Generator(LLAMA, max_sequences=8, **CACHE) as generator,
        serving(generator, max_queue=40, max_tokens=10**9, max_body_bytes=50_000) as server,
    ):
        clients = Clients(server, expected)
        n_files, resident = [], []
        for seed in range(3):
            asyncio.run(asyncio.wait_for(clients.run(seed, N_CLIENTS // 3), 4 * PATIENCE))
            wait_until(lambda: idle(server))
            gc.collect()  # also what earlier tests left
            n_files.append(n_open_files())
            resident.append(f"{resident_bytes() / 2**20:.0f} MiB")
        assert n_files == n_files[:1] * 3
        assert threading.active_count() - n_threads <= N_THREADS
        assert server.ask("/health").status == 200
        print(json.dumps({**clients.counts, "resident after each third": resident}, indent=2))
    correct = clients.counts["correct streams"] + clients.counts["correct responses"]
    assert correct >= 2 * (N_CLIENTS // 3 // 8) * 3
