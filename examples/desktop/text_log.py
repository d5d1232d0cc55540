"""The text: what was said, and what the model adds."""

from __future__ import annotations

from PySide6.QtCore import QRectF
from PySide6.QtGui import (
    QFont,
    QPainter,
    QPaintEvent,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextFrame,
    QTextFrameFormat,
)
from PySide6.QtWidgets import QTextEdit, QWidget

from desktop.theme import LIGHT, Colours, tint

_PADDING, _INDENT, _GAP = 8, 40, 10  # pixels
_LINE_HEIGHT = 130  # percent of the font's


class TextLog(QTextEdit):
    """A chat, as messages; or a text that is continued, with what the user said in bold."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setReadOnly(True)
        self.setTabChangesFocus(True)
        self.document().setDocumentMargin(1)
        self.setAccessibleName("Text")
        self.colours = LIGHT
        self._users: list[QTextFrame] = []  # whose messages have a background
        self._end: QTextCursor | None = None  # where the answer goes on

    def set_colours(self, colours: Colours) -> None:
        """Draw in these."""
        self.colours = colours
        self.viewport().update()

    def begin(self) -> None:
        """Forget the text."""
        self._users, self._end = [], None
        self.clear()

    def say(self, text: str, *, chat: bool) -> None:
        """Add what the user said; add() then adds to the answer."""
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.setBlockFormat(_spaced())
        if chat:
            user = _message(cursor, left=_INDENT)
            cursor.insertText(text)
            self._users.append(user)
            cursor.movePosition(QTextCursor.MoveOperation.End)
            _message(cursor, right=_INDENT)
        else:
            bold = QTextCharFormat()
            bold.setFontWeight(QFont.Weight.Bold)
            cursor.insertText(text, bold)
        self._end = cursor
        self._scroll_to_end()

    def add(self, text: str) -> None:
        """Add to the answer; whoever has scrolled up stays there."""
        bar = self.verticalScrollBar()
        at_end = bar.value() >= bar.maximum() - 40
        if self._end is not None:
            self._end.insertText(text, QTextCharFormat())
        if at_end:
            self._scroll_to_end()

    def _scroll_to_end(self) -> None:
        self.verticalScrollBar().setValue(self.verticalScrollBar().maximum())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802 - Qt's name
        """Draw the backgrounds of the user's messages, then the text."""
        painter = QPainter(self.viewport())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(tint(self.colours.sink, 0.0))
        painter.setBrush(tint(self.colours.sink, 0.12))
        x, y = self.horizontalScrollBar().value(), self.verticalScrollBar().value()
        for frame in self._users:
            box: QRectF = self.document().documentLayout().frameBoundingRect(frame)
            box = box.adjusted(_INDENT, _GAP, 0, 0).translated(-x, -y)
            painter.drawRoundedRect(box, 8, 8)
        painter.end()
        super().paintEvent(event)


def _message(cursor: QTextCursor, *, left: int = 0, right: int = 0) -> QTextFrame:
    """A frame for a message, which the cursor is then in."""
    form = QTextFrameFormat()
    form.setPadding(_PADDING)
    form.setLeftMargin(left)
    form.setRightMargin(right)
    form.setTopMargin(_GAP)
    frame = cursor.insertFrame(form)
    cursor.setBlockFormat(_spaced())
    return frame


def _spaced() -> QTextBlockFormat:
    form = QTextBlockFormat()
    form.setLineHeight(_LINE_HEIGHT, QTextBlockFormat.LineHeightTypes.ProportionalHeight.value)
    return form
