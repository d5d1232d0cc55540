"""Rank a model's KV heads by how much they attend to facts far back in a prompt.

Reads prompts that state a fact, and their answers, with the full cache. A few heads do most of the
finding: an archive of these alone keeps most facts (--archive-heads). --write stores the ranking in
the model file.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from h2o_cpp.arguments import check_context, check_int
from h2o_cpp.cli.argument_types import integer
from h2o_cpp.cli.cache_options import add_n_ctx
from h2o_cpp.cli.options import add_json, add_model, add_store, add_threads, stores
from h2o_cpp.cli.output import put, put_json, tell
from h2o_cpp.cli.parser import Parser
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.files.stored_metadata import store_metadata
from h2o_cpp.measure.heads import RETRIEVAL_HEADS, TASKS, rank_heads
from h2o_cpp.measure.retrieval.tasks import make_samples
from h2o_cpp.model.session import open_model
from h2o_cpp.model.tokenizer import Tokenizer

_LENGTH = 1000
_SHOWN = 20  # heads in the table
_SEED = 1  # other prompts than those of the retrieve command


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    add_n_ctx(
        parser, "tokens of a prompt with its answer", f"as trained, at most {_LENGTH}", "--length"
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=integer, default=8, metavar="N",
        help=f"prompts of each task: {', '.join(TASKS)} (default: %(default)s)",
    )  # fmt: skip
    add_threads(parser)
    add_json(parser)
    add_store(parser, "the ranking")


def run(args: argparse.Namespace) -> int:
    file = ModelFile.find(args.model)
    stored = stores(args, file.path)
    n_samples = check_int("samples", args.samples, 1)
    model = open_model(file, device="cpu", threads=args.threads)
    length = check_context(args.n_ctx, model.n_ctx_train, _LENGTH)
    tokenizer = Tokenizer.of_model(model)
    samples = [
        sample
        for task in TASKS
        for sample in make_samples(tokenizer, task, n=n_samples, length=length, seed=_SEED)
    ]
    from tqdm import tqdm  # type: ignore[import-untyped]  # as in open_model

    n_tokens = sum(len(sample.prompt) + len(sample.answer) - 1 for sample in samples)
    with tqdm(total=n_tokens, desc="prompts", unit="token", disable=None, leave=False) as bar:
        heads = rank_heads(model, samples, n_ctx=length, progress=bar.update)
    if args.json:
        put_json([asdict(head) for head in heads])
    else:
        put("| | layer | KV head | share | in all |")
        put("|---|---|---|---|---|")
        total = 0.0
        for i, head in enumerate(heads[:_SHOWN], 1):
            total += head.share
            put(f"| {i} | {head.layer} | {head.kv_head} | {head.share:.1%} | {total:.1%} |")
        put()
        put(
            f"{min(len(heads), _SHOWN)} of {len(heads)} heads, by their share of the attention "
            f"to the facts of {len(samples)} prompts of up to {length} tokens, while the answers "
            "are written"
        )
    if stored:
        ranked = [head.layer * model.n_kv_heads + head.kv_head for head in heads]
        store_metadata(file.path, args.output, {RETRIEVAL_HEADS: ranked})
        tell(f"wrote {args.output or file.path}, for --archive-heads")
    return 0
