"""Retrieval with eviction: the prompts, and a model that finds digits."""

from __future__ import annotations

import json
from collections import Counter
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator, Policy, _core
from h2o_cpp.cli import main
from h2o_cpp.measure.budgets import Comparison
from h2o_cpp.measure.retrieval.measurement import answer_logits, measure
from h2o_cpp.measure.retrieval.tasks import TASKS, Sample, make_samples, read_samples
from h2o_cpp.model.session import open_session
from h2o_cpp.model.tokenizer import Tokenizer
from support.needs import packages
from support.scripted_opt import F16, N_VOCAB, Tensor, scripted_opt

LENGTH = 200


@pytest.fixture(scope="module")
def finder(tmp_path_factory: pytest.TempPathFactory) -> _core.Model:
    """A model that outputs the digit in its context.

    Embeddings are unit vectors e, which the norm maps to (e - 1/n) / sd. Keys of digits get exp(20)
    times the attention weight of others for any query, values are the tokens themselves, and the
    attention output is added at ten times the size of the current token.
    """
    n = N_VOCAB
    gguf = scripted_opt([], n_ctx=n)
    head_dim = n // 2
    sd = np.sqrt((1 / n) * (1 - 1 / n) + 1e-5)
    k, q_bias = np.zeros((n, n), np.float32), np.zeros(n, np.float32)
    k[::head_dim, ord("0") : ord("9") + 1] = 20 * np.sqrt(head_dim) * sd
    q_bias[::head_dim] = 1
    eye = np.eye(n, dtype=np.float32)
    for name, value in {
        "position_embd.weight": 0 * eye,
        "blk.0.attn_norm.weight": np.ones(n, np.float32),
        "blk.0.attn_q.bias": q_bias,
        "blk.0.attn_k.weight": k,
        "blk.0.attn_v.weight": eye,
        "blk.0.attn_output.weight": (10 * sd * eye).astype(np.float32),
        "output.weight": eye,
    }.items():
        gguf.tensors[name] = Tensor(value.shape[::-1], value.tobytes())
    gguf.tensors["token_embd.weight"] = Tensor((n, n), eye.astype(np.float16).tobytes(), F16)
    path = tmp_path_factory.mktemp("finder") / "model.gguf"
    return _core.Model(gguf.write(path), device="cpu", threads=1)


def digit_sample(digit: str, n_before: int, n_after: int) -> Sample:
    letters = list(b"the quick brown fox jumps over the lazy dog " * 5)
    return Sample(letters[:n_before], [ord(digit)], letters[:n_after], [ord(digit)])


def test_evicted_digit_is_not_found(finder: _core.Model) -> None:
    samples = [digit_sample("7", 10, 60), digit_sample("3", 30, 40)]
    rows = list(
        measure(
            finder,
            {"digit": samples},
            Comparison.of(["h2o", "window", "sinks"], [0.2, 0.9], n_ctx=100, n_batch=8),
        )
    )
    found = {(row.policy, row.budget): row.exact for row in rows}
    assert found == {
        ("full", 1): 1,
        ("absent", 1): 0,
        ("h2o", 0.2): 1,  # the digit is the heaviest hitter
        ("window", 0.2): 0,  # 20 tokens; the digits are 60 and 40 tokens back
        ("sinks", 0.2): 0,  # 4 of them at the start
        ("h2o", 0.9): 1,
        ("window", 0.9): 1,
        ("sinks", 0.9): 1,
    }
    full, absent, h2o, window, *_ = rows
    # The final norm makes the digit's entry about sqrt(n) = 16 and the others about 0.
    assert full.log_likelihood == pytest.approx(0, abs=N_VOCAB * np.exp(-14))
    assert h2o.log_likelihood == pytest.approx(0, abs=N_VOCAB * np.exp(-14))
    # Without the digit it is as unlikely as other absent tokens.
    assert max(absent.log_likelihood, window.log_likelihood) < -log(N_VOCAB)
    difference = absent.log_likelihood - full.log_likelihood
    assert absent.of_full == pytest.approx(difference, rel=1e-12)
    assert (full.of_full, full.error) == (0, 0)
    assert [row.samples for row in rows] == [2] * 8


