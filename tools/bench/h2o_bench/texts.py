"""Sequences that are read and decoded together, with timings."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

import numpy as np

from h2o_bench.engines.serving import Tokens
from h2o_bench.shapes import N_SPECIAL
from h2o_cpp import _core
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.session import chunks, open_session


class Texts:
    """All sequences of a session, of the same length."""

    def __init__(
        self, model: _core.Model, policy: Policy, *, n_ctx: int, n_batch: int, n_sequences: int = 1
    ) -> None:
        """Open the session; arguments as for open_session. Raises MemoryError."""
        self.session = open_session(
            model,
            policy,
            n_ctx=n_ctx,
            n_batch=max(n_batch, n_sequences),
            n_sequences=n_sequences,
        )
        self._model = model
        self._policy = policy
        self._random = np.random.default_rng(0)
        self._next: Tokens = np.zeros(n_sequences, np.int32)

    def __len__(self) -> int:
        return len(self._next)

    def reset(self) -> None:
        for sequence in range(len(self)):
            self.session.reset(sequence)

    def read(self, n: int) -> float:
        """Read n random tokens into each sequence, one sequence after another; returns seconds."""
        shape = len(self), n
        texts = self._random.integers(N_SPECIAL, self._model.n_vocab, shape, np.int32)
        begun = perf_counter()
        for sequence, tokens in enumerate(texts):
            for part in chunks(self.session, tokens, sequence):
                self._next[sequence] = self.session.greedy([(sequence, part)])[0]
        return perf_counter() - begun

    def decode(self, n: int) -> list[float]:
        """Decode n greedy tokens of each sequence; returns seconds per step."""
        times = [perf_counter()]
        for _ in range(n):
            self._next = self.session.greedy(self._inputs())
            times.append(perf_counter())
        return [end - begin for begin, end in pairwise(times)]

    def check(self, n_tokens: int) -> None:
        """Decode one more token of each sequence and check the results.

        n_tokens: expected length before it.

        Raises RuntimeError unless lengths are right, logits are finite, and each sequence keeps
        distinct positions, as many as the policy allows.
        """
        if not np.isfinite(self.session.step(self._inputs())).all():
            raise RuntimeError("logits are not finite")
        seen = n_tokens + 1
        kept = seen if self._policy.budget is None else min(self._policy.budget, seen)
        for sequence in range(len(self)):
            if self.session.tokens_seen(sequence) != seen:
                raise RuntimeError(f"{self.session.tokens_seen(sequence)} tokens, expected {seen}")
            for layer in (0, self._model.n_layers - 1):
                positions, _ = self.session.kept(layer, 0, sequence)
                if len(np.unique(positions)) != kept or self.session.tokens_kept(sequence) != kept:
                    raise RuntimeError(
                        f"{len(np.unique(positions))} tokens are kept, expected {kept}"
                    )

    def _inputs(self) -> list[tuple[int, Tokens]]:
        return [(sequence, self._next[sequence : sequence + 1]) for sequence in range(len(self))]
