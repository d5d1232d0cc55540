"""Budget advice: the bisection, storing it in the model file, and hh="auto"."""

from __future__ import annotations

import json
import re
import shutil
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from h2o_cpp import Advice, Generator, Policy, _core, advise, capacity
from h2o_cpp.budget.policy import named_policy, protected_policy
from h2o_cpp.budget.stored_budget import store_budget
from h2o_cpp.cli import main
from h2o_cpp.measure.advice import Needle
from h2o_cpp.measure.budgets import Comparison
from h2o_cpp.measure.perplexity import perplexity
from h2o_cpp.measure.retrieval.measurement import measure
from h2o_cpp.measure.retrieval.tasks import make_samples
from h2o_cpp.model.session import open_session
from h2o_cpp.model.tokenizer import Tokenizer
from support.needs import packages
from support.short_text import TEXT

N_CTX = 110
LOSS = 0.05
STORED: dict[str, Any] = {"hh": 0.29, "policy": "mean", "n_ctx": 512, "loss": 0.0078125}
STORED["kv_dtype"] = "q8_0"


@pytest.fixture(scope="module")
def text() -> str:
    return f"{TEXT} {TEXT.replace('sea', 'town').replace('son', 'wife')} " * 3


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Policy]:
    """The policies of the sessions that a search has opened."""
    found: list[Policy] = []

    def recording_open_session(model: _core.Model, policy: Policy, **options: Any) -> _core.Session:
        found.append(policy)
        return open_session(model, policy, **options)

    monkeypatch.setattr("h2o_cpp.measure.budget_search.open_session", recording_open_session)
    return found


@pytest.fixture(scope="module")
def advice(tiny_opt: Path, text: str) -> Advice:
    return advise(tiny_opt, text, loss=LOSS, n_ctx=N_CTX, text_tokens=N_CTX, threads=1)


def test_advice_is_smallest_cache_within_loss(advice: Advice) -> None:
    """The loss is within the limit, at one percent less budget it is not; no other is smaller."""
    full = advice.curve[0]
    assert (full.policy, full.perplexity) == ("full", advice.full_perplexity)
    most = full.perplexity * (1 + LOSS)
    searched = {(point.policy, point.kv_dtype) for point in advice.curve[1:]}
    assert {policy for policy, kv_dtype in searched if kv_dtype == "f16"} == {
        "h2o", "mean", "contribution"
    }  # fmt: skip
    assert [policy for policy, kv_dtype in searched if kv_dtype == "q8_0"] == [advice.policy]
    for search in searched:
        points = {
            round(100 * point.budget): point.perplexity
            for point in advice.curve[1:]
            if (point.policy, point.kv_dtype) == search
        }
        edge = min(percent for percent, value in points.items() if value <= most)
        assert points.get(edge - 1, inf) > most
        assert 1 < edge < 100  # not trivial
        assert len(points) <= 1 + 9
        if search == (advice.policy, advice.kv_dtype):
            assert round(100 * advice.hh) == edge
    enough = [point.cache_bytes for point in advice.curve[1:] if point.perplexity <= most]
    assert advice.cache_bytes == min(enough)
    assert advice.kv_dtype == "q8_0"  # nearly half of the bytes at hardly any loss


def test_needle_matches_retrieve(advice: Advice, tiny_opt: Path) -> None:
    """The needle's log-likelihoods equal those that `retrieve` measures with the advised cache."""
    model = _core.Model(tiny_opt, device="cpu", threads=1)
    samples = make_samples(Tokenizer.of_model(model), "needle", n=4, length=N_CTX)
    full, absent, found = measure(
        model,
        {"needle": samples},
        Comparison.of(
            [advice.policy], [advice.hh], n_ctx=N_CTX, n_batch=32, kv_dtype=advice.kv_dtype
        ),
        question_apart=True,
    )
    assert advice.needle.found == pytest.approx(found.log_likelihood, rel=1e-12)
    assert advice.needle.absent == pytest.approx(absent.log_likelihood, rel=1e-12)
    assert advice.needle.full == pytest.approx(full.log_likelihood, rel=1e-12)
    assert Needle(-2, -1, -3).share == 0.5
    assert Needle(-2, -2.6, -3).share is None


