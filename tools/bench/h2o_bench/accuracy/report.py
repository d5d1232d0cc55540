"""A table and a plot of accuracy against budget."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

from h2o_cpp.measure.plots import new_figure

# Scores of guessing.
CHANCE = {
    "copa": 0.5,
    "piqa": 0.5,
    "openbookqa": 0.25,
    "winogrande": 0.5,
    "rte": 0.5,
    "mathqa": 0.2,
}


class Record(NamedTuple):
    """A task with a policy and a budget."""

    task: str
    policy: str
    budget: float
    tokens: float  # mean tokens per request
    kept: float
    metrics: dict[str, list[float]]  # per document

    @property
    def metric(self) -> str:
        """The metric to report."""
        return next(name for name in ("rougeL", "acc_norm", "acc") if name in self.metrics)

    @property
    def mean(self) -> float:
        return float(np.mean(self.metrics[self.metric]))

    @property
    def error(self) -> float:
        values = self.metrics[self.metric]
        return float(np.std(values, ddof=1) / sqrt(len(values)))


def print_table(records: Sequence[Record]) -> None:
    """Print a row per task, policy and budget, with the difference to the full cache."""
    full = {record.task: record for record in records if record.policy == "full"}
    print(
        "| task | n | metric | policy | budget | kept of tokens | value | ± | less than full | ± |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for record in records:
        values = np.array(record.metrics[record.metric])
        less = np.array(full[record.task].metrics[record.metric]) - values
        print(
            f"| {record.task} | {len(values)} | {record.metric} | {record.policy} "
            f"| {record.budget:.0%} | {record.kept:.0f} of {record.tokens:.0f} "
            f"| {record.mean:.3f} | {record.error:.3f} | {less.mean():.3f} "
            f"| {less.std(ddof=1) / sqrt(len(less)):.3f} |"
        )


def plot(records: Sequence[Record], path: Path) -> None:
    """Draw a panel per task: a line per policy; dashed: the full cache; dotted: guessing."""
    tasks = list(dict.fromkeys(record.task for record in records))
    n_budgets = len({record.budget for record in records if record.policy != "full"})
    columns, rows = 4, len(tasks) // 4 + 1  # leaves a panel for the legend
    figure = new_figure(3.2 * columns, 2.9 * rows)
    first, *_ = panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, task in zip(panels, tasks, strict=False):
        of_task = [record for record in records if record.task == task]
        [full] = [record for record in of_task if record.policy == "full"]
        for policy in dict.fromkeys(record.policy for record in of_task if record is not full):
            line = sorted((r for r in of_task if r.policy == policy), key=lambda r: r.budget)
            # A budget of 1 is the full cache; lines end at missing budgets.
            points = [*line, full] if len(line) == n_budgets else line
            axes.errorbar(
                [100 * r.budget for r in points],
                [r.mean for r in points],
                [r.error for r in points],
                marker="o",
                markersize=3,
                linewidth=1.2,
                elinewidth=0.5,
                label=policy,
            )
        axes.axhline(full.mean, linestyle="--", color="black", linewidth=0.8, label="full")
        if task in CHANCE:
            axes.axhline(CHANCE[task], linestyle=":", color="gray", label="a guess")
        axes.set_title(f"{task}, {full.metric}, n={len(full.metrics[full.metric])}", fontsize=9)
        axes.set_xlabel("budget, % of the tokens", fontsize=8)
        axes.set_xlim(0, 105)
        axes.tick_params(labelsize=8)
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    panels[len(tasks)].legend(*first.get_legend_handles_labels(), loc="center", fontsize=9)
    figure.savefig(path, dpi=120)
