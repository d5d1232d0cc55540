"""Accuracy against budget: batched equals single evaluation, shared examples, the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from h2o_bench.together import (
    common_prefix,
    greedy_tokens,
    log_likelihoods,
    read_examples,
    together,
)
from h2o_cpp import Generator, Policy, _core
from h2o_cpp.measure.perplexity import token_losses
from h2o_cpp.model.session import open_session
from h2o_cpp.model.tokenizer import Tokenizer
from support.needs import packages

POLICY = Policy.h2o(4, 5)
EXAMPLES = "The sea is blue. The old man went down to the sea with his son. "
QUESTIONS = {
    "The son said that": [" he was tired.", " the boat"],
    "It was a bright morning, and": [" they", " the old man", " his son had been a sailor."],
    "Then": [" he went home."],
}


def alone(model: _core.Model, context: Sequence[int], answer: Sequence[int]) -> float:
    """The log-likelihood from a separate session that evaluates one token at a time."""
    session = open_session(model, POLICY, n_ctx=len(context) + len(answer), n_batch=1)
    tokens = [*context, *answer]
    rows = [session.step([(0, np.array([token], np.int32))])[0] for token in tokens]
    after = np.stack(rows[len(context) - 1 : -1])
    return -sum(
        float(token_losses(row[None], np.array([token], np.int32))[0])
        for row, token in zip(after, answer, strict=True)
    )


def test_together_equals_alone(model: _core.Model, tokenizer: Tokenizer) -> None:
    """Bit for bit, with fewer sequences than texts."""
    contexts = [tokenizer.encode(EXAMPLES + question) for question in QUESTIONS]
    answers = [
        [tokenizer.encode(answer, add_special=False) for answer in each]
        for each in QUESTIONS.values()
    ]
    session = open_session(model, POLICY, n_ctx=100, n_batch=2, n_sequences=2)
    n = common_prefix(contexts)
    assert n > len(tokenizer.encode(EXAMPLES)) - 3
    examples = read_examples(session, contexts[0][:n])
    answer = partial(log_likelihoods, session)
    texts = [
        partial(answer, examples=examples, context=context, answers=each)
        for context, each in zip(contexts, answers, strict=True)
    ]
    assert together(session, texts) == [
        [alone(model, context, answer) for answer in each]
        for context, each in zip(contexts, answers, strict=True)
    ]


def test_greedy_tokens_equal_generator(
    model: _core.Model, tokenizer: Tokenizer, tiny_opt: Path
) -> None:
    """Each text has its own policy and budget."""
    policies = [Policy.h2o(4, 5), Policy.window(12), Policy.h2o(2, 3)]
    prompts = [tokenizer.encode(EXAMPLES + question) for question in QUESTIONS]
    session = open_session(model, Policy.h2o(20, 20), n_ctx=100, n_batch=2, n_sequences=2)
    say = partial(greedy_tokens, session, max_tokens=12, end_tokens=tokenizer.end_tokens)
    texts = [
        partial(say, prompt=prompt, policy=policy)
        for prompt, policy in zip(prompts, policies, strict=True)
    ]
    for prompt, policy, generated in zip(prompts, policies, together(session, texts), strict=True):
        with Generator(tiny_opt, policy=policy, n_batch=1, threads=1) as generator:
            stream = generator.stream(prompt, max_tokens=12, temperature=0)
            assert "".join(stream) == tokenizer.decode(generated)


def test_common_prefix() -> None:
    assert common_prefix([[1, 2, 3], [1, 2, 4, 5]]) == 2
    assert common_prefix([[1, 2], [1, 2, 3]]) == 1  # leaves at least one token of each
    assert common_prefix([[1, 2], [3]]) == 0


@packages("lm_eval")
def test_choice_scores_equal_separate_evaluation(tmp_path: Path, model: _core.Model) -> None:
    """The first document is the few-shot example; the full cache gives lm_eval's answers."""
    from h2o_bench.accuracy_tasks import Setting, choice_scores
    from h2o_cpp.eval.tasks import LOCAL_TASKS

    documents = [
        {"goal": "To boil", "sol1": "heat it", "sol2": "cool it", "label": 0},
        {"goal": "To cut", "sol1": "use a spoon", "sol2": "use a knife", "label": 1},
        {"goal": "To sail", "sol1": "take a boat", "sol2": "take a house", "label": 0},
        {"goal": "To sleep", "sol1": "go to bed", "sol2": "go to the sea", "label": 0},
    ]
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (tmp_path / LOCAL_TASKS["piqa"].file).write_text(lines, encoding="utf-8")
    tokenizer = Tokenizer.of_model(model)
    measure = partial(choice_scores, model, "piqa", data=tmp_path, n_examples=1, limit=2)
    scores = measure(Setting("full", 1.0))
    right, lengths = [], []
    for document in documents[1:3]:
        text = "Question: To boil\nAnswer: heat it\n\nQuestion: " + f"{document['goal']}\nAnswer:"
        context = tokenizer.encode(text)
        totals = []
        for solution in ("sol1", "sol2"):
            answer = tokenizer.encode(f"{text} {document[solution]}")[len(context) :]
            session = open_session(model, Policy.full(), n_ctx=100, n_batch=100)
            logits = session.score(0, np.array([*context, *answer], np.int32))
            losses = token_losses(logits[len(context) - 1 : -1], np.array(answer, np.int32))
            totals.append(-float(losses.sum()))
            lengths.append(len(context) + len(answer))
        right.append(float(np.argmax(totals) == document["label"]))
    assert scores.metrics["acc"] == right
    assert scores.tokens == scores.kept == np.mean(lengths)
    assert measure(Setting("h2o", 1.0)).metrics == scores.metrics
    assert measure(Setting("h2o", 0.25)).kept == round(scores.tokens) // 4


