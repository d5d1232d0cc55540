"""The server and offline jobs on a Ray cluster of two local nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.jobs import line_seed
from support.background import PATIENCE
from support.scripted_chat import PLAIN
from support.serving import wait_until

# Ray's processes need a normal share of a busy machine, and time to start.
for name in ("PROXY_READY_CHECK", "PROXY_HEALTH_CHECK"):
    os.environ[f"RAY_SERVE_{name}_TIMEOUT_S"] = str(PATIENCE)
os.environ.update(RAY_worker_niceness="0", RAY_USAGE_STATS_ENABLED="0")
ray = pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")
pytest.importorskip("ray.serve", reason="Ray Serve is not installed (extra: ray)")
pytest.importorskip("ray.data", reason="Ray Data is not installed (extra: ray)")

import pyarrow  # noqa: E402
from ray import cloudpickle, serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from starlette.requests import Request  # noqa: E402

import h2o_cpp.ray.data  # noqa: E402
from h2o_cpp.ray import Continue, application, deployment, generate  # noqa: E402
from h2o_cpp.ray.routing import beginning_of  # noqa: E402
from h2o_cpp.ray.serving import Front  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # Ray emits warnings

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
CACHE: dict[str, Any] = {"hh": 12, "n_batch": 8}
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9], [11, 12]] * 3
INDICES = range(len(PROMPTS))
OPTIONS: Any = {"max_tokens": 20, "ignore_eos": True}
LONG: dict[str, Any] = {"prompt": [5], "max_tokens": 3000, "ignore_eos": True, "stream": True}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes, each with CPUs for a replica, an actor of a job, and a reader or writer."""
    node = {"num_cpus": 3, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        ray.init(cluster.address, log_to_driver=False)
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def port(cluster: None) -> Iterator[int]:
    """The port of a server with two replicas, one on each node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"port": number})
    server = {"name": "tiny", "max_tokens": 10**6}
    serve.run(deployment(LLAMA, num_replicas=2, server=server, grace=5, **CACHE))
    yield number
    serve.shutdown()


def texts_without_ray(seeds: Iterable[int | None], **options: Any) -> list[str]:
    """Outputs for PROMPTS without Ray."""
    with Generator(LLAMA, threads=1, **CACHE) as generator:
        return [
            generator.generate(prompt, seed=seed, **{**OPTIONS, **options}).text
            for prompt, seed in zip(PROMPTS, seeds, strict=True)
        ]


def begin(port: int, body: Any, path: str = "/v1/completions") -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", path, json.dumps(body), JSON)
    return connection


def ask(port: int, body: Any, path: str = "/v1/completions") -> tuple[int, bytes]:
    connection = begin(port, body, path)
    try:
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def read_text(port: int, i: int, *, stream: bool = False, **options: Any) -> str:
    """The server's output for PROMPTS[i]."""
    body = {"prompt": PROMPTS[i], "seed": i, "stream": stream, **OPTIONS, **options}
    status, answer = ask(port, body)
    assert status == 200, answer
    if not stream:
        text: str = json.loads(answer)["choices"][0]["text"]
        return text
    *chunks, done, end = answer.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    pieces = [json.loads(chunk.removeprefix("data: "))["choices"] for chunk in chunks]
    return "".join(choice["text"] for [choice] in pieces)


def replicas() -> set[str]:
    """Names of the actors that have loaded the model of the `port` fixture."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if "default#Model#" in actor["name"]}


def test_outputs_equal_those_of_a_generator(port: int) -> None:
    expected = texts_without_ray(INDICES)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        whole = threads.map(lambda i: read_text(port, i), INDICES)
        streamed = threads.map(lambda i: read_text(port, i, stream=True), INDICES)
        assert list(whole) == expected
        assert list(streamed) == expected


def test_invalid_requests(port: int) -> None:
    status, answer = ask(port, {"prompt": [99]})
    assert status == 400
    assert "token 99 is not in the vocabulary" in json.loads(answer)["error"]["message"]
    status, _ = ask(port, {"prompt": "x" * 5 * 2**20})
    assert status == 413


@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_clients_free_their_sequences(port: int, stream: bool) -> None:
    """Otherwise their generations, which take minutes, would occupy all 16 sequences."""
    for _ in range(24):
        connection = begin(port, {**LONG, "max_tokens": 10**6, "stream": stream})
        if stream:
            assert connection.getresponse().readline().startswith(b"data: {")
        connection.close()
    assert [read_text(port, i) for i in range(2)] == texts_without_ray(INDICES)[:2]


def test_conversation_returns_to_its_replica(port: int, tiny_opt: Path) -> None:
    """And continues from the state cached there in the previous turn."""
    app = deployment(tiny_opt, num_replicas=2, server={"template": PLAIN}, n_batch=32, grace=1)
    serve.run(app, name="chats", route_prefix="/chats")
    conversations = [[{"role": "user", "content": f"{i} " + "Hi " * 12}] for i in range(6)]
    cached = []
    for _ in range(3):
        for messages in conversations:
            body = {"messages": messages, "max_tokens": 1, "temperature": 0}
            status, answer = ask(port, body, "/chats/v1/chat/completions")
            assert status == 200, answer
            cached.append(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages += [
                {"role": "assistant", "content": "Hi " * 12},
                {"role": "user", "content": "Hi " * 12},
            ]
    serve.delete("chats")
    assert all(cached[len(conversations) :])


def test_conversation_key_is_its_first_messages() -> None:
    system, first = {"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}
    turns = [[system, first], [system, first, {"role": "assistant", "content": "A"}, first]]
    keys = {
        beginning_of(json.dumps({"messages": m, "seed": i}).encode()) for i, m in enumerate(turns)
    }
    assert len(keys) == 1
    assert keys != {beginning_of(json.dumps({"messages": [first]}).encode())}
    for body in (b"", b"{", b"[]", b'{"prompt": "a"}', b'{"messages": 5}', b'{"messages": [5]}'):
        assert beginning_of(body) == ""


def test_killed_replica_loses_no_request(port: int) -> None:
    """The other replica takes over its requests, except streams that have started."""
    expected = texts_without_ray(INDICES, max_tokens=1000)
    connections = [begin(port, LONG) for _ in range(4)]
    streams = [connection.getresponse() for connection in connections]
    assert all(stream.readline().startswith(b"data: {") for stream in streams)
    before = replicas()
    victim = ray.get_actor(min(before), namespace="serve")
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = [threads.submit(read_text, port, i, max_tokens=1000) for i in INDICES]
        # More than the streams, in case all of them are on this replica.
        wait_until(lambda: ray.get(victim.get_num_ongoing_requests.remote()) > len(streams))
        ray.kill(victim)
        assert [answer.result(PATIENCE) for answer in answers] == expected
    ends = [stream.read().split(b"\n\n")[-2] for stream in streams]
    assert ends.count(b"data: [DONE]") < len(ends)  # otherwise the killed replica was idle
    assert all(end == b"data: [DONE]" or b"not taking requests" in end for end in ends)
    for connection in connections:
        connection.close()
    wait_until(lambda: len(replicas() - {min(before)}) == 2)


class DyingReplica:
    """The handle of a replica that dies after some messages."""

    def __init__(self, *messages: Any) -> None:
        self._messages = messages

    def options(self, **_: object) -> DyingReplica:
        return self

    def remote(self, *_: object, **__: object) -> DyingReplica:
        self._left = iter(self._messages)
        return self

    def __aiter__(self) -> DyingReplica:
        return self

    async def __anext__(self) -> Any:
        for message in self._left:
            return message
        raise ray.exceptions.RayActorError

    def cancel(self) -> None:
        """As of Ray's responses."""


@pytest.mark.parametrize(
    ("path", "begin", "end"),
    [
        ("/v1/completions", b'data: {"error": {"message"', b"}\n\n"),
        ("/v1/messages", b'event: error\ndata: {"type": "error"', b"}\n\n"),
        ("/api/chat", b'{"error": "the server is not taking requests"', b"}\n"),
    ],
)
def test_errors_have_the_form_of_the_api(path: str, begin: bytes, end: bytes) -> None:
    """Of a replica that dies within a stream, and of replicas that cannot be reached."""
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def answer(replica: Any) -> Any:
        return await Front(replica, 2**20)(Request(scope, receive))

    async def parts() -> list[bytes]:
        response = await answer(DyingReplica((200, []), b"first"))
        return [part async for part in response.body_iterator]

    first, last = asyncio.run(parts())
    assert first == b"first"
    assert last.startswith(begin)
    assert last.endswith(end)
    unreached = asyncio.run(answer(DyingReplica()))
    assert unreached.status_code == 503
    assert unreached.body == last[last.index(b"{") :].strip()


def dying_once(killed: Path) -> type[Continue]:
    """A stage whose process is killed once, before its outputs are returned."""

    class Dying(Continue):
        def __call__(self, batch: Any) -> Any:
            found = Continue.__call__(self, batch)
            try:
                killed.touch(exist_ok=False)
            except FileExistsError:
                return found
            os.kill(os.getpid(), signal.SIGKILL)

    return Dying


def rows_by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)  # no duplicates
    return found


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_job_survives_a_killed_worker(
    kind: str,
    cluster: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every row occurs once, with the same output as without Ray."""
    rows = [{"id": f"q{i}", "index": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    rows.append({"id": "bad", "index": 12, "prompt": [99]})
    killed = tmp_path / "killed"
    monkeypatch.setattr(h2o_cpp.ray.data, "Continue", dying_once(killed))
    if kind == "jsonl":
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = ray.data.read_json(str(path), lines=True)
    else:
        ray.data.from_items(rows).write_parquet(str(tmp_path / "prompts"))
        dataset = ray.data.read_parquet(str(tmp_path / "prompts"))
    done = generate(
        dataset, LLAMA, index="index", seed=7, options=OPTIONS, concurrency=2, num_cpus=0.5,
        batch_size=3, **CACHE,
    )  # fmt: skip
    done.write_parquet(str(tmp_path / "out"))
    assert killed.exists()
    found = rows_by_id(ray.data.read_parquet(str(tmp_path / "out")).take_all())
    assert [found.pop(f"q{i}")["text"] for i in INDICES] == texts_without_ray(
        line_seed(7, i) for i in INDICES
    )
    bad = found.pop("bad")
    assert bad["text"] is None
    assert "token 99 is not in the vocabulary" in bad["error"]
    assert not found


def test_application_accepts_command_line_strings() -> None:
    application({"model": str(LLAMA), "num_replicas": "2", "hh": "0.2", "server": '{"name": "x"}'})
    with pytest.raises(ValueError, match="num_replicas"):
        application({"model": str(LLAMA), "num_replicas": "-2"})


def test_invalid_columns() -> None:
    stage = Continue(LLAMA, options=OPTIONS)
    table = pyarrow.table({"prompt": [[5]], "text": ["x"]})
    with pytest.raises(ValueError, match="'text' already"):
        stage(table)
    with pytest.raises(ValueError, match="no column 'prompt'"):
        stage(table.rename_columns(["question", "answer"]))
    with pytest.raises(ValueError, match="seed needs index"):
        Continue(LLAMA, seed=1)
    with pytest.raises(ValueError, match="seed needs index"):
        generate(None, LLAMA, seed=1)
    assert stage(table.select(["prompt"]).slice(1)).num_rows == 0
