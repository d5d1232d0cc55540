"""The window of examples/desktop on an X server, with real mouse and key events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from h2o_cpp import Generator
from support import desktop_window  # noqa: F401 - skips where Qt does not work
from support.background import PATIENCE
from support.needs import programs

HERE = Path(__file__).parent
PROMPT = "It was a bright morning, and the old man went down to the sea with"
CACHE: dict[str, Any] = {"hh": 0.02, "n_batch": 128, "seed": 1}  # the window's options

pytestmark = programs("Xvfb", "xdotool")


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    """The display name of an X server."""
    reading, writing = os.pipe()
    command = ["Xvfb", "-r", "-displayfd", str(writing), "-screen", "0", "1200x800x24"]
    with subprocess.Popen(
        [*command, "-nolisten", "tcp"], pass_fds=[writing], stderr=subprocess.DEVNULL
    ) as server:
        os.close(writing)
        with os.fdopen(reading) as pipe:
            number = pipe.readline().strip()
        assert number, "Xvfb does not start"
        yield f":{number}"
        server.terminate()


class Screen:
    """A window on the X server, operated with xdotool."""

    def __init__(self, display: str, model: Path, *options: str) -> None:
        paths = [str(HERE), str(HERE.parents[1] / "examples"), *sys.path]
        self._environment = {
            **os.environ,
            "DISPLAY": display,
            "QT_QPA_PLATFORM": "xcb",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        self.process = subprocess.Popen(
            [sys.executable, HERE / "support" / "desktop_process.py", model, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        self.state: dict[str, Any] = {}  # what is visible

    def begin(self) -> None:
        """Wait until the model is open."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()  # Qt may lack an X library
        self.state = json.loads(line)
        self.xdotool("windowfocus", "--sync", self.state["window"])

    def next_line(self, key: str) -> Any:
        """The next line of output that has this key."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if key in (message := json.loads(line)):
                return message
        raise AssertionError("the window has exited")

    def xdotool(self, *arguments: object) -> None:
        subprocess.run(
            ["xdotool", *map(str, arguments)], env=self._environment, check=True, timeout=PATIENCE
        )

    def click(self, name: str) -> None:
        self.xdotool("mousemove", "--sync", *self.state["at"][name], "click", 1)

    def type(self, text: str) -> None:
        self.xdotool("type", "--delay", 2, text)

    def done(self) -> dict[str, Any]:
        """Wait until the worker is done; returns the visible state."""
        self.state = self.next_line("at")
        return dict(self.state)


@contextmanager
def opened(display: str, model: Path, *options: str) -> Iterator[Screen]:
    screen = Screen(display, model, *options)
    with screen.process:
        timeout = Timer(PATIENCE, screen.process.kill)
        timeout.start()
        try:
            screen.begin()
            yield screen
        finally:
            timeout.cancel()
            screen.process.kill()


def test_generate_with_keyboard_and_mouse(display: str, tiny_opt: Path) -> None:
    with Generator(tiny_opt, **CACHE) as generator:
        expected = [PROMPT + generator.generate(PROMPT, max_tokens=40).text for _ in range(2)]
        n = generator.stats().tokens_seen
    with opened(display, tiny_opt) as screen:
        screen.click("message")
        screen.type(PROMPT)
        screen.xdotool("key", "Return")
        seen = screen.done()
        assert seen["text"] == expected[0]
        assert seen["kept"].startswith(f"40 of {n} kept, ")
        screen.click("new")
        assert screen.done()["text"] == ""
        screen.click("message")
        screen.type(PROMPT)
        screen.click("send")
        assert screen.done()["text"] == expected[1]
        screen.click("slider")
        screen.xdotool("key", "Home")  # 1 %
        while not (seen := screen.done())["kept"].startswith("20 of "):
            pass
        screen.click("strip")
        screen.xdotool("key", "ctrl+Home")
        while not screen.next_line("pointed")["pointed"].startswith("Position 0 · "):
            pass
        screen.xdotool("key", "--repeat", 5, "Right")  # to the next token
        while not screen.next_line("pointed")["pointed"].startswith("Position 1 · "):
            pass


def test_escape_stops_and_close_during_generation_is_clean(display: str, tiny_opt: Path) -> None:
    with opened(display, tiny_opt, "slow") as screen:
        screen.click("message")
        screen.type(PROMPT)
        screen.xdotool("key", "Return")
        assert screen.next_line("wrote")
        screen.xdotool("key", "Escape")
        stopped = screen.done()
        assert stopped["text"].startswith(PROMPT)
        assert stopped["error"] == ""  # stopped before the context was full
        screen.type("Then")
        screen.xdotool("key", "Return")
        assert screen.next_line("wrote")
        screen.xdotool("key", "ctrl+q")
        assert "worker" not in screen.next_line("threads")["threads"]
        assert screen.process.wait(PATIENCE) == 0
        assert screen.process.stderr is not None
        assert screen.process.stderr.read() == ""
