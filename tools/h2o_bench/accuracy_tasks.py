"""Scores of every document of a task with a policy and a budget."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.api.samplers import FirstNSampler

from h2o_bench.together import (
    common_prefix,
    greedy_tokens,
    log_likelihoods,
    read_examples,
    together,
)
from h2o_cpp import _core
from h2o_cpp.budget.policy import Policy, fraction_of, named_policy
from h2o_cpp.eval.tasks import load_task
from h2o_cpp.model.session import open_session
from h2o_cpp.model.tokenizer import Tokenizer

XSUM = "xsum"
XSUM_FILE = "xsum_0shot_100.jsonl"
_N_TOGETHER = 12  # sequences
_MAX_TOKENS = 64  # of a summary


@dataclass(frozen=True)
class Setting:
    """A cache setting."""

    policy: str  # "full", or one of h2o_cpp.policy.POLICIES
    budget: float  # fraction of a request's tokens

    def of(self, n_tokens: int) -> Policy:
        """The policy for a request with this many tokens."""
        if self.policy == "full":
            return Policy.full()
        return named_policy(self.policy, max(1, fraction_of(n_tokens, self.budget)))


@dataclass(frozen=True)
class Scores:
    """Scores of a task's documents, by metric."""

    metrics: Mapping[str, Sequence[float]]
    tokens: float  # mean tokens per request
    kept: float  # most kept tokens per layer and KV head


class _SharedExamples(TemplateLM):  # type: ignore[misc]  # lm_eval is not typed
    """A model that reads the common beginning of all requests once."""

    def __init__(self, model: _core.Model, setting: Setting) -> None:
        super().__init__()
        self._model = model
        self._tokenizer = Tokenizer.of_model(model)
        self._setting = setting
        self.tokens = 0.0
        self.kept = 0.0

    @property
    def eot_token_id(self) -> int | None:
        return self._tokenizer.eos

    def tok_encode(self, string: str, **_: object) -> list[int]:
        return self._tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        lengths = [len(context) + len(answer) for _, context, answer in requests]
        self.tokens = sum(lengths) / len(lengths)
        policy = self._setting.of(round(self.tokens))
        session = open_session(
            self._model, policy, n_ctx=max(lengths), n_batch=_N_TOGETHER, n_sequences=_N_TOGETHER
        )
        contexts = [
            (context, [answer for _, _, answer in same])
            for context, same in groupby(requests, key=lambda request: request[1])
        ]
        n = common_prefix([context for context, _ in contexts])
        examples = read_examples(session, contexts[0][0][:n])
        answer = partial(log_likelihoods, session)
        texts = [
            partial(answer, examples=examples, context=context, answers=answers)
            for context, answers in contexts
        ]
        totals = [total for each in together(session, texts) for total in each]
        self.kept = self.tokens if policy.budget is None else policy.budget
        return [(total, False) for total in totals]

    def loglikelihood_rolling(self, requests: object, disable_tqdm: bool = False) -> list[float]:
        """Not used by these tasks."""
        raise NotImplementedError

    def generate_until(self, requests: object, disable_tqdm: bool = False) -> list[str]:
        """Not used by these tasks."""
        raise NotImplementedError


def choice_scores(
    model: _core.Model, task: str, setting: Setting, *, data: Path, n_examples: int, limit: int
) -> Scores:
    """Scores of a multiple-choice task, with the first `n_examples` documents as examples."""
    loaded = load_task(task, data)
    [one] = loaded["tasks"].values()
    one.set_config("num_fewshot", n_examples)
    one.sampler = FirstNSampler(list(one.fewshot_docs()))
    end = min(n_examples + limit, len(one.dataset["test"]))
    asked = _SharedExamples(model, setting)
    results = lm_eval.evaluate(
        asked, loaded, samples={task: list(range(n_examples, end))}, log_samples=True
    )
    documents: list[dict[str, Any]] = results["samples"][task]
    names = [str(name) for name in ("acc", "acc_norm") if name in documents[0]]
    metrics = {name: [float(each[name]) for each in documents] for name in names}
    return Scores(metrics, asked.tokens, asked.kept)


def summary_scores(model: _core.Model, setting: Setting, *, data: Path, limit: int) -> Scores:
    """ROUGE of the first line after an article, on XSum."""
    from rouge_score.rouge_scorer import RougeScorer

    lines = (data / XSUM_FILE).read_text(encoding="utf-8").splitlines()[:limit]
    documents = [json.loads(line) for line in lines]
    tokenizer = Tokenizer.of_model(model)
    prompts = [tokenizer.encode(document["article"]) for document in documents]
    n_ctx = max(len(prompt) for prompt in prompts) + _MAX_TOKENS
    session = open_session(
        model, setting.of(n_ctx), n_ctx=n_ctx, n_batch=_N_TOGETHER, n_sequences=_N_TOGETHER
    )
    policies = [setting.of(len(prompt)) for prompt in prompts]
    summarize = partial(
        greedy_tokens, session, max_tokens=_MAX_TOKENS, end_tokens=frozenset(tokenizer.end_tokens)
    )
    texts = [
        partial(summarize, prompt=prompt, policy=policy)
        for prompt, policy in zip(prompts, policies, strict=True)
    ]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    metrics: dict[str, list[float]] = {}
    for document, output in zip(documents, together(session, texts), strict=True):
        summary = next(iter(tokenizer.decode(output).strip().splitlines()), "")
        for name, score in scorer.score(document["summary_gt"], summary).items():
            metrics.setdefault(name, []).append(score.fmeasure)
    n = len(prompts)
    kept = [
        len(p) if q.budget is None else q.budget for p, q in zip(prompts, policies, strict=True)
    ]
    return Scores(metrics, sum(map(len, prompts)) / n, sum(kept) / n)
