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
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.jobs import line_seed
from support.background import PATIENCE
from support.pages import run
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
NODE = {"num_cpus": 3, "object_store_memory": 80 * 2**20, "include_dashboard": False}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, each with CPUs for a replica, an actor of a job, and a reader or writer."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        cluster.add_node(**NODE)
        ray.init(cluster.address, log_to_driver=False)
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def port(cluster: Any) -> Iterator[int]:
    """The port of a server with two replicas, one on each node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"port": number})
    server = {"name": "tiny", "max_tokens": 10**6}
    serve.run(deployment(LLAMA, num_replicas=2, server=server, grace=5, **CACHE))
    yield number
    serve.shutdown()


def texts_without_ray(seeds: Iterable[int | None]) -> list[str]:
    """Outputs for PROMPTS without Ray."""
    with Generator(LLAMA, threads=1, **CACHE) as generator:
        return [
            generator.generate(prompt, seed=seed, **OPTIONS).text
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


def read_text(port: int, i: int, *, stream: bool = False, app: str = "") -> str:
    """An application's output for PROMPTS[i]."""
    body = {"prompt": PROMPTS[i], "seed": i, "stream": stream, **OPTIONS}
    status, answer = ask(port, body, f"{app}/v1/completions")
    assert status == 200, answer
    if not stream:
        text: str = json.loads(answer)["choices"][0]["text"]
        return text
    *chunks, done, end = answer.decode().replace(": ping\n\n", "").split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    pieces = [json.loads(chunk.removeprefix("data: "))["choices"] for chunk in chunks]
    return "".join(choice["text"] for [choice] in pieces)


def replicas(app: str = "default") -> set[str]:
    """Names of the actors that have loaded the model of an application."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if f"{app}#Model#" in actor["name"]}


def node_of(replica: Any) -> str:
    """The id of a replica's node."""
    node = replica.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
    found: str = ray.get(node)
    return found


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
    status, _ = ask(port, {"prompt": "x" * 9 * 2**20})
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


def test_prompts_that_begin_alike_share_a_replica(port: int, tiny_opt: Path) -> None:
    """Each of several long beginnings is reused from the second request on."""
    app = deployment(tiny_opt, num_replicas=2, n_batch=32, grace=1)
    serve.run(app, name="prompts", route_prefix="/prompts")
    cached = []
    for i in range(3):
        for name in "abcdef":
            body = {"prompt": f"{name} " + "Hi " * 200 + f"{i}", "max_tokens": 1, "temperature": 0}
            status, answer = ask(port, body, "/prompts/v1/completions")
            assert status == 200, answer
            cached.append(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])
    serve.delete("prompts")
    assert not any(cached[:6])
    assert all(cached[6:])


