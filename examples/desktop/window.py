"""The window: the text beside the cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QCloseEvent, QGuiApplication, QKeySequence, QResizeEvent, QShortcut
from PySide6.QtWidgets import (
    QApplication,
    QComboBox,
    QFileDialog,
    QFrame,
    QHBoxLayout,
    QLabel,
    QMainWindow,
    QPushButton,
    QScrollArea,
    QSplitter,
    QVBoxLayout,
    QWidget,
)

from desktop.cache_panel import CachePanel
from desktop.text_panel import TextPanel
from desktop.theme import Colors, palette, style_sheet, system_colors
from desktop.worker import Opened, Worker

_NARROW = 720  # pixels; in narrower windows the cache is below the text
_BUDGET = 0.2  # the paper's "H2O (20%)"


class Window(QMainWindow):
    """Chat with a model, and watch its cache."""

    def __init__(
        self,
        models: Sequence[Path],
        *,
        budget: float | None = _BUDGET,
        seed: int | None = None,
        colors: Colors | None = None,
    ) -> None:
        """models: files to choose from; the first one is opened.

        budget: a fraction of the context; None: the full cache.
        seed: makes the replies reproducible.
        colors: default: the desktop's.
        """
        super().__init__()
        self.setWindowTitle("h2o.cpp")
        self.resize(1100, 720)
        self.setMinimumSize(400, 560)  # smaller than the two columns; see resizeEvent
        self.worker = Worker(self, seed=seed)
        self.picker = QComboBox()
        self.open_button = QPushButton("&Open…")
        self.text = TextPanel()
        self.cache = CachePanel()
        self.busy = 0  # unfinished tasks of the worker
        self._opened: Opened | None = None
        self._sent: str | None = None  # a message that was not accepted yet
        self._budget_waits = False  # until the worker is idle
        self._lay_out()
        self._connect()
        for path in models:
            self._add(path)
        if colors is None:
            self.set_colors(system_colors())
            hints = QGuiApplication.styleHints()
            hints.colorSchemeChanged.connect(lambda: self.set_colors(system_colors()))
        else:
            self.set_colors(colors)
        self.cache.set_budget(budget)
        self.open(models[0])
        self.text.message.setFocus()

    def open(self, path: Path) -> None:
        """Open a model with the slider's budget."""
        self._add(path)
        self._ask()
        self.worker.stop()
        self.worker.open(path, self.cache.budget)

    def send(self) -> None:
        """Send the message, if there is one and the worker is idle."""
        message = self.text.message.toPlainText()
        opened = self._opened
        if self.busy or opened is None or (opened.chat and not message.strip()):
            return
        if not message and not self.text.log.toPlainText():
            return
        self._sent = message
        self.text.message.clear()
        self.text.message.setFocus()  # the pressed button will be disabled
        self._ask()
        self.worker.say(message, self.text.most_tokens.value())

    def stop(self) -> None:
        """Stop the reply."""
        self.worker.stop()
        self.text.message.setFocus()  # the pressed button will be disabled

    def start_over(self) -> None:
        """Clear the text."""
        self._ask()
        self.worker.forget()

    def set_colors(self, colors: Colors) -> None:
        """Use these colors."""
        QApplication.setPalette(palette(colors))
        self.setStyleSheet(style_sheet(colors))
        self.text.set_colors(colors)
        self.cache.set_colors(colors)

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802 - Qt's name
        """Put the cache beside or below the text."""
        super().resizeEvent(event)
        narrow = event.size().width() < _NARROW
        self._splitter.setOrientation(
            Qt.Orientation.Vertical if narrow else Qt.Orientation.Horizontal
        )

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802 - Qt's name
        """Close at once; the current computation ends first."""
        self.hide()
        self.worker.close()
        super().closeEvent(event)

    def _ask(self) -> None:
        self.busy += 1
        self.text.show_error("")
        self._show_state()

    def _done(self) -> None:
        self.busy -= 1
        if self._sent is not None:  # it was rejected
            self.text.message.textCursor().insertText(self._sent)
            self._sent = None
        if self.busy == 0 and self._opened is not None:
            if self._budget_waits:
                self._change_budget()
            else:  # the error is not shown
                self.picker.setCurrentIndex(self.picker.findData(str(self._opened.path)))
                if not self.cache.settling:
                    self.cache.set_budget(self._opened.budget)
        self._show_state()

    def _show_state(self) -> None:
        self.text.set_running(ready=self._opened is not None, running=self.busy > 0)

    def _show_opened(self, opened: Opened) -> None:
        before, self._opened = self._opened, opened
        n_ctx = opened.stats.n_ctx
        self.text.set_chat(opened.chat)
        self.cache.show_policy(opened.policy, n_ctx)
        self.cache.show_stats(opened.stats)
        if before is None or before.path != opened.path:
            self._forget()

    def _show_began(self, text: str) -> None:
        self._sent = None
        self.text.log.say(text, chat=self._opened is not None and self._opened.chat)

    def _forget(self) -> None:
        self.text.log.begin()
        self.cache.forget()

    def _pick(self, index: int) -> None:
        path = Path(self.picker.itemData(index))
        if self._opened is None or path != self._opened.path:
            self.open(path)

    def _pick_file(self) -> None:
        name, _ = QFileDialog.getOpenFileName(self, "Open a model", "", "Models (*.gguf);;All (*)")
        if name:
            self.open(Path(name))

    def _change_budget(self) -> None:
        self._budget_waits = self.busy > 0
        if self._opened is not None and not self.busy:
            self.open(self._opened.path)

    def _add(self, path: Path) -> None:
        """Add a model to the list and select it."""
        found = self.picker.findData(str(path))
        if found < 0:
            self.picker.addItem(path.stem, str(path))
            found = self.picker.count() - 1
            self.picker.setItemData(found, str(path), Qt.ItemDataRole.ToolTipRole)
        self.picker.setCurrentIndex(found)

    def _connect(self) -> None:
        worker, text = self.worker, self.text
        worker.opened.connect(self._show_opened)
        worker.began.connect(self._show_began)
        worker.wrote.connect(text.log.add)
        worker.looked.connect(self.cache.show_look)
        worker.forgot.connect(self._forget)
        worker.told.connect(text.show_error)
        worker.done.connect(self._done)
        text.sent.connect(self.send)
        text.stopped.connect(self.stop)
        text.start_over.connect(self.start_over)
        self.cache.budget_chosen.connect(self._change_budget)
        self.picker.activated.connect(self._pick)
        self.open_button.clicked.connect(self._pick_file)
        for keys, do in (
            (QKeySequence(Qt.Key.Key_Escape), self.stop),
            (QKeySequence.StandardKey.Open, self._pick_file),
            (QKeySequence.StandardKey.Quit, self.close),
        ):
            QShortcut(QKeySequence(keys), self).activated.connect(do)

    def _lay_out(self) -> None:
        self.picker.setAccessibleName("Model")
        self.picker.setSizeAdjustPolicy(
            QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon
        )
        self.picker.setMinimumContentsLength(8)
        self.picker.setMaximumWidth(360)
        label = QLabel("Mo&del")
        label.setBuddy(self.picker)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(label)
        row.addWidget(self.picker, 1)
        row.addWidget(self.open_button)
        row.addStretch()
        self._splitter = QSplitter()
        self._splitter.setChildrenCollapsible(False)
        self._splitter.setHandleWidth(12)
        self._splitter.addWidget(self.text)
        cache = QScrollArea()  # for low windows
        cache.setFrameShape(QFrame.Shape.NoFrame)
        cache.setWidgetResizable(True)
        cache.setWidget(self.cache)
        self._splitter.addWidget(cache)
        self._splitter.setSizes([550, 550])
        page = QWidget()
        column = QVBoxLayout(page)
        column.setContentsMargins(12, 12, 12, 12)
        column.setSpacing(12)
        column.addLayout(row)
        column.addWidget(self._splitter, 1)
        self.setCentralWidget(page)
