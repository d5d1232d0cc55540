"""Perplexity with eviction."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from math import exp, inf, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator, Policy, _core
from h2o_cpp.budget.policy import POLICIES, budget_policy
from h2o_cpp.cli import main
from h2o_cpp.measure.budgets import Comparison, at_budgets
from h2o_cpp.measure.perplexity import measure, perplexity, stream_losses, token_losses
from h2o_cpp.model.session import open_session
from support.needs import packages

N_CTX = 48


@pytest.fixture(scope="module")
def tokens(tiny_opt: Path) -> list[int]:
    text = (
        "It was a bright morning, and the old man went down to the sea with his son. He had not "
        "been there for many years, and he thought of his father, who had been a sailor. "
    )
    with Generator(tiny_opt) as generator:
        return generator.tokenize(text * 6)


def losses(generator: Generator, window: list[int]) -> list[float]:
    logits = generator.logits(window).astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return [-log(p[i, token]) for i, token in enumerate(window[1:])]


def test_agreement_compares_the_predictions_of_two_caches(
    tiny_opt: Path, tokens: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The full cache's logits are those of Generator; a window's come token by token."""
    policy = Policy.h2o(8, 8)
    same, overlap = [], []
    step = N_CTX - 1
    with Generator(tiny_opt, n_ctx=N_CTX, threads=1) as generator:
        model = _core.Model(tiny_opt, device="cpu", threads=1)
        session = open_session(model, policy, n_ctx=N_CTX, n_batch=1)
        for begin in range(0, 2 * step, step):
            window = tokens[begin : begin + N_CTX]
            session.reset(0)
            kept = [session.score(0, np.array([token], np.int32))[0] for token in window[:-1]]
            for p, q in zip(generator.logits(window), np.stack(kept), strict=False):
                same.append(p.argmax() == q.argmax())
                odds = [np.exp(row.astype(np.float64) - row.max()) for row in (p, q)]
                overlap.append(np.minimum(*(row / row.sum() for row in odds)).sum())
    full, found = measure(
        model,
        tokens[: 2 * step + 1],
        Comparison.of(["h2o"], [16 / N_CTX], n_ctx=N_CTX, n_batch=1),
        agreement=True,
    )
    assert full.agreement is not None
    assert found.agreement is not None
    assert full.agreement.same == 1
    assert full.agreement.overlap == pytest.approx(1, abs=1e-6)
    assert found.agreement.same == np.mean(same)
    assert found.agreement.overlap == pytest.approx(np.mean(overlap), abs=1e-6)
    assert 0.1 < found.agreement.same < 1  # not trivial

    (tmp_path / "text").write_text("It was a bright morning, and the old man went down. " * 9)
    arguments = ["perplexity", str(tiny_opt), str(tmp_path / "text"), "-c", "48", "--hh", "0.5"]
    assert main([*arguments, "--agreement", "--policy", "h2o"]) == 0
    header, _, first, *_ = capsys.readouterr().out.splitlines()
    assert header.endswith("| same token | overlap |")
    assert first.endswith("| 1.000 | 1.000 |")
    assert main([*arguments, "--agreement", "--stride", "3"]) == 1
    assert "not to streaming or a stride" in capsys.readouterr().err


@pytest.mark.parametrize("n_batch", [1, 7, N_CTX])
@pytest.mark.parametrize("stride", [None, 20])
def test_full_cache_equals_logits_of_each_window(
    tiny_opt: Path, model: _core.Model, tokens: list[int], n_batch: int, stride: int | None
) -> None:
    """For any n_batch and stride; each window is evaluated as a separate text."""
    step = stride or N_CTX - 1
    with Generator(tiny_opt, n_ctx=N_CTX, threads=1) as generator:
        expected = [
            loss
            for begin in range(0, len(tokens) - N_CTX + 1, step)
            for loss in losses(generator, tokens[begin : begin + N_CTX])[-step:]
        ]
    session = open_session(model, Policy.full(), n_ctx=N_CTX, n_batch=n_batch)
    value, n = perplexity(session, tokens, stride=stride)
    assert n == len(expected)
    assert value == pytest.approx(exp(sum(expected) / n), rel=1e-9)


