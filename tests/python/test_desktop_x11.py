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
CACHE: dict[str, Any] = {"hh": 0.02, "n_batch": 128, "seed": 1}  # as the window has it

pytestmark = programs("Xvfb", "xdotool")


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    """An X server, by its name."""
    reading, writing = os.pipe()
    command = ["Xvfb", "-displayfd", str(writing), "-screen", "0", "1200x800x24"]
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
    """A window on the X server, and the hands of somebody who uses it."""

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
        self.state: dict[str, Any] = {}  # what there is to see

    def begin(self) -> None:
        """Wait until the model is open."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()  # Qt may lack a library of X
        self.state = json.loads(line)
        self.hands("windowfocus", "--sync", self.state["window"])

    def heard(self, key: str) -> Any:
        """The next line that has this key."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if key in (said := json.loads(line)):
                return said
        raise AssertionError("the window is gone")

    def hands(self, *arguments: object) -> None:
        subprocess.run(
            ["xdotool", *map(str, arguments)], env=self._environment, check=True, timeout=PATIENCE
        )

    def click(self, name: str) -> None:
        self.hands("mousemove", "--sync", *self.state["at"][name], "click", 1)

    def type(self, text: str) -> None:
        self.hands("type", "--delay", 2, text)

    def done(self) -> dict[str, Any]:
        """What there is to see when the worker is done."""
        self.state = self.heard("at")
        return dict(self.state)


@contextmanager
def opened(display: str, model: Path, *options: str) -> Iterator[Screen]:
    screen = Screen(display, model, *options)
    with screen.process:
        stuck = Timer(PATIENCE, screen.process.kill)
        stuck.start()
        try:
            screen.begin()
            yield screen
        finally:
            stuck.cancel()
            screen.process.kill()


def test_a_text_by_keys_and_another_by_mouse(display: str, tiny_opt: Path) -> None:
    with Generator(tiny_opt, **CACHE) as alone:
        expected = [PROMPT + alone.generate(PROMPT, max_tokens=40).text for _ in range(2)]
        n = alone.stats().tokens_seen
    with opened(display, tiny_opt) as screen:
        screen.click("message")
        screen.type(PROMPT)
        screen.hands("key", "Return")
        seen = screen.done()
        assert seen["text"] == expected[0]
        assert seen["kept"] == f"40 of {n}"
        screen.click("new")
        assert screen.done()["text"] == ""
        screen.click("message")
        screen.type(PROMPT)
        screen.click("send")
        assert screen.done()["text"] == expected[1]
        screen.click("slider")
        screen.hands("key", "Home")  # 1 %
        while not (seen := screen.done())["kept"].startswith("20 of "):
            pass
        screen.click("strip")
        screen.hands("key", "Home")
        while not screen.heard("pointed")["pointed"].startswith("Position 0 · "):
            pass
        screen.hands("key", "Right")
        while not screen.heard("pointed")["pointed"].startswith("Position 1 · "):
            pass


def test_escape_stops_and_closing_in_the_middle_is_clean(display: str, tiny_opt: Path) -> None:
    with opened(display, tiny_opt, "slow") as screen:
        screen.click("message")
        screen.type(PROMPT)
        screen.hands("key", "Return")
        assert screen.heard("wrote")
        screen.hands("key", "Escape")
        stopped = screen.done()
        assert stopped["text"].startswith(PROMPT)
        assert stopped["error"] == ""  # the end of the context would be one
        screen.type("Then")
        screen.hands("key", "Return")
        assert screen.heard("wrote")
        screen.hands("key", "ctrl+q")
        assert "worker" not in screen.heard("threads")["threads"]
        assert screen.process.wait(PATIENCE) == 0
        assert screen.process.stderr is not None
        assert screen.process.stderr.read() == ""
