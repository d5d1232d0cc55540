"""A model's scores on tasks, with the mean cache contents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval

from h2o_cpp.arguments import check_int
from h2o_cpp.eval.budgeted import Usage
from h2o_cpp.eval.model import H2oModel
from h2o_cpp.eval.tasks import load_task

_SEED = 1234  # of few-shot examples; lm_eval's default


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    task: str
    metric: str  # such as "acc" and "acc_norm"
    value: float
    stderr: float | None  # None if lm_eval has none
    n: int  # documents
    kept: float  # mean tokens in the cache at the end of a request, per layer and KV head
    cache_bytes: float  # allocated, mean
    truncated: int  # requests that lost the beginning of their text


def evaluate(
    model: H2oModel,
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> Iterator[Score]:
    """Score a model on tasks, one after another.

    tasks: names for load_task.
    data: directory of local files; None: from the Hub.
    num_fewshot: examples before each question; default: the task's own, mostly 0.
    limit: only the first N documents of a task.

    Raises as load_task does, before the first score.
    """
    if num_fewshot is not None:
        check_int("num_fewshot", num_fewshot, 0)
    if limit is not None:
        check_int("limit", limit, 1)
    loaded = [load_task(name, data) for name in tasks]
    if num_fewshot:
        for each in loaded:
            for name, task in each["tasks"].items():
                _check_examples(name, task, num_fewshot)
    return (score for each in loaded for score in _evaluate(model, each, num_fewshot, limit))


def _check_examples(name: str, task: Any, n: int) -> None:
    # Questions of the same split are examples of each other.
    most = len(task.fewshot_docs()) - (task.fewshot_cfg.split == task.config.test_split)
    if n > most:
        raise ValueError(f"num_fewshot={n}, expected at most {most}, the examples of {name}")


def _evaluate(
    model: H2oModel, loaded: Mapping[str, Any], num_fewshot: int | None, limit: int | None
) -> Iterator[Score]:
    for task in loaded["tasks"].values():
        if num_fewshot is not None:
            task.set_config("num_fewshot", num_fewshot)
        task.set_fewshot_seed(_SEED)
    model.budgeted.clear_usage()
    results = lm_eval.evaluate(model, loaded, limit=limit, log_samples=False)
    for task, metrics in results["results"].items():
        yield from _scores(task, metrics, model.budgeted.usage)


def _scores(task: str, metrics: Mapping[str, Any], usage: Usage) -> Iterator[Score]:
    """A Score for each "metric,filter" of lm_eval, with its "metric_stderr,filter"."""
    for key, value in metrics.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = metrics.get(f"{metric}_stderr,{kind}")
        yield Score(
            task=task,
            metric=metric if kind == "none" else key,
            value=value,
            stderr=stderr if isinstance(stderr, float) else None,
            n=metrics["sample_len"],
            kept=usage.kept,
            cache_bytes=usage.cache_bytes,
            truncated=usage.truncated,
        )
