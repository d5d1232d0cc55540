"""The text and the message input."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from desktop.message_edit import MessageEdit
from desktop.text_log import TextLog
from desktop.theme import Colors

_MAX_TOKENS = 300  # default for a reply


class TextPanel(QFrame):
    """The log, an error, the message input and buttons."""

    sent = Signal()
    stopped = Signal()
    start_over = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("panel")
        self.log = TextLog()
        self.error = QLabel()
        self.error.setObjectName("error")
        self.error.setWordWrap(True)
        self.error.hide()
        self._label = QLabel()
        self.message = MessageEdit()
        self._label.setBuddy(self.message)
        self.send_button, self.stop_button, self.new_button = (
            QPushButton(name) for name in ("&Send", "S&top", "&New text")
        )
        self.send_button.setDefault(True)
        self.most_tokens = QSpinBox()
        self.most_tokens.setRange(1, 1_000_000)
        self.most_tokens.setValue(_MAX_TOKENS)
        self.most_tokens.setMaximumWidth(130)
        self.most_tokens.setSuffix(" tokens")
        self.most_tokens.setAccessibleName("Most tokens of an answer")
        self.most_tokens.setToolTip("Most tokens of an answer")
        self.message.sent.connect(self.sent)
        self.send_button.clicked.connect(self.sent)
        self.stop_button.clicked.connect(self.stopped)
        self.new_button.clicked.connect(self.start_over)
        self._lay_out()
        self.set_chat(False)

    def set_chat(self, chat: bool) -> None:
        """Whether the model answers messages; otherwise it continues a text."""
        self._label.setText("&Message" if chat else "Te&xt to go on from")
        self.message.setAccessibleName("Message" if chat else "Text to go on from")
        self.message.setPlaceholderText("" if chat else "The old man …")

    def set_running(self, *, ready: bool, running: bool) -> None:
        """Enable the buttons for this state."""
        self.send_button.setEnabled(ready and not running)
        self.stop_button.setEnabled(running)
        self.new_button.setEnabled(ready)

    def show_error(self, sentence: str) -> None:
        """Show an error; "" hides it."""
        self.error.setText(sentence)
        self.error.setVisible(bool(sentence))

    def set_colors(self, colors: Colors) -> None:
        """Use these colors."""
        self.log.set_colors(colors)

    def _lay_out(self) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 12, 12, 12)
        column.setSpacing(8)
        title = QLabel("Text")
        title.setObjectName("title")
        column.addWidget(title)
        self.log.setMinimumHeight(60)
        column.addWidget(self.log, 1)
        column.addWidget(self.error)
        column.addWidget(self._label)
        column.addWidget(self.message)
        hint = QLabel("Enter sends, Shift+Enter makes a new line, Escape stops")
        hint.setObjectName("muted")
        hint.setWordWrap(True)
        row = QHBoxLayout()
        row.setSpacing(12)
        row.addWidget(hint, 1)
        row.addWidget(self.most_tokens)
        column.addLayout(row)
        row = QHBoxLayout()
        row.setSpacing(8)
        for button in (self.send_button, self.stop_button, self.new_button):
            row.addWidget(button)
        row.addStretch(1)
        column.addLayout(row)
