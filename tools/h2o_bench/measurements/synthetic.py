"""Write a GGUF file of a real model's shape with random weights.

tools/bench synthetic TinyLlama-1.1B Q4_0 model.gguf
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from h2o_bench.results import Row
from support.shapes import SHAPES, config
from support.synthetic import TYPES, write_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shape", choices=SHAPES, metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("type", choices=TYPES, metavar="TYPE", help=", ".join(TYPES))
    parser.add_argument("output", type=Path, metavar="OUT", help="GGUF file to write")
    parser.add_argument("--layers", type=int, metavar="N", help="(default: as the real model)")
    parser.add_argument("--vocab", type=int, metavar="N", help="(default: as the real model)")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    sizes = {"num_hidden_layers": args.layers, "vocab_size": args.vocab}
    changes = {name: value for name, value in sizes.items() if value is not None}
    write_model(args.output, config(args.shape, **changes), args.type)
    yield {"file": args.output.name, "MiB": args.output.stat().st_size / 2**20}
