"""Hugging Face transformers on PyTorch, with random weights of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from h2o_cpp.peers.engines.serving import StepEngine, Tokens, serve


class Transformers(StepEngine):
    """A model made from a config, with a DynamicCache."""

    def __init__(self, config: Mapping[str, Any], *, threads: int, dtype: str) -> None:
        """Make the model; dtype: "float32" or "bfloat16"."""
        begun = perf_counter()
        import torch
        import transformers

        self._import_seconds = perf_counter() - begun
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self._torch: Any = torch
        self._transformers: Any = transformers
        self._dtype = dtype
        options = {key: value for key, value in config.items() if key != "model_type"}
        model_config = transformers.AutoConfig.for_model(config["model_type"], **options)
        make: Any = transformers.AutoModelForCausalLM.from_config
        self._model: Any = make(model_config, dtype=getattr(torch, dtype)).eval()
        super().__init__(config["vocab_size"])
        self.reset()

    def reset(self) -> None:
        """A new cache."""
        self._cache = self._transformers.DynamicCache()

    def feed(self, tokens: Tokens) -> None:
        """One forward pass, with logits after the last."""
        with self._torch.inference_mode():
            self._model(
                self._torch.from_numpy(tokens.astype("int64"))[None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )

    @property
    def n_tokens(self) -> int:
        """Tokens in the cache."""
        return int(self._cache.get_seq_length())

    @property
    def description(self) -> Mapping[str, Any]:
        """What it is; there is no file to load."""
        return {
            "name": f"transformers {self._dtype}",
            "version": f"{self._transformers.__version__}, torch {self._torch.__version__}",
            "import_seconds": self._import_seconds,
        }


if __name__ == "__main__":
    serve(Transformers)
