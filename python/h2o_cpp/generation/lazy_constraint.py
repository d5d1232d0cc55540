"""A grammar that begins where an output begins to follow it, such as at a tool call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.generation.grammar import make_constraint

if TYPE_CHECKING:
    from h2o_cpp.generation.constraint_process import Constraint, LocalConstraint
    from h2o_cpp.model.tokenizer import Tokenizer

_PATIENCE = 0.001  # seconds to wait for a grammar while other outputs could go on


class LazyConstraint:
    """Allows all tokens up to the first `trigger`, and from there on what a grammar allows.

    The grammar is made and compiled then, in a thread of its own. If it cannot be, all tokens stay
    allowed.
    """

    def __init__(self, tokenizer: Tokenizer, trigger: int, grammar: Callable[[], str]) -> None:
        """grammar: makes a grammar of text that begins with the trigger. May raise ValueError."""
        self._tokenizer = tokenizer
        self._trigger = trigger
        self._grammar = grammar
        self._n_seen: int | None = None  # tokens without the trigger, prompt included
        self._compiled: Future[Constraint | LocalConstraint | None] | None = None

    def ready(self, tokens: NDArray[np.int32]) -> bool:
        """Whether the mask after `tokens` is known."""
        if not self._begins(tokens):
            return True
        assert self._compiled is not None
        if not wait([self._compiled], _PATIENCE).done:
            return False
        inner = self._compiled.result()
        return inner is None or not hasattr(inner, "ready") or inner.ready(tokens)

    def __call__(self, tokens: NDArray[np.int32], allowed: NDArray[np.uint32]) -> None:
        """Waits for the grammar. Raises as its own constraint does."""
        inner = None
        if self._begins(tokens):
            assert self._compiled is not None
            inner = self._compiled.result()
        if inner is None:
            allowed.fill(0xFFFFFFFF)
        else:
            inner(tokens, allowed)

    def _begins(self, tokens: NDArray[np.int32]) -> bool:
        """Whether the trigger was generated; then the grammar is being compiled."""
        if self._compiled is not None:
            return True
        first = len(tokens) if self._n_seen is None else self._n_seen  # the prompt does not count
        found = np.flatnonzero(tokens[first:] == self._trigger)
        self._n_seen = len(tokens)
        if not len(found):
            return False
        self._compiled = Future()
        begin = first + int(found[0])
        threading.Thread(target=self._compile, args=[self._compiled, begin], daemon=True).start()
        return True

    def _compile(self, compiled: Future[Constraint | LocalConstraint | None], begin: int) -> None:
        inner = None
        try:
            inner = make_constraint(self._tokenizer, "grammar", self._grammar())
            inner.begin_at(begin)
        except (ValueError, TimeoutError, ImportError, OSError):
            pass  # as without a grammar
        finally:
            compiled.set_result(inner)
