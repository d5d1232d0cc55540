"""The observations of the H2O paper on a model and a text (arXiv 2306.14048, section 3).

Sparsity, by layer: the share of a row below 1 % of its largest entry, masked entries not counted.

Power law, by layer: accumulated attention, sorted per head and averaged by rank; the share of all
attention that the top 5, 10 and 20 % hold; exponent and R2 of a line in log-log coordinates, from
rank n/100 to n/2. Only what exceeds "uniform", where every token attends to all before it equally,
is due to the model.

Removal: perplexity, token by token, when the cache evicts the lightest (H2O), the heaviest
(inverse) or the oldest (window); and with the first 4 tokens always kept.

Co-occurrence: whether heavy tokens are those that often occur within 5 tokens of others: the rank
correlation (Spearman), and the overlap of the top tenths beside that by chance. By position; by
position, over what uniform attention would give; and by token, summed over its places as in the
paper, which correlates for any model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isnan
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from h2o_bench import observations
from h2o_bench.observations import LEAST_TOKENS, TOP, accumulated_attention, attention_rows
from h2o_bench.results import Row
from h2o_cpp.arguments import check_int
from h2o_cpp.budget.policy import Policy, Score, fraction_of
from h2o_cpp.files.text_files import read_text
from h2o_cpp.measure.perplexity import perplexity
from h2o_cpp.model.session import open_model, open_session
from h2o_cpp.model.tokenizer import Tokenizer

_MAX_TOKENS = 2048
_BUDGETS = (0.9, 0.6, 0.4, 0.2)  # kept fractions
_SINKS = 4


def _scored(n: int, sinks: int = 0, score: Score = "sum") -> Policy:
    heavy = (n - sinks) // 2
    return Policy.h2o(heavy, n - sinks - heavy, sinks, score=score)


# Policies that keep n tokens, by the tokens that they evict besides recent ones.
REMOVALS: dict[str, Callable[[int], Policy]] = {
    "lightest": _scored,
    "heaviest": partial(_scored, score="inverse"),
    "oldest": Policy.window,
    "lightest, sinks kept": partial(_scored, sinks=_SINKS),
    "heaviest, sinks kept": partial(_scored, sinks=_SINKS, score="inverse"),
    "oldest, sinks kept": lambda n: Policy.sinks(_SINKS, n - _SINKS),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path, help="a text")
    parser.add_argument(
        "--text-tokens", type=int, metavar="N", help=f"(default: as trained, at most {_MAX_TOKENS})"
    )
    parser.add_argument("--threads", type=int, default=2)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    text = read_text(args.file)
    model = open_model(args.model, device="cpu", threads=args.threads)
    n = min(model.n_ctx_train, _MAX_TOKENS)
    n = n if args.text_tokens is None else check_int("text_tokens", args.text_tokens, 1)
    tokenizer = Tokenizer.of_model(model)
    beginning = tokenizer.encode("")
    words = tokenizer.encode(text, add_special=False)[: n - len(beginning)]
    tokens = [*beginning, *words]
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(f"the text has {len(tokens)} tokens, expected at least {LEAST_TOKENS}")
    accumulated = accumulated_attention(model, tokens)
    yield from layers(observations.sparsity(attention_rows(model, tokens)), accumulated)
    full = None
    kept = {share: fraction_of(len(tokens), share) for share in _BUDGETS}
    every = [(1.0, len(tokens), "none", Policy.full())]
    every += [(s, n, name, make(n)) for s, n in kept.items() for name, make in REMOVALS.items()]
    for share, n, evicted, policy in every:
        session = open_session(model, policy, n_ctx=len(tokens), n_batch=1)
        value, _ = perplexity(session, words, beginning=beginning)
        full = full or value
        yield {
            "table": "removal",
            "evicted": evicted,
            "share, %": 100 * (1 - share),
            "kept": n,
            "perplexity": value,
            "of full": value / full,
        }
    yield from associations(tokens, accumulated.mean(axis=(0, 1)))


def layers(sparsity: NDArray[np.float64], accumulated: NDArray[np.float64]) -> Iterator[Row]:
    """The sparsity and the power law of each layer, and those of uniform attention."""
    ranks = {str(i): observations.ranked(layer) for i, layer in enumerate(accumulated)}
    ranks["uniform"] = observations.uniform_attention(accumulated.shape[-1])
    for (layer, by_rank), sparse in zip(ranks.items(), [*sparsity, 0.0], strict=True):
        law = observations.power_law(by_rank)
        tops = zip(TOP, law.top_shares, strict=True)
        yield {
            "table": "layers",
            "layer": layer,
            "sparsity, %": 100 * float(sparse),
            **{f"top {top:.0%}, %": 100 * share for top, share in tops},
            "exponent": law.exponent,
            "R2": law.r_squared,
        }


def associations(tokens: Sequence[int], scores: NDArray[np.float64]) -> Iterator[Row]:
    """Accumulated attention [n] and co-occurrence, of which some kinds are associated."""
    together = observations.cooccurrences(tokens)
    _, first, word = np.unique(tokens, return_index=True, return_inverse=True)
    uniform = observations.uniform_attention(len(tokens))
    by_token = np.bincount(word, scores).astype(np.float64)
    for name, found in {
        "position": observations.associate(scores, together),
        "position, age removed": observations.associate(scores / uniform, together),
        "token": observations.associate(by_token, together[first]),
    }.items():
        yield {
            "table": "co-occurrence",
            "by": name,
            "Spearman": None if isnan(found.spearman) else found.spearman,
            "overlap of top 10%, %": 100 * found.overlap,
            "by chance, %": 100 * found.overlap_by_chance,
        }
