"""Relevance of documents to a query, by models that score pairs of texts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.generation.embedding import pooled
from h2o_cpp.generation.request import make_request
from h2o_cpp.model.runtime import Runtime
from h2o_cpp.model.special_escape import SpecialTokenEscape, unused_characters
from h2o_cpp.model.tokenizer import Tokenizer


def rerank(runtime: Runtime, query: str, documents: Sequence[str]) -> NDArray[np.float32]:
    """Computes Generator.rerank."""
    if isinstance(documents, str) or not documents:
        raise ValueError("documents must be a list of at least one text")
    prompts = pair_prompts(runtime.tokenizer, runtime.model, query, documents)
    seeds = random.Random(0)  # unused, as nothing is sampled
    requests = [make_request(runtime, seeds, prompt, {}) for prompt in prompts]
    names = [f"documents[{i}] with the query" for i in range(len(requests))]
    return relevance(pooled(runtime, requests, "rank", names))


class Scorer(Protocol):
    """A model, or a Generator of one."""

    @property
    def n_labels(self) -> int:
        """0: it does not score texts."""

    @property
    def is_encoder(self) -> bool:
        """Whether tokens attend to later ones."""


def pair_prompts(
    tokenizer: Tokenizer,
    model: Scorer,
    query: str,
    documents: Iterable[str],
    *,
    most: int | None = None,
) -> list[list[int]]:
    """The prompts for which a model scores the query with each document.

    most: raise ContextFullError at the first prompt of more tokens.

    Special tokens in these texts are ordinary text. Raises ValueError for another kind of model,
    and for an encoder of several labels, of which none is known to be the relevance.
    """
    if model.n_labels == 0:
        raise ValueError("the model scores no pairs of texts: its file has no cls.output")
    template = tokenizer.named_templates.get("rerank")
    if template is None and model.is_encoder:
        if model.n_labels > 1:
            raise ValueError(
                f"the model has {model.n_labels} labels, expected 1: it classifies texts"
            )
        return list(tokenizer.encode_pairs(query, documents, most=most))
    if template is None:
        raise ValueError("the file has no template `rerank` for a query and a document")
    special = tokenizer.special_texts

    def prompt(document: str) -> list[int]:
        texts = {"query": query, "document": document}
        escape = SpecialTokenEscape(
            special, unused_characters([template, *texts.values(), *special])
        )
        whole = re.sub(
            r"\{(query|document)\}", lambda found: escape.escape(texts[found[1]]), template
        )
        parts = tokenizer.split_special(whole)
        texts_and_tokens = (
            escape.unescape(part) if isinstance(part, str) else part for part in parts
        )
        return tokenizer.encode_parts(texts_and_tokens, most=most)

    return [prompt(document) for document in documents]


def relevance(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """The probability of the first label, by the labels' scores [n, n_labels], as [n]."""
    if scores.shape[1] == 1:
        scores = np.concatenate([scores, np.zeros_like(scores)], axis=1)
    exps = np.exp((scores - scores.max(axis=1, keepdims=True)).astype(np.float64))
    shares: NDArray[np.float64] = exps[:, 0] / exps.sum(axis=1)
    return shares.astype(np.float32)