@pytest.mark.parametrize("policy", [Policy.h2o(4, 4), Policy.window(8), Policy.sinks(2, 6)])
def test_n_batch_1_predicts_from_the_evicted_cache(
    model: _core.Model, tokens: list[int], policy: Policy
) -> None:
    session = open_session(model, policy, n_ctx=N_CTX, n_batch=1)
    total = 0.0
    for i in range(N_CTX - 1):
        [row] = session.step([(0, np.array([tokens[i]], np.int32))]).astype(np.float64)
        total += row.max() + log(np.exp(row - row.max()).sum()) - row[tokens[i + 1]]
    value, n = perplexity(session, tokens[:N_CTX])
    assert n == N_CTX - 1
    assert value == pytest.approx(exp(total / n), rel=1e-9)


def test_measure_rows_per_policy_and_budget(model: _core.Model, tokens: list[int]) -> None:
    rows = list(
        measure(
            model,
            tokens,
            Comparison.of(["h2o", "window"], [0.25, 1.0], n_ctx=N_CTX, n_batch=1),
        )
    )
    assert [(r.policy, r.kept) for r in rows] == [
        ("full", 48),
        ("h2o", 12),
        ("window", 12),
        ("h2o", 48),
        ("window", 48),
    ]
    full, h2o, window, h2o_all, window_all = rows
    assert h2o_all.perplexity == window_all.perplexity == full.perplexity  # nothing is evicted
    assert window.cache_bytes < h2o.cache_bytes < full.cache_bytes / 3  # a window has no scores
    assert window.perplexity > full.perplexity


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ["lru"]}, "policy='lru', expected one of"),
        ({"budgets": [0.0]}, "budget=0.0"),
        ({"budgets": [1.5]}, "budget=1.5"),
        ({"budgets": [0.001]}, "keeps 0 of"),
        ({"n_ctx": 1}, "n_ctx=1"),
        ({"n_ctx": 2000}, "tokens, expected at least"),
        ({"stride": 0}, "stride=0"),
        ({"stride": N_CTX}, "stride=48"),
        ({"n_batch": 0}, "n_batch=0"),
        ({"budgets": [float("nan")]}, "budget=nan"),
        ({"streaming": True, "stride": 5}, "stride applies to windows"),
        ({"streaming": True}, "since positions do not roll"),
    ],
)
def test_bad_options(
    model: _core.Model, tokens: list[int], options: dict[str, Any], message: str
) -> None:
    caches: dict[str, Any] = {"policies": ["h2o"], "budgets": [0.5], "n_ctx": N_CTX, "n_batch": 1}
    changed = {name: value for name, value in options.items() if name in caches}
    others = {name: value for name, value in options.items() if name not in caches}
    with pytest.raises(ValueError, match=message):
        list(measure(model, tokens, Comparison.of(**(caches | changed)), **others))


