"""Using the window of examples/desktop by keyboard and mouse."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import pytest

from support.background import PATIENCE

pytest.importorskip(
    "PySide6.QtWidgets", exc_type=ImportError
)  # or a library that Qt needs is missing

import PySide6
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QWidget

from desktop.window import Window

if PySide6.__version__ == "6.12.0" and sys.version_info < (3, 12):
    pytest.skip("PySide6 6.12.0 takes None away from Pythons before 3.12", allow_module_level=True)


def application() -> QApplication:
    """The process's application, offscreen unless the environment names a platform."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    found = QApplication.instance()
    if not isinstance(found, QApplication):
        found = QApplication(["h2o.cpp"])
        found.setStyle("Fusion")
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Run Qt's event loop until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "stuck"
        QTest.qWait(2)


def idle(window: Window) -> None:
    """Wait until the worker is idle."""
    wait_until(lambda: window.busy == 0)


def press(widget: QWidget, key: Qt.Key) -> None:
    QTest.keyClick(widget, key)


def click(widget: QWidget) -> None:
    QTest.mouseClick(widget, Qt.MouseButton.LeftButton)


def enter(window: Window, text: str) -> None:
    """Type a message and send it."""
    QTest.keyClicks(window.text.message, text)
    press(window.text.message, Qt.Key.Key_Return)


def say(window: Window, text: str) -> None:
    """Send a message and wait for the reply."""
    enter(window, text)
    idle(window)


def log(window: Window) -> str:
    return str(window.text.log.toPlainText())


def error(window: Window) -> str:
    return window.text.error.text() if window.text.error.isVisible() else ""
