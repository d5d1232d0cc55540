"""Batched decoding of coroutines, one token of each per step.

A text is a generator: it yields the next token of its sequence, receives the logits after it
[n_vocab], and returns its result. Eviction follows every token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.budget.policy import Policy
from h2o_cpp.measure.perplexity import token_losses

Logits: TypeAlias = NDArray[np.float32]
T = TypeVar("T")
Text: TypeAlias = Generator[int, Logits, T]


def together(session: _core.Session, texts: Sequence[Callable[[int], Text[T]]]) -> list[T]:
    """The results of texts, in order; each gets a sequence of its own."""
    results: dict[int, T] = {}
    waiting = iter(enumerate(texts))
    running: dict[int, tuple[int, Text[T], int]] = {}  # sequence: (index, text, its next token)
    while True:
        for sequence in range(session.n_sequences):
            while sequence not in running and (first := next(waiting, None)) is not None:
                index, text = first[0], first[1](sequence)
                try:
                    running[sequence] = (index, text, next(text))
                except StopIteration as end:
                    results[index] = end.value
        if not running:
            return [results[index] for index in range(len(texts))]
        inputs = [(s, np.array([token], np.int32)) for s, (_, _, token) in running.items()]
        for (sequence, _), logits in zip(inputs, session.step(inputs), strict=True):
            index, text, _ = running[sequence]
            try:
                running[sequence] = (index, text, text.send(logits))
            except StopIteration as end:
                del running[sequence]
                results[index] = end.value


def log_likelihoods(
    session: _core.Session,
    sequence: int,
    examples: bytes,
    context: Sequence[int],
    answers: Sequence[Sequence[int]],
) -> Text[list[float]]:
    """Log-likelihoods of answers after a context that begins with a snapshot's tokens."""
    session.load(sequence, examples)
    after_context = yield from _feed(context[session.tokens_seen(sequence) :])
    read = session.save(sequence, context, "")
    totals = []
    for answer in answers:
        session.load(sequence, read)
        logits, total = after_context, 0.0
        for i, token in enumerate(answer):
            total -= float(token_losses(logits[None], np.array([token], np.int32))[0])
            if i + 1 < len(answer):
                logits = yield token
        totals.append(total)
    return totals


def greedy_tokens(
    session: _core.Session,
    sequence: int,
    prompt: Sequence[int],
    policy: Policy,
    *,
    max_tokens: int,
    end_tokens: frozenset[int],
) -> Text[list[int]]:
    """The greedy continuation of a prompt within the budget of `policy`."""
    session.reset(sequence, [policy.core()])
    logits = yield from _feed(prompt)
    output: list[int] = []
    while (token := int(logits.argmax())) not in end_tokens:
        output.append(token)
        if len(output) == max_tokens:
            break
        logits = yield token
    return output


def read_examples(session: _core.Session, tokens: Sequence[int]) -> bytes:
    """A snapshot of a sequence with these tokens."""

    def text(sequence: int) -> Text[bytes]:
        session.reset(sequence)
        if tokens:
            yield from _feed(tokens)
        return session.save(sequence, tokens, "")

    [snapshot] = together(session, [text])
    return snapshot


def common_prefix(texts: Sequence[Sequence[int]]) -> int:
    """The length of the common prefix, shorter than each text."""
    shortest = min(len(text) for text in texts) - 1
    columns: Iterator[tuple[int, ...]] = zip(*texts, strict=False)
    for n, column in enumerate(columns):
        if n == shortest or len(set(column)) > 1:
            return n
    return shortest


def _feed(tokens: Sequence[int]) -> Text[Logits]:
    """The logits after the last token."""
    for token in tokens:
        logits = yield token
    return logits
