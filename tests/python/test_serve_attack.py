"""Honest clients among hostile ones: they get answers, and memory stays bounded.

tools/bench/measure_attack measures the latencies.
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

from h2o_bench.attacks import ATTACKS, run_attack
from h2o_bench.server_process import start_server
from h2o_cpp import Generator
from support.background import PATIENCE
from support.needs import LINUX
from support.serving import Server, wait_until

KEY = "sesame"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
PROMPTS = ["The", "It was a dark", "A ship", "On the hill there was a house"]
BODIES = 64 * 2**20  # --max-bodies
FREE = 64 * 2**10  # of a body beside that
N_REQUESTS = int(os.environ.get("H2O_LOAD", "120")) // len(PROMPTS)  # of each honest client


@contextmanager
def serving_alone(model: Path) -> Iterator[tuple[Server, int]]:
    """A server in a process of its own, and its id."""
    command = [sys.executable, "-m", "h2o_cpp", "serve", str(model), "--port", "0"]
    command += ["-t", "1", "--max-sequences", "4", "--n-ctx", "2048"]
    command += ["--api-key", KEY, "--template", TEMPLATE]
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
    """The text that one honest client gets."""
    body = {"prompt": PROMPTS[seed % len(PROMPTS)], "seed": seed, **OPTIONS}
    answer = server.ask("/v1/completions", body, Authorization=f"Bearer {KEY}")
    assert answer.status == 200, answer
    text: str = answer.json()["choices"][0]["text"]
    return text


async def everybody(server: Server, seen: Counter[str]) -> tuple[dict[int, str], int]:
    """What the honest ones get beside all attacks, and the most bytes of bodies in flight."""
    hostile = [
        asyncio.ensure_future(run_attack(server.port, fewer, KEY, seen))
        for attack in ATTACKS.values()
        for fewer in [replace(attack, n_connections=attack.n_connections // 5)]
    ]
    texts: dict[int, str] = {}
    most_bytes = 0.0

    async def honest(number: int) -> None:
        nonlocal most_bytes
        for i in range(N_REQUESTS):
            seed = number + len(PROMPTS) * i
            texts[seed] = await asyncio.to_thread(ask, server, seed)
            in_flight = await asyncio.to_thread(server.metric, "h2o_body_bytes")
            most_bytes = max(most_bytes, in_flight)

    try:
        await asyncio.gather(*(honest(number) for number in range(len(PROMPTS))))
        while not (seen["401"] and seen["400"] + seen["503"]):  # how often is a matter of speed
            await honest(0)
    finally:
        for one in hostile:
            one.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
    return texts, int(most_bytes)


@LINUX  # memory is read in /proc
def test_honest_clients_among_hostile_ones(tiny_opt: Path) -> None:
    seen: Counter[str] = Counter()
    with serving_alone(tiny_opt) as (server, pid):
        ask(server, 0)
        chat = {"messages": [{"role": "user", "content": "A ship?"}], "max_tokens": 1}
        server.ask("/v1/chat/completions", chat, Authorization=f"Bearer {KEY}")
        idle = resident(pid, "VmRSS")
        limit = 4 * PATIENCE
        texts, n_bytes = asyncio.run(asyncio.wait_for(everybody(server, seen), limit))
        most = resident(pid, "VmHWM") - idle
        wait_until(lambda: server.metric("h2o_body_bytes") == 0)
        assert server.ask("/health").status == 200
        left = resident(pid, "VmRSS") - idle
    print(json.dumps({**seen, "MB above idle": most / 1e6, "left": left / 1e6}, indent=2))
    with Generator(tiny_opt, threads=1, n_ctx=2048) as alone:
        for seed, text in texts.items():
            prompt = PROMPTS[seed % len(PROMPTS)]
            assert text == alone.generate(prompt, seed=seed, **OPTIONS).text
    assert len(texts) == len(PROMPTS) * N_REQUESTS
    # Beside what is bounded in all, so much of each body and of what uvicorn has read ahead of it.
    assert n_bytes <= BODIES + 512 * FREE
    assert most <= 300e6
    assert {*seen} <= {"400", "401", "408", "503", "cut"}
