"""LoadedModel: the part of a Generator that does not generate text."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.embedding import embed
from h2o_cpp.generation.request import Pooling, text_tokens, token_ids
from h2o_cpp.generation.stats import Stats
from h2o_cpp.model.arguments import check_int
from h2o_cpp.model.runtime import Runtime
from h2o_cpp.model.tokenizer import Tokenizer


class LoadedModel(Closing):
    """A loaded model: its limits, tokenizer, logits, embeddings and cache."""

    def __init__(self, runtime: Runtime) -> None:
        self._open: Runtime | None = runtime
        self.policy = runtime.policy
        self._finalizer = weakref.finalize(self, runtime.engine.close)  # also at exit of Python

    def _runtime(self) -> Runtime:
        if self._open is None:
            raise RuntimeError("this Generator is closed")
        return self._open

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return Path(self._runtime().model.file.path)

    @property
    def n_ctx(self) -> int:
        """The context: the most tokens of a sequence, prompt included, unless it is endless."""
        return self._runtime().engine.session.n_ctx

    @property
    def n_ctx_train(self) -> int:
        """The trained length in tokens, and the largest n_ctx."""
        return self._runtime().model.n_ctx_train

    @property
    def endless(self) -> bool:
        """Whether an output can continue past n_ctx, with rolling positions."""
        return self._runtime().engine.endless

    @property
    def max_sequences(self) -> int:
        """The most sequences decoded at once."""
        return self._runtime().n_sequences

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return self._runtime().model.n_vocab

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer."""
        return self._runtime().tokenizer

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Tokens of a text.

        add_special: add the tokens that the model expects around a text, such as beginning-of-text.
        parse_special: parse special tokens in the text, such as "</s>".
        """
        return self._runtime().tokenizer.encode(
            text, add_special=add_special, parse_special=parse_special
        )

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._runtime().tokenizer.decode(token_ids("tokens", tokens))

    def logits(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Logits after each of the n tokens of a text, float32 [n, n_vocab].

        The text is read like a prompt: in chunks of n_batch, each followed by eviction.

        Raises ValueError for no tokens, more than n_ctx tokens unless the Generator is `endless`,
        and tokens outside the vocabulary.
        """
        runtime = self._runtime()
        return runtime.engine.logits(text_tokens(runtime, tokens))

    def embed(
        self,
        text: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
    ) -> NDArray[np.float32]:
        """Embedding of a text or its tokens, float32 [n_embd]; of a list of n, [n, n_embd].

        pooling: the "mean" of the hidden states after the last norm, or that of the "last" token.
        normalize: scale to length 1.

        Texts are read like prompts: in chunks of n_batch, each followed by eviction.

        Raises as stream() does.
        """
        return embed(self._runtime(), text, pooling, normalize)

    def stats(self, *, layers: bool = False) -> Stats:
        """What the cache of the last stream holds; layers: also per layer and KV head."""
        runtime = self._runtime()
        engine = runtime.engine
        return Stats.of(runtime.model, engine.session, engine.last_sequence, layers=layers)

    def kept(self, layer: int, kv_head: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Kept positions of one KV head, ascending, int32 [n], and their scores, float32 [n].

        For the last stream. Raises ValueError for an unknown layer or KV head.
        """
        runtime = self._runtime()
        model, engine = runtime.model, runtime.engine
        layer = check_int("layer", layer, 0, model.n_layers - 1)
        kv_head = check_int("kv_head", kv_head, 0, model.n_kv_heads - 1)
        return engine.session.kept(layer, kv_head, engine.last_sequence)

    def close(self) -> None:
        """End all streams after the current token; free the model and the caches."""
        self._open = None
        self._finalizer()
