"""A benchmark engine that only counts tokens, with optional faults."""

from __future__ import annotations

import os
import sys

from h2o_bench.engines.serving import StepEngine, Tokens, serve


class FakeEngine(StepEngine):
    def __init__(self, fault: str = "", n_vocab: int = 50, version: str = "7") -> None:
        if fault == "hangs":
            sys.stdin.read()  # until the benchmark kills it or ends
        if fault == "cannot open":
            raise ValueError("no such model")
        print("what a library prints")
        super().__init__(n_vocab)
        self._n_vocab = n_vocab
        self._fault, self._version = fault, version
        self._n_read = 0
        self._n_tokens = 0

    def reset(self) -> None:
        self._n_tokens = 0

    def feed(self, tokens: Tokens) -> None:
        print("more of it")
        assert all(4 <= token < self._n_vocab for token in tokens)
        self._n_tokens += len(tokens)
        self._n_read += len(tokens)
        if self._fault == "miscounts":
            self._n_tokens -= 1
        if self._fault == "fails":
            raise RuntimeError("out of luck")
        if self._fault == "dies":
            os._exit(3)

    def batch(self, n_texts: int, n_prompt: int, n: int) -> list[float]:
        self.reset()
        for _ in range(n_texts):
            self.feed(self._tokens(n_prompt + n - 1))
        return [0.5]

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    @property
    def version(self) -> str:
        return self._version


if __name__ == "__main__":
    serve(FakeEngine)
