"""Embeddings of texts, from the model's hidden states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.arguments import check_bool
from h2o_cpp.generation.batch import run_batch
from h2o_cpp.generation.request import (
    ContextFullError,
    Pooled,
    Pooling,
    Request,
    is_batch,
    make_request,
)
from h2o_cpp.model.runtime import Runtime


def embed(
    runtime: Runtime,
    text: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    pooling: Pooling | None,
    normalize: bool,
) -> NDArray[np.float32]:
    """Computes Generator.embed."""
    if pooling is None:
        pooling = default_pooling(runtime.pooling_type)
    if pooling not in get_args(Pooling):
        raise ValueError(
            f"pooling={pooling!r}, expected 'mean' or 'last', or 'cls' for the first token"
        )
    check_bool("normalize", normalize)
    many = is_batch(text)
    texts: Sequence[str | Sequence[int]] = text if many else [text]  # type: ignore[list-item, assignment]
    if not len(texts):
        raise ValueError("text is an empty list, expected at least one text")
    seeds = random.Random(0)  # unused, as nothing is sampled
    requests = [make_request(runtime, seeds, one, {}) for one in texts]
    names = [f"text[{i}]" for i in range(len(requests))] if many else ["the text"]
    vectors = pooled(runtime, requests, pooling, names)
    if normalize:
        vectors = unit_length(vectors)
    return vectors if many else vectors[0]


def pooled(
    runtime: Runtime, requests: Sequence[Request], pooling: Pooled, names: Sequence[str]
) -> NDArray[np.float32]:
    """The pooled values of each prompt [n_requests, n]; names: of the prompts, in errors."""
    requests = [replace(request, pooling=pooling, max_tokens=0) for request in requests]
    n_ctx, n_train = runtime.engine.session.n_ctx, runtime.model.n_ctx_train
    for name, request in zip(names, requests, strict=True):
        n = len(request.prompt)
        if n == 0:
            raise ValueError(f"{name} is empty, expected at least one token")
        if n > n_ctx and not runtime.engine.endless:
            more = f"; n_ctx can be up to {n_train}" if n_ctx < n_train else ", the trained length"
            raise ContextFullError(f"{name} has {n} tokens, expected at most n_ctx={n_ctx}{more}")
        request.submit(runtime.engine)  # validate only
    found: dict[int, NDArray[np.float32]] = {}
    for piece in run_batch(runtime.engine, requests, runtime.n_sequences):
        if piece.last:
            if piece.state.finish_reason == "cancelled":
                raise RuntimeError("this Generator is closed")
            found[piece.index] = piece.state.embedding
    return np.stack([found[i] for i in range(len(requests))])


# By pooling_type in a file; 0 is none, for which the mean is as good as any.
_RANK = 4
_DEFAULTS: dict[int, Pooling] = {0: "mean", 1: "mean", 2: "cls", 3: "last"}


def default_pooling(pooling_type: int) -> Pooling:
    """The pooling of a model by its file's number; ValueError for a model without embeddings."""
    if pooling_type in _DEFAULTS:
        return _DEFAULTS[pooling_type]
    if pooling_type == _RANK:
        raise ValueError(
            "the model scores pairs of texts (its pooling_type is rank), so it has no embedding;"
            " pooling='last' or 'mean' gives a hidden state"
        )
    raise ValueError(
        f"the file's pooling_type is {pooling_type}, which is unknown; give pooling='mean',"
        " 'last' or 'cls'"
    )


def unit_length(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors along the last axis scaled to length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)