def test_equal_bytes(model: _core.Model, tokenizer: Tokenizer) -> None:
    samples = make_samples(tokenizer, "needle", n=1, length=100)
    kept = {}
    for kv_dtype in (None, "f16"):
        rows = measure(
            model,
            {"x": samples},
            Comparison.of(
                ["h2o", "window"],
                [0.4],
                n_ctx=100,
                n_batch=8,
                kv_dtype=kv_dtype,
                equal_bytes=True,
            ),
        )
        _, _, h2o, window = rows
        assert h2o.kept < window.kept  # a window stores no scores
        kept[kv_dtype] = h2o.kept
    assert kept["f16"] < 40 < kept[None]


def test_mean_difference_and_standard_error(model: _core.Model, tokenizer: Tokenizer) -> None:
    """Compared with each sample measured separately."""
    samples = make_samples(tokenizer, "needle", n=3, length=60)
    single = []
    for sample in samples:
        rows = measure(
            model, {"x": [sample]}, Comparison.of(["window"], [0.3], n_ctx=60, n_batch=8)
        )
        full, _, window = rows
        assert np.isnan(window.error)
        single.append(window.log_likelihood - full.log_likelihood)
    *_, window = measure(
        model, {"x": samples}, Comparison.of(["window"], [0.3], n_ctx=60, n_batch=8)
    )
    assert window.of_full == pytest.approx(np.mean(single), rel=1e-9)
    variance = sum((x - np.mean(single)) ** 2 for x in single) / 2
    assert window.error == pytest.approx(np.sqrt(variance / 3), rel=1e-9)


@pytest.mark.parametrize("n_batch", [1, 7, 64])
def test_answer_logits(tiny_opt: Path, model: _core.Model, n_batch: int) -> None:
    prompt, answer = list(range(40, 60)), [100, 200, 300]
    with Generator(tiny_opt, n_ctx=64, threads=1) as generator:
        expected = generator.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    session = open_session(model, Policy.full(), n_ctx=64, n_batch=n_batch)
    np.testing.assert_array_equal(answer_logits(session, prompt, answer), expected)


def test_separate_question_is_read_after_eviction(model: _core.Model) -> None:
    prompt, answer, policy = list(range(40, 80)), [100, 200], Policy.h2o(6, 6)
    session = open_session(model, policy, n_ctx=64, n_batch=64)
    separate = answer_logits(session, prompt, answer, 5)
    session.reset(0)
    session.step([(0, np.array(prompt[:-5], np.int32))])
    expected = [session.step([(0, np.array(prompt[-5:], np.int32))])]
    expected.append(session.step([(0, np.array(answer[:1], np.int32))]))
    np.testing.assert_array_equal(separate, np.concatenate(expected))
    assert not np.array_equal(separate, answer_logits(session, prompt, answer))


@pytest.mark.parametrize(
    "task", ["needle", "kv", "recency", "needles", "variables", "common_words"]
)
def test_n_question_covers_the_question(tokenizer: Tokenizer, task: str) -> None:
    for sample in make_samples(tokenizer, task, n=5, length=LENGTH):
        question = tokenizer.decode(sample.after[-sample.n_question :])
        assert question in (" The secret number is",) or question[:5] in (" The ", "}\n\nKe")
        assert tokenizer.decode(sample.answer) not in question


def test_facts_are_scattered_in_order(tokenizer: Tokenizer) -> None:
    """The fact of a sample is the one that its question asks for."""
    for sample in make_samples(tokenizer, "needles", n=5, length=LENGTH):
        text = tokenizer.decode(sample.prompt)
        question = tokenizer.decode(sample.after[-sample.n_question :])
        assert text.count(" The secret number of the ") == 5
        assert question + tokenizer.decode(sample.answer) in tokenizer.decode(sample.fact)
    for sample in make_samples(tokenizer, "variables", n=5, length=LENGTH):
        text = tokenizer.decode(sample.prompt)
        first, second, third = (text.index(f" = {value}") for value in (
            tokenizer.decode(sample.answer).strip(), *_copied(text)
        ))  # fmt: skip
        assert first < second < third


