"""Print the embedding of a text as a JSON array.

It is the mean of the hidden states after the last norm, or that of the last or first token.
"""

from __future__ import annotations

import argparse
from typing import get_args

from h2o_cpp.cli.cache_options import add_cache
from h2o_cpp.cli.options import add_machine, add_prompt, open_generator, read_prompt
from h2o_cpp.cli.output import put_json
from h2o_cpp.cli.parser import Parser
from h2o_cpp.generation.request import Pooling


def add_arguments(parser: Parser) -> None:
    add_prompt(parser, "TEXT", "text to embed")
    parser.add_argument(
        "--pooling", choices=get_args(Pooling), default=None,
        help="the mean over all tokens, the last token or the first (default: as the model's file "
        "says, else mean)",
    )  # fmt: skip
    parser.add_argument(
        "--lines",
        action="store_true",
        help="embed each line by itself (default: the whole text)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="do not normalize (default: scale to length 1)"
    )
    add_cache(parser, memory=True)
    add_machine(parser, resident=True)


def run(args: argparse.Namespace) -> int:
    text = read_prompt(args)
    texts = text.splitlines() if args.lines else text
    if args.lines and "" in texts:
        raise ValueError(f"line {texts.index('') + 1} is empty, expected a text in each line")
    with open_generator(args) as generator:
        vectors = generator.embed(texts, pooling=args.pooling, normalize=not args.raw)
        for vector in vectors if args.lines else [vectors]:
            put_json([round(float(value), 8) for value in vector], indent=None)
    return 0
