"""The interface of a measured engine, and the process that serves it.

One line of JSON on stdin asks, one on stdout answers. First the options of the engine, answered by
{"ready": its version}; then

    {"prefill": n}             forget everything, read n random tokens
    {"decode": [context, n]}   n tokens, one at a time, after `context` tokens
    {"batch": [texts, prompt, n]}   so many texts together, each a prompt continued by n tokens

are answered by {"seconds": of each step, "tokens": how many the engine has then read, by its own
count, "peak_rss_bytes": of the process}. An error is answered by {"error": why}. The end of the
input ends the process.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.measure.machine import peak_rss_bytes
from support.shapes import N_SPECIAL

Tokens = NDArray[np.int32]


class Engine(ABC):
    """A loaded model and what it has read."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._random = np.random.default_rng(0)

    @abstractmethod
    def prefill(self, n: int) -> list[float]:
        """Reset and read n random tokens; returns seconds."""

    @abstractmethod
    def decode(self, n_context: int, n: int) -> list[float]:
        """Read n_context tokens, then decode n tokens one by one; returns seconds per token.

        Context read by earlier calls is not read again.
        """

    @abstractmethod
    def batch(self, n_texts: int, n_prompt: int, n: int) -> list[float]:
        """Reset, then continue prompts of n_prompt random tokens greedily by n tokens each.

        Returns the total seconds. Of each sequence, n_prompt + n - 1 tokens are read.
        """

    @property
    @abstractmethod
    def n_tokens(self) -> int:
        """Tokens read since the last reset, as counted by the engine."""

    @property
    def peak_rss_bytes(self) -> int:
        """Peak resident memory."""
        return peak_rss_bytes() or 0  # unknown only on Windows

    @property
    @abstractmethod
    def version(self) -> str:
        """Its version, and what it computes with."""

    def _tokens(self, n: int) -> Tokens:
        """Random ids [n] of ordinary tokens."""
        first = min(N_SPECIAL, self._n_vocab - 1)
        return self._random.integers(first, self._n_vocab, n, np.int32)


class StepEngine(Engine):
    """An engine that reads token by token."""

    @abstractmethod
    def reset(self) -> None: ...

    @abstractmethod
    def feed(self, tokens: Tokens) -> None:
        """Read tokens [n] and compute the logits after the last one."""

    def prefill(self, n: int) -> list[float]:
        self.reset()
        return [self._feed(n)]

    def decode(self, n_context: int, n: int) -> list[float]:
        """Read the context, then one token at a time."""
        if self.n_tokens > n_context:
            self.reset()
        if missing := n_context - self.n_tokens:
            self._feed(missing)
        return [self._feed(1) for _ in range(n)]

    def _feed(self, n: int) -> float:
        tokens = self._tokens(n)
        begun = perf_counter()
        self.feed(tokens)
        return perf_counter() - begun


class TextEngine(Engine):
    """An engine that only generates complete outputs."""

    def __init__(self, n_vocab: int) -> None:
        super().__init__(n_vocab)
        self._n_tokens = 0

    @abstractmethod
    def generate(self, prompt: Tokens, n: int) -> list[float]:
        """Reset and continue tokens [n_prompt] by n; returns seconds per token.

        Raises RuntimeError if the engine's token counts differ.
        """

    def prefill(self, n: int) -> list[float]:
        """The time to the first token."""
        return self._generate(n, 1)

    def decode(self, n_context: int, n: int) -> list[float]:
        """The times of the n tokens after the first."""
        return self._generate(n_context, n + 1)[1:]

    @property
    def n_tokens(self) -> int:
        """Those of the last output."""
        return self._n_tokens

    def _generate(self, n_context: int, n: int) -> list[float]:
        seconds = self.generate(self._tokens(n_context), n)
        self._n_tokens = n_context + n - 1  # the last is not read
        return seconds


def serve(open_engine: Callable[..., Engine]) -> None:
    """Answer requests until the input ends."""
    # Libraries may print to stdout, which is redirected to stderr.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            engine = open_engine(**json.loads(sys.stdin.readline()))
            _say(output, {"ready": engine.version})
            for line in sys.stdin:
                _say(output, _answer(engine, json.loads(line)))
        except Exception as error:
            _say(output, {"error": f"{type(error).__name__}: {error}"})


def _answer(engine: Engine, request: Mapping[str, Any]) -> dict[str, Any]:
    match request:
        case {"prefill": n}:
            seconds = engine.prefill(n)
        case {"decode": [n_context, n]}:
            seconds = engine.decode(n_context, n)
        case {"batch": [n_texts, n_prompt, n]}:
            seconds = engine.batch(n_texts, n_prompt, n)
        case _:
            raise ValueError(f"unknown request {request}")
    return {
        "seconds": seconds,
        "tokens": engine.n_tokens,
        "peak_rss_bytes": engine.peak_rss_bytes,
    }


def _say(output: TextIO, answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), file=output, flush=True)
