"""llama.cpp, by the low-level interface of llama-cpp-python."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import POINTER, c_int32
from time import perf_counter
from typing import Any

import numpy as np

from h2o_cpp.peers.engines.serving import StepEngine, Tokens, serve

_N_BATCH = 512


class LlamaCpp(StepEngine):
    """A GGUF file with its f16 cache and flash attention, llama.cpp's own default."""

    def __init__(self, path: str, *, threads: int, n_ctx: int, flash_attn: bool = True) -> None:
        """Load the model."""
        begun = perf_counter()
        import llama_cpp

        self._import_seconds = perf_counter() - begun
        begun = perf_counter()
        self._llama: Any = llama_cpp.Llama(
            path,
            n_ctx=n_ctx,
            n_batch=_N_BATCH,
            n_ubatch=_N_BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash_attn,
            verbose=False,
        )
        self._load_seconds = perf_counter() - begun
        self._library: Any = llama_cpp
        self._memory = llama_cpp.llama_get_memory(self._llama.ctx)
        super().__init__(self._llama.n_vocab())

    def reset(self) -> None:
        """Empty the cache."""
        self._library.llama_memory_clear(self._memory, True)

    def feed(self, tokens: Tokens) -> None:
        """Decode them in batches, with logits after the last of each."""
        for begin in range(0, len(tokens), _N_BATCH):
            part = np.ascontiguousarray(tokens[begin : begin + _N_BATCH], np.int32)
            pointer = part.ctypes.data_as(POINTER(c_int32))
            batch = self._library.llama_batch_get_one(pointer, len(part))
            if failed := self._library.llama_decode(self._llama.ctx, batch):
                raise RuntimeError(f"llama_decode returned {failed}")
        self._library.llama_synchronize(self._llama.ctx)

    @property
    def n_tokens(self) -> int:
        """The last position in the cache, and one."""
        return int(self._library.llama_memory_seq_pos_max(self._memory, 0)) + 1

    @property
    def description(self) -> Mapping[str, Any]:
        """What it is."""
        return {
            "name": "llama.cpp",
            "version": f"llama-cpp-python {self._library.__version__}",
            "load_seconds": self._load_seconds,
            "import_seconds": self._import_seconds,
        }


if __name__ == "__main__":
    serve(LlamaCpp)
