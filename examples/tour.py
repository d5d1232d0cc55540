"""A tour in the terminal: heavy hitters, what the cache keeps, and what it costs.

python tour.py [MODEL]
"""

from __future__ import annotations

import sys
from time import perf_counter

from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.measure.budgets import Comparison
from h2o_cpp.measure.perplexity import measure
from h2o_cpp.model.session import open_model
from h2o_cpp.model.tokenizer import Tokenizer

STORY = """It was late in the evening when the old man came to the house by the sea. He had walked
all day, and he was tired, and he had not eaten since the morning. The door was open. He went in and
called, but there was no answer; only the clock went on, and the wind in the chimney. He sat down by
the fire, and looked at the picture of the ship on the wall, and waited for his son. """
BUDGET = 32  # tokens per KV head: 16 heavy hitters and 16 recent ones


def step(title: str, text: str) -> None:
    """Print a title and a text; in a terminal, wait for Enter."""
    if sys.stdin.isatty() and sys.stdout.isatty() and not title.startswith("1"):
        input("\n[Enter]")
    print(f"\n{title}\n{'-' * len(title)}\n{text}\n")


def bar(share: float, width: int = 40) -> str:
    """A bar for a share from 0 to 1."""
    return "#" * round(width * share)


def heavy_hitters(model: str) -> None:
    """Tokens of a story by the attention they have received."""
    with Generator(model, hh=1.0) as generator:
        stream = generator.stream(STORY, max_tokens=1, temperature=0.0)
        for _ in stream:
            pass
        layer = generator.stats().n_layers // 2
        positions, scores = generator.kept(layer, 0)
        order = scores.argsort()[::-1]
        tokens = stream.history
        for i in order[:8]:
            text = generator.detokenize([tokens[positions[i]]])
            print(f"  {text!r:12} token {positions[i]:3}  {bar(float(scores[i] / scores.max()))}")
        share = scores[order[: len(order) // 5]].sum() / scores.sum()
    print(f"\nOf {len(order)} tokens, the top 20 % received {share:.0%} of the attention.")


def what_is_kept(model: str) -> None:
    """The positions that one KV head keeps as the text grows."""
    with Generator(model, hh=BUDGET) as generator:
        stream = generator.stream("The old man", max_tokens=150, seed=1, ignore_eos=True)
        layer = generator.stats().n_layers // 2
        for n, _ in enumerate(stream, start=1):
            if n % 15 == 0:
                seen = generator.stats().tokens_seen
                kept = set(generator.kept(layer, 0)[0].tolist())
                marks = "".join("#" if i in kept else "." for i in range(seen))
                print(f"{seen:4} tokens  {marks}")


def what_it_costs(model: str) -> None:
    """Perplexity by budget and policy."""
    opened = open_model(model, device="auto", threads=None)
    tokens = Tokenizer.of_model(opened).encode(STORY * 2, add_special=False)
    n_ctx = min(len(tokens), opened.n_ctx_train)
    for row in measure(
        opened,
        tokens,
        Comparison.of(["h2o", "mean", "window"], [0.5, 0.2, 0.1], n_ctx=n_ctx, n_batch=1),
    ):
        print(f"  {row.policy:8}{row.kept:5} of {n_ctx} tokens kept   {row.perplexity:8.2f}")


def what_it_saves(model: str) -> None:
    """Memory and speed of a long output."""
    for name, hh in (("full cache", None), ("hh=0.2", 0.2), ("hh=0.05", 0.05)):
        with Generator(model, hh=hh) as generator:
            n = min(1500, generator.n_ctx - 20)
            begin, last = perf_counter(), 0.0
            for i, _ in enumerate(
                generator.stream("The old man", max_tokens=n, seed=1, ignore_eos=True)
            ):
                if i == n // 2:
                    begin = perf_counter()
                last = perf_counter() - begin
            used = generator.stats().cache_bytes / 2**20
        print(f"  {name:12}{used:6.2f} MiB   {n / 2 / last:6.0f} tokens/s in the second half")


def main(model: str) -> None:
    """All steps."""
    step(
        "1. Heavy hitters",
        "Attention is uneven: a few tokens receive most of it. The heaviest of a short story, for\n"
        "one head of a middle layer:",
    )
    heavy_hitters(model)
    step(
        "2. What is kept",
        f"The cache keeps {BUDGET} tokens: the {BUDGET // 2} most recent, and the {BUDGET // 2}"
        " heaviest of the rest.\nA line is the text so far: # is kept, . is evicted.",
    )
    what_is_kept(model)
    step(
        "3. What it costs",
        "Perplexity of the story with a part of the cache; lower is better.\n"
        "h2o ranks by the sum of attention, mean by its mean, window keeps the most recent only.",
    )
    what_it_costs(model)
    step(
        "4. What it saves",
        "Memory of the cache, and speed, of an output as long as the context allows.",
    )
    what_it_saves(model)
    print("\nOn a model and a text of yours: h2o-cpp advise MODEL TEXT")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(BUNDLED_MODEL))
