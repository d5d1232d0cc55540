"""Continuous batching: which tokens of which sequences make up the next forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.generation.continuation import Continuation
from h2o_cpp.generation.request import ContextFullError, Request
from h2o_cpp.generation.runtime import Runtime
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.session import Following, core_policies, step


@dataclass(eq=False)
class _Row:
    """A continuation and the sequence that computes it."""

    sequence: int
    continuation: Continuation
    unread: NDArray[np.int32]  # of its tokens: what is left of the prompt, or the newest
    n_evicted: int  # so far

    def wants_prompt(self) -> bool:
        """Whether every token that is read now is to be recorded."""
        record = self.continuation.request.record
        return record is not None and record.prompt and not self.continuation.tokens


class Scheduler:
    """Continues many requests at once, one forward pass for all of them at a time.

    Each has a sequence of the session, with a cache of its own, from start() until it ends; then
    the sequence is free for another. A step decodes a token of everyone whose prompt has been
    read, so that nobody waits for another one's prompt. Beside them it reads chunks of prompts, in
    the order of arrival, as many as the session's batch has room for; one always fits.

    Chunks are n_batch tokens long, but for the last of a prompt, and one that does not fit is read
    later, not shortened: where a prompt is cut decides what is evicted, so it must not depend on
    who else is there. As a row's results do not depend on the other rows either, each request gets
    the tokens that it gets alone, bit for bit.

    For one thread at a time.

    Attributes, counted from the beginning: `prompt_tokens` that were read, `generated_tokens`, and
    `evictions`, of the layer that keeps most.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._free = [*reversed(range(runtime.n_sequences))]
        self._rows: dict[Continuation, _Row] = {}  # in order of arrival
        self.prompt_tokens = self.generated_tokens = self.evictions = 0

    @property
    def n_free(self) -> int:
        """How many requests can be started."""
        return len(self._free)

    @property
    def n_active(self) -> int:
        """How many have been, and have not ended."""
        return len(self._rows)

    def start(self, request: Request) -> Continuation:
        """Give a request a free sequence.

        Raises ValueError if its policy needs more or other slots than there are, if its snapshot
        does not go with the sequence, and if its prompt is longer than the context.
        """
        session, sequence = self._runtime.session, self._free[-1]
        continuation = Continuation(self._runtime, request)
        try:
            self._reset(sequence, request.policy)
            if request.after is not None:
                session.load(sequence, request.after.data)
            unread = continuation.unread(session.tokens_seen(sequence))
            if len(unread) > session.room(sequence):
                n = len(continuation.text.tokens)
                raise ContextFullError(f"the prompt has {n} tokens, {self._runtime.limit()}")
        except BaseException:
            self._restore(sequence, request)
            raise
        self._free.pop()
        continuation.prompt_tokens = len(unread)
        n_evicted = self._n_evicted(sequence)  # of a snapshot
        self._rows[continuation] = _Row(sequence, continuation, unread, n_evicted)
        return continuation

    def cancel(self, continuation: Continuation) -> None:
        """End it, if it has not ended."""
        if continuation in self._rows:
            continuation.end("cancelled")
            self._release(self._rows[continuation])

    def step(self) -> list[tuple[Continuation, str]]:
        """One forward pass: who has got another token, and the text it completes, often empty.

        A ValueError ends those that it is about, and is then their `error`. Another error, as
        MemoryError, is raised, and nothing is known of the sequences then.
        """
        inputs = self._next_inputs()
        recorded = [one for one in inputs if one[0].wants_prompt()]
        inputs = [one for one in inputs if not one[0].wants_prompt()]
        started = perf_counter()
        greedy = all(row.continuation.request.greedy for row, _ in inputs)
        results = self._forward([(row.sequence, part) for row, part in inputs], greedy)
        results += [self._score(row, part) for row, part in recorded]
        seconds = perf_counter() - started
        pieces = []
        for (row, part), result in zip([*inputs, *recorded], results, strict=True):
            continuation = row.continuation
            n_before = len(continuation.tokens)
            if n_before:
                continuation.decode_seconds += seconds
            else:
                continuation.prompt_seconds += seconds
                self.prompt_tokens += len(part)
            self._count_evictions(row)
            row.unread = row.unread[len(part) :]
            if isinstance(result, ValueError):
                piece = continuation.end("cancelled", result)
            elif len(row.unread):
                continue
            else:
                piece = continuation.push(self._runtime, row.sequence, result)
                row.unread = np.asarray(continuation.tokens[-1:], np.int32)
            self.generated_tokens += len(continuation.tokens) - n_before
            continuation.said.write(piece)
            self._look(row)
            pieces.append((continuation, piece))
            if continuation.finish_reason is not None:
                self._release(row)
        return pieces

    def _next_inputs(self) -> list[tuple[_Row, NDArray[np.int32]]]:
        """Rows, each with the tokens that its sequence is to read."""
        session = self._runtime.session
        decoding = [row for row in self._rows.values() if row.continuation.tokens]
        reading = [row for row in self._rows.values() if not row.continuation.tokens]
        inputs = [(row, row.unread) for row in decoding]
        left = session.n_batch - len(decoding)
        for row in reading:
            n = min(len(row.unread), self._runtime.n_batch, session.chunk(row.sequence))
            if n <= left:
                inputs.append((row, row.unread[:n]))
                left -= n
        return inputs

    def _forward(
        self, inputs: list[tuple[int, NDArray[np.int32]]], greedy: bool
    ) -> list[Following | ValueError]:
        """For each what follows its last token, or what is wrong with it."""
        if not inputs:
            return []
        try:
            return [*step(self._runtime.session, inputs, greedy=greedy)]
        except ValueError as error:  # nothing has changed, and it may be about one of them
            if len(inputs) == 1:
                return [error]
            return [result for one in inputs for result in self._forward([one], greedy)]

    def _score(self, row: _Row, part: NDArray[np.int32]) -> Following | ValueError:
        """As _forward, for a chunk of a prompt whose every token is to be recorded."""
        try:
            logits = self._runtime.session.score(row.sequence, part)
        except ValueError as error:
            return error
        following = row.unread[1 : len(part) + 1]
        record = row.continuation.request.record
        assert record is not None
        record.tokens(logits[: len(following)], following)
        last: NDArray[np.float32] = logits[-1]
        return last

    def _count_evictions(self, row: _Row) -> None:
        n_evicted = self._n_evicted(row.sequence)
        self.evictions += n_evicted - row.n_evicted
        row.n_evicted = n_evicted

    def _n_evicted(self, sequence: int) -> int:
        session = self._runtime.session
        return session.tokens_seen(sequence) - session.tokens_kept(sequence)

    def _look(self, row: _Row) -> None:
        """Record what is kept, if it is time to."""
        continuation = row.continuation
        record = continuation.request.record
        if record is None or record.kept_every is None:
            return
        ended = continuation.finish_reason is not None
        if ended or (len(continuation.tokens) - 1) % record.kept_every == 0:
            record.look(self._runtime.model, self._runtime.session, row.sequence)

    def _release(self, row: _Row) -> None:
        del self._rows[row.continuation]
        self._restore(row.sequence, row.continuation.request)
        self._free.append(row.sequence)

    def _restore(self, sequence: int, request: Request) -> None:
        """Leave the sequence empty, with the policy of all."""
        policy = None if request.policy is None else self._runtime.policy
        self._reset(sequence, policy)

    def _reset(self, sequence: int, policy: Policy | Sequence[Policy] | None) -> None:
        policies = () if policy is None else core_policies(policy)
        self._runtime.session.reset(sequence, policies)
