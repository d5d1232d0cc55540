"""llama.cpp as a baseline with the same GGUF file and tokens. Needs llama-cpp-python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import Generator

# Types that only llama.cpp can write.
ONLY_READ = ["Q2_K", "Q3_K_M", "IQ4_NL", "IQ4_XS"]


def quantize_with_llama_cpp(source: Path, output: Path, file_type: str) -> None:
    """file_type: as in llama.h, "Q3_K_M" for LLAMA_FTYPE_MOSTLY_Q3_K_M."""
    import llama_cpp

    parameters: Any = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    parameters.nthread = 2
    parameters.allow_requantize = True
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(output).encode(), parameters)
    if failed:
        raise RuntimeError(f"llama.cpp could not quantize {source} to {file_type}")


class LlamaCpp:
    """A model in llama.cpp with its f16 cache."""

    def __init__(self, path: Path, n_ctx: int) -> None:
        import llama_cpp

        self._llama: Any = llama_cpp.Llama(
            str(path), n_ctx=n_ctx, n_batch=n_ctx, n_threads=2, logits_all=True, verbose=False
        )

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each token, [n, n_vocab]."""
        self._llama.reset()
        self._llama.eval(list(tokens))
        return np.array(self._llama.scores[: len(tokens)], np.float32)

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """The greedy continuation of a prompt by n tokens."""
        self._llama.reset()
        self._llama.eval(list(prompt))
        tokens: list[int] = []
        for _ in range(n):
            tokens.append(int(np.argmax(self._llama.scores[self._llama.n_tokens - 1])))
            self._llama.eval(tokens[-1:])
        return tokens

    def close(self) -> None:
        self._llama.close()


def perplexity(logits: NDArray[np.float32], tokens: Sequence[int]) -> float:
    """Perplexity of tokens[1:]."""
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    log_p = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return float(np.exp(-log_p[np.arange(len(rows)), list(tokens)[1:]].mean()))


def perplexities(path: Path, texts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Perplexities of h2o and llama.cpp, over sequences that start with an empty cache."""
    n_ctx = max(map(len, texts))
    theirs = LlamaCpp(path, n_ctx)
    with Generator(path, n_ctx=n_ctx, n_batch=n_ctx) as ours:
        logs = [
            [np.log(perplexity(model.logits(text), text)) for text in texts]
            for model in (ours, theirs)
        ]
    theirs.close()
    ours_mean, theirs_mean = np.exp(np.mean(logs, axis=1))
    return float(ours_mean), float(theirs_mean)
