"""All tokens that the cache has seen, in order, shaded by how many heads keep them."""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import accumulate

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QColor, QPalette, QTextCursor
from PySide6.QtWidgets import QTextEdit

from desktop.worker import Look

COLORS = {"heavy hitter": "#e68200", "recent": "#00946e"}


def tint(role: str, share: float) -> QColor:
    """The color behind a token, by the share of heads that keep it; text stays readable."""
    color = QColor(COLORS[role])
    color.setAlphaF(0.08 + 0.42 * share)
    return color


class TokenStrip(QTextEdit):
    """Heavy hitters, recent and, in gray, evicted tokens; the text's cursor points at one."""

    pointed = Signal(str)  # description of the current token

    def __init__(self) -> None:
        super().__init__()
        flags = Qt.TextInteractionFlag
        self.setTextInteractionFlags(flags.TextSelectableByMouse | flags.TextSelectableByKeyboard)
        self.setAccessibleName("Tokens in the order of the text; arrow keys move between them")
        self.setTextColor(self.palette().color(QPalette.ColorRole.PlaceholderText))
        self.cursorPositionChanged.connect(self._move)
        self.show_look()

    def show_look(self, look: Look | None = None) -> None:
        """Show what the cache has seen, or nothing."""
        at = self.textCursor().position()
        self.look, self.current = look, -1
        pieces = [] if look is None else [piece.replace("\n", "↵") for piece in look.pieces]
        # Where tokens begin, and the end; Qt counts in UTF-16.
        self._begins = [0, *accumulate(len(p.encode("utf-16-le")) // 2 for p in pieces)]
        self.setPlainText("".join(pieces))
        if self.hasFocus():
            cursor = self.textCursor()
            cursor.setPosition(min(at, self._begins[-1]))
            self.setTextCursor(cursor)
        else:
            self.verticalScrollBar().setValue(self.verticalScrollBar().maximum())
        self._color()

    def role(self, position: int) -> str:
        """The role of the token at a position in the cache."""
        look = self.look
        if look is None or look.shares[position] == 0:
            return "evicted"
        is_recent = look.n_recent is None or position >= len(look.shares) - look.n_recent
        return "recent" if is_recent else "heavy hitter"

    def token(self, position: int) -> QTextCursor:
        """A cursor that has selected a token."""
        cursor = QTextCursor(self.document())
        cursor.setPosition(self._begins[position])
        cursor.setPosition(self._begins[position + 1], QTextCursor.MoveMode.KeepAnchor)
        return cursor

    def _move(self) -> None:
        """Make the token under the text's cursor the current one."""
        n = len(self._begins) - 1
        at = bisect_right(self._begins, self.textCursor().position(), hi=n) - 1
        if n and self.look is not None and at != self.current:
            self.current = at
            share, text = self.look.shares[at], json.dumps(self.look.pieces[at])
            kept = f"kept by {100 * share:.0f} % of the heads" if share else "kept by none"
            self.pointed.emit(f"Position {at} · {text} · {self.role(at)} · {kept}")
            self._color()

    def _color(self) -> None:
        selections = []
        for position in range(len(self._begins) - 1):
            role, one = self.role(position), QTextEdit.ExtraSelection()
            if self.look is not None and role != "evicted":
                one.format.setForeground(self.palette().color(QPalette.ColorRole.Text))
                one.format.setBackground(tint(role, self.look.shares[position]))
            elif position != self.current:
                continue
            one.cursor = self.token(position)
            one.format.setFontUnderline(position == self.current)
            selections.append(one)
        self.setExtraSelections(selections)
