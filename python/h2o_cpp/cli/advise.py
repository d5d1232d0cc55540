"""Find the smallest cache that costs little on your text: the budget for --hh.

Measures the perplexity of the text with the full cache, and bisects the budget of each policy.
If perplexity does not always fall as the budget grows, a budget below the advised one may be as
good. Types of K and V are compared by bytes. --archive also finds the smallest cache whose
evicted tokens are archived; among several shares of heads, the one with the fewest bytes of cache
and archive. --write stores the advice (with --archive, that with an archive) in the metadata of the
model file, which the other commands then apply with --hh auto and llama.cpp ignores.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from h2o_cpp.cli.argument_types import names, number
from h2o_cpp.cli.cache_options import add_archive, add_n_batch, add_n_ctx
from h2o_cpp.cli.files import read_text
from h2o_cpp.cli.options import (
    add_json,
    add_model,
    add_store,
    add_text,
    add_text_tokens,
    add_threads,
    stores,
)
from h2o_cpp.cli.parser import Parser
from h2o_cpp.cli.tables import cache_text, mebibytes
from h2o_cpp.measure.advice import Advice, Archived, advise, archive_of
from h2o_cpp.model.arguments import KvDType, types_text
from h2o_cpp.model.model_files import find_model
from h2o_cpp.model.stored_budget import store_budget


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    add_text(parser)
    parser.add_argument(
        "--loss", type=number, default=0.01, metavar="X",
        help="allowed increase of perplexity, a fraction (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", type=names, default=["h2o", "mean", "contribution"],
        metavar="NAME,...",
        help="policies to try (default: h2o,mean,contribution)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-dtypes", type=_types, metavar="TYPE[+TYPE],...",
        help="types of K and V to try, or pairs of them: q8_0+q4_0 (default: f16,q8_0)",
    )  # fmt: skip
    add_n_ctx(parser, "tokens of a window", "as trained, at most 2048")
    add_text_tokens(parser, "two windows")
    add_n_batch(
        parser, 1, "tokens per chunk, each followed by eviction: more is faster, 1 is as in decode "
        "(default: %(default)s)", "--chunk",
    )  # fmt: skip
    add_archive(parser, search=True)
    add_threads(parser)
    add_json(parser)
    add_store(parser, "the advice, for --hh auto,")


def run(args: argparse.Namespace) -> int:
    model, text = find_model(args.model), read_text(args.file)
    stored = stores(args, model)
    found = advise(
        model,
        text,
        loss=args.loss,
        policies=args.policy,
        kv_dtypes=args.kv_dtypes,
        n_ctx=args.n_ctx,
        text_tokens=args.text_tokens,
        n_batch=args.n_batch,
        threads=args.threads,
        archive=args.archive,
        archive_pages=args.archive_pages,
        archive_heads=args.archive_heads,
    )
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        _print(found)
    if stored:
        advised = found.archived or found
        store_budget(
            found.model,
            args.output,
            hh=advised.hh,
            policy=found.policy,
            n_ctx=found.n_ctx,
            loss=advised.loss,
            kv_dtype=found.kv_dtype,
            **({} if found.archived is None else archive_of(found.archived)),
        )
        print(f"wrote {args.output or found.model}, for --hh auto", file=sys.stderr)
    return 0


def _print(found: Advice) -> None:
    print("| policy | K, V | budget | kept | perplexity | of full | cache |")
    print("|---|---|---|---|---|---|---|")
    several = len({row.archive_heads for row in found.curve if row.archive is not None}) > 1
    for row in found.curve:
        archive = "" if row.archive is None else f", archive {types_text(row.archive)}"
        if several and row.archive_heads is not None:
            archive += f" of {100 * row.archive_heads:g}% of the heads"
        print(
            f"| {row.policy} | {types_text(row.kv_dtype)}{archive} | {row.budget:g} | {row.kept} "
            f"| {row.perplexity:.3f} | {row.perplexity / found.full_perplexity:.3f} "
            f"| {cache_text(row.cache_bytes, row.archive_bytes)} |"
        )
    print(f"\n{found.tokens} tokens predicted, in windows of {found.n_ctx}")
    types = "" if found.kv_dtype == "f16" else f" --kv-dtype {types_text(found.kv_dtype)}"
    if found.hh == 1 and found.kv_dtype == "f16":
        print(f"advice: the full cache; every smaller one costs more than {found.most_loss:.1%}")
    else:
        print(f"advice: --hh {found.hh:g} --policy {found.policy}{types}")
        _print_costs(found, found, mebibytes(found.cache_bytes))
    if (with_archive := found.archived) is not None:
        arguments = archive_of(with_archive) | {"archive": types_text(with_archive.archive)}
        options = "".join(
            f" --{name.replace('_', '-')} {value}"
            for name, value in arguments.items()
            if value is not None
        )
        print(f"with an archive: --hh {with_archive.hh:g} --policy {found.policy}{types}{options}")
        sizes = cache_text(with_archive.cache_bytes, with_archive.archive_bytes)
        _print_costs(found, with_archive, sizes)


def _print_costs(found: Advice, one: Advice | Archived, memory: str) -> None:
    perplexities = f"{one.perplexity:.3f}, full {found.full_perplexity:.3f}"
    print(f"  perplexity  {perplexities} ({one.loss:+.2%})")
    print(f"  cache       {memory}, full {mebibytes(found.full_cache_bytes)}")
    needle, share = one.needle, one.needle.share
    found_text = f"{needle.found:.2f}, full {needle.full:.2f}, absent {needle.absent:.2f}"
    print(
        f"  needle      {found_text}: "
        + ("the model does not find it" if share is None else f"{share:.0%} is left")
    )
    print(
        f"  speed       {one.tokens_per_second:.0f} tokens/s, full "
        f"{found.full_tokens_per_second:.0f}, measured here after {found.n_ctx} tokens "
        f"({found.backend})"
    )


def _types(text: str) -> list[KvDType]:
    """Types and pairs of types: "f16,q8_0+q4_0"."""
    pairs = [part.partition("+") for part in text.split(",")]
    return [(k, v) if plus else k for k, plus, v in pairs]
