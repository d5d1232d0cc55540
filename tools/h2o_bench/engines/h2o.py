"""This engine, for comparison with others."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from h2o_bench.engines.serving import StepEngine, Tokens, serve
from h2o_cpp import __version__
from h2o_cpp.budget.policy import Policy
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.model.session import chunks, open_model, open_session
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.options import CacheOptions, make_options


class H2o(StepEngine):
    """A session used as a Generator uses it."""

    def __init__(
        self,
        path: str,
        *,
        n_sequences: int = 1,
        device: str = "cpu",
        threads: int | None = None,
        max_resident: int | None = None,
        **options: Any,
    ) -> None:
        """Load the model.

        n_sequences: the largest batch.
        options: as for Generator; default: the trained length, and 512 rows.
        """
        file = ModelFile.find(path)
        self.model = open_model(file, device=device, threads=threads, max_resident=max_resident)
        self.tokenizer = Tokenizer.of_model(self.model)
        cache = make_options(CacheOptions, {"n_ctx": 0, **options})
        rows = max(512 if cache.n_batch is None else cache.n_batch, n_sequences)
        cache = replace(cache, n_batch=rows).for_model(file)
        assert isinstance(cache.policy, Policy)
        self.policy = cache.policy
        self.session = open_session(self.model, n_sequences=n_sequences, **vars(cache))
        self._n_tokens = 0
        super().__init__(self.model.n_vocab)

    def reset(self) -> None:
        self.session.reset(0)
        self._n_tokens = 0

    def feed(self, tokens: Tokens) -> None:
        """Read tokens in chunks, as Generator reads a prompt."""
        for part in chunks(self.session, tokens):
            self._logits = self.session.step([(0, part)])
        self._n_tokens = self.session.tokens_seen(0)

    def prefill(self, n: int) -> list[float]:
        """Read n tokens. Raises FloatingPointError for logits that are not finite."""
        return self._checked(super().prefill(n))

    def decode(self, n_context: int, n: int) -> list[float]:
        """Read the context, then tokens one by one. Raises as prefill does."""
        return self._checked(super().decode(n_context, n))

    def batch(self, n_texts: int, n_prompt: int, n: int) -> list[float]:
        """Read prompts one by one, then a token of each per step."""
        prompts = [self._tokens(n_prompt) for _ in range(n_texts)]
        last = np.zeros(n_texts, np.int32)
        for sequence in range(n_texts):
            self.session.reset(sequence)
        begun = perf_counter()
        for sequence, prompt in enumerate(prompts):
            for part in chunks(self.session, prompt, sequence):
                last[sequence] = self.session.greedy([(sequence, part)])[0]
        for _ in range(n - 1):
            inputs = [(sequence, last[sequence : sequence + 1]) for sequence in range(n_texts)]
            last = self.session.greedy(inputs)
        seconds = perf_counter() - begun
        self._n_tokens = sum(map(self.session.tokens_seen, range(n_texts)))
        return [seconds]

    def _checked(self, seconds: list[float]) -> list[float]:
        if not np.isfinite(self._logits).all():
            raise FloatingPointError("logits are not finite")
        return seconds

    @property
    def n_tokens(self) -> int:
        """Tokens seen, kept or not."""
        return self._n_tokens

    @property
    def version(self) -> str:
        return f"{__version__} {self.model.backend}"


if __name__ == "__main__":
    serve(H2o)