def test_advice_with_archive(advice: Advice, tiny_opt: Path, text: str) -> None:
    """The smallest budget of the same policy and types with an archive, and its measurements."""
    pages = 2
    found = advise(
        tiny_opt, text, loss=LOSS, n_ctx=N_CTX, text_tokens=N_CTX, policies=[advice.policy],
        kv_dtypes=["q8_0"], threads=1, archive="q8_0", archive_pages=pages,
    )  # fmt: skip
    archived = found.archived
    assert archived is not None
    assert (found.hh, found.kv_dtype) == (advice.hh, "q8_0")  # the archive does not change it
    assert (archived.archive, archived.archive_pages) == ("q8_0", pages)
    points = {
        round(100 * point.budget): point for point in found.curve if point.archive is not None
    }
    most = found.full_perplexity * (1 + LOSS)
    edge = min(percent for percent, point in points.items() if point.perplexity <= most)
    assert round(100 * archived.hh) == edge < round(100 * advice.hh)
    assert points[edge - 1].perplexity > most
    assert points[edge].cache_bytes == archived.cache_bytes < advice.cache_bytes

    with Generator(tiny_opt, threads=1) as generator:
        first, *tokens = generator.tokenize(text)
    model = _core.Model(tiny_opt, device="cpu", threads=1)
    session = open_session(
        model, named_policy(advice.policy, archived.kept), n_ctx=N_CTX, n_batch=1,
        kv_dtype="q8_0", archive="q8_0", archive_pages=pages,
    )  # fmt: skip
    value, _ = perplexity(session, tokens[:N_CTX], beginning=[first])
    assert archived.perplexity == pytest.approx(value, rel=1e-12)
    assert archived.loss == pytest.approx(value / found.full_perplexity - 1)
    assert archived.cache_bytes == session.cache_bytes
    # K and V of the N_CTX - kept evicted tokens in q8_0, and the bounds of their pages.
    heads, row = model.n_layers * model.n_kv_heads, model.head_dim * 34 // 32
    bounds = 2 * model.head_dim * 2
    least = heads * (N_CTX - archived.kept) * 2 * row
    assert least < archived.archive_bytes <= least + heads * (N_CTX // 16 + 1) * bounds

    samples = make_samples(Tokenizer.of_model(model), "needle", n=4, length=N_CTX)
    *_, needle = measure(
        model,
        {"needle": samples},
        Comparison.of(
            [advice.policy],
            [archived.hh],
            n_ctx=N_CTX,
            n_batch=32,
            kv_dtype="q8_0",
            archive="q8_0",
            archive_pages=pages,
        ),
        question_apart=True,
    )
    assert archived.needle.found == pytest.approx(needle.log_likelihood, rel=1e-12)
    assert archived.tokens_per_second > 0


def test_advice_equals_measurements_of_advised_cache(
    advice: Advice, model: _core.Model, text: str, tiny_opt: Path
) -> None:
    with Generator(
        tiny_opt, n_ctx=N_CTX, hh=advice.hh, policy=advice.policy, kv_dtype=advice.kv_dtype
    ) as generator:
        stats = generator.stats()
        first, *tokens = generator.tokenize(text)
        assert generator.policy == named_policy(advice.policy, advice.kept)
    assert advice.cache_bytes == stats.cache_bytes
    for policy, kv_dtype, found, expected_bytes in (
        (named_policy(advice.policy, advice.kept), advice.kv_dtype, advice.perplexity,
         advice.cache_bytes),
        (Policy.full(), "f16", advice.full_perplexity, advice.full_cache_bytes),
    ):  # fmt: skip
        session = open_session(model, policy, n_ctx=N_CTX, n_batch=1, kv_dtype=kv_dtype)
        value, n = perplexity(session, tokens[:N_CTX], beginning=[first])
        assert session.cache_bytes == expected_bytes
        assert value == pytest.approx(found, rel=1e-12)
        assert n == advice.tokens
    assert advice.loss == pytest.approx(advice.perplexity / advice.full_perplexity - 1)
    assert advice.loss <= LOSS
    assert advice.tokens_per_second > 0
    assert advice.full_tokens_per_second > 0


@pytest.mark.parametrize("edge", [1, 2, 10, 37, 99, 100])
def test_bisection_finds_edge(
    tiny_opt: Path,
    tmp_path: Path,
    text: str,
    edge: int,
    opened: list[Policy],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At most nine measurements find the edge; at 100 % the advice is the full cache."""

    def step_perplexity(*_: Any, **__: Any) -> tuple[float, int]:
        budget = opened[-1].budget  # n_ctx is 200
        return (10.0, 7) if budget is None or budget >= 2 * edge else (10.2, 7)

    monkeypatch.setattr("h2o_cpp.measure.quality.perplexity", step_perplexity)
    monkeypatch.setattr("h2o_cpp.measure.advice._NEEDLES", 1)
    (tmp_path / "text").write_text(text)
    arguments = ["advise", str(tiny_opt), str(tmp_path / "text"), "-c", "200", "--policy", "sinks"]
    arguments += ["--kv-dtypes", "f16"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["hh"], document["kept"]) == (edge / 100, 2 * edge)
    assert document["loss"] == 0
    assert (document["cache_bytes"] == document["full_cache_bytes"]) == (edge == 100)
    assert len(document["curve"]) <= 1 + 1 + 9
    assert main(arguments) == 0
    assert ("advice: the full cache" in capsys.readouterr().out) == (edge == 100)


def test_command_writes_advice_that_auto_reads(
    tiny_opt: Path, tmp_path: Path, text: str, advice: Advice, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.gguf"
    shutil.copyfile(tiny_opt, model)
    (tmp_path / "text").write_text(text)
    options = ["--loss", str(LOSS), "-c", str(N_CTX), "--max-tokens", str(N_CTX), "--write"]
    assert main(["advise", str(model), str(tmp_path / "text"), *options]) == 0
    out, err = capsys.readouterr()
    assert f"advice: --hh {advice.hh:g} --policy {advice.policy} --kv-dtype q8_0" in out
    assert "  needle " in out
    assert "measured here" in out
    assert "with an archive" not in out
    *answers, last = err.splitlines()
    assert last == f"wrote {model}, for --hh auto"
    assert answers  # the first comes before the whole text has been read
    for answer in answers:
        assert re.fullmatch(r"so far: --hh \S+ --policy .*; the last answer takes .*", answer)
    with Generator(model, hh="auto", n_ctx=200, threads=1) as generator:
        assert generator.policy == named_policy(advice.policy, int(advice.hh * 200))
        in_q8_0 = generator.stats().cache_bytes
    with Generator(model, hh="auto", n_ctx=200, threads=1, kv_dtype="f16") as generator:
        assert generator.stats().cache_bytes > 1.5 * in_q8_0
    expected = capacity(model, "1GiB", hh=advice.hh, policy=advice.policy, kv_dtype="q8_0")
    assert capacity(model, "1GiB", hh="auto") == expected
    assert main(["run", "The", "-m", str(model), "--hh", "auto", "-n", "1"]) == 0
    assert main(["inspect", "The", "-m", str(model), "--hh", "auto", "-c", "400"]) == 0


def test_command_with_archive(
    tiny_opt: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(text)
    options = ["--loss", str(LOSS), "-c", str(N_CTX), "--max-tokens", str(N_CTX)]
    options += ["--policy", "mean", "--kv-dtypes", "q8_0", "--archive", "q8_0,q4_0"]
    options += ["--archive-pages", "1000", "--output", str(tmp_path / "model.gguf")]
    assert main(["advise", str(tiny_opt), str(tmp_path / "text"), *options]) == 0
    out = capsys.readouterr().out
    assert "| mean | q8_0, archive q8_0,q4_0 | " in out
    without, within = out.split("with an archive: ")
    assert "--archive" not in without
    assert " --policy mean --kv-dtype q8_0 --archive q8_0,q4_0 --archive-pages 1000\n" in within
    assert "MiB, archive " in within
    assert "  needle " in within
    hh = within.split()[1]
    given: dict[str, Any] = {"policy": "mean", "kv_dtype": "q8_0", "n_ctx": 200, "threads": 1}
    given |= {"archive": ("q8_0", "q4_0"), "archive_pages": 1000}
    states = []
    for stored in ({"hh": "auto", "n_ctx": 200, "threads": 1}, {"hh": float(hh), **given}):
        with Generator(tmp_path / "model.gguf", **stored) as generator:
            generator.read(text[:400])
            states.append(generator.stats())
    assert states[0].cache_bytes == states[1].cache_bytes
    assert states[0].archive_bytes == states[1].archive_bytes > 0
    assert main(["info", str(tmp_path / "model.gguf")]) == 0
    assert " in q8_0, archive in q8_0,q4_0, 1000 pages, which costs" in capsys.readouterr().out
    with Generator(tmp_path / "model.gguf", hh=0.5, n_ctx=200, threads=1) as generator:
        generator.read(text[:400])
        assert generator.stats().archive_bytes == 0
    store_budget(tmp_path / "model.gguf", **STORED)  # without an archive
    with Generator(tmp_path / "model.gguf", hh="auto", n_ctx=200, threads=1) as generator:
        generator.read(text[:400])
        assert generator.stats().archive_bytes == 0


def test_questions_are_measured_by_their_answers(
    tiny_opt: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each answer follows its question; its perplexity is computed from the model's logits."""
    questions = [(text[:400], " The old man"), (text[200:700], " went down to the sea")]
    found = advise(tiny_opt, questions, loss=LOSS, policies=["h2o"], kv_dtypes=["f16"], threads=1)
    losses = []
    with Generator(tiny_opt, threads=1) as generator:
        longest = max(len(generator.tokenize(q + a)) for q, a in questions)
        for question, answer in questions:
            prompt, whole = generator.tokenize(question), generator.tokenize(question + answer)
            assert whole[: len(prompt)] == prompt
            logits = generator.logits(whole).astype(np.float64)
            for i in range(len(prompt), len(whole)):
                row = logits[i - 1] - logits[i - 1].max()
                losses.append(np.log(np.exp(row).sum()) - row[whole[i]])
    assert found.full_perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)
    assert (found.tokens, found.n_ctx) == (len(losses), longest)

    lines = [json.dumps({"question": q, "answer": a}) for q, a in questions]
    (tmp_path / "asked.jsonl").write_text("\n".join([*lines, ""]))
    options = ["--loss", str(LOSS), "--policy", "h2o", "--kv-dtypes", "f16", "--json"]
    assert main(["advise", str(tiny_opt), str(tmp_path / "asked.jsonl"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["hh"] == found.hh
    (tmp_path / "asked.jsonl").write_text('{"question": "Who?"}')
    assert main(["advise", str(tiny_opt), str(tmp_path / "asked.jsonl")]) == 1
    assert "asked.jsonl: line 1 is not {" in capsys.readouterr().err


@pytest.mark.parametrize("least", [40, 80])
def test_beginning_of_all_questions_is_protected(
    tiny_opt: Path,
    tmp_path: Path,
    text: str,
    least: int,
    opened: list[Policy],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The advice names it where its protection makes a smaller cache acceptable."""

    def step_quality(*_: Any) -> tuple[float, int]:
        budget, is_protected = opened[-1].budget, opened[-1].n_sinks > 0  # n_ctx is 200
        return (10.0 if (budget or 200) >= (least if is_protected else 60) else 10.2, 7)

    monkeypatch.setattr("h2o_cpp.measure.quality.AnswerQuality.quality", step_quality)
    monkeypatch.setattr("h2o_cpp.measure.advice._NEEDLES", 1)
    instruction = "Answer in one word."
    questions = [f"{instruction} {word} {text[:200]}" for word in ("Old", "Young", "Rich")]
    with Generator(tiny_opt, threads=1) as generator:
        n = len(generator.tokenize(instruction))
    assert 1 < n < 30
    lines = [json.dumps({"question": question, "answer": " The"}) for question in questions]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    arguments = ["advise", str(tiny_opt), str(tmp_path / "asked.jsonl"), "-c", "200"]
    arguments += ["--policy", "h2o", "--kv-dtypes", "f16"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hh"], found["kept"]) == (0.3, 60)
    protected = {policy for policy in opened if policy.n_sinks > 0}
    for policy in protected:
        assert policy.budget is not None
        rest = policy.budget - n
        assert policy == Policy.h2o(rest // 2, rest - rest // 2, sinks=n)
        assert rest > 0
    assert len(protected) == sum(trial["protect"] == n for trial in found["curve"]) > 1
    assert main(arguments) == 0
    out = capsys.readouterr().out
    if least == 40:
        assert (found["protected"]["protect"], found["protected"]["kept"]) == (n, 40)
        assert found["protected"]["cache_bytes"] < found["cache_bytes"]
        assert f"| h2o, protect {n} | f16 | 0.2 | 40 |" in out
        assert f" protected: --hh 0.2 --policy h2o --protect {n}\n  perplexity  10.000" in out
    else:
        assert found["protected"] is None
        assert "beginning protected" not in out

    (tmp_path / "asked.jsonl").write_text("\n".join([lines[0]] * 2))  # nothing but a beginning
    assert main(arguments) == 0
    assert "protect" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected fewer than the 9 of"):
        protected_policy(Policy.window(9), 9)


def test_interrupt_keeps_the_best_answer(
    tiny_opt: Path,
    tmp_path: Path,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C while the whole text is read, and before there is an answer."""
    (tmp_path / "text").write_text(text)
    arguments = ["advise", str(tiny_opt), str(tmp_path / "text"), "-c", "200", "--policy", "mean"]
    batches: list[int] = []

    def interrupted(session: _core.Session, *_: Any, **__: Any) -> tuple[float, int]:
        batches.append(session.n_batch)
        if session.n_batch == last:
            raise KeyboardInterrupt
        return 10.0 + session.cache_bytes / 2**40, 7

    monkeypatch.setattr("h2o_cpp.measure.quality.perplexity", interrupted)
    last = 1
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "advice: --hh 0.01 --policy mean" in out
    assert "interrupted: this is the best answer so far" in err
    assert batches.count(1) == 1
    last = 32
    assert main(arguments) == 130
    assert "advice" not in capsys.readouterr().out


@packages("matplotlib")
def test_plot_shows_perplexity_by_bytes(tiny_opt: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "text").write_text(text)
    arguments = ["advise", str(tiny_opt), str(tmp_path / "text"), "-c", "110", "--policy", "mean"]
    arguments += ["--max-tokens", "110"]
    assert main([*arguments, "--plot", str(tmp_path / "plot.svg")]) == 0
    assert "mean q8_0" in (tmp_path / "plot.svg").read_text()


def test_auto_of_commands_that_measure_has_the_stored_types(
    tiny_opt: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tmp_path / "model.gguf"
    store_budget(tiny_opt, model, **STORED)
    bench = ["bench", str(model), "-p", "8", "-d", "4", "-n", "2", "-r", "1", "--hh", "auto"]
    bench += ["-c", "16"]
    for options, expected in (([], "q8_0"), (["--kv-dtype", "f32"], "f32")):
        assert main([*bench, *options, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["kv_dtype"] == expected

    store_budget(tiny_opt, model, **STORED, archive="f16", archive_pages=2)
    assert main([*bench, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["archive"] == "f16"
    assert measured["archive_bytes"] > 0
    assert main(bench) == 0
    assert ", archive " in capsys.readouterr().out

    def inspect(*_: object, kv_dtype: str, **options: object) -> None:
        raise ValueError(f"the cache is in {kv_dtype}")

    monkeypatch.setattr("h2o_cpp.cli.inspect.inspect", inspect)
    assert main(["inspect", "The", "-m", str(model), "--hh", "auto"]) == 1
    assert capsys.readouterr().err == "error: the cache is in q8_0\n"


@pytest.mark.parametrize("alignment", [32, 256])
def test_store_budget_changes_nothing_else_in_file(tmp_path: Path, alignment: int) -> None:
    """Compared with gguf-py; storing again replaces the advice."""
    source, output = tmp_path / "model.gguf", tmp_path / "advised.gguf"
    writer = GGUFWriter(source, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.ggml.tokens", ["a", "\u00e9", "\n"])
    writer.add_float64("h2o.hh", 0.5)
    random = np.random.default_rng(0)
    for i, shape in enumerate([(3,), (2, 5), (2, 3, 7)]):
        writer.add_tensor(f"t{i}", random.random(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def contents(path: Path) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        fields = {name: value for name, value in fields.items() if not name.startswith("GGUF.")}
        return fields, [
            (t.name, t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in reader.tensors
        ]

    store_budget(source, output, **STORED)
    metadata, tensors = contents(source)
    advised = metadata | {f"h2o.{key}": value for key, value in STORED.items()}
    assert contents(output) == (advised, tensors)
    store_budget(output, **(STORED | {"hh": 0.5}))
    assert contents(output) == (advised | {"h2o.hh": 0.5}, tensors)
    assert _core.GgufFile(output).metadata()["h2o.policy"] == "mean"


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"hh": 1.5}, "h2o.hh is 1.5"),
        ({"hh": float("nan")}, "h2o.hh is nan"),
        ({"policy": "best"}, "h2o.policy is 'best'"),
        ({"kv_dtype": "f16,f16,f16"}, "h2o.kv_dtype is 'f16,f16,f16'"),
        ({"kv_dtype": "q9"}, "q9"),
    ],
)
def test_invalid_stored_budget_is_rejected(
    tiny_opt: Path, tmp_path: Path, stored: dict[str, Any], message: str
) -> None:
    store_budget(tiny_opt, tmp_path / "model.gguf", **(STORED | stored))
    with pytest.raises(ValueError, match=message):
        Generator(tmp_path / "model.gguf", hh="auto")


def test_auto_without_stored_advice_is_rejected(tiny_opt: Path) -> None:
    with pytest.raises(ValueError, match=r"h2o-cpp advise .*tiny-opt.gguf TEXT --write"):
        Generator(tiny_opt, hh="auto")
    with pytest.raises(ValueError, match="includes a policy"):
        Generator(tiny_opt, hh="auto", policy="window")
    with pytest.raises(ValueError, match="expected hh as a number with recent="):
        Generator(tiny_opt, hh="auto", recent=3)
    with pytest.raises(ValueError, match="hh='most'"):
        Generator(tiny_opt, hh="most")  # type: ignore[arg-type]


def test_command_checks_the_output_first(
    tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is too short to be measured."""
    (tmp_path / "text").write_text("The")
    (tmp_path / "link.gguf").symlink_to(tiny_opt)
    for model, options, message in (
        (tiny_opt, ["-o", str(tmp_path / "none" / "out.gguf")], "none: no such directory"),
        (tiny_opt, ["-o", str(tmp_path / "text")], "text: the file already exists (--force"),
        (tmp_path / "link.gguf", ["--write"], "link.gguf: a symbolic link"),
    ):
        assert main(["advise", str(model), str(tmp_path / "text"), *options]) == 1
        assert message in capsys.readouterr().err


def test_context_0_is_the_trained_length(tiny_opt: Path, text: str) -> None:
    """By default, a window is as long as this text."""
    with pytest.raises(ValueError, match="expected at least 2047 for n_ctx=2048"):
        advise(tiny_opt, text, n_ctx=0)


def test_store_budget_rejects_symlink_and_missing_file(tiny_opt: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(tiny_opt)
    with pytest.raises(ValueError, match="a symbolic link"):
        store_budget(tmp_path / "link.gguf", **STORED)
    with pytest.raises(FileNotFoundError):
        store_budget(tmp_path / "none.gguf", **STORED)
    assert [path.name for path in tmp_path.iterdir()] == ["link.gguf"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "Too short."}, "expected at least 100"),
        ({"loss": -0.1}, "loss"),
        ({"loss": 1}, "loss"),
        ({"policies": ["best"]}, "best"),
        ({"policies": []}, "policies"),
        ({"kv_dtypes": []}, "kv_dtypes"),
        ({"kv_dtypes": ["q9"]}, "q9"),
        ({"n_ctx": 50}, "n_ctx"),
        ({"archive": "q9"}, "archive"),
        ({"archive": "q8_0", "archive_pages": 0}, "archive_pages"),
        ({"n_ctx": 200, "text_tokens": 100}, "text_tokens"),
    ],
)
def test_invalid_arguments_are_rejected(
    tiny_opt: Path, text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        advise(tiny_opt, **({"text": text} | options))


@pytest.mark.parametrize("name", ["policies", "kv_dtypes"])
def test_names_must_be_a_list(tiny_opt: Path, text: str, name: str) -> None:
    options: dict[str, Any] = {name: "h2o"}
    with pytest.raises(TypeError, match=f"{name}='h2o', expected a list of names"):
        advise(tiny_opt, text, **options)
