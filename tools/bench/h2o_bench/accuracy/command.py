"""Measure every task with every cache setting, and plot the results."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from h2o_bench.accuracy.report import Record, plot, print_table
from h2o_cpp.cli.argument_types import fractions
from h2o_cpp.model.session import open_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy against the budget of the cache.")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path, help="directory of task files, as of `h2o-cpp eval`")
    parser.add_argument("--records", type=Path, required=True, help="JSON lines, added to")
    parser.add_argument("--tasks", default="copa,piqa,openbookqa,winogrande,rte,mathqa,xsum")
    parser.add_argument("--policies", default="window,h2o,contribution")
    parser.add_argument("--budget", type=fractions, default=[0.04, 0.1, 0.2, 0.4, 0.6])
    parser.add_argument("--examples", type=int, default=5)
    parser.add_argument("--limit", type=int, default=100, help="documents of a task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    records = _read(args.records)
    _measure(args, records)
    print_table(records)
    if args.plot is not None:
        plot(records, args.plot)


def _measure(args: argparse.Namespace, records: list[Record]) -> None:
    from h2o_bench.accuracy.tasks import XSUM, Setting, choice_scores, summary_scores

    settings = [Setting("full", 1.0)]
    settings += [Setting(policy, x) for x in args.budget for policy in args.policies.split(",")]
    done = {(record.task, record.policy, record.budget) for record in records}
    model = open_model(args.model, device="cpu", threads=args.threads)
    for task in args.tasks.split(","):
        for setting in settings:
            if (task, setting.policy, setting.budget) in done:
                continue
            if task == XSUM:
                scores = summary_scores(model, setting, data=args.data, limit=args.limit)
            else:
                scores = choice_scores(
                    model, task, setting, data=args.data, n_examples=args.examples, limit=args.limit
                )
            metrics = {name: list(values) for name, values in scores.metrics.items()}
            record = Record(
                task, setting.policy, setting.budget, scores.tokens, scores.kept, metrics
            )
            records.append(record)
            with args.records.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record._asdict()) + "\n")


def _read(path: Path) -> list[Record]:
    if not path.exists():
        return []
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
