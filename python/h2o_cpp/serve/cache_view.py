"""What the cache keeps of a sequence, in the form that clients receive."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_cpp.measure.inspection import VisiblePieces
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.responses import KeptTokens, PolicyCounts


class CacheView:
    """What the cache keeps of one sequence, one observation after another."""

    def __init__(self, tokenizer: Tokenizer, output: Output) -> None:
        self._output = output
        self._pieces = VisiblePieces(tokenizer)
        self._n_pieces = 0

    def new(self) -> KeptTokens | None:
        """The last observation; None if it was already returned."""
        kept = self._output.record.kept
        if kept is None or len(kept.shares) == self._n_pieces:
            return None
        n = len(kept.shares)
        tokens = [*self._output.prompt, *self._output.completion.tokens][self._n_pieces : n]
        begin, self._n_pieces = self._n_pieces, n
        return KeptTokens(
            tokens_seen=n,
            tokens_kept=kept.tokens_kept,
            policy=policy_counts(self._output.policy),
            shares=[round(share, 3) for share in kept.shares.tolist()],
            begin=begin,
            pieces=[self._pieces.push(token) for token in tokens],
        )


def policy_counts(policy: Policy | Sequence[Policy]) -> PolicyCounts:
    """The counts of a policy; of a list, those of the first layer."""
    first = policy if isinstance(policy, Policy) else policy[0]
    return PolicyCounts(sinks=first.n_sinks, heavy=first.n_heavy, recent=first.n_recent)
