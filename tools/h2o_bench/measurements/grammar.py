"""The cost of a constraint for the thread that computes tokens, beside llguidance in that thread.

Outputs of each schema are written at random: of the tokens that may follow, any. Both ways take
turns. A step of the model, a pause of --step milliseconds, is between asking for a mask and reading
it, as in the scheduler.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_bench.results import Row
from h2o_bench.schemas import cases
from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.generation.constraint_process import Constraint, LocalConstraint, setup_of
from h2o_cpp.generation.grammar import _source, make_constraint
from h2o_cpp.grammars.worker import Vocabulary, compile_grammar
from h2o_cpp.model.tokenizer import Tokenizer

Tokens = NDArray[np.int32]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", type=Path, default=BUNDLED_MODEL, help="for its tokens")
    parser.add_argument("--outputs", type=int, default=2, help="of each schema")
    parser.add_argument("--step", type=float, default=1.0, metavar="MS", help="time of a step")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="(default: all)")


class Local(LocalConstraint):
    """Masks computed in this thread."""

    def ready(self, tokens: Tokens) -> bool:
        return True


def walk(
    constraint: Constraint | Local, tokenizer: Tokenizer, seed: int, step: float
) -> Iterator[float]:
    """Microseconds of this thread per token of an output of at most 100 tokens."""
    numbers = random.Random(seed)
    tokens = [0]
    words = np.zeros((tokenizer.n_vocab + 31) // 32, np.uint32)
    while len(tokens) < 100 and not (tokens[1:] and tokens[-1] in tokenizer.end_tokens):
        given = np.asarray(tokens, np.int32)
        started = perf_counter()
        constraint.ready(given)
        asked = perf_counter()
        sleep(step)
        reading = perf_counter()
        constraint.ready(given)
        constraint(given, words)
        yield 1e6 * (perf_counter() - reading + asked - started)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        tokens.append(int(numbers.choice(allowed)))


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """A result, or None if it is refused, and milliseconds."""
    started = perf_counter()
    try:
        made = make()
    except ValueError:
        made = None
    return made, 1e3 * (perf_counter() - started)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    with Generator(args.model) as generator:
        tokenizer = generator.tokenizer
        vocabulary = Vocabulary(*setup_of(tokenizer), tokenizer.core).build()
        make_constraint(tokenizer, "schema", {})  # one-time costs
        kinds = {kind: found for kind, found in cases().items() if kind in (args.kinds or [kind])}
        for kind, schemas in kinds.items():
            n_refused = 0
            compiled: dict[str, list[float]] = {"thread": [], "process": []}
            times: dict[str, list[float]] = {"thread": [], "process": []}
            for schema in schemas:
                source = _source("schema", schema, tokenizer)
                matcher, here = timed(partial(compile_grammar, vocabulary, source))
                first, there = timed(partial(make_constraint, tokenizer, "schema", schema))
                if (matcher is None) != (first is None):
                    raise RuntimeError(f"only one of two refuses {schema}")
                if matcher is None:
                    n_refused += 1
                    continue
                compiled["thread"].append(here)
                compiled["process"].append(there)
                for seed in range(args.outputs):
                    local = Local(matcher.deep_copy())
                    times["thread"] += walk(local, tokenizer, seed, args.step / 1e3)
                    constraint = make_constraint(tokenizer, "schema", schema)
                    assert isinstance(constraint, Constraint)
                    times["process"] += walk(constraint, tokenizer, seed, args.step / 1e3)
            row: dict[str, Any] = {"schemas": kind, "cases": len(schemas), "refused": n_refused}
            for way in compiled:
                row[f"{way}: compile, ms"] = float(np.median(compiled[way]))
                row[f"{way}: token, us p50"] = float(np.percentile(times[way], 50))
                row[f"{way}: p99"] = float(np.percentile(times[way], 99))
            yield row
