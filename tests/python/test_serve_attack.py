"""Legitimate clients among attackers: they get replies, and memory is bounded.

`tools/bench attack` measures latencies.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra: serve)")
pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")
pytest.importorskip("prometheus_client", reason="prometheus_client is missing (extra: serve)")

from h2o_cpp import Generator
from support.attacks import ATTACKS, run_attack
from support.background import PATIENCE
from support.needs import LINUX
from support.server_process import start_server
from support.serving import Server, wait_until

KEY = "sesame"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
PROMPTS = ["The", "It was a dark", "A ship", "On the hill there was a house"]
BODIES = 16 * 2**20  # --max-bodies, a fraction of what the attackers send
CONNECTIONS = 512
BODY = 4 * 2**20  # --max-body
FREE = 64 * 2**10  # bytes per body that do not count towards BODIES
# Besides them, each connection may hold FREE bytes, read ahead by uvicorn.
HELD = BODIES + CONNECTIONS * FREE
# A body is held by the server and by the parser, and one large body at a time is parsed and
# tokenized, which takes up to 16 times its size. Without --max-bodies, it would be 430 MB.
MOST = 2 * HELD + 16 * BODY
N_REQUESTS = int(os.environ.get("H2O_LOAD", "60")) // len(PROMPTS)  # of each legitimate client


@contextmanager
def server_process(model: Path) -> Iterator[tuple[Server, int]]:
    """A server in its own process, and the process id."""
    command = [sys.executable, "-m", "h2o_cpp", "serve", str(model), "--port", "0"]
    command += ["-t", "1", "--max-sequences", "4", "--n-ctx", "2048"]
    command += ["--api-key", KEY, "--template", TEMPLATE]
    command += ["--max-bodies", str(BODIES), "--max-body", str(BODY)]
    command += ["--max-connections", str(CONNECTIONS)]
    process, port = start_server(command)
    try:
        yield Server(None, port), process.pid
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def resident(pid: int, field: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(kilobytes) * 1024


def ask(server: Server, seed: int) -> str:
    """The output for one request of a legitimate client."""
    body = {"prompt": PROMPTS[seed % len(PROMPTS)], "seed": seed, **OPTIONS}
    response = server.ask("/v1/completions", body, Authorization=f"Bearer {KEY}")
    assert response.status == 200, response
    text: str = response.json()["choices"][0]["text"]
    return text


async def run_clients_and_attacks(server: Server, seen: Counter[str]) -> tuple[dict[int, str], int]:
    """Outputs of the legitimate clients during all attacks, and the peak of body bytes."""
    attacks = [
        asyncio.ensure_future(run_attack(server.port, scaled, KEY, seen))
        for attack in ATTACKS.values()
        for scaled in [replace(attack, n_connections=attack.n_connections // 5)]
    ]
    texts: dict[int, str] = {}
    max_body_bytes = 0.0

    async def client(number: int) -> None:
        nonlocal max_body_bytes
        for i in range(N_REQUESTS):
            seed = number + len(PROMPTS) * i
            texts[seed] = await asyncio.to_thread(ask, server, seed)
            in_flight = await asyncio.to_thread(server.metric, "h2o_body_bytes")
            max_body_bytes = max(max_body_bytes, in_flight)

    try:
        await asyncio.gather(*(client(number) for number in range(len(PROMPTS))))
        while not (seen["401"] and seen["400"] + seen["503"]):  # until attacks have been rejected
            await client(0)
    finally:
        for task in attacks:
            task.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)
    return texts, int(max_body_bytes)


@LINUX  # reads /proc
def test_legitimate_clients_among_attackers(tiny_opt: Path) -> None:
    seen: Counter[str] = Counter()
    with server_process(tiny_opt) as (server, pid):
        ask(server, 0)
        chat = {"messages": [{"role": "user", "content": "A ship?"}], "max_tokens": 1}
        server.ask("/v1/chat/completions", chat, Authorization=f"Bearer {KEY}")
        idle = resident(pid, "VmRSS")
        limit = 4 * PATIENCE
        texts, n_bytes = asyncio.run(asyncio.wait_for(run_clients_and_attacks(server, seen), limit))
        peak = resident(pid, "VmHWM") - idle
        wait_until(lambda: server.metric("h2o_body_bytes") == 0)
        assert server.ask("/health").status == 200
        left = resident(pid, "VmRSS") - idle
    print(json.dumps({**seen, "MB above idle": peak / 1e6, "left": left / 1e6}, indent=2))
    with Generator(tiny_opt, threads=1, n_ctx=2048) as alone:
        for seed, text in texts.items():
            prompt = PROMPTS[seed % len(PROMPTS)]
            assert text == alone.generate(prompt, seed=seed, **OPTIONS).text
    assert len(texts) == len(PROMPTS) * N_REQUESTS
    assert n_bytes <= HELD
    assert peak <= MOST
    assert {*seen} <= {"400", "401", "408", "503", "cut"}
