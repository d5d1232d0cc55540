"""The window: a text, and beside it the cache: its budget, its sizes and every token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6 import QtWidgets as Qw
from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QCloseEvent, QKeySequence, QShortcut, QTextCursor

from desktop.token_strip import TokenStrip
from desktop.worker import Look, Worker
from h2o_cpp import Stats


class Window(Qw.QMainWindow):
    """Chat with a model, and watch its cache."""

    def __init__(
        self, model: Path, *, percent: int = 20, max_tokens: int = 300, seed: int | None = None
    ) -> None:
        """percent: of the context, to keep. max_tokens: of a reply. seed: makes it the same."""
        super().__init__()
        self.setWindowTitle("h2o.cpp")
        self.resize(1100, 720)
        self.worker, self.max_tokens = Worker(self, seed), max_tokens
        self.busy = 0  # unfinished tasks of the worker
        self.model: Path | None = None
        self.log, self.message = Qw.QPlainTextEdit(readOnly=True), Qw.QLineEdit()
        self.message.setPlaceholderText("The old man …")
        names = ("&Send", "S&top", "&New text")
        self.send_button, self.stop_button, self.new_button = map(Qw.QPushButton, names)
        self.error, self.sizes, self.detail = (Qw.QLabel(wordWrap=True) for _ in range(3))
        self.slider = Qw.QSlider(Qt.Orientation.Horizontal)
        self.slider.setRange(1, 100)
        self.slider.setAccessibleName("Budget")
        self.slider.setValue(percent)
        self.strip = TokenStrip()
        self._settled = QTimer(self, singleShot=True, interval=250)  # when a budget is chosen
        self._lay_out()
        self._connect(model)
        self.open(model)

    def open(self, path: Path) -> None:
        """Open a model with the slider's budget; if its file is the same, the text continues."""
        self.worker.stop()
        percent = self.slider.value()
        self._ask(self.worker.open, path, None if percent == 100 else percent / 100)

    def send(self) -> None:
        """Send the message, if the worker is idle; an empty one lets a text go on."""
        message = self.message.text()
        if not self.busy and self.model is not None and (message or self.log.toPlainText()):
            self._ask(self.worker.say, message, self.max_tokens)

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802 - Qt's name
        """End the thread, after its current computation."""
        self.worker.close()
        super().closeEvent(event)

    def _ask(self, task: Callable[..., str], *arguments: object) -> None:
        self.busy += 1
        self.worker.put(task, *arguments)
        self.error.clear()
        self.send_button.setEnabled(False)
        self.stop_button.setEnabled(True)

    def _done(self, sentence: str) -> None:
        self.busy -= 1
        self.error.setText(sentence)
        self.send_button.setEnabled(not self.busy)
        self.stop_button.setEnabled(self.busy > 0)

    def _show_opened(self, path: Path, stats: Stats) -> None:
        self.model = path
        self.strip.show_look()
        self._show_sizes(stats)

    def _show_sizes(self, stats: Stats, speed: float = 0) -> None:
        kept = f"{stats.tokens_kept} of {stats.tokens_seen} kept, {stats.evictions} evicted"
        memory = f"{stats.cache_bytes >> 10} of {stats.full_cache_bytes >> 10} KiB"
        self.sizes.setText(f"{kept}\n{memory}" + (f", {speed:.0f} tokens/s" if speed else ""))

    def _show_look(self, look: Look) -> None:
        self._show_sizes(look.stats, look.tokens_per_second)
        self.strip.show_look(look)

    def _write(self, text: str) -> None:
        self.log.moveCursor(QTextCursor.MoveOperation.End)
        self.log.insertPlainText(text)

    def _connect(self, model: Path) -> None:
        worker = self.worker
        worker.opened.connect(self._show_opened)
        worker.began.connect(self.message.clear)
        worker.began.connect(self._write)
        worker.wrote.connect(self._write)
        worker.looked.connect(self._show_look)
        worker.forgot.connect(self.log.clear)
        worker.forgot.connect(self.strip.show_look)
        worker.done.connect(self._done)
        self.message.returnPressed.connect(self.send)
        self.send_button.clicked.connect(self.send)
        self.stop_button.clicked.connect(worker.stop)
        self.new_button.clicked.connect(worker.stop)
        self.new_button.clicked.connect(lambda: self._ask(worker.forget))
        self.slider.valueChanged.connect(lambda _: self._settled.start())
        self._settled.timeout.connect(lambda: self.open(self.model or model))
        self.strip.pointed.connect(self.detail.setText)
        QShortcut(QKeySequence(Qt.Key.Key_Escape), self).activated.connect(worker.stop)
        QShortcut(QKeySequence(QKeySequence.StandardKey.Quit), self).activated.connect(self.close)

    def _lay_out(self) -> None:
        left, right, row, page = Qw.QVBoxLayout(), Qw.QVBoxLayout(), Qw.QHBoxLayout(), Qw.QWidget()
        for layout, widgets in (
            (left, (self.log, self.error, self.message)),
            (row, (self.send_button, self.stop_button, self.new_button)),
            (right, (Qw.QLabel("Budget"), self.slider, self.sizes, self.strip, self.detail)),
        ):
            for widget in widgets:
                layout.addWidget(widget)
        left.addLayout(row)
        columns = Qw.QHBoxLayout(page)
        columns.addLayout(left, 1)
        columns.addLayout(right, 1)
        self.setCentralWidget(page)
