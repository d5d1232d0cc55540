"""The four observations for a model and a text, as numbers and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_bench.analysis.attention import uniform_attention
from h2o_bench.analysis.cooccurrence import Association, associate, cooccurrences
from h2o_bench.analysis.power_law import TOP, PowerLaw, power_law, ranked
from h2o_cpp.measure.perplexity import Measurement

# Policies, and the tokens that they evict besides recent ones.
REMOVALS = {
    "h2o": "lightest",
    "inverse": "heaviest",
    "window": "oldest",
    "h2o+sinks": "lightest, sinks kept",
    "inverse+sinks": "heaviest, sinks kept",
    "sinks": "oldest, sinks kept",
}


@dataclass(frozen=True)
class Report:
    """The results. Lists are by layer."""

    n_tokens: int
    sparsity: list[float]
    power_laws: list[PowerLaw]
    uniform: PowerLaw  # with uniform attention, for comparison
    associations: dict[str, Association]  # accumulated attention and co-occurrence
    removal: list[Measurement]
    by_rank: NDArray[np.float64]  # accumulated attention [n_layers, n_tokens], sorted per head
    scores: NDArray[np.float64]  # accumulated attention [n_tokens], mean over layers and heads
    cooccurrences: NDArray[np.float64]  # [n_tokens]

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        layer_sparsity: NDArray[np.float64],
        accumulated: NDArray[np.float64],
        removal: Sequence[Measurement],
    ) -> Report:
        """From sparsity [n_layers] and accumulated attention [n_layers, n_kv_heads, n].

        `removal` has the full cache, then the policies of REMOVALS.
        """
        n = len(tokens)
        together = cooccurrences(tokens)
        scores: NDArray[np.float64] = accumulated.mean(axis=(0, 1))
        uniform = uniform_attention(n)
        by_rank = np.array([ranked(layer) for layer in accumulated])
        _, first, word = np.unique(tokens, return_index=True, return_inverse=True)
        return cls(
            n_tokens=n,
            sparsity=layer_sparsity.tolist(),
            power_laws=[power_law(layer) for layer in by_rank],
            uniform=power_law(uniform),
            associations={
                "position": associate(scores, together),
                "position, age removed": associate(scores / uniform, together),
                "token": associate(np.bincount(word, scores).astype(np.float64), together[first]),
            },
            removal=list(removal),
            by_rank=by_rank,
            scores=scores,
            cooccurrences=together,
        )

    def as_json(self) -> dict[str, Any]:
        """All fields except arrays per token; null for nan."""
        associations = {name: asdict(a) for name, a in self.associations.items()}
        for numbers in associations.values():
            numbers["spearman"] = None if isnan(numbers["spearman"]) else numbers["spearman"]
        return {
            "n_tokens": self.n_tokens,
            "sparsity": self.sparsity,
            "power_laws": [asdict(law) for law in self.power_laws],
            "uniform": asdict(self.uniform),
            "associations": associations,
            "removal": [asdict(row) for row in self.removal],
        }

    def lines(self) -> Iterator[str]:
        """Markdown tables, each with a sentence."""
        yield from self._layers()
        yield ""
        yield from self._removal()
        yield ""
        yield from self._associations()

    def _layers(self) -> Iterator[str]:
        tops = [f"top {share:.0%}" for share in TOP]
        yield f"| layer | sparsity | {' | '.join(tops)} | exponent | R2 |"
        yield "|---" * (len(TOP) + 4) + "|"
        for i, (sparse, law) in enumerate(zip(self.sparsity, self.power_laws, strict=True)):
            yield f"| {i} | {sparse:.1%} | {_law(law)} |"
        yield f"| uniform | 0.0% | {_law(self.uniform)} |"
        yield ""
        yield (
            f"In the median layer {median(self.sparsity):.1%} of the attention entries are below "
            "1 % of the largest of their row."
        )
        share = median(law.top_shares[1] for law in self.power_laws)
        yield (
            f"The heaviest {TOP[1]:.0%} of the tokens receive {share:.1%} of all attention in the "
            f"median layer; uniform attention would give them {self.uniform.top_shares[1]:.1%}."
        )

    def _removal(self) -> Iterator[str]:
        full = self.removal[0]
        yield "| evicted | share | kept | perplexity | of full |"
        yield "|---|---|---|---|---|"
        for row in self.removal:
            evicted = REMOVALS.get(row.policy, "none")
            ratio = row.perplexity / full.perplexity
            share = 1 - row.budget
            yield f"| {evicted} | {share:.0%} | {row.kept} | {row.perplexity:.3f} | {ratio:.3f} |"
        yield ""
        most = self.removal[-1].budget
        cost = {
            row.policy: f"{row.perplexity / full.perplexity:.3g}"
            for row in self.removal
            if row.budget == most
        }
        yield (
            f"With {1 - most:.0%} evicted, perplexity is {cost['h2o']} times the full cache's "
            f"without the lightest tokens and {cost['inverse']} times without the heaviest; "
            f"{cost['h2o+sinks']} and {cost['inverse+sinks']} if the first tokens, attention "
            "sinks, are kept in both."
        )

    def _associations(self) -> Iterator[str]:
        yield "| attention and co-occurrence by | Spearman | overlap of top 10% | by chance |"
        yield "|---|---|---|---|"
        for name, a in self.associations.items():
            yield f"| {name} | {a.spearman:.3f} | {a.overlap:.1%} | {a.overlap_by_chance:.1%} |"
        yield ""
        by_token, by_position = (
            self.associations[name] for name in ("token", "position, age removed")
        )
        yield (
            "The attention to a token of the vocabulary, in all its places, has a rank correlation "
            f"of {by_token.spearman:.2f} with how often it is near others, much of which is how "
            f"often it occurs; in one place, its age removed, {by_position.spearman:.2f}."
        )


def _law(law: PowerLaw) -> str:
    shares = " | ".join(f"{share:.1%}" for share in law.top_shares)
    return f"{shares} | {law.exponent:.2f} | {law.r_squared:.3f}"
