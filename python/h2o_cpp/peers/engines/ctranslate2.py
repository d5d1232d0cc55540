"""CTranslate2, in int8."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from h2o_cpp.peers.ctranslate2_model import vocabulary
from h2o_cpp.peers.engines.serving import Engine, Tokens, random_tokens, serve


class CTranslate2(Engine):
    """A generator, which can only be asked for whole texts; the times are those between tokens."""

    def __init__(self, path: str, *, threads: int, n_vocab: int) -> None:
        """Load a model that peers.ctranslate2_model has written."""
        begun = perf_counter()
        import ctranslate2

        self._import_seconds = perf_counter() - begun
        self._library: Any = ctranslate2
        begun = perf_counter()
        self._generator: Any = ctranslate2.Generator(path, "cpu", intra_threads=threads)
        self._load_seconds = perf_counter() - begun
        self._vocabulary = vocabulary(n_vocab)
        self._random = np.random.default_rng(0)
        self._n_tokens = 0

    def prefill(self, n: int) -> list[float]:
        """The time to the first token."""
        return self._generate(n, 1)

    def decode(self, n_context: int, n: int) -> list[float]:
        """The times of the n tokens after the first, which comes with the context."""
        return self._generate(n_context, n + 1)[1:]

    def _generate(self, n_context: int, n: int) -> list[float]:
        prompt: Tokens = random_tokens(self._random, n_context, len(self._vocabulary))
        times = [perf_counter()]
        (result,) = self._generator.generate_batch(
            [[self._vocabulary[i] for i in prompt]],
            include_prompt_in_result=False,
            max_length=n,
            min_length=n,
            callback=lambda step: times.append(perf_counter()),
        )
        if len(result.sequences_ids[0]) != n or len(times) != n + 1:
            raise RuntimeError(f"{len(result.sequences_ids[0])} tokens came, expected {n}")
        self._n_tokens = n_context + n - 1  # the last is not read
        return [after - before for before, after in pairwise(times)]

    @property
    def n_tokens(self) -> int:
        """Of the newest text."""
        return self._n_tokens

    @property
    def description(self) -> Mapping[str, Any]:
        """What it is."""
        return {
            "name": "CTranslate2 int8",
            "version": self._library.__version__,
            "load_seconds": self._load_seconds,
            "import_seconds": self._import_seconds,
        }


if __name__ == "__main__":
    serve(CTranslate2)
