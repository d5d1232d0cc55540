"""llama.cpp, through llama-cpp-python's low-level API."""

from __future__ import annotations

from ctypes import POINTER, c_int32
from time import perf_counter
from typing import Any

import numpy as np

from h2o_bench.engines.serving import StepEngine, Tokens, serve

_N_BATCH = 512
_PAD = 256  # tokens; sequences have a multiple of this


class LlamaCpp(StepEngine):
    """A GGUF file. The defaults are llama.cpp's: flash attention and an f16 cache."""

    def __init__(
        self,
        path: str,
        *,
        threads: int,
        n_ctx: int,
        flash_attn: bool = True,
        kv_dtype: str = "f16",
    ) -> None:
        """Load the model. kv_dtype: of the cache, f16 or q8_0."""
        import llama_cpp

        cache_type = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}[kv_dtype]
        self._llama: Any = llama_cpp.Llama(
            path,
            n_ctx=n_ctx,
            n_batch=_N_BATCH,
            n_ubatch=_N_BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash_attn,
            type_k=cache_type,
            type_v=cache_type,
            verbose=False,
        )
        self._library: Any = llama_cpp
        self._threads = threads
        self._batch_tokens: int | None = None
        self._memory = llama_cpp.llama_get_memory(self._llama.ctx)
        super().__init__(self._llama.n_vocab())

    def reset(self) -> None:
        self._batch_tokens = None
        self._library.llama_memory_clear(self._memory, True)

    def feed(self, tokens: Tokens) -> None:
        """Decode tokens in batches, with logits after the last of each."""
        for begin in range(0, len(tokens), _N_BATCH):
            part = np.ascontiguousarray(tokens[begin : begin + _N_BATCH], np.int32)
            pointer = part.ctypes.data_as(POINTER(c_int32))
            batch = self._library.llama_batch_get_one(pointer, len(part))
            if failed := self._library.llama_decode(self._llama.ctx, batch):
                raise RuntimeError(f"llama_decode returned {failed}")
        self._library.llama_synchronize(self._llama.ctx)

    def batch(self, n_texts: int, n_prompt: int, n: int) -> list[float]:
        """Continue prompts with llama_batch in a separate context with one part per sequence."""
        library = self._library
        params = library.llama_context_default_params()
        room = -(-(n_prompt + n) // _PAD) * _PAD
        params.n_ctx, params.n_seq_max, params.kv_unified = n_texts * room, n_texts, False
        params.n_batch = params.n_ubatch = max(_N_BATCH, n_texts)
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context = library.llama_init_from_model(self._llama.model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot create a context of {n_texts} x {room} tokens")
        try:
            return self._run_batch(context, params.n_batch, n_texts, n_prompt, n)
        finally:
            library.llama_free(context)

    def _run_batch(
        self, context: Any, n_rows: int, n_texts: int, n_prompt: int, n: int
    ) -> list[float]:
        library = self._library
        rows = library.llama_batch_init(n_rows, 0, 1)
        prompts = [self._tokens(n_prompt) for _ in range(n_texts)]
        n_vocab = self._n_vocab

        def decode(tokens: Tokens, sequences: list[int], positions: list[int]) -> list[int]:
            """Decode a batch; returns the greedy token after the last one of each sequence."""
            rows.n_tokens = len(tokens)
            for i, sequence in enumerate(sequences):
                rows.token[i], rows.pos[i] = int(tokens[i]), positions[i]
                rows.n_seq_id[i], rows.seq_id[i][0] = 1, sequence
                rows.logits[i] = i + 1 == len(sequences) or sequences[i + 1] != sequence
            if failed := library.llama_decode(context, rows):
                raise RuntimeError(f"llama_decode returned {failed}")
            ends = [i for i in range(len(sequences)) if rows.logits[i]]
            logits = (library.llama_get_logits_ith(context, i) for i in ends)
            return [int(np.ctypeslib.as_array(row, (n_vocab,)).argmax()) for row in logits]

        begun = perf_counter()
        last = np.zeros(n_texts, np.int32)
        for sequence, prompt in enumerate(prompts):
            for at in range(0, n_prompt, _N_BATCH):
                part = prompt[at : at + _N_BATCH]
                positions = [*range(at, at + len(part))]
                (last[sequence],) = decode(part, [sequence] * len(part), positions)
        for step in range(n - 1):
            last[:] = decode(last, [*range(n_texts)], [n_prompt + step] * n_texts)
        seconds = perf_counter() - begun
        library.llama_batch_free(rows)
        memory = library.llama_get_memory(context)
        ends = [library.llama_memory_seq_pos_max(memory, i) for i in range(n_texts)]
        self._batch_tokens = sum(int(end) + 1 for end in ends)
        return [seconds]

    @property
    def n_tokens(self) -> int:
        """Counts from the last position in the cache, of the sequence or of each one in a batch."""
        if self._batch_tokens is not None:
            return self._batch_tokens
        return int(self._library.llama_memory_seq_pos_max(self._memory, 0)) + 1

    @property
    def version(self) -> str:
        return f"llama-cpp-python {self._library.__version__}"


if __name__ == "__main__":
    serve(LlamaCpp)
