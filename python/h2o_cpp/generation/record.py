"""Records: data collected about a sequence while it is computed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import check_int


class TokenLogprob(NamedTuple):
    """The log-probability of a token given those before it.

    Natural logarithms of the model's distribution, before temperature and other sampling options.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the most likely tokens, descending


class Kept(NamedTuple):
    """The tokens that the cache keeps of a sequence at one moment."""

    tokens_kept: int  # in the layer that keeps the most
    shares: NDArray[np.float32]  # [tokens seen], share of KV heads that keep each token
    # [tokens seen], empty without an archive: the share of the archived KV heads that recalled each
    # token's page, the mean of the tokens since the record before; on a device always 0
    recalls: NDArray[np.float32]


class Record:
    """Data that Engine.submit() collects about one sequence; readable at any time."""

    def __init__(
        self, *, n_top: int | None = None, prompt: bool = False, kept_every: int | None = None
    ) -> None:
        """Nothing is collected by default.

        n_top: record log-probabilities of the generated tokens, and of the n_top most likely ones.
        prompt: also record those of the prompt's tokens, from the second on, as read in chunks of
            n_batch with full attention within each.
        kept_every: record what is kept after the first generated token, then every kept_every
            tokens, and at the end. Costs a call per layer and KV head each time.

        Raises ValueError for numbers out of range.
        """
        self.n_top = None if n_top is None else check_int("n_top", n_top, 0)
        if prompt and n_top is None:
            raise ValueError("prompt=True needs n_top, the number of most likely tokens to record")
        self.prompt = prompt
        self.kept_every = None if kept_every is None else check_int("kept_every", kept_every, 1)
        self.core = _core.Trace(n_top=self.n_top, prompt=prompt, kept_every=self.kept_every)

    @property
    def used(self) -> bool:
        """Whether data has been collected."""
        return self.core.n_logprobs > 0 or self.core.kept() is not None

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of all tokens so far."""
        return self.logprobs_between(0, self.core.n_logprobs)

    def logprobs_between(self, begin: int, end: int) -> list[TokenLogprob]:
        """Log-probabilities from `begin` to `end`."""
        return [TokenLogprob(*one) for one in self.core.logprobs(begin, end)]

    @property
    def kept(self) -> Kept | None:
        """The last record of kept tokens; None before the first."""
        found = self.core.kept()
        return None if found is None else Kept(*found)
