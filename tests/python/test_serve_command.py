"""h2o-cpp serve in a subprocess: startup and shutdown."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from support.background import PATIENCE
from support.needs import packages
from support.server_process import start_server
from support.serving import FOREVER, Server, events, wait_until

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
ENDLESS: dict[str, Any] = {"prompt": [5, 6], **FOREVER}
SHORT: dict[str, Any] = {"prompt": [7, 8], "max_tokens": 200, "seed": 1, "ignore_eos": True}


COMMAND = (sys.executable, "-m", "h2o_cpp", "serve", str(LLAMA), "--port", "0", "-t", "1")


@contextmanager
def running_server(*options: str) -> Iterator[tuple[subprocess.Popen[str], Server]]:
    """The process and its server."""
    process = subprocess.Popen(
        [*COMMAND, "--hh", "12", "--max-tokens", "1000000000", *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        while (found := re.search(r":(\d+) \(Press", process.stderr.readline())) is None:
            assert process.poll() is None, "the server has exited"
        yield process, Server(None, int(found[1]))
    finally:
        process.kill()
        process.communicate()


def run_failing(*options: str, status: int = 1) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == status
    assert "Traceback" not in result.stderr
    return result


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_shutdown_waits_for_generations(stop: signal.Signals) -> None:
    body = {**ENDLESS, "model": "other", "max_tokens": 5000, "stream": True}
    with running_server("--name", "other") as (process, server):
        connection = server.begin(body)
        response = connection.getresponse()
        first = response.readline()
        process.send_signal(stop)
        chunks = events(first + response.read())
        assert chunks[-1] == "[DONE]"
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        connection.close()
        assert process.wait(PATIENCE) == (0 if stop == signal.SIGINT else -stop)


def test_draining_server_still_answers() -> None:
    """/ready tells load balancers to send requests elsewhere."""
    with running_server("--drain", "60") as (process, server):
        assert server.ask("/ready").status == 200
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.ask("/ready").status == 503)
        assert server.ask("/health").status == 200
        assert server.ask("/v1/completions", SHORT).status == 200


def test_rolling_restart_under_load_loses_nothing() -> None:
    """Two servers are replaced one after the other, while clients use those that are ready."""
    known: list[Server] = []
    ready: list[Server] = []
    served: Counter[int] = Counter()
    wrong: list[object] = []
    ends = threading.Event()

    def watch() -> None:  # as a load balancer does
        while not ends.is_set():
            ready[:] = [server for server in known if is_ready(server)]
            ends.wait(0.05)

    def is_ready(server: Server) -> bool:
        try:
            return server.ask("/ready").status == 200
        except OSError:
            return False

    def use(stream: bool) -> None:
        for i in count():
            if ends.is_set():
                return
            targets = [*ready]
            server = targets[i % len(targets)]
            try:
                answer = server.ask("/v1/completions", {**SHORT, "stream": stream})
                last = events(answer.body)[-2] if stream else answer.json()
                right = last["choices"][0]["finish_reason"] == "length"
            except (OSError, HTTPException, LookupError, ValueError) as error:
                right, last = False, error
            served[server.port] += 1
            if not right:
                wrong.append(last)

    with ExitStack() as running:
        processes = []
        for _ in range(2):
            process, server = running.enter_context(running_server("--drain", "3"))
            processes.append(process)
            known.append(server)
        wait_until(lambda: all(map(is_ready, known)))
        ready[:] = known
        threads = [threading.Thread(target=watch)]
        threads += [threading.Thread(target=use, args=[i % 2 == 0]) for i in range(4)]
        for thread in threads:
            thread.start()
        try:
            for old in processes:
                _, server = running.enter_context(running_server("--drain", "3"))
                known.append(server)
                wait_until(lambda: known[-1] in ready)
                old.send_signal(signal.SIGTERM)
                assert old.wait(PATIENCE) == -signal.SIGTERM
            wait_until(lambda: all(served[server.port] > 5 for server in known))
        finally:
            ends.set()
            for thread in threads:
                thread.join(PATIENCE)
    assert wrong == []


def test_server_ends_while_a_thread_does_not() -> None:
    """Python waits for this thread; without a watchdog, for ever."""
    script = (
        "import sys, threading, time; from h2o_cpp.cli import main; "
        "threading.Thread(target=time.sleep, args=[1e6]).start(); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, *COMMAND[3:], "--grace", "0"]
    process, _ = start_server(command)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 1


@packages("llguidance")
def test_server_ends_while_everything_is_busy() -> None:
    """Endless outputs, grammars and templates, long prompts, and clients that stall."""
    grammar = 'start: /a+/ /a+/ "x"\n'
    busy: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**ENDLESS, "stream": True}),
        ("/v1/completions", ENDLESS),
        *(("/v1/completions", {**ENDLESS, "grammar": f"{grammar}// {i}\n"}) for i in range(3)),
        ("/v1/completions", {**ENDLESS, "guided_regex": "a?b*" * 20000}),
        ("/v1/completions", {**ENDLESS, "prompt": "A ship " * 500_000}),
        ("/v1/embeddings", {"input": ["A ship"] * 2000}),
        ("/api/generate", {"model": "model", "prompt": "A", "options": {"num_predict": 10**8}}),
    ]
    with running_server("--grace", "0") as (process, server):
        connections = [server.begin(body, path) for path, body in busy]
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
        wait_until(lambda: server.metric("h2o_sequences_active") > 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) in (-signal.SIGTERM, 1)  # 1: by the watchdog
        half.close()
        for connection in connections:
            connection.close()


def test_shutdown_cuts_generations_after_grace() -> None:
    with running_server("--grace", "1") as (process, server):
        connections = [server.begin({**ENDLESS, "stream": stream}) for stream in (True, False)]
        response = connections[0].getresponse()
        first = response.readline()
        states = ("h2o_sequences_active", "h2o_requests_waiting")
        wait_until(lambda: sum(map(server.metric, states)) == 2)
        process.send_signal(signal.SIGTERM)
        *_, last = events(first + response.read())
        assert last["error"]["code"] == "unavailable"
        assert connections[1].getresponse().status == 503
        for connection in connections:
            connection.close()
        assert process.wait(PATIENCE) == -signal.SIGTERM
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("options", "template"),
    [
        ([], "none, so chats are refused; --template NAME has one"),
        (["--template", "chatml"], "chatml"),
        (["--template", "{{ messages[0].content }}", "--max-tokens", "40"], "given"),
    ],
)
def test_startup_summary(options: list[str], template: str) -> None:
    with running_server("--max-sequences", "3", *options) as (process, server):
        assert process.stderr is not None
        lines = [process.stderr.readline().strip() for _ in range(7)]
        summary = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
        limits = server.ask("/v1/models").json()["data"][0]["h2o"]
    assert summary["model"].startswith(f"{LLAMA}, on cpu")
    past = {True: f"prompts and outputs of {10**9} tokens go past"}
    past[False] = "prompts go past, and outputs if --max-tokens is larger"
    assert summary["context"] == f"{limits['n_ctx']} tokens, which {past[limits['endless']]}"
    assert limits["endless"] == ("--max-tokens" not in options)
    assert summary["sequences"] == "3 at once"
    one, full = (limits[key] / 2**20 for key in ("cache_bytes", "full_cache_bytes"))
    assert summary["cache"] == (f"{one:.2f} MiB for each (full: {full:.2f} MiB)")
    assert summary["chat template"] == template
    assert summary["page"] == f"http://127.0.0.1:{server.port}"
    assert summary["API"] == f"http://127.0.0.1:{server.port}/v1"


def test_hosts_origins_and_limits() -> None:
    options = ["--allowed-host", "h2o.example.org", "--cors-origin", "https://a.org"]
    options += ["--cors-origin", "https://b.org", "--body-timeout", "1", "--max-body", "1KiB"]
    with running_server(*options) as (_, server):
        for host, status in (("h2o.example.org", 200), ("other.example.org", 403)):
            assert server.ask("/health", Host=host).status == status
        answer = server.ask("/health", Origin="https://b.org")
        assert answer.headers["Access-Control-Allow-Origin"] == "https://b.org"
        assert server.ask("/v1/completions", b" " * 1025).status == 413
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
            assert slow.recv(65536).startswith(b"HTTP/1.1 408")


def test_defaults_of_requests() -> None:
    """Sampling options and variables of the chat template, as llama-server takes them."""
    options = ["--temp", "0", "--seed", "7", "--logit-bias", "5-100"]
    options += ["--template", "{{ tone }}", "--chat-template-kwargs", '{"tone": "kind"}']
    with running_server(*options) as (_, server):
        params = server.ask("/props").json()["default_generation_settings"]["params"]
        assert (params["temperature"], params["seed"], params["top_k"]) == (0, 7, 40)
        assert params["logit_bias"] == [{"token": 5, "bias": -100}]
        messages = {"messages": [{"role": "user", "content": "a"}]}
        assert server.ask("/apply-template", messages).json()["prompt"].endswith("kind")


def test_port_in_use() -> None:
    with running_server() as (_, server):
        result = run_failing("--port", str(server.port))
        assert "in use" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-body", "much"], "--max-body 'much', expected bytes or a size"),
        (["--port", "65536"], "--port 65536, expected an integer, 0 to 65535"),
        (["--tls-cert", ""], "--tls-cert is empty, expected a file"),
        (["--tls-cert", __file__], f"--tls-cert {__file__!r}, expected a certificate and its key"),
        (["--temp", "-1"], "--temp is -1, expected 0 (greedy) or more"),
        (["--max-models", "2"], "--max-models 2 needs --models, a list of models"),
    ],
)
def test_invalid_options(options: list[str], message: str) -> None:
    assert run_failing(*options, status=2).stderr.startswith(f"error: {message}")
