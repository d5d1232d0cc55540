"""Score a model on tasks of lm-evaluation-harness under eviction. Needs the extra `eval`."""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict
from pathlib import Path

from h2o_cpp.budget.policy import POLICIES
from h2o_cpp.cli.argument_types import integer, number
from h2o_cpp.cli.cache_options import add_kv_dtype, add_n_batch, add_n_ctx
from h2o_cpp.cli.files import STANDARD, check_outputs, write_text
from h2o_cpp.cli.options import add_machine, add_model
from h2o_cpp.cli.output import put
from h2o_cpp.cli.parser import Parser
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.files.visible_text import visible_json


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--tasks", "--task", required=True, metavar="NAME,...",
        help="tasks of lm_eval; with --data, of copa, openbookqa, piqa, rte, winogrande, mathqa",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="read the tasks' data from files in DIR (default: download it)",
    )  # fmt: skip
    parser.add_argument(
        "--hh",
        type=number,
        metavar="X",
        help="fraction of each request that is kept (default: all)",
    )
    parser.add_argument(
        "--policy", default="h2o", metavar="NAME",
        help=f"policy for --hh, one of {', '.join(POLICIES)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--num-fewshot", type=integer, metavar="N",
        help="examples in front of each question (default: as the task says, mostly 0)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=integer, metavar="N", help="only N documents of each task (default: all)"
    )
    add_n_ctx(parser, "maximum length of a request, in tokens", "as trained")
    add_n_batch(
        parser, None,
        "tokens per chunk, each followed by eviction (default: the whole context)",
        "--chunk",
    )  # fmt: skip
    add_kv_dtype(parser, "f16")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help='also write the scores to FILE; "-": only them, to stdout (default: no)',
    )
    add_machine(parser)


def run(args: argparse.Namespace) -> int:
    """Print a table, task by task."""
    check_outputs(json=args.json)
    try:
        from h2o_cpp.eval.model import H2oModel
        from h2o_cpp.eval.scores import evaluate
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: `pip install lm-eval`, or the extra `eval`") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about its own tasks
    file = ModelFile.find(args.model)
    model = H2oModel(
        file,
        hh=args.hh,
        policy=args.policy,
        n_ctx=args.n_ctx or None,
        n_batch=args.n_batch,
        kv_dtype=args.kv_dtype,
        device=args.device,
        threads=args.threads,
    )
    scores = evaluate(
        model, args.tasks.split(","), data=args.data, num_fewshot=args.num_fewshot, limit=args.limit
    )
    table = args.json != STANDARD
    if table:
        put("| task | metric | value | ± | n | kept | cache | truncated |")
        put("|---|---|---|---|---|---|---|---|")
    rows = []
    for row in scores:
        rows.append(asdict(row))
        stderr = "" if row.stderr is None else f"{row.stderr:.4f}"
        if table:
            put(
                f"| {row.task} | {row.metric} | {row.value:.4f} | {stderr} | {row.n} "
                f"| {row.kept:.1f} | {row.cache_bytes / 2**10:.1f} KiB | {row.truncated} |",
            )
    if args.json is not None:
        settings = {
            "model": Path(file.path).name,
            "hh": args.hh,
            "policy": args.policy,
            "num_fewshot": args.num_fewshot,
            "limit": args.limit,
            "n_ctx": model.budgeted.n_ctx,
            "n_batch": args.n_batch,
            "kv_dtype": args.kv_dtype,
        }
        text = visible_json({"settings": settings, "scores": rows}, indent=2)
        write_text(args.json, text + "\n")
    return 0
