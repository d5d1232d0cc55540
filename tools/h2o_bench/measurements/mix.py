"""Streams, JSON, tool calls and conversations by very many clients: what they get.

Each client, at a random time, asks for a stream, for JSON by a schema, for a tool's call, or has a
conversation of two turns that begins as all others do. Fails where anything is lost, wrong or 5xx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from h2o_bench.load import memory_mb, serving
from h2o_bench.results import Row
from h2o_cpp import BUNDLED_MODEL

TEMPLATE = """{% for t in tools or [] %}{{ t.function.name }} <tool_call> {% endfor %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant:"""
SYSTEM = {"role": "system", "content": "You are the captain of an old ship. " * 12}
SCHEMA = {
    "type": "object",
    "properties": {"sails": {"enum": [1, 2, 3]}, "at sea": {"type": "boolean"}},
    "required": ["sails", "at sea"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "steer", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "ship", "schema": SCHEMA}}


class Clients:
    """All clients. Attributes: `met`, the results."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.met: Counter[str] = Counter()

    async def run(self, seeds: range, seconds: float) -> None:
        """Run a client per seed; they start within this many seconds."""
        kinds = [self.streams, self.writes_json, self.calls, self.talks]
        await asyncio.gather(*(self._one(kinds[s % len(kinds)], s, seconds) for s in seeds))

    async def _one(self, kind: Any, seed: int, seconds: float) -> None:
        chance = random.Random(seed)
        await asyncio.sleep(chance.uniform(0, seconds))
        try:
            await kind(chance)
            self.met[kind.__name__] += 1
        except (OSError, AssertionError, LookupError, ValueError) as error:
            self.met[f"LOST by {kind.__name__}: {type(error).__name__} {error}"[:120]] += 1

    async def streams(self, chance: random.Random) -> None:
        """Stream an output to its end."""
        body = self._body(chance, [{"role": "user", "content": "Tell me of the sea."}])
        answer = await self._ask({**body, "stream": True}, chance)
        assert answer.rstrip().endswith(b"data: [DONE]")

    async def writes_json(self, chance: random.Random) -> None:
        """Request JSON by a schema."""
        body = self._body(chance, [{"role": "user", "content": "How is the ship?"}])
        choice = self._choice(await self._ask({**body, "response_format": FORM}, chance))
        self._check(json.loads(choice["message"]["content"]))

    async def calls(self, chance: random.Random) -> None:
        """Request a tool call."""
        body = self._body(chance, [{"role": "user", "content": "Steer the ship."}])
        tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        choice = self._choice(await self._ask({**body, **tools}, chance))
        [call] = choice["message"]["tool_calls"]
        self._check(json.loads(call["function"]["arguments"]))

    async def talks(self, chance: random.Random) -> None:
        """Two turns after a common prefix."""
        messages = [SYSTEM, {"role": "user", "content": f"I am sailor {chance.randrange(20)}."}]
        for _ in range(2):
            answer = json.loads(await self._ask(self._body(chance, messages), chance))
            self.met["tokens of talks"] += answer["usage"]["prompt_tokens"]
            self.met["of them cached"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            content = answer["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": "And then?"},
            ]

    @staticmethod
    def _body(chance: random.Random, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"messages": messages, "max_tokens": 150, "seed": chance.randrange(2**31)}

    @staticmethod
    def _choice(answer: bytes) -> Any:
        [choice] = json.loads(answer)["choices"]
        assert choice["finish_reason"] in ("stop", "tool_calls"), choice["finish_reason"]
        return choice

    @staticmethod
    def _check(value: Any) -> None:
        assert value.keys() == {"sails", "at sea"}
        assert value["sails"] in (1, 2, 3)
        assert isinstance(value["at sea"], bool)

    async def _ask(self, body: dict[str, Any], chance: random.Random) -> bytes:
        """The response body; retries while the server is full."""
        sent = json.dumps(body).encode()
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(
                    b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                    % len(sent)
                    + sent
                )
                head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
            status = int(head.split()[1])
            if status == 200:
                return answer
            self.met[f"status {status}"] += 1
            assert status == 429, answer[:80]
            await asyncio.sleep(chance.uniform(0.5, 3))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--clients", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=60, help="in which each third begins")
    parser.add_argument("--sequences", type=int, default=32, help="computed at once")
    parser.add_argument("--queue", type=int, default=1000, help="as for h2o-cpp serve")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    with TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        words = [str(args.model), "--template", str(template), "--max-queue", str(args.queue)]
        words += ["--threads", "2", "--max-sequences", str(args.sequences), "--n-batch", "64"]
        words += ["--hh", "0.2", "--max-connections", str(args.clients), "--prefix-cache", "64MiB"]
        with serving(*words) as (port, process):
            clients, third = Clients(port), args.clients // 3
            begin = perf_counter()
            for i in range(3):
                asyncio.run(clients.run(range(i * third, (i + 1) * third), args.seconds))
                counts = dict(clients.met)
                yield {"after": (i + 1) * third, "MB": memory_mb(process), **counts}
    yield {"after": "all", "seconds": perf_counter() - begin}
    if lost := [name for name in clients.met if name.startswith(("LOST", "status 5"))]:
        raise RuntimeError("; ".join(lost))
