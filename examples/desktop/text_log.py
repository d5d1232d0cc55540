"""The text of the conversation."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import (
    QFont,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QTextBlock,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
)
from PySide6.QtWidgets import QTextEdit, QWidget

from desktop.theme import LIGHT, Colors, tint

_PADDING, _INDENT, _GAP = 8, 40, 12  # pixels
_LINE_HEIGHT = 130  # percent of the font's
_NEAR = 40  # pixels from the end that still count as the end
_LINE_SEPARATOR = "\u2028"  # a line break without a new block


class TextLog(QTextEdit):
    """A chat as messages, or a continued text with the user's parts in bold."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setReadOnly(True)
        self.setTabChangesFocus(True)
        self.document().setDocumentMargin(1)
        self.setAccessibleName("Text")
        self.colors = LIGHT
        self._messages: list[QTextBlock] = []  # of the user, in a chat
        self._end = QTextCursor(self.document())  # where the reply continues

    def set_colors(self, colors: Colors) -> None:
        """Use these colors."""
        self.colors = colors
        self.viewport().update()

    def begin(self) -> None:
        """Clear the text."""
        self._messages = []
        self.clear()

    def say(self, text: str, *, chat: bool) -> None:
        """Add the user's message; add() then appends to the reply."""
        self._end.movePosition(QTextCursor.MoveOperation.End)
        if chat:
            self._new_block(left=_INDENT + _PADDING, top=_GAP + _PADDING, bottom=_PADDING)
            self._end.insertText(text.replace("\n", _LINE_SEPARATOR))
            self._messages.append(self._end.block())
            self._new_block(right=_INDENT, top=_GAP)
        else:
            self._end.setBlockFormat(_block_format())
            bold = QTextCharFormat()
            bold.setFontWeight(QFont.Weight.Bold)
            self._end.insertText(text, bold)
        self._scroll_to_end()

    def add(self, text: str) -> None:
        """Append to the reply; keeps the position of a reader who has scrolled up."""
        at_end = self._at_end()
        if self._messages:
            text = text.replace("\n", _LINE_SEPARATOR)
        self._end.insertText(text, QTextCharFormat())
        if at_end:
            self._scroll_to_end()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802 - Qt's name
        """Draw the backgrounds of the user's messages, then the text."""
        painter = QPainter(self.viewport())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(tint(self.colors.sink, 0.12))
        width = self.viewport().width() - _INDENT
        for block in self._messages:
            layout = block.layout()
            top = layout.position().y() - self.verticalScrollBar().value() - _PADDING
            height = layout.boundingRect().height() + 2 * _PADDING
            painter.drawRoundedRect(QRectF(_INDENT, top, width, height), 8, 8)
        painter.end()
        super().paintEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802 - Qt's name
        """Stay at the end."""
        at_end = self._at_end()
        super().resizeEvent(event)
        if at_end:
            self._scroll_to_end()

    def _new_block(self, *, left: int = 0, right: int = 0, top: int = 0, bottom: int = 0) -> None:
        form = _block_format()
        form.setLeftMargin(left)
        form.setRightMargin(right)
        form.setTopMargin(top)
        form.setBottomMargin(bottom)
        if self.document().isEmpty():
            self._end.setBlockFormat(form)
        else:
            self._end.insertBlock(form, QTextCharFormat())

    def _at_end(self) -> bool:
        bar = self.verticalScrollBar()
        return bool(bar.value() >= bar.maximum() - _NEAR)

    def _scroll_to_end(self) -> None:
        self.verticalScrollBar().setValue(self.verticalScrollBar().maximum())


def _block_format() -> QTextBlockFormat:
    form = QTextBlockFormat()
    form.setLineHeight(_LINE_HEIGHT, QTextBlockFormat.LineHeightTypes.ProportionalHeight.value)
    return form
