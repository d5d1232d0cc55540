"""A stream far beyond the trained length: speed, memory and fluency of each tenth.

One stream with rolling positions once the trained length is reached. Perplexity is that of its last
tokens, as many as half the trained context, for the same model with a full cache that reads nothing
else.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import exp
from pathlib import Path
from time import perf_counter

import numpy as np

from h2o_bench.results import Row
from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.measure.machine import rss_bytes
from h2o_cpp.measure.perplexity import token_losses

PROMPT = "Once upon a time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--hh", type=float, default=0.2)
    parser.add_argument("--threads", type=int, default=2)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    part = args.tokens // 10
    generator = Generator(args.model, hh=args.hh, threads=args.threads)
    stream = generator.stream(
        PROMPT, max_tokens=args.tokens, temperature=0.8, seed=1, ignore_eos=True
    )
    found: list[tuple[float, int]] = []
    begin = perf_counter()
    for _ in stream:
        if stream.completion_tokens // part > len(found):
            found.append((part / (perf_counter() - begin), rss_bytes()))
            begin = perf_counter()
    if stream.completion_tokens != args.tokens or len(found) != 10:
        raise RuntimeError(f"got {stream.completion_tokens} tokens, expected {args.tokens}")
    judge = Generator(args.model, threads=args.threads)
    n_judged = min(judge.n_ctx // 2, part)
    for i, (rate, rss) in enumerate(found):
        end = (i + 1) * part
        ids = np.asarray(stream.tokens[end - n_judged : end], np.int32)
        yield {
            "tokens": end,
            "tokens/s": rate,
            "growth, KiB": (rss - found[0][1]) / 1024,
            "perplexity": exp(token_losses(judge.logits(ids)[:-1], ids[1:]).mean()),
        }
