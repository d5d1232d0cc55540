"""The window of examples/desktop, offscreen, matches Generator's text and cache.

H2O_SCREENSHOTS=DIR saves a screenshot to DIR.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.needs import needs
from support.scripted_chat import script

pytest.importorskip("PySide6.QtWidgets", exc_type=ImportError)  # also if Qt lacks a library

from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QColor
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QPushButton
from shiboken6 import isValid

from desktop import worker as worker_module
from desktop.token_strip import COLORS, tint
from desktop.window import Window
from support.desktop_window import (
    application,
    click,
    enter,
    error,
    idle,
    log,
    press,
    say,
    wait_until,
)

PROMPT = "It was a bright morning, and the old man went down to the sea with"
CACHE: dict[str, Any] = {"hh": 0.02, "n_batch": 128, "seed": 1}  # the window's options
Open = Callable[..., Window]


@pytest.fixture
def open_window(tiny_opt: Path) -> Iterator[Open]:
    """Opens windows and waits until they are idle; closes them after the test."""
    application()
    windows: list[Window] = []

    def open_one(model: Path = tiny_opt, n: int = 40) -> Window:
        window = Window(model, percent=2, max_tokens=n, seed=1)
        windows.append(window)
        window.show()
        idle(window)
        return window

    yield open_one
    for window in windows:
        window.close()
        # Otherwise, garbage collection could destroy widgets in another thread.
        window.deleteLater()
    QTest.qWait(1)
    assert not any(isValid(window) for window in windows)


def kept(generator: Generator) -> set[int]:
    stats = generator.stats()
    heads = [(i, j) for i in range(stats.n_layers) for j in range(stats.n_kv_heads)]
    return {int(position) for head in heads for position in generator.kept(*head)[0]}


def shown(window: Window, *roles: str) -> set[int]:
    strip = window.strip
    assert strip.look is not None
    return {i for i in range(len(strip.look.shares)) if strip.role(i) in roles}


def test_text_and_cache_equal_generator(open_window: Open, tiny_opt: Path) -> None:
    window = open_window(n=120)
    say(window, PROMPT)
    with Generator(tiny_opt, **CACHE) as generator:
        stream = generator.stream(PROMPT, max_tokens=120)
        expected = PROMPT + "".join(stream)
        stats, expected_kept = generator.stats(), kept(generator)
    n = stats.tokens_seen
    assert log(window) == expected
    assert shown(window, "heavy hitter", "recent") == expected_kept
    assert shown(window, "recent") == {*range(n - 20, n)}
    kept_of, memory = window.sizes.text().split("\n")
    assert kept_of == f"40 of {n} kept, {n - 40} evicted"
    assert memory.startswith(f"{stats.cache_bytes // 2**10} of 9504 KiB, ")
    assert memory.endswith(" tokens/s")


def test_messages_are_paragraphs_and_empty_message_continues(
    open_window: Open, tiny_opt: Path
) -> None:
    window = open_window()
    for message in (PROMPT, "The captain", ""):
        say(window, message)
    expected = ""
    with Generator(tiny_opt, **CACHE) as generator:
        after = None
        for prompt in (PROMPT, "\n\nThe captain", ""):
            stream = generator.stream(prompt, after=after, max_tokens=40)
            expected += prompt + "".join(stream)
            after = stream.save()
    assert log(window) == expected
    click(window.new_button)
    idle(window)
    assert log(window) == ""
    assert window.strip.look is None
    say(window, "")
    assert log(window) == error(window) == ""  # there is no text to continue


def test_budget_change_updates_cache_and_keeps_text(open_window: Open, tiny_opt: Path) -> None:
    window = open_window()
    say(window, PROMPT)
    before = log(window)
    look = window.strip.look
    assert look is not None
    n_seen = len(look.shares)
    window.slider.setFocus()
    press(window.slider, Qt.Key.Key_Left)
    assert window.slider.value() == 1  # percent
    wait_until(lambda: window.busy > 0)
    idle(window)
    with Generator(tiny_opt, **{**CACHE, "hh": 0.01}) as generator:
        generator.read(generator.tokenize(before))
        expected_kept = kept(generator)
        assert generator.stats().tokens_seen == n_seen + 1  # includes the last generated token
    assert shown(window, "heavy hitter", "recent") == expected_kept
    assert window.sizes.text().startswith(f"20 of {n_seen + 1} kept, ")
    assert log(window) == before
    say(window, "Then")
    assert log(window).startswith(f"{before}\n\nThen")
    window.slider.setValue(100)
    wait_until(lambda: window.busy > 0)
    idle(window)
    seen, of, *_ = window.sizes.text().replace(" of ", " ").split()
    assert seen == of
    assert ", 0 evicted\n9504 of 9504 KiB" in window.sizes.text()


def test_model_with_template_replies_to_messages(open_window: Open, tmp_path: Path) -> None:
    model = script(tmp_path, {"Hello": "Good day.", "And now?": "Farewell."})
    window = open_window(model)
    for message in ("Hello", "And now?"):
        say(window, message)
    assert log(window) == "Hello\nGood day.\nAnd now?\nFarewell."
    press(window.slider, Qt.Key.Key_Right)  # a new cache, the same conversation
    wait_until(lambda: window.busy > 0)
    idle(window)
    look = window.strip.look
    assert look is not None
    assert (look.stats.tokens_kept, look.n_recent) == (3, 2)  # 3 % of 128
    assert log(window).endswith("Farewell.")
    say(window, "Still there?")
    assert "Still there?" in log(window)


def test_errors_are_one_line_and_leave_text_unchanged(
    open_window: Open, tmp_path: Path, tiny_opt: Path
) -> None:
    window = open_window()
    say(window, PROMPT)
    before = log(window)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    for path in (bad, tmp_path / "none.gguf"):
        window.open(path)
        idle(window)
        assert path.name in error(window)
        assert "\n" not in error(window)
        assert window.model == tiny_opt
    long = "old man " * 2000
    window.message.setText(long)
    click(window.send_button)
    idle(window)
    assert "the prompt has" in error(window)
    assert window.message.text() == long  # kept for editing
    assert log(window) == before
    window.message.clear()
    say(window, "Then")
    assert error(window) == ""
    assert log(window).startswith(f"{before}\n\nThen")


class Gate:
    """Blocks the worker thread in `owner.name` until `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        function = getattr(owner, name)

        def gated(*args: Any, **options: Any) -> Any:
            self.entered.set()
            assert self.open.wait(60), "timed out"
            return function(*args, **options)

        monkeypatch.setattr(owner, name, gated)


def test_window_stays_responsive_while_opening_a_model(
    open_window: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = open_window()
    gate = Gate(monkeypatch, worker_module, "Generator")
    window.slider.setValue(1)
    wait_until(gate.entered.is_set)
    enter(window, "Meanwhile")  # not sent
    assert window.message.text() == "Meanwhile"
    assert not window.send_button.isEnabled()
    window.slider.setValue(5)  # queued
    wait_until(lambda: window.busy == 2)
    gate.open.set()
    idle(window)
    press(window.message, Qt.Key.Key_Return)
    idle(window)
    assert log(window).startswith("Meanwhile")
    assert window.strip.look is not None
    assert window.strip.look.n_recent == 51


@pytest.mark.parametrize("stop", ["Escape", "Stop", "New text"])
def test_reply_can_be_stopped(
    open_window: Open, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    window = open_window(n=1_000_000)
    gate = Gate(monkeypatch, worker_module.Worker, "look")
    enter(window, PROMPT)
    wait_until(lambda: gate.entered.is_set() and len(log(window)) > len(PROMPT))
    if stop == "Escape":
        press(window, Qt.Key.Key_Escape)
    else:
        click(window.stop_button if stop == "Stop" else window.new_button)
    gate.open.set()
    idle(window)
    text = log(window)
    assert error(window) == ""
    if stop == "New text":
        assert text == ""
        assert window.strip.look is None
    else:
        look = window.strip.look
        assert look is not None
        assert look.stats.tokens_seen < 40
    window.max_tokens = 5
    say(window, "Then")
    assert log(window).startswith(f"{text}\n\nThen" if text else "Then")


def count_threads() -> int:
    """Threads of this process, except those of Qt's pool, which live for half a minute."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            count += (task / "comm").read_text() != "Thread (pooled)\n"
    return count


def test_closing_during_generation_leaves_no_thread(open_window: Open) -> None:
    open_window().close()  # now Qt has started its persistent threads
    n_threads = count_threads()
    window = open_window(n=1_000_000)
    enter(window, PROMPT)
    wait_until(lambda: len(log(window)) > len(PROMPT))
    window.close()
    assert not any(thread.name == "worker" for thread in threading.enumerate())
    wait_until(lambda: count_threads() <= n_threads)
    application().processEvents()  # pending signals


def test_closing_while_opening_a_model(open_window: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    window = open_window()
    gate = Gate(monkeypatch, worker_module, "Generator")
    window.slider.setValue(1)
    wait_until(gate.entered.is_set)
    threading.Timer(0.05, gate.open.set).start()
    window.close()
    assert not any(thread.name == "worker" for thread in threading.enumerate())


def test_keyboard_and_mouse_select_tokens(open_window: Open) -> None:
    window = open_window()
    say(window, PROMPT)
    strip, detail = window.strip, window.detail
    strip.setFocus()
    end = len(shown(window, "heavy hitter", "recent", "evicted")) - 1
    for key, modifier, position in (
        (Qt.Key.Key_Right, Qt.KeyboardModifier.NoModifier, 0),
        (Qt.Key.Key_End, Qt.KeyboardModifier.ControlModifier, end),
        (Qt.Key.Key_Home, Qt.KeyboardModifier.ControlModifier, 0),
    ):
        QTest.keyClick(strip, key, modifier)
        assert detail.text().startswith(f"Position {position} · ")
    cursor = strip.token(2)
    cursor.setPosition(cursor.selectionStart() + 1)
    place = strip.cursorRect(cursor).center()
    QTest.mouseClick(strip.viewport(), Qt.MouseButton.LeftButton, pos=place)
    assert detail.text().startswith('Position 2 · " was" · ')


@pytest.mark.parametrize("size", [(640, 480), (1100, 720)], ids=["small", "wide"])
def test_widgets_fit_in_window(open_window: Open, size: tuple[int, int]) -> None:
    window = open_window()
    window.resize(*size)
    application().processEvents()
    assert (window.width(), window.height()) == size
    for button in window.findChildren(QPushButton):
        corner = button.mapTo(window, QPoint(0, 0))
        assert button.width() >= button.minimumSizeHint().width(), button.text()
        assert corner.x() >= 0
        assert corner.x() + button.width() <= size[0], button.text()
        assert corner.y() + button.height() <= size[1], button.text()
    assert window.strip.horizontalScrollBar().maximum() == 0


def luminance(color: QColor) -> float:
    """Relative luminance, as in WCAG 2.2."""
    parts: list[float] = [color.redF(), color.greenF(), color.blueF()]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: QColor, other: QColor) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("role", COLORS)
@pytest.mark.parametrize(("text", "page"), [("black", "#ffffff"), ("white", "#1e1e1e")])
def test_text_contrast(role: str, text: str, page: str) -> None:
    """WCAG 2.2, level AA, on light and on dark desktops."""
    shade = tint(role, 1)
    opaque = QColor(shade.rgb())
    assert contrast(QColor(text), over(opaque, shade.alphaF(), QColor(page))) >= 4.5


def over(color: QColor, share: float, below: QColor) -> QColor:
    """The color `color` with opacity `share` over `below`."""

    def mix(a: float, b: float) -> float:
        return share * a + (1 - share) * b

    return QColor.fromRgbF(
        mix(color.redF(), below.redF()),
        mix(color.greenF(), below.greenF()),
        mix(color.blueF(), below.blueF()),
    )


@needs("a directory for screenshots (H2O_SCREENSHOTS)", "H2O_SCREENSHOTS" in os.environ)
def test_screenshot(open_window: Open) -> None:
    window = open_window(n=150)
    window.resize(1100, 720)
    for message in (PROMPT, "The captain looked at him, and"):
        say(window, message)
    window.grab().save(str(Path(os.environ["H2O_SCREENSHOTS"]) / "desktop.png"))
