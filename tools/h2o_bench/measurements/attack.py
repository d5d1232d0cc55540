"""Honest clients of `h2o-cpp serve` beside hostile ones: their latencies, the server's memory.

Honest clients ask for texts, alone and beside each attack in turn, round after round. The server,
the honest and the hostile clients are three processes of one machine; the hostile ones, who would
be elsewhere, have a lower priority. Milliseconds are of whole answers, and compared with those of
the same round without an attack; memory is that above the idle server's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from h2o_bench.load import Texts, memory_mb, quantile, run_clients, serving
from h2o_bench.results import Row
from h2o_cpp import BUNDLED_MODEL
from support.attacks import ATTACKS, run_attack

KEY = "sesame"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--clients", type=int, default=4, help="honest ones")
    parser.add_argument("--requests", type=int, default=10, help="of each, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a text")
    parser.add_argument("--threads", type=int, default=1, help="of the server's engine")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=[*ATTACKS])


def attack(port: int, name: str) -> None:
    """The attacking process."""
    os.nice(19)
    asyncio.run(run_attack(port, ATTACKS[name], KEY, Counter()))


@contextmanager
def attacked(port: int, name: str | None) -> Iterator[None]:
    """While a process attacks, if a name is given."""
    if name is None:
        yield
        return
    process = get_context("spawn").Process(target=attack, args=(port, name))
    process.start()
    time.sleep(2)  # until it has started
    try:
        yield
    finally:
        process.kill()
        process.join()


def measure(args: argparse.Namespace) -> Iterator[Row]:
    texts = Texts(args.requests, args.prompt, args.tokens)
    words = [str(args.model), "--max-sequences", str(args.clients), "--threads", str(args.threads)]
    words += ["--n-ctx", "2048", "--api-key", KEY, "--template", TEMPLATE]
    names: list[str | None] = [None, *args.attacks]
    last: dict[str | None, list[float]] = {name: [] for name in names}
    most: dict[str | None, list[float]] = {name: [] for name in names}
    slower: dict[str | None, list[float]] = {name: [] for name in names}
    with serving(*words) as (port, process):
        asyncio.run(run_clients(port, args.clients, texts, key=KEY))  # one-time costs
        idle = memory_mb(process)
        for _ in range(args.rounds):
            alone = 0.0
            for name in names:
                Path(f"/proc/{process}/clear_refs").write_text("5")  # resets VmHWM
                with attacked(port, name):
                    seen = asyncio.run(run_clients(port, args.clients, texts, key=KEY))
                last[name] += [1e3 * seconds for seconds in seen.last]
                most[name].append(memory_mb(process, "VmHWM") - idle)
                p99 = quantile(seen.last, 0.99)
                alone = p99 if name is None else alone
                slower[name].append(p99 / alone)
    for name in names:
        yield {
            "attack": "none" if name is None else ATTACKS[name].what,
            "ms p50": quantile(last[name], 0.5),
            "p99": quantile(last[name], 0.99),
            "p99, compared": slower[name],
            "memory, MB": max(most[name]),
        }
