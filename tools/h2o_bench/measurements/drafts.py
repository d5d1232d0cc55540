"""Decoding with drafts and without: outputs that repeat their prompt, and others.

The runs take turns, and their outputs must be equal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from h2o_bench.results import Row
from h2o_cpp import Generator

_TEXT = (
    "The engine keeps a pool of slots for each head, and a slot holds one token. While there are "
    "free slots, nothing is lost. Later, each new token takes the slot of the token that mattered "
    "least so far, unless it is among the latest ones. What mattered is a sum: the attention that "
    "a token received from all tokens after it. Such sums are kept in single precision, since a "
    "long text would exceed what smaller numbers can count. The memory is known before the first "
    "word is read, and it stays the same after a million words. People who run models on their "
    "own machines asked for this, because their memory is small and their texts are long."
)
_PERSON = '{"name": "Anna Berg", "age": 31, "city": "Oslo", "languages": ["English", "Norwegian"]}'

# Name, prompt and temperature.
CASES = (
    ("edit", f"The text:\n\n{_TEXT}\n\nThe text with errors corrected:\n\n", 0.0),
    ("summary", f"The text:\n\n{_TEXT}\n\nA summary of the text:\n\n", 0.0),
    ("JSON", f"A list of people in JSON:\n\n[\n  {_PERSON},\n  ", 0.0),
    ("story", "The old man and the sea captain", 0.0),
    ("story, sampled", "The old man and the sea captain", 0.8),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model")
    parser.add_argument("--draft", default="lookup", help="as for h2o-cpp run")
    parser.add_argument("--hh", type=float, default=0.2)
    parser.add_argument("--n-ctx", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    generators = [
        Generator(
            args.model, hh=args.hh, n_ctx=args.n_ctx, threads=args.threads, draft=draft,
            max_sequences=1, prefix_cache=0,
        )
        for draft in (None, args.draft)
    ]  # fmt: skip
    for name, prompt, temperature in CASES:
        rates: list[list[float]] = [[], []]
        gains, passes = [], []
        for seed in range(args.rounds):
            pair = [
                generator.generate(
                    prompt, max_tokens=args.tokens, temperature=temperature, seed=seed,
                    ignore_eos=True,
                )
                for generator in generators
            ]  # fmt: skip
            plain, drafted = pair
            if plain.text != drafted.text:
                raise RuntimeError(f"{name}: the output with drafts differs: {drafted.text!r}")
            for result, found in zip(pair, rates, strict=True):
                found.append((result.completion_tokens - 1) / result.decode_seconds)
            gains.append(rates[1][-1] / rates[0][-1])
            n_passes = drafted.completion_tokens - drafted.accepted_tokens
            passes.append(drafted.completion_tokens / n_passes)
        yield {
            "output": name,
            "tokens/s without drafts": rates[0],
            "with": rates[1],
            "gain": gains,
            "tokens per pass": passes,
        }
