"""python -m desktop [MODEL ...]: opens the window."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtWidgets import QApplication

from desktop.window import Window
from h2o_cpp import BUNDLED_MODEL


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the window until it is closed; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m desktop", description=__doc__)
    parser.add_argument(
        "models", nargs="*", type=Path, metavar="MODEL", help="GGUF files to choose from"
    )
    models = parser.parse_args(arguments).models
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python handles signals only between events
    app = QApplication(["h2o.cpp"])
    app.setStyle("Fusion")
    window = Window([*models, BUNDLED_MODEL])
    window.show()
    status: int = app.exec()
    return status


if __name__ == "__main__":
    sys.exit(main())