@packages("rouge_score")
@packages("lm_eval")
def test_summary_equal_to_output_scores_one(
    tmp_path: Path, model: _core.Model, tiny_opt: Path
) -> None:
    """A summary equal to the first line of the model's output scores 1."""
    from h2o_bench.accuracy_tasks import XSUM_FILE, Setting, summary_scores

    with Generator(tiny_opt, threads=1) as generator:
        generated = generator.generate(EXAMPLES, max_tokens=64, temperature=0).text
        n = len(generator.tokenize(EXAMPLES))
    summaries = [generated.strip().splitlines()[0], "xylophone"]
    lines = [json.dumps({"article": EXAMPLES, "summary_gt": summary}) for summary in summaries]
    (tmp_path / XSUM_FILE).write_text("\n".join([*lines, "not read"]), encoding="utf-8")
    scores = summary_scores(model, Setting("full", 1.0), data=tmp_path, limit=2)
    assert scores.metrics["rougeL"] == [1.0, 0.0]
    assert (scores.tokens, scores.kept) == (n, n)
    assert summary_scores(model, Setting("h2o", 0.5), data=tmp_path, limit=1).kept == n // 2


@packages("lm_eval")
def test_rows() -> None:
    """Standard errors: of 1, 1, 0, 1 and of 1, 0, 0, 1, over the square root of 4; and those of the
    differences 0, 1, 0, 0."""
    from h2o_bench.accuracy_tasks import Setting
    from h2o_bench.measurements.accuracy import row

    full, right = [1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]
    whole = row("copa", Setting("full", 1.0), "acc", full, full)
    assert (whole["value"], whole["±"], whole["less than full"]) == (0.75, 0.25, 0)
    part = row("copa", Setting("h2o", 0.2), "acc", right, full)
    assert (part["n"], part["budget, %"], part["value"]) == (4, 20, 0.5)
    assert part["±"] == pytest.approx(3**-0.5 / 2)
    assert (part["less than full"], part["± of that"]) == (0.25, 0.25)
    assert part["_scores"] == right
