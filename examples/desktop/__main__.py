"""Opens the window: python -m desktop [MODEL.gguf]."""

import signal
import sys
from pathlib import Path

from PySide6.QtWidgets import QApplication

from desktop.window import Window
from h2o_cpp import BUNDLED_MODEL

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python handles signals only between events
app = QApplication(["h2o.cpp"])
window = Window(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED_MODEL)
window.show()
sys.exit(app.exec())
