"""Embeddings of texts, from the model's hidden states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.generation.batch import run_batch
from h2o_cpp.generation.request import ContextFullError, Pooling, is_batch, make_request
from h2o_cpp.model.arguments import check_bool
from h2o_cpp.model.runtime import Runtime


def embed(
    runtime: Runtime,
    text: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    pooling: Pooling,
    normalize: bool,
) -> NDArray[np.float32]:
    """As Generator.embed."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling={pooling!r}, expected 'mean' or 'last'")
    check_bool("normalize", normalize)
    many = is_batch(text)
    texts: Sequence[str | Sequence[int]] = text if many else [text]  # type: ignore[list-item, assignment]
    if not len(texts):
        raise ValueError("text is an empty list, expected at least one text")
    seeds = random.Random(0)  # unused, as nothing is sampled
    requests = [make_request(runtime, seeds, one, {}, pooling=pooling) for one in texts]
    n_ctx, n_train = runtime.engine.session.n_ctx, runtime.model.n_ctx_train
    for i, request in enumerate(requests):
        name, n = f"text[{i}]" if many else "the text", len(request.prompt)
        if n == 0:
            raise ValueError(f"{name} is empty, expected at least one token")
        if n > n_ctx and not runtime.engine.endless:
            more = f"; -c allows up to {n_train}" if n_ctx < n_train else ", the trained length"
            raise ContextFullError(f"{name} has {n} tokens, expected at most n_ctx={n_ctx}{more}")
        request.submit(runtime.engine)  # validate only
    found: dict[int, NDArray[np.float32]] = {}
    for piece in run_batch(runtime.engine, requests, runtime.n_sequences):
        if piece.last:
            if piece.state.finish_reason == "cancelled":
                raise RuntimeError("this Generator is closed")
            found[piece.index] = piece.state.embedding
    vectors = np.stack([found[i] for i in range(len(requests))])
    if normalize:
        vectors = unit_length(vectors)
    return vectors if many else vectors[0]


def unit_length(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors along the last axis scaled to length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)
