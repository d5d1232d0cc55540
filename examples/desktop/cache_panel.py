"""The cache panel: budget, statistics and kept tokens."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import (
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QSlider,
    QVBoxLayout,
    QWidget,
)

from desktop.look import Look
from desktop.theme import Colors, strength, tint
from desktop.token_strip import TokenStrip
from h2o_cpp import Policy, Stats

# Fractions of the context; the last one is the full cache.
BUDGETS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
_NONE = "\N{EN DASH}"  # a value that is not known yet
_SETTLED_MS = 250  # delay until a budget counts as chosen
_HINT = (
    "Stronger: kept by more heads. Point at a token, or move between tokens with the arrow keys."
)


class CachePanel(QFrame):
    """Budget, memory, speed and tokens."""

    budget_chosen = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("panel")
        self.slider = QSlider(Qt.Orientation.Horizontal)
        self.slider.setRange(0, len(BUDGETS) - 1)
        self.slider.setPageStep(1)
        self.slider.setAccessibleName("Budget")
        self.slider.setToolTip("How much of the context the cache keeps")
        self._budget = QLabel()
        self._about = _muted("")
        self.kept, self.evicted, self.memory, self.speed = (QLabel(_NONE) for _ in range(4))
        self.kept_bar, self.memory_bar = _bar(), _bar()
        self.strip = TokenStrip()
        self.detail = _muted(_HINT)
        self._n_ctx = 0
        self._legend = [QLabel(f" {name} ") for name in ("heavy hitter", "recent", "evicted")]
        self._settled = QTimer(self)
        self._settled.setSingleShot(True)
        self._settled.setInterval(_SETTLED_MS)
        self._settled.timeout.connect(self.budget_chosen)
        self.slider.valueChanged.connect(self._slider_moved)
        self.strip.pointed.connect(lambda said: self.detail.setText(said or _HINT))
        self._lay_out()

    @property
    def budget(self) -> float | None:
        """The slider's budget, a fraction of the context; None: the full cache."""
        share = BUDGETS[self.slider.value()]
        return None if share == 1 else share

    @property
    def settling(self) -> bool:
        """Whether the slider was just moved, before budget_chosen is emitted."""
        return bool(self._settled.isActive())

    def set_budget(self, budget: float | None) -> None:
        """Move the slider without emitting budget_chosen."""
        share = 1.0 if budget is None else budget
        self.slider.setValue(min(range(len(BUDGETS)), key=lambda i: abs(BUDGETS[i] - share)))
        self._settled.stop()

    def show_policy(self, policy: Policy | Sequence[Policy], n_ctx: int) -> None:
        """Show what the cache will keep."""
        self._n_ctx = n_ctx
        self._show_budget()
        first = policy if isinstance(policy, Policy) else policy[0]
        keeps = "everything is kept"
        if first.n_recent is not None:
            keeps = f"{first.n_heavy} heavy hitters and {first.n_recent} recent tokens are kept"
        self._about.setText(f"Context of {n_ctx} tokens · {keeps}")

    def show_stats(self, stats: Stats) -> None:
        """Show the size of the cache."""
        seen, kept = stats.tokens_seen, stats.tokens_kept
        self.kept.setText(f"{kept} of {seen}" if seen else _NONE)
        self.evicted.setText(str(stats.evictions) if seen else _NONE)
        self.kept_bar.setValue(round(1000 * kept / seen) if seen else 0)
        self.memory.setText(f"{_bytes(stats.cache_bytes)} of {_bytes(stats.full_cache_bytes)}")
        self.memory_bar.setValue(round(1000 * stats.cache_bytes / stats.full_cache_bytes))

    def show_look(self, look: Look) -> None:
        """Show a snapshot of the cache."""
        self.show_stats(look.stats)
        self.strip.show_look(look)
        if speed := look.tokens_per_second:
            self.speed.setText(f"{speed:.{1 if speed < 10 else 0}f} tokens/s")

    def forget(self) -> None:
        """Show an empty cache."""
        for label in (self.kept, self.evicted, self.speed):
            label.setText(_NONE)
        self.kept_bar.setValue(0)
        self.strip.clear()

    def set_colors(self, colors: Colors) -> None:
        """Use these colors."""
        self.strip.set_colors(colors)
        for label, color in zip(self._legend, (colors.heavy, colors.recent, None), strict=True):
            if color is None:
                label.setStyleSheet(f"color: {colors.muted}")
            else:
                shade = tint(color, strength(0.8)).name(tint(color, 1).NameFormat.HexArgb)
                label.setStyleSheet(f"background: {shade}; border-radius: 3px; padding: 1px")

    def _slider_moved(self) -> None:
        self._show_budget()
        self._settled.start()

    def _show_budget(self) -> None:
        share = BUDGETS[self.slider.value()]
        n = int(share * self._n_ctx)
        text = "full cache" if share == 1 else f"{100 * share:.0f}%"
        self._budget.setText(f"{text} · {n} tokens" if n else text)

    def _lay_out(self) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 12, 12, 12)
        column.setSpacing(8)
        column.addWidget(_title("The cache"))
        row = QHBoxLayout()
        row.setSpacing(10)
        label = QLabel("&Budget")
        label.setBuddy(self.slider)
        row.addWidget(label)
        row.addWidget(self.slider, 1)
        row.addWidget(self._budget)
        column.addLayout(row)
        self._about.setWordWrap(True)
        column.addWidget(self._about)
        column.addLayout(self._figures())
        column.addSpacing(6)
        column.addWidget(_title("Every token it has seen"))
        legend = QHBoxLayout()
        legend.setSpacing(10)
        for one in self._legend:
            legend.addWidget(one)
        legend.addStretch(1)
        column.addLayout(legend)
        column.addWidget(self.strip, 1)
        self.detail.setWordWrap(True)
        column.addWidget(self.detail)

    def _figures(self) -> QGridLayout:
        grid = QGridLayout()
        grid.setHorizontalSpacing(16)
        grid.setVerticalSpacing(3)
        figures = (
            ("kept of the tokens seen", self.kept, self.kept_bar),
            ("memory, of a full cache's", self.memory, self.memory_bar),
            ("evicted", self.evicted, None),
            ("speed", self.speed, None),
        )
        for i, (name, value, bar) in enumerate(figures):
            row, column = divmod(i, 2)
            value.setAccessibleName(name)
            grid.addWidget(_muted(name), 4 * row, column)
            grid.addWidget(value, 4 * row + 1, column)
            if bar is not None:
                bar.setAccessibleName(name)
                grid.addWidget(bar, 4 * row + 2, column)
            grid.setColumnStretch(column, 1)
        grid.setRowMinimumHeight(3, 4)
        return grid


def _title(text: str) -> QLabel:
    label = QLabel(text)
    label.setObjectName("title")
    return label


def _muted(text: str) -> QLabel:
    label = QLabel(text)
    label.setObjectName("muted")
    return label


def _bar() -> QProgressBar:
    bar = QProgressBar()
    bar.setRange(0, 1000)
    bar.setTextVisible(False)
    bar.setFixedHeight(8)
    return bar


def _bytes(n: int) -> str:
    return f"{n / 2**10:.0f} KiB" if n < 2**20 else f"{n / 2**20:.1f} MiB"
