"""The window of examples/desktop in a subprocess: desktop_process.py MODEL [slow]

Shows the window as `python -m desktop` does. After each task of the worker and on closing, prints
what is visible, and where on the screen, as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from PySide6.QtWidgets import QApplication, QWidget

from desktop import worker
from desktop.look import Looks
from desktop.window import Window


def state(window: Window) -> dict[str, Any]:
    text, cache = window.text, window.cache
    parts = {
        "message": text.message,
        "send": text.send_button,
        "stop": text.stop_button,
        "new": text.new_button,
        "slider": cache.slider,
        "strip": cache.strip,
    }
    return {
        "window": int(window.winId()),
        "text": text.log.toPlainText(),
        "error": text.error.text(),
        "kept": cache.kept.text(),
        "at": {name: place(part) for name, part in parts.items()},
    }


def place(widget: QWidget) -> tuple[int, int]:
    """The centre of a widget on the screen."""
    middle = widget.mapToGlobal(widget.rect().center())
    return middle.x(), middle.y()


def slow_down() -> None:
    """Make a reply take half a minute unless it is stopped."""
    take = Looks.take

    def slow_take(*arguments: Any) -> Any:
        time.sleep(0.015)
        return take(*arguments)

    worker._SAY_SECONDS = worker._LOOK_SECONDS = 0.0
    Looks.take = slow_take  # type: ignore[assignment, method-assign]


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> int:
    app = QApplication(["h2o.cpp"])
    app.setStyle("Fusion")
    window = Window([Path(sys.argv[1])], budget=0.02, seed=1)
    window.text.most_tokens.setValue(40)
    if "slow" in sys.argv[2:]:
        window.text.most_tokens.setValue(1_000_000)
        slow_down()
    window.worker.done.connect(lambda: say(state(window)))
    window.worker.wrote.connect(lambda piece: say({"wrote": piece}))
    window.cache.strip.pointed.connect(lambda detail: say({"pointed": detail}) if detail else None)
    window.show()
    status: int = app.exec()
    say({"threads": [thread.name for thread in threading.enumerate()]})
    return status


if __name__ == "__main__":
    sys.exit(main())