def test_command_prints_table_and_json(
    tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The old man went down to the sea. " * 20, encoding="utf-8")
    arguments = ["perplexity", str(tiny_opt), str(tmp_path / "text.txt"), "--n-ctx", "40"]
    arguments += ["--policy", "h2o,sinks", "--budget", "0.2,0.5"]
    assert main(arguments) == 0
    out = capsys.readouterr().out.splitlines()
    table = [line for line in out if line.startswith("| ")]
    assert len(table) == 1 + 1 + 4
    assert out[-1].endswith("tokens predicted, in windows of 40, 1 at a time")
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["measured"]
    assert [row["policy"] for row in rows] == ["full", "h2o", "sinks", "h2o", "sinks"]
    assert f"{rows[1]['perplexity']:.3f}" in table[2]
    assert "archive" not in "".join(out)


def test_table_shows_bytes_of_the_archive(
    tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The old man went down to the sea. " * 20, encoding="utf-8")
    arguments = ["perplexity", str(tiny_opt), str(tmp_path / "text.txt"), "--n-ctx", "100"]
    arguments += ["--policy", "h2o", "--hh", "0.2", "--archive", "q8_0"]
    assert main([*arguments, "--json"]) == 0
    _, row = json.loads(capsys.readouterr().out)["measured"]
    # K and V of the 99 - 20 evicted tokens in q8_0, and the bounds of their 7 or fewer pages.
    least = 36 * (99 - 20) * 2 * 34
    assert least < row["archive_bytes"] <= least + 36 * 7 * 2 * 32 * 2
    assert main(arguments) == 0
    sizes = f"{row['cache_bytes'] / 2**20:.2f} MiB, archive {row['archive_bytes'] / 2**20:.2f} MiB"
    assert f"| {sizes} |" in capsys.readouterr().out


@packages("torch", "transformers")
def test_full_cache_equals_transformers(shared: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    from h2o_cpp.convert import convert

    source = shared / "models" / "tiny-opt-hf"
    convert(source, tmp_path / "model.gguf", "f32")
    text = (shared / "text" / "robert-louis-stevenson_treasure-island.txt").read_text("utf-8")
    with Generator(tmp_path / "model.gguf") as generator:
        tokens = generator.tokenize(text[:8000])[:1024]
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        expected = exp(float(model(ids, labels=ids).loss))
    ours = _core.Model(tmp_path / "model.gguf", device="cpu", threads=1)
    session = open_session(ours, Policy.full(), n_ctx=1024, n_batch=1, kv_dtype="f32")
    value, _ = perplexity(session, tokens)
    assert value == pytest.approx(expected, rel=1e-3)


def test_beginning_is_prepended_to_every_window(
    tiny_opt: Path, model: _core.Model, tokens: list[int]
) -> None:
    """OPT expects </s> at the start of a text, so also at the start of every window."""
    beginning, text = tokens[:1], tokens[1:]
    n_text = N_CTX - 1
    with Generator(tiny_opt, n_ctx=N_CTX, threads=1) as generator:
        expected = [
            loss
            for begin in range(0, len(text) - n_text + 1, n_text)
            for loss in losses(generator, beginning + text[begin : begin + n_text])
        ]
    session = open_session(model, Policy.full(), n_ctx=N_CTX, n_batch=1)
    value, n = perplexity(session, text, beginning=beginning)
    assert n == len(expected)
    assert value == pytest.approx(exp(sum(expected) / n), rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("name", POLICIES)
def test_at_budgets_gives_policies_of_the_budget(name: str, n: int) -> None:
    [budgeted] = at_budgets([name], [1.0], n)  # every policy accepts a budget of 1 token
    assert budgeted.policy.budget == budgeted.kept == n


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, Fraction])
@pytest.mark.parametrize(("budget", "n_ctx", "kept"), [(0.29, 100, 28), (0.57, 100, 56)])
def test_at_budgets_keeps_as_many_tokens_as_a_generator(
    kind: Callable[[float], float], budget: float, n_ctx: int, kept: int
) -> None:
    """Not one more because a type rounds the product to the next whole number."""
    [budgeted] = at_budgets(["h2o"], [kind(budget)], n_ctx)
    assert budgeted.kept == budget_policy(kind(budget), None, n_ctx).budget == kept


def test_nan_is_an_error() -> None:
    logits = np.array([[0, 1], [0, np.nan]], np.float32)
    with pytest.raises(ValueError, match="the model computes NaN instead of logits"):
        token_losses(logits, np.array([0, 0], np.int32))


def test_losses_above_the_largest_float_are_infinity() -> None:
    class Unlikely:
        """A session that gives token 1 a probability of exp(-1000)."""

        n_ctx = 4

        def reset(self, sequence: int) -> None: ...

        def room(self, sequence: int) -> int:
            return self.n_ctx

        def chunk(self, sequence: int) -> int:
            return 2

        def score(self, sequence: int, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
            return np.array([[1000, 0]] * len(tokens), np.float32)

    session: Any = Unlikely()
    assert perplexity(session, [0, 1, 1, 1]) == (inf, 3)


def test_streaming_is_a_single_pass(tiny_opt: Path, model: _core.Model, tokens: list[int]) -> None:
    text = tokens[:41]  # 40 predictions: segments of 4
    with Generator(tiny_opt, n_ctx=N_CTX, threads=1) as generator:
        expected = losses(generator, text)
    got = stream_losses(open_session(model, Policy.full(), n_ctx=N_CTX, n_batch=7), text)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    [full, window] = measure(
        model,
        text[1:],
        Comparison.of(["window"], [0.25], n_ctx=N_CTX, n_batch=1),
        beginning=text[:1],
        streaming=True,
    )
    assert full.tokens == 40
    assert full.perplexity == pytest.approx(exp(sum(expected) / 40), rel=1e-9)
    segments = [exp(sum(expected[i : i + 4]) / 4) for i in range(0, 40, 4)]
    assert full.segments == pytest.approx(segments, rel=1e-9)
    # a window of 12 has evicted nothing yet when it predicts the first 12 of 40
    assert window.segments[:3] == pytest.approx(full.segments[:3], rel=1e-9)
    assert window.segments[4:] != pytest.approx(full.segments[4:], rel=1e-3)


def test_streaming_with_rolling_positions_exceeds_n_ctx(data: Path) -> None:
    model = _core.Model(data / "golden" / "llama_gqa2_tied.gguf", device="cpu", threads=1)
    text = [7 * i % 61 for i in range(3 * model.n_ctx_train)]
    session = open_session(model, Policy.window(10), n_ctx=40, n_batch=1)
    total = 0.0
    for token, next_token in pairwise(text):
        [row] = session.step([(0, np.array([token], np.int32))]).astype(np.float64)
        total += row.max() + log(np.exp(row - row.max()).sum()) - row[next_token]
    [window] = measure(
        model, text, Comparison.of(["window"], [0.25], n_ctx=40, n_batch=1), streaming=True
    )  # without the full cache, which does not fit
    assert window.tokens == len(text) - 1
    assert window.perplexity == pytest.approx(exp(total / window.tokens), rel=1e-9)


def test_streaming_command_beyond_n_ctx_shows_no_ratio(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The old man went down to the sea. " * 10, encoding="utf-8")
    arguments = ["perplexity", str(data / "golden" / "llama_gqa2_tied.gguf")]
    arguments += [str(tmp_path / "text.txt"), "--policy", "window,sinks", "--hh", "0.25"]
    assert main([*arguments, "-c", "40", "--streaming"]) == 0
    out = capsys.readouterr().out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert [(row[0], row[4]) for row in rows] == [
        ("| policy", "of full"),
        ("| window", "-"),
        ("| sinks", "-"),
    ]
    assert "nan" not in out
    assert "the full cache is not measured: the text is longer than n-ctx, 40" in out


def test_streaming_command(
    tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The old man went down to the sea. " * 20, encoding="utf-8")
    arguments = ["perplexity", str(tiny_opt), str(tmp_path / "text.txt"), "--max-tokens", "60"]
    arguments += ["--policy", "random", "--budget", "0.01", "--streaming"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["measured"]
    assert [row["policy"] for row in rows] == ["full", "random"]
    last = [f"{value:.3f}" for value in rows[1]["segments"]]
    assert " | ".join(last) in out
    assert "60 tokens predicted, in one pass" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--streaming"], "tokens, expected at most 25, since positions do not roll"),
        (["--policy", "lru"], "--policy 'lru', expected one of"),
        (["--text-tokens", "-5"], "--text-tokens -5, expected an integer, 1 or more"),
    ],
)
def test_errors_come_before_the_table(
    tiny_opt: Path,
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text.txt").write_text("The old man went down to the sea. " * 10, encoding="utf-8")
    arguments = ["perplexity", str(tiny_opt), str(tmp_path / "text.txt"), "-c", "24"]
    status = 2 if message.startswith("-") else 1
    assert main([*arguments, "--hh", "0.5", *options]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


@packages("matplotlib")
def test_plot(tiny_opt: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The old man went down to the sea. " * 10, encoding="utf-8")
    arguments = ["perplexity", str(tiny_opt), str(tmp_path / "text.txt"), "--n-ctx", "24"]
    assert main([*arguments, "--budget", "0.3,0.6", "--plot", str(tmp_path / "o.png")]) == 0
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


@packages("matplotlib")
@pytest.mark.parametrize("command", ["perplexity", "retrieve"])
@pytest.mark.parametrize(
    ("options", "message", "status"),
    [
        (["--csv", "none/a.csv"], "none: no such directory", 1),
        (["--csv", "."], ".: a directory, expected a file", 1),
        (["--plot", "none/a.png"], "none: no such directory", 1),
        (["--plot", "a.doc"], "--plot a.doc: expected an ending of ", 2),
    ],
)
def test_outputs_are_checked_first(
    command: str,
    options: list[str],
    message: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "no model", "-f", "no text", *options]) == status
    assert message in capsys.readouterr().err


def test_plot_without_matplotlib(
    tiny_opt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is raised before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["perplexity", str(tiny_opt), "no such text", "--plot", "o.png"]) == 1
    assert 'pip install "h2o-cpp[eval]"' in capsys.readouterr().err
