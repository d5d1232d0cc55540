"""The engine's side of the processes that compile grammars and compute masks.

`grammars/worker.py` describes the processes and has their limits.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.grammars import worker
from h2o_cpp.grammars.processes import (
    CAN_ISOLATE,
    SLOW_SECONDS,
    Forks,
    Limits,
    Process,
    Worker,
    find_llguidance,
)

if TYPE_CHECKING:
    import llguidance

    from h2o_cpp.model.tokenizer import Tokenizer

_PATIENCE = 0.002  # seconds that a step waits for a mask before other outputs go on
_MAX_COMPILED = 32  # grammars kept per model; the least recently used are dropped

_OUTPUT_LIMITS = Limits("a token of it", worker.TOKEN_SECONDS, worker.OUTPUT_BYTES)


class CompilingError(TimeoutError):
    """A grammar that has not been compiled within the time that a caller could wait.

    Asking again finds it compiled, if this exception is kept until then.
    """

    def __init__(self, compiled: Compiled) -> None:
        super().__init__("the grammar is still being compiled")
        self._compiled = compiled

    async def wait(self, goes_on: Callable[[], Awaitable[bool]] | None = None) -> bool:
        """Wait until it has been compiled or rejected, while `goes_on` is true; returns whether."""
        delay = 0.001
        while not self._compiled.poll(0):
            if goes_on is not None and not await goes_on():
                return False
            await asyncio.sleep(delay)
            delay = min(2 * delay, 0.05)
        return True


class Constraint:
    """Sets the allowed tokens of one output, as `constraint=` does; a process computes them."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._n_read: int | None = None  # tokens that the process has
        self._asked = self._waited = False  # since the last mask
        self._asked_at = 0.0

    def begin_at(self, n_tokens: int) -> None:
        """Follow the grammar after this many tokens, rather than after those of the first call."""
        self._n_read = n_tokens

    def ready(self, tokens: NDArray[np.int32]) -> bool:
        """Whether the mask after `tokens` is known; the first call for them asks for it.

        The second call waits briefly. Raises TimeoutError if it takes too long.
        """
        if not self._asked:
            self._ask(tokens)
            return False
        if self._process.poll(0.0 if self._waited else _PATIENCE):
            return True
        self._waited = True
        self._process.check_time(self._asked_at)
        return False

    def __call__(self, tokens: NDArray[np.int32], allowed: NDArray[np.uint32]) -> None:
        """Waits for the mask. Raises ValueError or TimeoutError if the grammar exceeds a limit."""
        if not self._asked:
            self._ask(tokens)
        while not self._process.poll(SLOW_SECONDS):
            self._process.check_time(self._asked_at)
        self._asked = False
        try:
            mask = self._process.read_answer(allowed.nbytes)
        except ValueError as error:
            raise ValueError(f"the grammar failed: {error}") from None
        allowed[:] = np.frombuffer(mask, np.uint32)

    def _ask(self, tokens: NDArray[np.int32]) -> None:
        first = len(tokens) if self._n_read is None else self._n_read  # the prompt is not part
        self._n_read = len(tokens)
        self._asked, self._waited = True, False
        self._asked_at = time.monotonic()
        self._process.send(np.ascontiguousarray(tokens[first:], np.int32).tobytes())


class Compiled:
    """A grammar in a process of its own."""

    def __init__(self, process: Process, source: dict[str, str]) -> None:
        self._process = process
        self._started = time.monotonic()
        self._mutex = threading.Lock()
        self._error: Exception | None = None
        self._forks: Forks | None = None  # if it was compiled
        process.send(json.dumps(source).encode())

    def poll(self, seconds: float) -> bool:
        """Wait until it is compiled or rejected, at most this long; returns whether it is."""
        with self._mutex:
            if self._forks is not None or self._error is not None:
                return True
            try:
                if not self._process.poll(seconds):
                    self._process.check_time(self._started)
                    return False
                self._process.read_answer()
                self._forks = Forks(self._process.socket)
            except (ValueError, RuntimeError, TimeoutError) as error:
                self._error = error
            return True

    def constraint(self, timeout: float | None) -> Constraint:
        """A constraint for one output; timeout: seconds to wait; default: until it is compiled.

        Raises CompilingError after the timeout, and ValueError or TimeoutError if it was rejected.
        """
        end = None if timeout is None else time.monotonic() + timeout
        left = SLOW_SECONDS
        while True:
            if end is not None:
                left = min(max(end - time.monotonic(), 0), SLOW_SECONDS)
            if self.poll(left):
                break
            if not left:
                raise CompilingError(self)
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        assert self._forks is not None
        return Constraint(self._forks.fork(_OUTPUT_LIMITS, keeps=self))

    @property
    def has_ended(self) -> bool:
        """Whether it was compiled but its process has ended since."""
        return self._forks is not None and self._forks.failed


