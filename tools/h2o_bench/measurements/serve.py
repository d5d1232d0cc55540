"""`h2o-cpp serve` with many clients that read streams: speed and latencies.

So many clients at once, each of which asks for a text, reads it to the end and asks again. Server
and clients are two processes of one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from h2o_bench.load import Seen, Texts, run_clients, serving
from h2o_bench.results import Row
from h2o_cpp import BUNDLED_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--requests", type=int, default=2, help="of each, at least 16 in all")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a text")
    parser.add_argument("--sequences", type=int, default=32, help="texts computed at once")
    parser.add_argument("--hh", help="as for h2o-cpp serve")
    parser.add_argument("--threads", type=int, default=1, help="of the server's engine")
    parser.add_argument("--rounds", type=int, default=1, help="each number of clients so often")
    parser.add_argument(
        "--before", metavar="PYTHON", help="an interpreter with another version, for comparison"
    )


def measure(args: argparse.Namespace) -> Iterator[Row]:
    texts = Texts(args.requests, args.prompt, args.tokens)
    words = [str(args.model), "--max-sequences", str(args.sequences)]
    words += ["--max-queue", str(max(args.clients)), "--threads", str(args.threads)]
    words += [] if args.hh is None else ["--hh", args.hh]
    versions = {"before": args.before} if args.before else {}
    versions["now"] = sys.executable
    rows = {(n, version): Seen() for n in args.clients for version in versions}
    with ExitStack() as running:
        ports = {}
        for version, python in versions.items():
            ports[version], _ = running.enter_context(serving(*words, python=python))
            asyncio.run(run_clients(ports[version], 1, texts))  # one-time costs
        for _ in range(args.rounds):
            for (n, version), seen in rows.items():  # in turns, as the machine may change
                seen.add(asyncio.run(run_clients(ports[version], n, texts)))
    for (n, version), seen in rows.items():
        yield {"clients": n, "version": version, **seen.cells()}
