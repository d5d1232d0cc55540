"""What the cache keeps of a sequence, as clients see it."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_cpp.generation.trace import Kept
from h2o_cpp.measure.inspection import VisiblePieces
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.serve.responses import KeptTokens, PolicyCounts
from h2o_cpp.serve.texts import ServedText


class CacheView:
    """What the cache keeps of one sequence, observation by observation."""

    def __init__(self, tokenizer: Tokenizer, text: ServedText) -> None:
        self._text = text
        self._pieces = VisiblePieces(tokenizer)
        self._n_pieces = 0
        self._last: Kept | None = None

    def new(self) -> KeptTokens | None:
        """What was kept when last observed; None if that has been returned before."""
        kept = self._text.record.kept
        if kept is None or kept is self._last:
            return None
        n = len(kept.shares)
        tokens = [*self._text.prompt, *self._text.completion.tokens][self._n_pieces : n]
        begin, self._n_pieces, self._last = self._n_pieces, n, kept
        return KeptTokens(
            tokens_seen=n,
            tokens_kept=kept.tokens_kept,
            policy=policy_counts(self._text.policy),
            shares=[round(share, 3) for share in kept.shares.tolist()],
            begin=begin,
            pieces=[self._pieces.push(token) for token in tokens],
        )


def policy_counts(policy: Policy | Sequence[Policy]) -> PolicyCounts:
    """Of one policy, or of the first layer's."""
    first = policy if isinstance(policy, Policy) else policy[0]
    return PolicyCounts(sinks=first.n_sinks, heavy=first.n_heavy, recent=first.n_recent)