def _copied(text: str) -> list[str]:
    """The right sides of the lines that copy a variable."""
    return [part.split(".")[0] for part in text.split(" = ")[1:] if part.startswith("VAR ")]


@pytest.mark.parametrize("task", TASKS)
def test_samples(tokenizer: Tokenizer, task: str) -> None:
    samples = make_samples(tokenizer, task, n=5, length=LENGTH, seed=3)
    assert samples == make_samples(tokenizer, task, n=5, length=LENGTH, seed=3)
    assert samples != make_samples(tokenizer, task, n=5, length=LENGTH, seed=4)
    assert len({tuple(sample.answer) for sample in samples}) == 5
    for sample in samples:
        assert sample.prompt[:1] == tokenizer.encode("")
        answer, fact = tokenizer.decode(sample.answer), tokenizer.decode(sample.fact)
        for part in answer.split() if task == "common_words" else [answer]:
            assert part in fact
            assert part not in tokenizer.decode(sample.without_fact)
        n = len(sample.prompt) + len(sample.answer)
        # At most this far below LENGTH: another kv pair or word does not fit.
        part_tokens = {"kv": 40, "common_words": 10}.get(task, 1)
        assert LENGTH - part_tokens < n <= LENGTH


def test_common_words_are_the_most_common(tokenizer: Tokenizer) -> None:
    for sample in make_samples(tokenizer, "common_words", n=5, length=1000):
        counts = Counter(tokenizer.decode(sample.fact).rstrip(".").split())
        common = tokenizer.decode(sample.answer).split()
        assert len(common) == 3
        assert {word for word, _ in counts.most_common(3)} == set(common)
        count = min(counts[word] for word in common)
        assert count > 2 * max(n for word, n in counts.items() if word not in common)
    with pytest.raises(ValueError, match="the filler has 2 words of four or more letters"):
        make_samples(tokenizer, "common_words", n=1, length=LENGTH, filler="Some words, and so on.")


def test_needle_positions(tokenizer: Tokenizer) -> None:
    depths = set()
    for sample in make_samples(tokenizer, "needle", n=20, length=LENGTH):
        assert tokenizer.decode(sample.fact).startswith(" The secret number is ")
        assert tokenizer.decode(sample.after).endswith(" The secret number is")
        assert len(sample.before) <= LENGTH / 2
        depths.add(len(sample.before))
    assert len(depths) > 10
    question = len(tokenizer.encode(" The secret number is", add_special=False, begins=False))
    for sample in make_samples(tokenizer, "recency", n=5, length=LENGTH):
        assert len(sample.after) == LENGTH // 16 + question


def test_copy_answer_is_the_fact(tokenizer: Tokenizer) -> None:
    text = "".join(f"Sentence {i} says {i * i}. " for i in range(200))
    [sample] = make_samples(tokenizer, "copy", n=1, length=LENGTH, filler=text)
    assert sample.answer == sample.fact
    assert len(sample.fact) == LENGTH // 4


def test_kv(tokenizer: Tokenizer) -> None:
    for sample in make_samples(tokenizer, "kv", n=5, length=LENGTH):
        text = tokenizer.decode(sample.prompt)
        data, question = text[text.index("{") :].split("\n\n")
        pairs = json.loads(data.replace(", }", "}"))
        assert len(pairs) > 2
        key = question.split('"')[1]
        assert pairs[key] == tokenizer.decode(sample.answer)


