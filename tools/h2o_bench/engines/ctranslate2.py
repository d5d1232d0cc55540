"""CTranslate2, in the type of the written model."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import Any

from h2o_bench.ctranslate2_model import vocabulary
from h2o_bench.engines.serving import TextEngine, Tokens, serve


class CTranslate2(TextEngine):
    def __init__(self, path: str, *, threads: int, n_vocab: int) -> None:
        """Load a model written by h2o_bench.ctranslate2_model."""
        import ctranslate2

        self._library: Any = ctranslate2
        self._generator: Any = ctranslate2.Generator(path, "cpu", intra_threads=threads)
        self._vocabulary = vocabulary(n_vocab)
        super().__init__(len(self._vocabulary))

    def generate(self, prompt: Tokens, n: int) -> list[float]:
        """The times between tokens."""
        times = [perf_counter()]
        (result,) = self._generator.generate_batch(
            [[self._vocabulary[i] for i in prompt]],
            include_prompt_in_result=False,
            max_length=n,
            min_length=n,
            callback=lambda step: times.append(perf_counter()),
        )
        if len(result.sequences_ids[0]) != n or len(times) != n + 1:
            raise RuntimeError(f"got {len(result.sequences_ids[0])} tokens, expected {n}")
        return [after - before for before, after in pairwise(times)]

    def batch(self, n_texts: int, n_prompt: int, n: int) -> list[float]:
        prompts = [[self._vocabulary[i] for i in self._tokens(n_prompt)] for _ in range(n_texts)]
        begun = perf_counter()
        results = self._generator.generate_batch(
            prompts, include_prompt_in_result=False, max_length=n, min_length=n
        )
        seconds = perf_counter() - begun
        # Only generated tokens are returned; the last of each sequence is not read.
        generated = sum(len(result.sequences_ids[0]) for result in results)
        self._n_tokens = n_texts * (n_prompt - 1) + generated
        return [seconds]

    @property
    def version(self) -> str:
        return str(self._library.__version__)


if __name__ == "__main__":
    serve(CTranslate2)
