"""Likelihoods and greedy outputs with a cache budget that is a fraction of each request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import KvDType, check_float, check_int
from h2o_cpp.budget.policy import Policy, fraction_of, named_policy
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.generation.sampling import make_sampling
from h2o_cpp.measure.perplexity import token_losses
from h2o_cpp.model.device import model_and_cache_bytes, open_on_device
from h2o_cpp.model.session import open_model, read_tokens
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.options import CacheOptions

# Tokens of a continuation scored at a time without eviction. Does not affect the result; bounds the
# logits, [64, n_vocab].
_N_SCORED = 64


@dataclass(frozen=True)
class Usage:
    """Mean cache contents over the requests since clear_usage()."""

    requests: int
    truncated: int  # requests that lost the beginning of their text
    kept: float  # tokens at the end of a request, per layer and KV head
    cache_bytes: float  # allocated


class BudgetedModel:
    """A model that processes each request with an empty cache of its own size.

    The budget is a fraction of the request, as in the paper (arXiv 2306.14048, section 5): `hh`
    times the prompt's tokens when generating, and times context and continuation together when
    scoring, as the authors count; rounded down, at least one token.

    By default, the context is read in one chunk with full attention, then evicted down to the
    budget. Tokens of a continuation are read one at a time with eviction after each, so every
    prediction but the first uses only kept tokens, and a continuation of one token does not depend
    on the budget. This is the authors' implementation with real eviction. For the paper's
    accuracies they masked attention instead, which also restricts tokens of the context;
    n_batch=1, with eviction while the context is read, is closer to that.

    Attributes: `tokenizer`; `n_ctx`, the most tokens of a request; `hh` and `policy`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | ModelFile,
        *,
        hh: float | None = None,
        policy: str = "h2o",
        n_ctx: int | None = None,
        n_batch: int | None = None,
        kv_dtype: KvDType = "f16",
        device: str = "auto",
        threads: int | None = None,
    ) -> None:
        """Load a model.

        path: a GGUF file.
        hh: the budget, a fraction of each request. None: the full cache.
        policy: a name from h2o_cpp.policy.POLICIES.
        n_ctx: most tokens of a request; longer ones lose their beginning. Default and maximum: the
            trained length.
        n_batch: tokens of a context per chunk, each followed by eviction; default: all of them.
        kv_dtype, device, threads: as for Generator.

        Raises FileNotFoundError, ValueError and MemoryError.
        """
        named_policy(policy, 1)  # checks the name
        if hh is not None and not 0 < check_float("hh", hh) <= 1:
            raise ValueError(f"hh={hh!r}, expected a fraction of a request, above 0 and up to 1")
        file, cache = ModelFile.find(path), CacheOptions(n_ctx=n_ctx, kv_dtype=kv_dtype)
        self._model = open_on_device(
            device,
            lambda name: open_model(file, device=name, threads=threads),
            lambda: model_and_cache_bytes(file, cache),
        )
        n_train = self._model.n_ctx_train
        self.n_ctx = n_train if n_ctx is None else check_int("n_ctx", n_ctx, 2, n_train)
        self.tokenizer = Tokenizer.of_model(self._model)
        self.hh = hh
        self.policy = policy
        self._chunk = self.n_ctx if n_batch is None else check_int("n_batch", n_batch, 1)
        self._kv_dtype = kv_dtype
        self.clear_usage()

    def clear_usage(self) -> None:
        """Reset the counts."""
        self._kept: list[int] = []
        self._bytes: list[int] = []
        self._truncated = 0

    @property
    def usage(self) -> Usage:
        """The mean cache contents."""
        n = len(self._kept)
        mean_kept, mean_bytes = (sum(values) / max(n, 1) for values in (self._kept, self._bytes))
        return Usage(n, self._truncated, mean_kept, mean_bytes)

    def loglikelihood(
        self, context: Sequence[int], continuation: Sequence[int]
    ) -> tuple[float, bool]:
        """Log-likelihood of a continuation, and whether it is the greedy output.

        Both arguments need at least one token. Raises ValueError if the continuation exceeds n_ctx.
        """
        if not context or not 0 < len(continuation) <= self.n_ctx:
            raise ValueError(
                f"{len(context)} tokens of context and {len(continuation)} of continuation, "
                f"expected at least 1 of each and a continuation of at most n_ctx={self.n_ctx}"
            )
        # The last token is only predicted, so one more token fits.
        tokens = self._newest([*context, *continuation], self.n_ctx + 1)
        n_context = len(tokens) - len(continuation)
        n_scored = min(self._chunk, _N_SCORED if self.hh is None else 1)
        n_batch = min(self._chunk, max(n_context, n_scored))
        cache = self._cache(len(tokens), len(tokens) - 1, n_batch)
        session = _core.Session(self._model, cache.core())
        total, greedy, begin = 0.0, True, n_context
        for logits in _logits(session, tokens[:-1], n_context, n_scored):
            targets = tokens[begin : begin + len(logits)]
            begin += len(logits)
            greedy = greedy and bool((logits.argmax(axis=1) == targets).all())
            total -= float(token_losses(logits, targets).sum())
        self._count(session)
        return total, greedy

    def generate(self, prompt: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> str:
        """The greedy output for a prompt, as of a Generator; it ends before the strings in `stop`.

        As in lm_eval's own models, it is a text of its own: without SentencePiece's first space.

        Raises ValueError if max_tokens and one token of the prompt exceed n_ctx.
        """
        max_tokens = check_int("max_tokens", max_tokens, 1, self.n_ctx - 1)
        tokens = self._newest(prompt, self.n_ctx - max_tokens)
        cache = self._cache(len(tokens), len(tokens) + max_tokens, min(self._chunk, len(tokens)))
        engine = _core.Engine(self._model, self.tokenizer.core, cache.core())
        output = engine.submit(
            tokens, sampling=make_sampling({"temperature": 0}), max_tokens=max_tokens, stop=stop
        )
        while output.next() is not None:
            pass
        self._count(engine.session)
        return output.text.removeprefix(" " if self._drops_space(output.generated_tokens) else "")

    def _drops_space(self, tokens: Sequence[int]) -> bool:
        """Whether a text that begins with these tokens is without their first space."""
        for token in tokens:
            if data := self.tokenizer.token_bytes(token):
                return data != self.tokenizer.token_bytes(token, begins=True)
        return False

    def _newest(self, tokens: Sequence[int], n: int) -> NDArray[np.int32]:
        """The last n tokens."""
        self._truncated += len(tokens) > n
        return np.asarray(tokens[-n:], np.int32)

    def _cache(self, n_request: int, n_ctx: int, n_batch: int) -> CacheOptions:
        """The cache of a request of n_request tokens."""
        policy = Policy.full()
        if self.hh is not None:
            policy = named_policy(self.policy, max(1, fraction_of(n_request, self.hh)))
        return CacheOptions(policy=policy, n_ctx=n_ctx, n_batch=n_batch, kv_dtype=self._kv_dtype)

    def _count(self, session: _core.Session) -> None:
        self._kept.append(session.tokens_kept(0))
        self._bytes.append(session.cache_bytes)


def _logits(
    session: _core.Session, tokens: NDArray[np.int32], n_context: int, n_scored: int
) -> Iterator[NDArray[np.float32]]:
    """Logits after the context and after each token that follows it, in chunks of rows."""
    yield read_tokens(session, tokens[:n_context])
    for begin in range(n_context, len(tokens), n_scored):
        yield session.score(0, tokens[begin : begin + n_scored])
