"""How well a model finds an answer in its prompt while the cache evicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan, sqrt

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import check_int
from h2o_cpp.measure.budgets import Comparison
from h2o_cpp.measure.perplexity import token_losses
from h2o_cpp.measure.retrieval.tasks import Sample
from h2o_cpp.model.session import read_tokens


@dataclass(frozen=True)
class Measurement:
    """A task with one policy; "absent" is the full cache and a prompt without the fact."""

    task: str
    policy: str
    budget: float  # fraction of n_ctx, or of bytes
    kept: int  # tokens per layer and KV head
    log_likelihood: float  # mean per token of the answer, in nats
    of_full: float  # difference to the full cache
    error: float  # standard error of of_full over samples; nan for one sample
    exact: float  # share of samples whose answer is the greedy output
    samples: int


def measure(
    model: _core.Model,
    tasks: Mapping[str, Sequence[Sample]],
    every: Comparison,
    *,
    question_apart: bool = False,
) -> Iterator[Measurement]:
    """Measure each task with the full cache, without the fact, and with every policy and budget.

    every: the caches; n_ctx and n_batch are required. The correct answer follows a prompt token by
        token.
    question_apart: evict before the question, as if the text had been read in advance.

    Raises ValueError.
    """
    n_ctx = every.cache.context
    check_int("n_batch", every.cache.n_batch, 1, n_ctx)
    whole, *evicting = every.caches(model)
    absent = whole._replace(name="absent")
    for task, samples in tasks.items():
        longest = max(len(sample.prompt) + len(sample.answer) for sample in samples)
        if longest > n_ctx:
            raise ValueError(
                f"{task} has a sample of {longest} tokens, expected at most n_ctx={n_ctx}"
            )
        full = np.zeros(len(samples))
        for one in [whole, absent, *evicting]:
            session = every.session(model, one)
            values, exact = np.zeros(len(samples)), np.zeros(len(samples), bool)
            for i, sample in enumerate(samples):
                prompt = sample.without_fact if one.name == "absent" else sample.prompt
                n_question = sample.n_question if question_apart else 0
                logits = answer_logits(session, prompt, sample.answer, n_question)
                answer = np.asarray(sample.answer, np.int32)
                values[i] = -token_losses(logits, answer).mean()
                exact[i] = (logits.argmax(axis=1) == answer).all()
            if one.name == "full":
                full = values
            gain = values - full
            yield Measurement(
                task,
                one.name,
                one.budget,
                one.kept,
                log_likelihood=float(values.mean()),
                of_full=float(gain.mean()),
                error=standard_error(gain),
                exact=float(exact.mean()),
                samples=len(samples),
            )


def standard_error(values: NDArray[np.float64]) -> float:
    """The standard error of a mean; nan for one value."""
    return float(values.std(ddof=1) / sqrt(len(values))) if len(values) > 1 else nan


def answer_logits(
    session: _core.Session, prompt: Sequence[int], answer: Sequence[int], n_apart: int = 0
) -> NDArray[np.float32]:
    """Logits [len(answer), n_vocab] that predict each token of the answer.

    The prompt is read in chunks of n_batch tokens, its last n_apart tokens separately, the answer
    token by token.
    """
    session.reset(0)
    tokens = np.asarray(prompt, np.int32)
    if n_apart:
        read_tokens(session, tokens[:-n_apart])
    rows = [read_tokens(session, tokens[-n_apart:])]
    rows += [session.step([(0, np.array([token], np.int32))]) for token in answer[:-1]]
    return np.concatenate(rows)
