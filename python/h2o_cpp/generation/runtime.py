"""What a Generator runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.model.arguments import check_int
from h2o_cpp.model.capacity import capacity
from h2o_cpp.model.policy import Policy, choose_policy
from h2o_cpp.model.session import Positions, chunks, open_model, open_session
from h2o_cpp.model.stored_budget import Budget, resolve_budget
from h2o_cpp.tokenizer import TextTokenizer

_MAX_ROWS = 65536  # of a session's batch


class Runtime(NamedTuple):
    """A model, the sequences of it that are open, and its tokenizer."""

    model: _core.Model
    session: _core.Session
    tokenizer: TextTokenizer
    policy: Policy | Sequence[Policy]  # of every sequence: one, or one for each layer
    n_sequences: int
    n_batch: int  # prompt tokens of a sequence that are read at a time
    endless: bool  # whether a text can go on past n_ctx

    def chunks(self, tokens: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
        """Those that sequence 0 reads at a time; see session.chunks."""
        return chunks(self.session, tokens, n_batch=self.n_batch)

    def limit(self) -> str:
        """Why a text ends."""
        n_ctx = self.session.n_ctx
        if not self.model.learned_positions:
            return (
                f"n_ctx is {n_ctx}; a text goes on only where the policy evicts and positions roll"
            )
        if n_ctx < self.model.n_ctx_train:
            return f"n_ctx is {n_ctx}"
        return f"n_ctx is {n_ctx}, and the model has learned no positions after that"


def open_runtime(
    path: str | os.PathLike[str],
    *,
    hh: Budget,
    recent: float | None,
    policy: str | Policy | Sequence[Policy] | None,
    n_ctx: int | None,
    positions: Positions,
    n_batch: int,
    kv_dtype: str | tuple[str, str],
    device: str,
    threads: int | None,
    max_sequences: int | None,
    memory: int | str | None,
    max_resident: int | str | None,
) -> Runtime:
    """Load a model, as Generator explains it, which also says what is raised."""
    n_batch = check_int("n_batch", n_batch, 1)
    model = open_model(path, device=device, threads=threads, max_resident=max_resident)
    n_ctx = model.n_ctx_train if n_ctx is None else check_int("n_ctx", n_ctx, 1)
    hh, policy = resolve_budget(hh, policy, model.file)
    policy = choose_policy(hh, recent, policy, n_ctx)
    if memory is None:
        n_sequences = 1 if max_sequences is None else check_int("max_sequences", max_sequences, 1)
    elif max_sequences is None:
        n_sequences = capacity(
            model, memory, policy=policy, n_ctx=n_ctx, kv_dtype=kv_dtype, positions=positions
        )
        if n_sequences == 0:
            raise ValueError(f"memory={memory!r} is less than the cache of one sequence takes")
        n_sequences = min(n_sequences, max(1, _MAX_ROWS - n_batch + 1))
    else:
        raise ValueError("give either max_sequences or memory, not both")
    tokenizer = TextTokenizer.of_model(model)
    session = open_session(
        model,
        policy,
        n_ctx=n_ctx,
        n_batch=n_batch + n_sequences - 1,  # a chunk of one, and a token of each of the others
        n_sequences=n_sequences,
        kv_dtype=kv_dtype,
        positions=positions,
    )
    return Runtime(
        model,
        session,
        tokenizer,
        policy,
        n_sequences,
        n_batch=min(n_batch, n_ctx),
        endless=session.can_roll(0),
    )
