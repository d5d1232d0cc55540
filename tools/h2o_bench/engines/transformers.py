"""Hugging Face transformers on PyTorch, with random weights of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from h2o_bench.engines.serving import StepEngine, Tokens, serve


class Transformers(StepEngine):
    """A model from a config, with a DynamicCache."""

    def __init__(self, config: Mapping[str, Any], *, dtype: str, threads: int) -> None:
        """Create the model; dtype: of torch."""
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self._torch: Any = torch
        self._version = f"{transformers.__version__}, torch {torch.__version__}"
        options = {key: value for key, value in config.items() if key != "model_type"}
        model_config = transformers.AutoConfig.for_model(config["model_type"], **options)
        make: Any = transformers.AutoModelForCausalLM.from_config
        self._model: Any = make(model_config, dtype=getattr(torch, dtype)).eval()
        self._new_cache: Any = transformers.DynamicCache
        super().__init__(config["vocab_size"])
        self.reset()

    def reset(self) -> None:
        self._cache = self._new_cache()
        self._n_tokens = 0

    def feed(self, tokens: Tokens) -> None:
        """Read the tokens, and choose the most likely next one."""
        self._next(self._torch.from_numpy(tokens.astype("int64"))[None])
        self._n_tokens = int(self._cache.get_seq_length())

    def batch(self, n_texts: int, n_prompt: int, n: int) -> list[float]:
        """Read all prompts in one pass, then a token of each per step."""
        self.reset()
        prompts = self._torch.from_numpy(self._tokens(n_texts * n_prompt).astype("int64"))
        ids = prompts.reshape(n_texts, n_prompt)
        begun = perf_counter()
        for _ in range(n):
            ids = self._next(ids)
        seconds = perf_counter() - begun
        self._n_tokens = n_texts * int(self._cache.get_seq_length())
        return [seconds]

    def _next(self, ids: Any) -> Any:
        """A pass; the most likely next token of each sequence."""
        with self._torch.no_grad():
            out = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)

    @property
    def n_tokens(self) -> int:
        """Tokens in the cache, of all sequences."""
        return self._n_tokens

    @property
    def version(self) -> str:
        return self._version


if __name__ == "__main__":
    serve(Transformers)
