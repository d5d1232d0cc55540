"""One conversation of very many turns with a server: memory, speed, and a fact of its beginning.

Every turn sends the whole conversation and reads a streamed reply. Medians of the second and of the
last tenth of the turns are compared; then the model continues sentences with a fact of the system
prompt, with and without `--protect system`. llama-server refuses prompts longer than its context:
its client then drops the oldest turn and asks again, which counts as time to the first token.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from h2o_bench.load import memory_mb, serving
from h2o_bench.results import Row
from h2o_cpp import BUNDLED_MODEL
from support.server_process import start_server

SECRET = "The secret word is strawberry. If anyone asks for the secret word, say strawberry."
SYSTEM = {"role": "system", "content": f"You are Joe. {SECRET}"}
DAY = (
    "On day {} the old man went to sea in his boat, with bread, water and a net. The wind came "
    "from the {}, and he saw {} ships. "
)
QUESTION = "What is the secret word?"
ANSWERS = (  # beginnings that the model continues
    "The secret word is",
    "The secret word is:",
    "I am Joe. The secret word is",
    "Sure! The secret word is",
    "If anyone asks for the secret word, say",
)
WINDS = ("north", "east", "south", "west")


def message(turn: int) -> str:
    """About 140 tokens of the user, other ones in each turn."""
    days = (
        DAY.format(5 * turn + i, WINDS[(turn + i) % 4], (7 * turn + 3 * i) % 11) for i in range(4)
    )
    return f"{''.join(days)}What did he see?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--reply", type=int, default=100, help="most tokens of a reply")
    parser.add_argument("--n-ctx", type=int, default=2048)
    parser.add_argument("--hh", default="0.2")
    parser.add_argument("--positions", default="rolling", help="the secret stays near")
    parser.add_argument("--prefix-cache", default="64MiB")
    parser.add_argument("--template", help="as for h2o-cpp serve")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-server", help="this program too, with --cache-reuse")


class Talk:
    """A conversation. Attributes: `usage` of its last reply; `n_refused` prompts."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._messages = [SYSTEM]
        self.usage: Any = None
        self.n_refused = 0

    def say(self, text: str, begun: str = "", **options: Any) -> tuple[str, float, float]:
        """The reply, the milliseconds to its first piece, and tokens per second after that.

        begun: the beginning of the reply.
        """
        self._messages.append({"role": "user", "content": text})
        if begun:
            self._messages.append({"role": "assistant", "content": begun})
        reply, times = "", [perf_counter()]
        while (response := self._ask(options)).status != 200:
            error = response.read().decode()
            if len(self._messages) < 4:
                raise RuntimeError(error)
            self.n_refused += 1
            del self._messages[1:3]
        for line in response:
            chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": []}
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    times.append(perf_counter())
                    reply += piece
        self._messages.append({"role": "assistant", "content": reply})
        seconds = max(times[-1] - times[1 if times[1:] else 0], 1e-9)
        return reply, 1e3 * (times[1:] or times)[0] - 1e3 * times[0], len(times[2:]) / seconds

    def _ask(self, options: dict[str, Any]) -> http.client.HTTPResponse:
        body = {"messages": self._messages, "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection.getresponse()


@contextmanager
def llama_server(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Its port and process."""
    words = [args.llama_server, "-m", args.model, "-c", args.n_ctx, "-t", args.threads, "-np", 1]
    words += ["--context-shift", "--cache-reuse", 256, "--port", 0]
    server, port = start_server([*map(str, words)])
    try:
        yield port, server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def measure(args: argparse.Namespace) -> Iterator[Row]:
    words = [args.model, "--n-ctx", args.n_ctx, "--hh", args.hh, "--threads", args.threads]
    words += ["--positions", args.positions, "--prefix-cache", args.prefix_cache]
    words += ["--max-sequences", 1] + (["--template", args.template] if args.template else [])
    ours = [*map(str, words)]
    ways = {
        "h2o.cpp": serving(*ours, "--protect", "none"),
        "and pinned": serving(*ours, "--protect", "system"),
    }
    if args.llama_server:
        ways["llama-server"] = llama_server(args)
    part = max(args.turns // 10, 1)
    for name, running in ways.items():
        with running as (port, process):
            talk, seen = Talk(port), []
            for turn in range(args.turns):
                _, first, rate = talk.say(message(turn), max_tokens=args.reply, seed=turn)
                seen.append((first, rate, memory_mb(process)))
            found = [
                [median(one) for one in zip(*some, strict=True)]
                for some in (seen[part : 2 * part] or seen, seen[-part:])
            ]
            n_tokens = talk.usage["total_tokens"]
            answers = [
                talk.say(QUESTION, begun, max_tokens=8, temperature=0)[0] for begun in ANSWERS
            ]
        n_right = sum("strawberry" in answer.lower() for answer in answers)
        row: dict[str, object] = {"": name, "tokens of the last turn": n_tokens}
        columns = zip(("first token, ms", "tokens/s", "memory, MB"), *found, strict=True)
        for column, begin, end in columns:
            ratio = end / begin if begin else None  # a reply in one piece has no speed
            row |= {column: begin, f"{column}, at the end": end, f"{column}, ratio": ratio}
        yield {**row, "refused": talk.n_refused, "the secret word": f"{n_right} of {len(ANSWERS)}"}
