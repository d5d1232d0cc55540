"""The four observations as panels of a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from h2o_bench.analysis.attention import uniform_attention
from h2o_bench.analysis.report import REMOVALS, Report
from h2o_cpp.measure.plots import draw_budgets

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_report(figure: Figure, report: Report) -> None:
    """Draw sparsity, power law, removal and co-occurrence."""
    (sparsity, ranks), (removal, words) = figure.subplots(2, 2)

    sparsity.bar(range(len(report.sparsity)), report.sparsity)
    sparsity.set(title="sparse rows", xlabel="layer", ylabel="entries below 1 % of the largest")
    sparsity.set_ylim(0, 1)

    rank = np.arange(1, report.n_tokens + 1)
    for layer, scores in enumerate(report.by_rank):
        ranks.loglog(rank, scores, linewidth=1, label=f"layer {layer}")
    uniform = uniform_attention(report.n_tokens) * report.by_rank.sum(axis=1).mean()
    ranks.loglog(rank, uniform / report.n_tokens, "k--", linewidth=1, label="uniform")
    ranks.set(title="accumulated attention", xlabel="rank", ylabel="score")
    if len(report.by_rank) <= 8:  # space for at most 8
        ranks.legend(fontsize="small")

    full, *rest = report.removal
    points = [(REMOVALS[row.policy], row.budget, row.perplexity) for row in rest]
    draw_budgets(removal, points, full.perplexity)
    removal.set(title="which tokens are evicted", ylabel="perplexity")

    words.loglog(report.cooccurrences, report.scores, ".", markersize=3)
    words.set(title="tokens of the text", xlabel="co-occurrences", ylabel="score, mean")
