"""Time that conversations wait for the first token, with and without the prefix cache.

Each user has a conversation of turns: so many new tokens, the answer's, and then a pause, random,
so that all users together send so many requests per second. Every turn sends the whole
conversation, and says where replies are, as prompts of chat templates do. Measured with and without
the prefix cache, and with `--hh` also under a budget; the same conversations at the same times.
Times are to the first piece of text; "later" are all turns but the first.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np

from h2o_bench.results import Row
from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.generation.engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--prompt-tokens", type=int, default=200, help="new ones of each turn")
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second, of all users")
    parser.add_argument("--hh", type=float, help="under this budget too")
    parser.add_argument("--n-batch", type=int, default=128)
    parser.add_argument("--n-ctx", type=int)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prefix-cache", default="1GiB")


class Trace:
    """The requests of all users, and their latencies."""

    def __init__(self, args: argparse.Namespace, generator: Generator) -> None:
        self.args, self.generator = args, generator
        self.ms: list[list[float]] = [[] for _ in range(args.turns)]  # by turn
        self.n_cached = self.n_prompt = 0

    async def user(self, engine: Engine, seed: int) -> None:
        """A conversation."""
        args, numbers, n_vocab = self.args, random.Random(seed), self.generator.n_vocab
        pause = args.users / args.rate
        conversation: list[int] = []
        replies: list[tuple[int, int]] = []
        await asyncio.sleep(numbers.uniform(0, pause))
        for turn in range(args.turns):
            conversation += [numbers.randrange(10, n_vocab) for _ in range(args.prompt_tokens)]
            started = perf_counter()
            completion = await engine.submit_async(
                conversation, replies=replies, max_tokens=args.output_tokens, ignore_eos=True,
                seed=seed,
            )  # fmt: skip
            first = None
            async for _ in completion:
                first = first or perf_counter()
            self.ms[turn].append(1e3 * ((first or perf_counter()) - started))
            self.n_cached += (await completion).cached_tokens
            self.n_prompt += len(conversation)
            replies.append((len(conversation), len(conversation) + len(completion.tokens)))
            conversation += completion.tokens
            await asyncio.sleep(numbers.expovariate(1 / pause))

    async def run(self) -> None:
        """Run all conversations."""
        with self.generator.engine(max_queue=self.args.users) as engine:
            await asyncio.gather(*(self.user(engine, seed) for seed in range(self.args.users)))


def measure(args: argparse.Namespace) -> Iterator[Row]:
    cached = {"prefix_cache": args.prefix_cache}
    ways = {"full cache, without": (None, {"prefix_cache": 0}), "full cache": (None, cached)}
    if args.hh:
        ways[f"hh={args.hh:g}"] = args.hh, cached
    for name, (hh, options) in ways.items():
        with Generator(
            args.model, hh=hh, n_batch=args.n_batch, n_ctx=args.n_ctx, threads=args.threads,
            max_sequences=args.sequences, **options,
        ) as generator:  # fmt: skip
            trace = Trace(args, generator)
            asyncio.run(trace.run())
        later = [ms for turn in trace.ms[1:] for ms in turn]
        row: dict[str, object] = {"": name}
        for of, ms in (("turn 1", trace.ms[0]), ("last turn", trace.ms[-1]), ("later", later)):
            row |= {f"{of}, ms p{p}": float(np.percentile(ms, p)) for p in (50, 99)}
        yield {**row, "reused, %": 100 * trace.n_cached / trace.n_prompt}
