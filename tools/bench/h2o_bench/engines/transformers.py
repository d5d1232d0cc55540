"""Hugging Face transformers on PyTorch, with random weights of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from h2o_bench.engines.serving import StepEngine, Tokens, serve


class Transformers(StepEngine):
    """A model from a config, with a DynamicCache, or compiled with a StaticCache."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        device: str = "cpu",
        threads: int | None = None,
        static: int | None = None,
        offload: str | None = None,
    ) -> None:
        """Create the model.

        dtype: of torch. static: tokens of a StaticCache with compiled single-token steps. offload:
            a directory to which Accelerate moves all weights; each layer is read when needed.
        """
        begun = perf_counter()
        import torch
        import transformers

        self._import_seconds = perf_counter() - begun
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(0)
        self._torch: Any = torch
        self._name = f"transformers {dtype}"
        self._version = f"{transformers.__version__}, torch {torch.__version__}"
        self._device = torch.device(device)
        options = {key: value for key, value in config.items() if key != "model_type"}
        model_config = transformers.AutoConfig.for_model(config["model_type"], **options)
        make: Any = transformers.AutoModelForCausalLM.from_config
        with self._device:
            self._model: Any = make(model_config, dtype=getattr(torch, dtype)).eval()
        if offload is not None:
            import accelerate

            self._model = accelerate.disk_offload(self._model, offload, execution_device=device)
            self._name += ", Accelerate disk offload"
            self._version += f", accelerate {accelerate.__version__}"
        self._step: Any = self._next
        self._mask: Any = None
        if static is None:
            self._new_cache: Any = transformers.DynamicCache
        else:
            # Its addresses are compiled in, so it is reused.
            cache: Any = transformers.StaticCache(config=model_config, max_cache_len=static)
            self._new_cache = lambda: cache
            self._mask = torch.ones((1, static), dtype=torch.int64, device=self._device)
            self._step = torch.compile(self._next, mode="reduce-overhead", fullgraph=True)
        super().__init__(config["vocab_size"])
        self.reset()
        if static is not None:
            self.decode(8, 4)
            self.reset()

    def reset(self) -> None:
        self._cache = self._new_cache()
        self._cache.reset()
        self._n_tokens = 0

    def feed(self, tokens: Tokens) -> None:
        """A forward pass; returns the greedy token."""
        ids = self._torch.from_numpy(tokens.astype("int64"))[None].to(self._device)
        positions = self._torch.arange(len(tokens), device=self._device)[None] + self._n_tokens
        run = self._step if len(tokens) == 1 else self._next
        with self._torch.no_grad():
            run(ids, positions).item()  # waits for the device
        self._n_tokens = int(self._cache.get_seq_length())

    def batch(self, n_texts: int, n_prompt: int, n: int) -> list[float]:
        """Read all prompts in one pass, then a token of each per step."""
        self.reset()
        prompts = self._torch.from_numpy(self._tokens(n_texts * n_prompt).astype("int64"))
        ids = prompts.reshape(n_texts, n_prompt).to(self._device)
        begun = perf_counter()
        with self._torch.no_grad():
            for _ in range(n):
                result = self._model(
                    ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
                )
                ids = result.logits[:, -1:].argmax(-1)
            ids.tolist()  # waits for the device
        seconds = perf_counter() - begun
        self._n_tokens = n_texts * int(self._cache.get_seq_length())
        return [seconds]

    def _next(self, ids: Any, positions: Any) -> Any:
        return (
            self._model(
                ids,
                position_ids=positions,
                attention_mask=self._mask,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            .logits[0, -1]
            .argmax()
        )

    @property
    def n_tokens(self) -> int:
        """Tokens in the cache, of all sequences."""
        return self._n_tokens

    @property
    def description(self) -> Mapping[str, Any]:
        return {
            "name": self._name,
            "version": self._version,
            "import_seconds": self._import_seconds,
        }


if __name__ == "__main__":
    serve(Transformers)
