"""BudgetedModel: log-likelihoods and outputs with a budget relative to each request."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator, Policy, _core
from h2o_cpp.cli import main
from h2o_cpp.eval.budgeted import BudgetedModel
from h2o_cpp.model.session import open_session
from support.scripted_opt import (
    END,
    N_VOCAB,
    VISIBLE,
    floats,
    integers,
    scripted_opt,
    string,
    strings,
    u32,
)

CONTEXT = "It was a bright morning, and the old man went down to the sea with"
CONTINUATION = " his son, who had been a sailor."


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Iterator[Generator]:
    with Generator(tiny_opt, threads=1) as generator:
        yield generator


@pytest.fixture(scope="module")
def context(generator: Generator) -> list[int]:
    return generator.tokenize(CONTEXT)


@pytest.fixture(scope="module")
def continuation(generator: Generator) -> list[int]:
    return generator.tokenize(CONTINUATION, add_special=False)


def log_likelihood(logits: np.ndarray[Any, Any], tokens: Sequence[int]) -> float:
    """The log-likelihood of tokens, each predicted by the same row of logits."""
    exact = logits.astype(np.float64)
    p = np.exp(exact - exact.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return float(np.log(p[np.arange(len(tokens)), tokens]).sum())


@pytest.mark.parametrize("n_batch", [None, 1, 5])
def test_full_cache_equals_generator_logits(
    tiny_opt: Path,
    generator: Generator,
    context: list[int],
    continuation: list[int],
    n_batch: int | None,
) -> None:
    """For any n_batch, and for a continuation longer than the scoring chunk."""
    model = BudgetedModel(tiny_opt, n_batch=n_batch, threads=1)
    stream = generator.stream(context, max_tokens=150, temperature=0, ignore_eos=True)
    assert "".join(stream)
    for tokens, is_greedy in ((continuation, False), (stream.tokens.tolist(), True)):
        rows = generator.logits([*context, *tokens])[len(context) - 1 : -1]
        total, greedy = model.loglikelihood(context, tokens)
        assert total == pytest.approx(log_likelihood(rows, tokens), rel=1e-9)
        assert greedy == is_greedy
    n = len(context) + len(continuation) - 1  # the last token is never fed
    assert model.usage.requests == 2
    assert model.usage.kept == (n + len(context) + 149) / 2


@pytest.mark.parametrize(
    ("name", "policy"),
    [("h2o", Policy.h2o(4, 5)), ("window", Policy.window(9)), ("sinks", Policy.sinks(4, 5))],
)
def test_continuation_is_predicted_from_kept_tokens(
    tiny_opt: Path, context: list[int], continuation: list[int], name: str, policy: Policy
) -> None:
    n = len(context) + len(continuation)
    hh = 9.5 / n  # rounds down to 9
    core = _core.Model(tiny_opt, device="cpu", threads=1)
    session = open_session(core, policy, n_ctx=n - 1, n_batch=len(context))
    fed = [context, *([token] for token in continuation[:-1])]
    rows = np.concatenate([session.step([(0, np.array(tokens, np.int32))]) for tokens in fed])
    model = BudgetedModel(tiny_opt, hh=hh, policy=name, threads=1)
    total, _ = model.loglikelihood(context, continuation)
    assert total == pytest.approx(log_likelihood(rows, continuation), rel=1e-9)
    assert model.usage.kept == 9
    assert model.usage.cache_bytes == session.cache_bytes
    whole, _ = BudgetedModel(tiny_opt, threads=1).loglikelihood(context, continuation)
    assert total != pytest.approx(whole, rel=1e-3)


def test_first_prediction_uses_whole_context(
    tiny_opt: Path, context: list[int], continuation: list[int]
) -> None:
    full = BudgetedModel(tiny_opt, threads=1).loglikelihood(context, continuation[:1])
    assert BudgetedModel(tiny_opt, hh=0.1, threads=1).loglikelihood(context, continuation[:1]) == (
        full
    )
    in_chunks = BudgetedModel(tiny_opt, hh=0.1, n_batch=4, threads=1)
    assert in_chunks.loglikelihood(context, continuation[:1]) != full


def test_budget_of_100_percent_equals_full_cache(
    tiny_opt: Path, context: list[int], continuation: list[int]
) -> None:
    full, _ = BudgetedModel(tiny_opt, threads=1).loglikelihood(context, continuation)
    everything = BudgetedModel(tiny_opt, hh=1.0, threads=1)
    total, _ = everything.loglikelihood(context, continuation)
    assert total == pytest.approx(full, rel=1e-12)  # up to the order of a sum in float64


def test_at_least_one_token_is_kept(tiny_opt: Path, context: list[int]) -> None:
    model = BudgetedModel(tiny_opt, hh=0.01, threads=1)
    model.loglikelihood(context[:3], context[3:6])
    assert model.usage.kept == 1


def test_long_context_is_truncated_at_start(
    tiny_opt: Path, context: list[int], continuation: list[int]
) -> None:
    n_ctx = len(continuation) + 4
    short = BudgetedModel(tiny_opt, n_ctx=n_ctx, threads=1)
    expected = short.loglikelihood(context[-5:], continuation)
    assert short.usage.truncated == 0
    assert short.loglikelihood(context, continuation) == expected
    assert short.usage.truncated == 1
    text = short.generate(context, max_tokens=4)
    assert text == short.generate(context[4 - n_ctx :], max_tokens=4)
    assert short.usage.truncated == 2
    short.clear_usage()
    assert short.usage.requests == short.usage.truncated == 0


def test_generate_equals_generator(
    tiny_opt: Path, generator: Generator, context: list[int]
) -> None:
    expected = generator.generate(context, max_tokens=40, temperature=0).text
    model = BudgetedModel(tiny_opt, threads=1)
    assert model.generate(context, max_tokens=40) == expected
    middle, late = expected[17:20], expected[25:28]
    assert (
        model.generate(context, max_tokens=40, stop=(late, middle))
        == (expected[: min(expected.index(middle), expected.index(late))])
    )


def test_generate_with_budget_relative_to_prompt(tiny_opt: Path, context: list[int]) -> None:
    model = BudgetedModel(tiny_opt, hh=0.5, threads=1)
    n = len(context) // 2
    with Generator(tiny_opt, policy=Policy.h2o(n // 2, n - n // 2), threads=1) as generator:
        expected = generator.generate(context, max_tokens=30, temperature=0).text
    assert model.generate(context, max_tokens=30) == expected
    assert model.usage.kept == n


def test_generation_writes_no_files(
    tiny_opt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = BudgetedModel(tiny_opt.absolute(), threads=1)
    model.generate(model.tokenizer.encode("The old man " * 20), max_tokens=30)
    assert not [*tmp_path.iterdir()]


def test_generation_stops_at_eos(tmp_path: Path) -> None:
    path = scripted_opt([*b"abcd", END]).write(tmp_path / "scripted.gguf")
    assert BudgetedModel(path, threads=1).generate(list(b"x"), max_tokens=10) == "abcd"


def test_first_complete_stop_string_ends_the_output(tmp_path: Path) -> None:
    """A stop of one token counts: "🦙" is complete before "a🦙a", which begins earlier."""
    model = scripted_opt([257])
    model.keys["tokenizer.ggml.tokens"] = strings(
        [*VISIBLE, "</s>", "".join(VISIBLE[byte] for byte in "a🦙a".encode())]
    )
    model.keys["tokenizer.ggml.merges"] = strings([])
    path = model.write(tmp_path / "llama.gguf")
    stop = ["🦙", "a🦙a"]
    with Generator(path, threads=1) as generator:
        assert generator.generate(list(b"x"), temperature=0, stop=stop).text == "a"
    assert BudgetedModel(path, threads=1).generate(list(b"x"), max_tokens=9, stop=stop) == "a"


def test_output_is_without_the_first_space_of_sentencepiece(tmp_path: Path) -> None:
    """transformers decodes so: lm_eval's own models decode an output without its prompt."""
    model = scripted_opt([4, 4, 3, 2])
    pieces = ["<unk>", "<s>", "</s>", "a", "\u2581a", *map(str, range(N_VOCAB - 5))]
    model.keys |= {
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.tokens": strings(pieces),
        "tokenizer.ggml.token_type": integers([2, 3, 3] + [1] * (N_VOCAB - 3)),
        "tokenizer.ggml.scores": floats([0.0] * N_VOCAB),
        "tokenizer.ggml.eos_token_id": u32(2),
    }
    path = model.write(tmp_path / "pieces.gguf")
    with Generator(path, threads=1) as generator:
        assert generator.generate([3], temperature=0).text == " a aa"
    assert BudgetedModel(path, threads=1).generate([3], max_tokens=9) == "a aa"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hh": 0.0}, "hh=0.0"),
        ({"hh": 1.5}, "hh=1.5"),
        ({"hh": "x"}, "hh='x'"),
        ({"policy": "lru"}, "policy='lru', expected one of"),
        ({"n_ctx": 1}, "n_ctx=1"),
        ({"n_ctx": 4096}, "n_ctx=4096"),
        ({"n_batch": 0}, "n_batch=0"),
    ],
)
def test_invalid_options_are_rejected(
    tiny_opt: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BudgetedModel(tiny_opt, **options)


def test_invalid_requests_are_rejected(tiny_opt: Path) -> None:
    model = BudgetedModel(tiny_opt, n_ctx=8, threads=1)
    for context, continuation in (([], [5]), ([5], []), ([5], [5] * 9)):
        with pytest.raises(ValueError, match="tokens of context"):
            model.loglikelihood(context, continuation)
    with pytest.raises(ValueError, match="max_tokens=8"):
        model.generate([5], max_tokens=8)


def test_missing_lm_eval(
    tiny_opt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "h2o_cpp.eval.model", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval.api.instance", None)
    assert main(["eval", str(tiny_opt), "--tasks", "copa"]) == 1
    assert "pip install lm-eval" in capsys.readouterr().err