class Processes:
    """Compiled grammars for a vocabulary, in processes; kept by content."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start the process of the vocabulary. Raises ValueError, ImportError and OSError."""
        self._mutex = threading.Lock()
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self.worker = Worker(*setup_of(tokenizer, _check(tokenizer)))
        self._limits = Limits("compiling it", worker.COMPILE_SECONDS, worker.COMPILE_BYTES)

    def constraint(self, source: dict[str, str], timeout: float | None) -> Constraint:
        """A constraint for one output; source: as for compile_grammar().

        timeout, errors: as for Compiled.constraint().
        """
        return self._compile(source).constraint(timeout)

    def _compile(self, source: dict[str, str]) -> Compiled:
        key = json.dumps(source)
        with self._mutex:
            found = self._compiled.pop(key, None)
            if found is None or found.has_ended:
                found = Compiled(self.worker.forks.fork(self._limits), source)
            self._compiled[key] = found
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended, or belongs to the parent of this process."""
        return self.worker.has_ended


def _check(tokenizer: Tokenizer) -> str:
    """The folder of llguidance. Raises ImportError without it, and ValueError."""
    if not tokenizer.end_tokens:
        raise ValueError("the model has no end-of-text token, which constrained outputs need")
    return find_llguidance()


def setup_of(tokenizer: Tokenizer, *folders: str) -> tuple[worker.Setup, bytes]:
    """The set-up of a vocabulary, and the bytes of its tokens; folders: to import llguidance."""
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.n_vocab)]
    special = [token for token, found in enumerate(tokens) if not found]
    for token in special:
        tokens[token] = f"<|{token}|>".encode()  # matches no text
    setup: worker.Setup = {
        "folders": [*folders],
        "core": _core.__file__,
        "model": tokenizer.path,
        "sizes": [len(token) for token in tokens],
        "special": special,
        "bos": tokenizer.bos,
        "ends": sorted(tokenizer.end_tokens),
        "compile_seconds": worker.COMPILE_SECONDS,
    }
    return setup, b"".join(tokens)


class LocalConstraint:
    """A constraint of this process, where there can be no others: without their limits."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._n_read: int | None = None

    def begin_at(self, n_tokens: int) -> None:
        """Follow the grammar after this many tokens."""
        self._n_read = n_tokens

    def __call__(self, tokens: NDArray[np.int32], allowed: NDArray[np.uint32]) -> None:
        """Raises ValueError if the grammar exceeds llguidance's limits."""
        if self._n_read is not None and len(tokens) > self._n_read:
            self._matcher.consume_tokens(tokens[self._n_read :].tolist())
        self._n_read = len(tokens)
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self._matcher.is_error():
            raise ValueError(f"the grammar failed: {worker.error_of(self._matcher)}")


class _LocalCompiler:
    """Compiles grammars for a vocabulary in this process."""

    has_ended = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError and ImportError."""
        _check(tokenizer)
        vocabulary = worker.Vocabulary(*setup_of(tokenizer), tokenizer.core).build()

        @lru_cache(_MAX_COMPILED)
        def compiled(source: str) -> llguidance.LLMatcher:
            matcher: llguidance.LLMatcher = worker.compile_grammar(vocabulary, json.loads(source))
            return matcher

        self._compiled = compiled

    def constraint(self, source: dict[str, str], timeout: float | None) -> LocalConstraint:
        """A constraint for one output. Raises ValueError if the grammar is rejected."""
        return LocalConstraint(self._compiled(json.dumps(source)).deep_copy())


Compiler = Processes | _LocalCompiler

_of_tokenizers: WeakKeyDictionary[Tokenizer, Compiler] = WeakKeyDictionary()
_mutex = threading.Lock()


def compiler_of(tokenizer: Tokenizer) -> Compiler:
    """The compiler for a vocabulary, started when it is first needed.

    Raises ValueError, ImportError and OSError.
    """
    with _mutex:
        found = _of_tokenizers.get(tokenizer)
        if found is None or found.has_ended:
            kind = Processes if CAN_ISOLATE else _LocalCompiler
            found = _of_tokenizers[tokenizer] = kind(tokenizer)
        return found
