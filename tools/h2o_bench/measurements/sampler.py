"""The sampler's time per token, by its options and by how peaked the probabilities are.

The logits are random numbers of a normal distribution of some deviations. The cases take turns, so
that a disturbance does not fall on one of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np

from h2o_bench.results import Row
from h2o_cpp._core import Sampler
from h2o_cpp.generation.sampling import make_sampling

DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
DEFAULTS |= {"repeat_penalty": 1.0, "repeat_last_n": 64}
_ALL: dict[str, Any] = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k 40, top_p 0.95, min_p 0.05": _ALL,
    "the same, repeat_penalty 1.1": _ALL | {"repeat_penalty": 1.1},
    "top_k 5000, top_p 0.95": {"top_k": 5000, "top_p": 0.95},
    "top_p 0.95, min_p 0.05": {"top_p": 0.95, "min_p": 0.05},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "no filter": {},
    "frequency_penalty 0.5, top_p 0.95": {"frequency_penalty": 0.5, "top_p": 0.95},
    "dry_multiplier 0.8, top_p 0.95": {"dry_multiplier": 0.8, "top_p": 0.95},
    "typical_p 0.95": {"typical_p": 0.95},
    "top_n_sigma 2": {"top_n_sigma": 2.0},
    "xtc_probability 0.5": {"xtc_probability": 0.5},
    "dynatemp_range 0.5": {"dynatemp_range": 0.5},
    "mirostat 2": {"mirostat": 2},
    "top_p 0.95, then temperature": {"top_p": 0.95, "samplers": ["top_p", "temperature"]},
}
DEVIATIONS = (1.0, 3.0, 6.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocab", type=int, default=151936, help="tokens in the vocabulary")
    parser.add_argument("--rounds", type=int, default=51, help="measurements of each case")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    random = np.random.default_rng(1)
    logits = {d: random.normal(0, d, args.vocab).astype(np.float32) for d in DEVIATIONS}
    samplers = {n: Sampler(args.vocab, make_sampling(DEFAULTS | case)) for n, case in CASES.items()}
    for sampler in samplers.values():
        for token in random.integers(0, args.vocab, 64):
            sampler.accept(int(token))
    seconds: dict[tuple[str, float], list[float]] = {(n, d): [] for n in CASES for d in DEVIATIONS}
    for _ in range(args.rounds):
        for (name, deviation), measured in seconds.items():
            start = perf_counter()
            samplers[name].sample(logits[deviation])
            measured.append(1e3 * (perf_counter() - start))
    for name in CASES:
        yield {"options": name, **{f"ms, deviation {d:g}": seconds[name, d] for d in DEVIATIONS}}