def test_conversation_key_is_its_first_messages() -> None:
    system, first = {"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}
    turns = [[system, first], [system, first, {"role": "assistant", "content": "A"}, first]]
    keys = {
        beginning_of(json.dumps({"messages": m, "seed": i}).encode()) for i, m in enumerate(turns)
    }
    assert len(keys) == 1
    assert keys != {beginning_of(json.dumps({"messages": [first]}).encode())}
    prompts: list[tuple[Any, Any]] = [("x" * 512, "y"), ([7] * 128, [8])]
    for long, more in prompts:
        found = [
            beginning_of(json.dumps({"prompt": prompt}).encode())
            for prompt in (long, long + more, long[1:])
        ]
        assert found[0] == found[1] != ""
        assert found[2] == ""  # too short to reuse
    for body in (b"", b"{", b"[]", b'{"prompt": "a"}', b'{"messages": 5}', b'{"messages": [5]}'):
        assert beginning_of(body) == ""


def last_event(connection: HTTPConnection, begun: set[HTTPConnection]) -> bytes:
    """The last event of a stream with a piece or an error; adds it to `begun` at the first one."""
    last = b""
    with suppress(HTTPException, OSError):
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                last = line
                begun.add(connection)
    return last


@pytest.mark.parametrize("killed", ["replica", "node"])
def test_killed_process_loses_no_request(killed: str, cluster: Any, port: int) -> None:
    """The other replica takes over all requests but the stream that has begun.

    Endless streams occupy both replicas, so all other requests wait, however busy the machine is.
    """
    server = {"max_tokens": 10**6}
    app = deployment(LLAMA, num_replicas=2, server=server, max_sequences=1, grace=1, **CACHE)
    serve.run(app, name="busy", route_prefix="/busy")
    actors = [ray.get_actor(name, namespace="serve") for name in replicas("busy")]
    head = ray.get_runtime_context().get_node_id()
    [victim] = [actor for actor in actors if node_of(actor) != head]

    def n_ongoing() -> list[int]:
        found: list[int] = ray.get([one.get_num_ongoing_requests.remote() for one in actors])
        return found

    endless = {**LONG, "max_tokens": 10**6}
    connections = [begin(port, endless, "/busy/v1/completions") for _ in range(8)]
    begun: set[HTTPConnection] = set()
    with ThreadPoolExecutor(len(connections) + len(PROMPTS)) as threads:
        streams = [threads.submit(last_event, one, begun) for one in connections]
        wait_until(lambda: len(begun) == len(actors) and sum(n_ongoing()) == len(streams))
        before = n_ongoing()
        answers = [
            threads.submit(read_text, port, i, stream=i % 2 == 0, app="/busy") for i in INDICES
        ]
        wait_until(lambda: all(now > was for now, was in zip(n_ongoing(), before, strict=True)))
        if killed == "replica":
            ray.kill(victim)
        else:
            cluster.remove_node(*cluster.worker_nodes, allow_graceful=False)
        wait_until(lambda: any(stream.done() for stream in streams))
        for connection in connections:
            connection.sock.shutdown(socket.SHUT_RDWR)
        assert [b"not taking requests" in stream.result() for stream in streams].count(True) == 1
        assert [answer.result(PATIENCE) for answer in answers] == texts_without_ray(INDICES)
    for connection in connections:
        connection.close()
    serve.delete("busy")
    if killed == "node":
        cluster.add_node(**NODE)
    wait_until(lambda: len(replicas()) == 2)


class DyingReplica:
    """The handle of a replica that dies after some messages."""

    def __init__(self, *messages: Any, then: Any = None) -> None:
        """then: another replica, for the next attempt."""
        self._messages = messages
        self._then = then

    def options(self, **_: object) -> DyingReplica:
        return self

    def remote(self, *_: object, **__: object) -> DyingReplica:
        self._left = iter(self._messages)
        if self._then is not None:
            self._messages, self._then = self._then, None
        return self

    def __aiter__(self) -> DyingReplica:
        return self

    async def __anext__(self) -> Any:
        for message in self._left:
            return message
        raise ray.exceptions.RayActorError

    def cancel(self) -> None:
        """Stands for Ray's responses."""


@pytest.mark.parametrize(
    ("path", "begin", "end"),
    [
        ("/v1/completions", b'data: {"error": {"message"', b"}\n\n"),
        ("/v1/messages", b'event: error\ndata: {"type": "error"', b"}\n\n"),
        ("/api/chat", b'{"error": "the server is not taking requests"', b"}\n"),
    ],
)
def test_errors_have_the_form_of_the_api(path: str, begin: bytes, end: bytes) -> None:
    """The errors of a replica that dies within a stream, and of replicas that cannot be reached."""
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


PINGS = {
    "/v1/completions": b": ping\n\n" * 2,
    "/v1/chat/completions": b'data: {"id":"c","choices":[],"prompt_progress":{"total":9}}\n\n',
    "/v1/messages": b'event: ping\ndata: {"type": "ping"}\n\n',
    "/api/chat": b'{"model":"m","done":false,"message":{"role":"assistant","content":""}}\n',
    "/api/generate": b'{"model":"m","done":false,"response":""}\n',
}


@pytest.mark.parametrize("path", PINGS)
def test_waiting_streams_move_to_another_replica(path: str) -> None:
    """A replica that dies after pings has lost nothing that its client has seen."""
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    ping = PINGS[path]
    head: tuple[int, list[Any]] = (200, [])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def parts(replica: Any) -> list[bytes]:
        response: Any = await Front(replica, 2**20)(Request(scope, receive))
        return [part async for part in response.body_iterator]

    *got, error = asyncio.run(parts(DyingReplica(head, ping, then=[head, ping, b"text"])))
    assert got == [ping, ping, b"text"]
    assert b"error" in error  # the second one dies within its text
    refused = (503, [(b"retry-after", b"1")])
    *got, error = asyncio.run(parts(DyingReplica(head, ping, then=[refused, b"{}"])))
    assert got == [ping]
    assert b"error" in error


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
    cluster: Any,
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


@pytest.mark.usefixtures("cluster")
def test_page(tmp_path: Path) -> None:
    """Its code runs, with fewer processes."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The sea"}\n{"prompt": "It was"}\n')
    words = {"num_replicas=4, num_cpus=8": "num_replicas=1, num_cpus=1"}
    words |= {"concurrency=4, num_cpus=8": "concurrency=1, num_cpus=1"}
    words |= {'"model.gguf"': repr(str(BUNDLED_MODEL)), "prompts.jsonl": str(prompts)}
    run("docs/ray.md", {}, words | {'"outputs"': repr(str(tmp_path / "outputs"))})
    assert ray.data.read_parquet(str(tmp_path / "outputs")).count() == 2
