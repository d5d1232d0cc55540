"""Light and dark colors, the same as on the server's page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QGuiApplication, QPalette


@dataclass(frozen=True)
class Colors:
    """Colors as "#rrggbb"."""

    page: str
    panel: str
    ink: str
    muted: str
    line: str
    sink: str
    heavy: str
    recent: str
    wrong: str


LIGHT = Colors(
    page="#fbfbfa", panel="#ffffff", ink="#1d2329", muted="#66707a", line="#d9dde1",
    sink="#0066b2", heavy="#e68200", recent="#00946e", wrong="#b3261e",
)  # fmt: skip
DARK = Colors(
    page="#14171a", panel="#1c2024", ink="#e4e7ea", muted="#929ca6", line="#343a41",
    sink="#4aa0eb", heavy="#f09628", recent="#28b991", wrong="#ff8a80",
)  # fmt: skip


def system_colors() -> Colors:
    """The desktop's light or dark colors."""
    scheme = QGuiApplication.styleHints().colorScheme()
    return DARK if scheme == Qt.ColorScheme.Dark else LIGHT


@lru_cache(maxsize=512)
def tint(color: str, strength: float) -> QColor:
    """A transparent color; strength: 0 to 1."""
    tinted = QColor(color)
    tinted.setAlphaF(strength)
    return tinted


def strength(share: float) -> float:
    """The strength of a token's tint, by the share of heads that keep it."""
    return 0.08 + 0.42 * share  # keeps the text readable, see the tests


def palette(colors: Colors) -> QPalette:
    """The palette of Qt's widgets."""
    role = QPalette.ColorRole
    found = QPalette(QColor(colors.page))
    for roles, color in (
        ((role.Window, role.AlternateBase, role.Button), colors.page),
        ((role.Base, role.ToolTipBase), colors.panel),
        ((role.WindowText, role.Text, role.ButtonText, role.ToolTipText), colors.ink),
        ((role.PlaceholderText,), colors.muted),
        ((role.Highlight,), colors.sink),
        ((role.HighlightedText,), colors.panel),
    ):
        for one in roles:
            found.setColor(one, QColor(color))
    for one in (role.WindowText, role.Text, role.ButtonText):
        found.setColor(QPalette.ColorGroup.Disabled, one, QColor(colors.muted))
    return found


def style_sheet(colors: Colors) -> str:
    """The style sheet of the window."""
    c = colors
    soft = tint(c.sink, 0.15).name(QColor.NameFormat.HexArgb)
    softer = tint(c.sink, 0.08).name(QColor.NameFormat.HexArgb)
    return f"""
QWidget {{ color: {c.ink}; }}
#panel {{ background: {c.panel}; border: 1px solid {c.line}; border-radius: 8px; }}
QSplitter::handle {{ background: transparent; }}
#title {{ font-weight: 600; }}
#muted {{ color: {c.muted}; }}
#error {{ color: {c.wrong}; }}
QPlainTextEdit, QPushButton {{
  background: {c.page}; border: 1px solid {c.line}; border-radius: 6px; padding: 5px 8px;
}}
TextLog, TokenStrip {{
  background: transparent; border: 1px solid transparent; border-radius: 6px;
}}
QPlainTextEdit:focus, QPushButton:focus, TextLog:focus, TokenStrip:focus {{
  border: 1px solid {c.sink};
}}
QPushButton {{ min-width: 3.6em; padding: 7px 12px; }}
QPushButton:hover {{ background: {softer}; }}
QPushButton:pressed, QPushButton:default {{ background: {soft}; }}
QPushButton:disabled {{ color: {c.muted}; background: {c.panel}; }}
QComboBox, QSpinBox {{ min-height: 26px; }}
QComboBox:disabled, QSpinBox:disabled {{ color: {c.muted}; }}
QProgressBar {{ background: {c.line}; border: none; border-radius: 4px; }}
QProgressBar::chunk {{ background: {c.recent}; border-radius: 4px; }}
QSlider {{ min-height: 24px; }}
QSlider::groove:horizontal {{ height: 4px; background: {c.line}; border-radius: 2px; }}
QSlider::sub-page:horizontal {{ background: {c.sink}; border-radius: 2px; }}
QSlider::handle:horizontal {{
  width: 16px; margin: -6px 0; border-radius: 8px; background: {c.sink};
}}
QSlider::handle:horizontal:focus {{ background: {c.ink}; }}
QSlider::sub-page:horizontal:disabled, QSlider::handle:horizontal:disabled {{
  background: {c.muted};
}}
QScrollBar:vertical {{ background: transparent; width: 10px; margin: 0; }}
QScrollBar::handle:vertical {{ background: {c.line}; border-radius: 4px; min-height: 24px; }}
QScrollBar::handle:vertical:hover {{ background: {c.muted}; }}
QScrollBar::add-line, QScrollBar::sub-line {{ height: 0; }}
QScrollBar::add-page, QScrollBar::sub-page {{ background: transparent; }}
"""
