"""Sequences that are read and decoded together, with timings."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from time import perf_counter

import numpy as np

from h2o_bench.engines.serving import Tokens
from h2o_cpp import _core
from h2o_cpp.budget.policy import Policy
from h2o_cpp.model.session import open_session
from support.shapes import N_SPECIAL

_SOON = 2.0  # seconds of reading that need no shortcut


class TooLongError(Exception):
    """Reading would take longer than is allowed."""


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

    def read(self, n: int, *, together: int = 1, most: float = inf) -> float:
        """Read n random tokens into each sequence; returns seconds.

        together: sequences that are read in one pass. most: seconds.

        Raises TooLongError after the first pass if all would take longer than `most`.
        """
        groups = [range(i, min(i + together, len(self))) for i in range(0, len(self), together)]
        texts = self._draw(n)
        begun = perf_counter()
        for group in groups:
            self._read_group(group, texts)
            _check_time(
                (perf_counter() - begun) / (group.start // together + 1) * len(groups), most
            )
        return perf_counter() - begun

    def fill(self, n: int, *, most: float = inf) -> None:
        """Read n random tokens into each sequence, or copy the first one where that is faster.

        Raises TooLongError if it would take more than `most` seconds.
        """
        texts = self._draw(n)
        begun = perf_counter()
        self._read_group(range(1), texts)
        one = perf_counter() - begun
        rest = range(1, len(self))
        if one * len(rest) > _SOON:
            snapshot = self.session.save(0, texts[0].tolist(), "")
            begun = perf_counter()
            self._load(1, snapshot)
            copy = perf_counter() - begun
            rest = rest[1:]
            _check_time(min(one, copy) * len(rest), most)
            if copy < one:
                for sequence in rest:
                    self._load(sequence, snapshot)
                return
        for sequence in rest:
            self._read_group(range(sequence, sequence + 1), texts)

    def _draw(self, n: int) -> Tokens:
        """Random tokens [sequences, n]."""
        shape = len(self), n
        return self._random.integers(N_SPECIAL, self._model.n_vocab, shape, np.int32)

    def _read_group(self, group: range, texts: Tokens) -> None:
        """Read some sequences in as few passes as possible."""
        most = max(1, self.session.n_batch // len(group))
        at, end = 0, texts.shape[1]
        while at < end:
            n = min(end - at, most, *(self.session.chunk(sequence) for sequence in group))
            if n < 1:
                raise RuntimeError(f"no room for {end - at} more tokens")
            inputs = [(sequence, texts[sequence, at : at + n]) for sequence in group]
            self._next[group.start : group.stop] = self.session.greedy(inputs)
            at += n

    def _load(self, sequence: int, snapshot: bytes) -> None:
        self.session.load(sequence, snapshot)
        self._next[sequence] = self._next[0]

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


def _check_time(seconds: float, most: float) -> None:
    if seconds > most:
        raise TooLongError(f"reading would take {seconds:.0f} s")
