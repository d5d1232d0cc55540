"""OpenVINO GenAI with a GGUF file of architecture `llama`, with or without cache eviction."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from h2o_bench.engines.serving import TextEngine, Tokens, serve

_BLOCK = 32  # tokens; eviction sizes are multiples of this


class OpenVino(TextEngine):
    def __init__(
        self,
        path: str,
        *,
        threads: int,
        n_vocab: int,
        cache_tokens: int | None = None,
        pool_tokens: int | None = None,
    ) -> None:
        """Load the model.

        cache_tokens: keep this many with its H2O-like eviction (default: all). pool_tokens:
            capacity for all sequences (default: as many as needed).
        """
        import openvino
        import openvino_genai

        self._openvino: Any = openvino
        self._genai: Any = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        if pool_tokens is not None:
            scheduler.num_kv_blocks = pool_tokens // _BLOCK
        if cache_tokens is not None:
            recent = max(_BLOCK, cache_tokens // 2 // _BLOCK * _BLOCK)
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = openvino_genai.CacheEvictionConfig(
                start_size=_BLOCK,
                recent_size=recent,
                max_cache_size=cache_tokens // _BLOCK * _BLOCK,
                aggregation_mode=openvino_genai.AggregationMode.SUM,
            )
        self._pipeline: Any = openvino_genai.LLMPipeline(
            path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads
        )
        super().__init__(n_vocab)

    def generate(self, prompt: Tokens, n: int) -> list[float]:
        """The reported times."""
        config = self._genai.GenerationConfig(max_new_tokens=n, min_new_tokens=n, ignore_eos=True)
        config.apply_chat_template = False
        tokens = self._openvino.Tensor(prompt[None].astype(np.int64))
        result = self._pipeline.generate(tokens, config)
        metrics = result.perf_metrics
        if len(result.tokens[0]) != n or metrics.get_num_input_tokens() != len(prompt):
            raise RuntimeError(
                f"got {len(result.tokens[0])} tokens after {metrics.get_num_input_tokens()}, "
                f"expected {n} after {len(prompt)}"
            )
        raw = metrics.raw_metrics
        # It reads a prompt in chunks; the first duration covers only the last chunk.
        times = [*raw.m_times_to_first_token, *raw.token_infer_durations[1:]]
        return [microseconds / 1e6 for microseconds in times]

    def batch(self, n_texts: int, n_prompt: int, n: int) -> list[float]:
        """One call, batched by its scheduler."""
        config = self._genai.GenerationConfig(max_new_tokens=n, min_new_tokens=n, ignore_eos=True)
        config.apply_chat_template = False
        prompts = self._tokens(n_texts * n_prompt).reshape(n_texts, n_prompt).astype(np.int64)
        inputs = self._genai.TokenizedInputs(
            self._openvino.Tensor(prompts), self._openvino.Tensor(np.ones_like(prompts))
        )
        begun = perf_counter()
        result = self._pipeline.generate(inputs, config)
        seconds = perf_counter() - begun
        generated = sum(map(len, result.tokens))
        self._n_tokens = n_texts * (n_prompt - 1) + generated  # the last of each is not read
        return [seconds]

    @property
    def version(self) -> str:
        return str(self._genai.__version__)


if __name__ == "__main__":
    serve(OpenVino)