def test_read_samples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines = [{"context": f"A is {i}. What is A?", "answer": str(i), "more": 0} for i in (52, 63)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    [first, second] = read_samples(tokenizer, file, 9)
    assert tokenizer.decode(first.prompt) == "A is 52. What is A?"
    assert tokenizer.decode(second.answer) == tokenizer.decode(second.fact) == "63"
    assert tokenizer.decode(second.without_fact) == "A is . What is A?"
    assert len(read_samples(tokenizer, file, 1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no samples"),
        ('{"context": "A"}', ':1: expected an object with "context" and "answer"'),
        ("[1]", ":1: expected an object"),
        ("{", ":1: expected an object"),
        ('{"context": "A is 1", "answer": "2"}', ":1: the answer is not in the context"),
        ('{"context": "A is 1", "answer": ""}', ":1: the answer is not in the context"),
    ],
)
def test_bad_samples(tokenizer: Tokenizer, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_samples(tokenizer, tmp_path / "data.jsonl", 1)


def test_bad_tasks(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="task='find', expected one of copy"):
        make_samples(tokenizer, "find", n=1, length=LENGTH)
    with pytest.raises(ValueError, match="the filler has no tokens"):
        make_samples(tokenizer, "copy", n=1, length=LENGTH, filler="")
    for task in TASKS:
        with pytest.raises(ValueError, match="length=2, expected at least"):
            make_samples(tokenizer, task, n=1, length=2)


def test_bad_options(model: _core.Model) -> None:
    tasks = {"digit": [digit_sample("1", 20, 20)]}
    valid: dict[str, Any] = {"policies": ["h2o"], "budgets": [0.5], "n_ctx": 64, "n_batch": 8}
    for options, message in (
        ({"policies": ["lru"]}, "policy='lru'"),
        ({"budgets": [2.0]}, "budget=2.0"),
        ({"n_batch": 0}, "n_batch=0"),
        ({"n_ctx": 41}, "digit has a sample of 42 tokens, expected at most n_ctx=41"),
    ):
        with pytest.raises(ValueError, match=message):
            list(measure(model, tasks, Comparison.of(**(valid | options))))


def test_command(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["retrieve", str(tiny_opt), "--task", "kv,copy", "--length", "120", "--samples"]
    arguments += ["2", "--policy", "h2o", "--budget", "0.3,0.5"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["measured"]
    policies = ["full", "absent", "h2o", "h2o"]
    assert [(row["task"], row["policy"]) for row in rows] == [
        (task, policy) for task in ("kv", "copy") for policy in policies
    ]
    assert all(f"| {row['log_likelihood']:.3f} |" in out for row in rows)


def test_json_has_no_nan(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sample has no standard error; repeated policies and budgets are measured once."""
    arguments = ["retrieve", str(tiny_opt), "--task", "copy,copy", "-c", "120", "--samples", "1"]
    assert main([*arguments, "--policy", "h2o,h2o", "--hh", "0.5,0.50", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["measured"]
    assert [(row["policy"], row["error"]) for row in rows] == [
        ("full", None), ("absent", None), ("h2o", None)
    ]  # fmt: skip


def test_table_has_no_nan(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["retrieve", str(tiny_opt), "--task", "copy", "-c", "120", "--samples", "1"]
    assert main([*arguments, "--policy", "h2o", "--hh", "0.5"]) == 0
    header, _, *rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    error = header.split(" | ").index("error")
    assert [row.split(" | ")[error] for row in rows] == ["-"] * 3


@packages("matplotlib")
def test_command_with_files(tiny_opt: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The ship went by. " * 9, encoding="utf-8")
    (tmp_path / "data.jsonl").write_text('{"context": "A is 5. A is ", "answer": "5"}')
    arguments = ["retrieve", str(tiny_opt), "--task", "kv,recency", "--length", "50"]
    arguments += ["--samples", "1", "--text", str(tmp_path / "text.txt"), "--budget", "0.5"]
    arguments += ["--data", str(tmp_path / "data.jsonl"), "--plot", str(tmp_path / "o.png")]
    assert main(arguments) == 0
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
