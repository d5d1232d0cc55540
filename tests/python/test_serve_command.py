"""h2o-cpp serve, in a process of its own: how it begins and how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.background import PATIENCE
from support.serving import FOREVER, Server, events

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
ENDLESS: dict[str, Any] = {"prompt": [5, 6], **FOREVER}


COMMAND = (sys.executable, "-m", "h2o_cpp", "serve", str(LLAMA), "--port", "0", "-t", "1")


@contextmanager
def listening(*options: str) -> Iterator[tuple[subprocess.Popen[str], Server]]:
    """The process, and where it listens."""
    process = subprocess.Popen(
        [*COMMAND, "--hh", "12", "--max-tokens", "1000000000", *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        while (found := re.search(r":(\d+) \(Press", process.stderr.readline())) is None:
            assert process.poll() is None, "it has ended"
        yield process, Server(None, int(found[1]))
    finally:
        process.kill()
        process.communicate()


def fails(*options: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_texts_may_end(stop: signal.Signals) -> None:
    body = {**ENDLESS, "model": "other", "max_tokens": 5000, "stream": True}
    with listening("--name", "other") as (process, server):
        connection = server.begin(body)
        response = connection.getresponse()
        first = response.readline()
        process.send_signal(stop)
        chunks = events(first + response.read())
        assert chunks[-1] == "[DONE]"
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        connection.close()
        assert process.wait(PATIENCE) == (0 if stop == signal.SIGINT else -stop)


def test_texts_that_do_not_end_are_cut() -> None:
    with listening("--grace", "1") as (process, server):
        connections = [server.begin({**ENDLESS, "stream": stream}) for stream in (True, False)]
        response = connections[0].getresponse()
        first = response.readline()
        process.send_signal(signal.SIGTERM)
        *_, last = events(first + response.read())
        assert last["error"]["code"] == "unavailable"
        assert connections[1].getresponse().status == 503
        for connection in connections:
            connection.close()
        assert process.wait(PATIENCE) == -signal.SIGTERM
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_port_that_is_taken() -> None:
    with listening() as (_, server):
        done = fails("--port", str(server.port))
        assert "in use" in done.stderr


@pytest.mark.parametrize("options", [["--max-body", "much"], ["--port", "65536"]])
def test_options_that_make_no_sense(options: list[str]) -> None:
    assert fails(*options).stderr.startswith("error: ")
