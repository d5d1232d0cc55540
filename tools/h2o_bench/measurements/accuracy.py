"""Accuracy in tasks against the budget of the cache, as in figure 4 of the H2O paper.

Questions follow five examples, which are the same for all and read once. Every token is followed by
eviction. Errors are standard errors, also those of the differences to the full cache.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from h2o_bench.accuracy_tasks import XSUM, Setting, choice_scores, summary_scores
from h2o_bench.chart import Chart
from h2o_bench.results import Row
from h2o_cpp.cli.argument_types import fractions
from h2o_cpp.model.session import open_model

CHART = Chart(
    line="policy",
    x="budget, %",
    y={"_scores": "score"},
    panel="task",
    has_errors=True,
    level="full",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path, help="directory of task files, as of `h2o-cpp eval`")
    parser.add_argument("--tasks", default="copa,piqa,openbookqa,winogrande,rte,mathqa,xsum")
    parser.add_argument("--policies", default="window,h2o,contribution")
    parser.add_argument("--budget", type=fractions, default=[0.04, 0.1, 0.2, 0.4, 0.6])
    parser.add_argument("--examples", type=int, default=5)
    parser.add_argument("--limit", type=int, default=100, help="documents of a task")
    parser.add_argument("--threads", type=int, default=1)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    settings = [Setting("full", 1.0)]
    settings += [Setting(policy, x) for x in args.budget for policy in args.policies.split(",")]
    model = open_model(args.model, device="cpu", threads=args.threads)
    for task in args.tasks.split(","):
        full: Sequence[float] = ()
        for setting in settings:
            if task == XSUM:
                scores = summary_scores(model, setting, data=args.data, limit=args.limit)
            else:
                scores = choice_scores(
                    model, task, setting, data=args.data, n_examples=args.examples, limit=args.limit
                )
            metric = next(m for m in ("rougeL", "acc_norm", "acc") if m in scores.metrics)
            full = full or scores.metrics[metric]
            yield row(task, setting, metric, scores.metrics[metric], full) | {
                "kept": f"{scores.kept:.0f} of {scores.tokens:.0f}"
            }


def row(
    task: str, setting: Setting, metric: str, found: Sequence[float], full: Sequence[float]
) -> dict[str, object]:
    """The row of a setting; scores of each document, and of the full cache."""
    mean, error = _mean_and_error(found)
    less, its_error = _mean_and_error(np.subtract(full, found))
    cells = {"value": mean, "±": error, "less than full": less, "± of that": its_error}
    about = {"task": task, "n": len(found), "metric": metric, "policy": setting.policy}
    return {**about, "budget, %": 100 * setting.budget, **cells, "_scores": list(found)}


def _mean_and_error(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    n = len(values)
    return float(np.mean(values)), float(np.std(values, ddof=1) / n**0.5) if n > 1 else 0.0
