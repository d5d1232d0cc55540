"""All tokens that the cache has seen, in order, shaded by how many heads keep them."""

from __future__ import annotations

import json
from bisect import bisect_left
from operator import attrgetter
from typing import NamedTuple

from PySide6.QtCore import QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QFocusEvent,
    QFontMetricsF,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
)
from PySide6.QtWidgets import QAbstractScrollArea, QFrame, QWidget

from desktop.look import Look
from desktop.theme import LIGHT, Colors, strength, tint

_LINE_HEIGHT = 1.45  # times the font's height


class _Box(NamedTuple):
    """The position of a token."""

    line: int
    x: float
    width: float
    text: str


class TokenStrip(QAbstractScrollArea):
    """Tokens as running text: heavy hitters, recent and evicted tokens.

    Stronger colors mean that more KV heads keep the token. Arrow keys, Home, End and the mouse
    move between tokens.
    """

    pointed = Signal(str)  # description of the current token

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName("Tokens in the order of the text; arrow keys move between them")
        self.viewport().setMouseTracking(True)
        self.viewport().setAutoFillBackground(False)
        self.colors = LIGHT
        self.current = -1  # the current token
        self.look: Look | None = None  # the newest
        self._pieces: list[str] = []
        self._boxes: list[_Box] = []
        self._last_word = 0  # first token of the last word, which may continue

    def set_colors(self, colors: Colors) -> None:
        """Use these colors."""
        self.colors = colors
        self.viewport().update()

    def clear(self) -> None:
        """Show nothing."""
        self.current, self.look, self._pieces = -1, None, []
        self._lay_out_all()
        self.pointed.emit("")

    def show_look(self, look: Look) -> None:
        """Show another observation."""
        self.look = look
        del self._pieces[look.begin :]
        self._pieces += look.pieces
        bar = self.verticalScrollBar()
        at_end = bar.value() >= bar.maximum()
        self._last_word = min(self._last_word, look.begin)
        self._lay_out()
        if at_end:
            bar.setValue(bar.maximum())
        self._tell()

    def role(self, position: int) -> str:
        """The role of the token at a position in the cache."""
        look = self.look
        if look is None or look.shares[position] == 0:
            return "evicted"
        if look.n_recent is None or position >= len(look.shares) - look.n_recent:
            return "recent"
        return "heavy hitter"

    def describe(self, position: int) -> str:
        """The description of a token."""
        if self.look is None:
            return ""
        share = float(self.look.shares[position])
        kept = f"kept by {100 * share:.0f} % of the heads" if share > 0 else "kept by none"
        text = json.dumps(self._pieces[position], ensure_ascii=False)
        return f"Position {position} · {text} · {self.role(position)} · {kept}"

    def box(self, position: int) -> QRectF:
        """The rectangle of a token in the viewport."""
        box, height = self._boxes[position], self._line_height()
        y = box.line * height - self.verticalScrollBar().value()
        return QRectF(box.x, y + 0.1 * height, box.width, 0.8 * height)

    def sizeHint(self) -> QSize:  # noqa: N802 - Qt's name
        """Some lines."""
        return QSize(320, 160)

    def minimumSizeHint(self) -> QSize:  # noqa: N802 - Qt's name
        """Two lines."""
        return QSize(120, int(2 * self._line_height()))

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802 - Qt's name
        """Draw the visible lines."""
        look, height = self.look, self._line_height()
        if look is None:
            return
        painter = QPainter(self.viewport())
        top = self.verticalScrollBar().value()
        first = bisect_left(self._boxes, int(top / height), key=attrgetter("line"))
        last = (top + self.viewport().height()) / height
        rise = height * 0.5 + self.fontMetrics().capHeight() / 2 - top  # to the baseline
        tints = {"heavy hitter": self.colors.heavy, "recent": self.colors.recent}
        evicted: list[_Box] = []
        painter.setPen(self.colors.ink)
        for position in range(first, len(self._boxes)):
            box, role = self._boxes[position], self.role(position)
            if box.line > last:
                break
            if role in tints:
                shade = strength(float(look.shares[position]))
                painter.fillRect(self.box(position), tint(tints[role], shade))
                painter.drawText(QPointF(box.x, box.line * height + rise), box.text)
            else:
                evicted.append(box)
            if position == self.current:
                painter.drawRect(self.box(position).adjusted(0.5, 0.5, -0.5, -0.5))
        painter.setPen(self.colors.muted)
        for box in evicted:
            painter.drawText(QPointF(box.x, box.line * height + rise), box.text)

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802 - Qt's name
        """Break the lines again."""
        self._lay_out_all()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802 - Qt's name
        """Make the token under the mouse the current one."""
        line = int((event.position().y() + self.verticalScrollBar().value()) / self._line_height())
        begin = bisect_left(self._boxes, line, key=attrgetter("line"))
        for position in range(begin, len(self._boxes)):
            if self._boxes[position].line > line:
                break
            if self.box(position).contains(event.position()):
                self._point_at(position)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802 - Qt's name
        """Move between tokens."""
        to = {
            Qt.Key.Key_Left: self.current - 1,
            Qt.Key.Key_Right: self.current + 1,
            Qt.Key.Key_Home: 0,
            Qt.Key.Key_End: len(self._boxes) - 1,
        }.get(Qt.Key(event.key()))
        if to is None or not self._boxes:
            super().keyPressEvent(event)
            return
        self._point_at(max(0, min(len(self._boxes) - 1, to)))
        box, bar = self.box(self.current), self.verticalScrollBar()
        below = box.bottom() - self.viewport().height()
        bar.setValue(bar.value() + int(min(0, box.top()) + max(0, below + 1)))

    def focusInEvent(self, event: QFocusEvent) -> None:  # noqa: N802 - Qt's name
        """Select a current token."""
        super().focusInEvent(event)
        if self.current < 0 and self._boxes:
            self._point_at(0)

    def _point_at(self, position: int) -> None:
        self.current = position
        self._tell()
        self.viewport().update()

    def _tell(self) -> None:
        if 0 <= self.current < len(self._pieces):
            said = self.describe(self.current)
            self.setAccessibleDescription(said)
            self.pointed.emit(said)

    def _line_height(self) -> float:
        return _LINE_HEIGHT * float(self.fontMetrics().height())

    def _lay_out_all(self) -> None:
        self._last_word = 0
        self._lay_out()

    def _lay_out(self) -> None:
        """Lay out tokens from the last word on; words are only broken if they fill a line."""
        metrics, room = QFontMetricsF(self.font()), self.viewport().width()
        pieces, i = self._pieces, self._last_word
        del self._boxes[i:]
        line, x = self._after(i)
        while i < len(pieces):
            end = i + 1
            while end < len(pieces) and not _begins_word(pieces[end]):
                end += 1
            if x > 0 and x + metrics.horizontalAdvance("".join(pieces[i:end])) > room:
                line, x = line + 1, 0.0
            self._last_word = i
            while i < end:
                text = _visible(pieces[i], begins_line=x == 0)
                width = metrics.horizontalAdvance(text)
                if x > 0 and x + width > room:
                    line, x = line + 1, 0.0
                self._boxes.append(_Box(line, x, width, text))
                i += 1
                line, x = self._after(i)
        n_lines = self._boxes[-1].line + 1 if self._boxes else 0
        bar, shown = self.verticalScrollBar(), self.viewport().height()
        bar.setRange(0, max(0, int(n_lines * self._line_height()) + 1 - shown))
        bar.setPageStep(shown)
        bar.setSingleStep(int(self._line_height()))
        self.viewport().update()

    def _after(self, position: int) -> tuple[int, float]:
        """Line and x after the token at a position."""
        if position == 0:
            return 0, 0.0
        box = self._boxes[position - 1]
        return box.line, box.x + box.width


def _begins_word(piece: str) -> bool:
    return piece[:1].isspace()


def _visible(piece: str, *, begins_line: bool) -> str:
    text = piece.replace("\n", "↵").replace("\t", " ")
    return text.lstrip(" ") or text if begins_line else text
