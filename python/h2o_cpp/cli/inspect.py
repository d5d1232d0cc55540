"""Show which tokens of a text the cache keeps: in the terminal, as a page or as JSON.

The text is read one token at a time (--n-batch) and may be continued greedily (-n).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from h2o_cpp.arguments import check_int
from h2o_cpp.cli.argument_types import integer
from h2o_cpp.cli.cache_options import add_cache, options_of
from h2o_cpp.cli.files import STANDARD, check_outputs, write_text
from h2o_cpp.cli.options import add_machine, add_max_tokens, add_prompt, read_prompt
from h2o_cpp.cli.output import put, put_styled
from h2o_cpp.cli.parser import Parser
from h2o_cpp.cli.token_colors import color_wanted, marked
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.files.visible_text import visible_json
from h2o_cpp.measure.inspection import Inspection, inspect
from h2o_cpp.model.device import model_and_cache_bytes, open_on_device
from h2o_cpp.model.session import open_model
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.options import CacheOptions


def add_arguments(parser: Parser) -> None:
    add_prompt(parser, "TEXT", "the text")
    add_max_tokens(parser, 0, "continue the text greedily by at most N tokens")
    add_cache(parser, n_batch=1)
    add_machine(parser)

    shown = parser.add_argument_group("what to show")
    shown.add_argument(
        "--layer", type=integer, metavar="N", help="show only layer N (default: all)"
    )
    shown.add_argument(
        "--head", type=integer, metavar="N", help="show only KV head N (default: all)"
    )
    shown.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto",
        help="auto: on a terminal, unless NO_COLOR is set (default: %(default)s)",
    )  # fmt: skip
    shown.add_argument(
        "--html", type=Path, metavar="FILE", help='write a page to explore; "-": to stdout'
    )
    shown.add_argument(
        "--json", type=Path, metavar="FILE", help='write all data as JSON; "-": to stdout'
    )


def run(args: argparse.Namespace) -> int:
    """Print the text with the kept tokens marked, and a table; write the requested files."""
    check_outputs(html=args.html, json=args.json)
    file, cache = ModelFile.find(args.model), options_of(args, CacheOptions)
    found = open_on_device(
        args.device,
        partial(_inspected, args, file, cache.for_model(file), read_prompt(args)),
        partial(model_and_cache_bytes, file, cache),
    )
    if args.html is not None:
        write_text(args.html, found.to_html())
    if args.json is not None:
        write_text(args.json, visible_json(found.to_dict()) + "\n")
    if STANDARD in (args.html, args.json):
        return 0
    color = args.color == "always" or (args.color == "auto" and color_wanted(sys.stdout))
    one_head = args.layer is not None and args.head is not None
    kept = found.kept()
    if args.layer is not None:
        kept = kept[args.layer : args.layer + 1]
    if args.head is not None:
        kept = kept[:, args.head : args.head + 1]
    for part in marked(kept, found.pieces, found.policy, color=color, one_head=one_head):
        put_styled(part + "\n")
    for line in _table(found, args.layer, args.head):
        put(line)
    return 0


def _inspected(
    args: argparse.Namespace, file: ModelFile, cache: CacheOptions, text: str, device: str
) -> Inspection:
    model = open_model(file, device=device, threads=args.threads)
    if args.layer is not None:
        check_int("layer", args.layer, 0, model.n_layers - 1)
    if args.head is not None:
        check_int("head", args.head, 0, model.n_kv_heads - 1)
    tokenizer = Tokenizer.of_model(model)
    tokens = tokenizer.encode(text)
    return inspect(model, tokenizer, tokens, max_tokens=args.max_tokens, **vars(cache))


def _table(found: Inspection, layer: int | None, kv_head: int | None) -> Iterator[str]:
    n_layers, n_kv_heads, n = found.evicted_at.shape
    yield "| layer | kept | evicted | oldest kept | share of score | kept by every head |"
    yield "|---|---|---|---|---|---|"
    for each in range(n_layers) if layer is None else [layer]:
        row = found.summary(each, kv_head)
        if row.kept == 0:
            yield f"| {each} | no cache | | | | |"
            continue
        score = "-" if row.score_share is None else f"{row.score_share:.0%}"
        yield (
            f"| {each} | {row.kept} | {row.evicted} | {row.oldest} | {score} "
            f"| {row.common_share:.0%} |"
        )
    yield ""
    heads = f"{n_kv_heads} KV heads" if kv_head is None else f"KV head {kv_head} of {n_kv_heads}"
    yield f"{n} tokens, {n - found.n_prompt} of them generated; {n_layers} layers, {heads} in each"
    if not found.evicted_at.any():
        yield "nothing was evicted: the budget (--hh) holds the whole text"
