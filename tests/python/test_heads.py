"""Retrieval heads: their ranking, and archives of some heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from h2o_cpp import Generator, Policy, _core
from h2o_cpp.cli import main
from h2o_cpp.files.stored_metadata import store_metadata
from h2o_cpp.measure.heads import RETRIEVAL_HEADS, rank_heads
from h2o_cpp.measure.retrieval.tasks import Sample
from h2o_cpp.model.session import open_session, read_tokens
from support.converted_files import make_file
from support.needs import packages
from support.random_models import N_CTX, RECIPES, make_model, random_tokens

POLICY = Policy.h2o(4, 4)


def sample_of(tokens: list[int]) -> Sample:
    """The setting: a prompt of 34 tokens with the fact at 7 to 11, and an answer of 6."""
    return Sample(tokens[:7], tokens[7:12], tokens[12:34], tokens[34:])


SAMPLES = [sample_of([int(token) for token in random_tokens(seed)]) for seed in range(3)]


@packages("torch", "transformers")
@pytest.mark.parametrize("name", ["llama", "opt", "qwen3"])
def test_shares_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Attention from the tokens that predict the answer to those of the fact, in float32."""
    import torch

    model = make_model(RECIPES[name], 1)
    path = make_file(model, tmp_path)
    core = _core.Model(path, device="cpu", threads=1)
    expected = np.zeros((core.n_layers, core.n_kv_heads))
    model.set_attn_implementation("eager")
    for sample in SAMPLES:
        n_prompt = len(sample.prompt)
        with torch.no_grad():
            all_tokens = torch.as_tensor(sample.prompt + sample.answer)[None]
            layers = model.double()(all_tokens, output_attentions=True).attentions
        received = np.array(
            [
                layer[0, :, n_prompt - 1 : -1, 7:12].sum((1, 2)).reshape(core.n_kv_heads, -1).sum(1)
                for layer in layers
            ]
        )
        expected += received / received.sum() / len(SAMPLES)
    heads = rank_heads(core, SAMPLES, n_ctx=N_CTX)
    assert [head.share for head in heads] == sorted((h.share for h in heads), reverse=True)
    actual = np.zeros_like(expected)
    for head in heads:
        actual[head.layer, head.kv_head] = head.share
    # The cache is in f16: keys, and so logits of at most a few tens, are off by 2^-11.
    np.testing.assert_allclose(actual, expected, atol=0.02)


def test_heads_with_a_window_are_not_ranked(data: Path) -> None:
    """Every second layer of Gemma 2 has one."""
    model = _core.Model(data / "golden" / "gemma2.gguf", device="cpu", threads=1)
    heads = rank_heads(model, SAMPLES, n_ctx=N_CTX)
    assert sorted((head.layer, head.kv_head) for head in heads) == [
        (layer, kv_head) for layer in range(1, model.n_layers, 2)
        for kv_head in range(model.n_kv_heads)
    ]  # fmt: skip
    assert sum(head.share for head in heads) == pytest.approx(1)


@pytest.fixture(scope="module")
def ranked(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama_gqa2_tied with 2 layers of 2 KV heads: layer 1's second, then layer 0's first."""
    path = tmp_path_factory.mktemp("ranked") / "model.gguf"
    store_metadata(llama, path, {RETRIEVAL_HEADS: [3, 0, 1, 2]})
    return path


def session_of(path: Path, **options: Any) -> _core.Session:
    model = _core.Model(path, device="cpu", threads=1)
    session = open_session(
        model, POLICY, **{"n_ctx": N_CTX, "n_batch": 8, "archive": "f16", **options}
    )
    read_tokens(session, random_tokens(0)[:30].astype(np.int32))
    return session


@pytest.mark.parametrize(("share", "n_heads"), [(0.1, 1), (0.25, 1), (0.5, 2), (0.7, 3), (1, 4)])
def test_archive_has_a_share_of_the_heads(ranked: Path, share: float, n_heads: int) -> None:
    session = session_of(ranked, archive_heads=share)
    head_dim = 12
    rows, page = (30 - 8) * 2 * 2 * head_dim, 2 * 2 * head_dim
    assert n_heads * (rows + page) <= session.archive_bytes <= n_heads * (rows + 3 * page)


def test_all_heads_are_the_default(llama: Path, ranked: Path) -> None:
    tokens = list(range(30))
    saved = [session_of(ranked, **more).save(0, tokens, "") for more in ({}, {"archive_heads": 1})]
    saved.append(session_of(llama, archive_heads=1.0).save(0, tokens, ""))
    assert saved[0] == saved[1] == saved[2]


def test_snapshot_of_some_heads(ranked: Path) -> None:
    one, other = (session_of(ranked, archive_heads=0.5) for _ in range(2))
    data = one.save(0, list(range(30)), "")
    other.reset(0)
    other.load(0, data)
    assert other.archive_bytes == one.archive_bytes > 0
    for token in range(5):
        following = [(0, np.array([token], np.int32))]
        np.testing.assert_array_equal(one.step(following), other.step(following))
    all_heads = session_of(ranked).save(0, list(range(30)), "")
    session_of(ranked, archive_heads=0.99).load(0, all_heads)
    for share in (0.25, 1):
        with pytest.raises(ValueError, match=r"an archive of other.* heads"):
            session_of(ranked, archive_heads=share).load(0, data)
    with pytest.raises(ValueError, match="an archive of other heads"):
        other.load(0, all_heads)


def test_generator(ranked: Path, llama: Path) -> None:
    tokens, options = list(range(20)), dict[str, Any](hh=8, archive="f16", n_ctx=N_CTX)
    with Generator(ranked, **options, archive_heads=0.5) as generator:
        generator.generate(tokens, max_tokens=15, seed=1)
        half = generator.stats().archive_bytes
    with Generator(ranked, **options) as generator:
        generator.generate(tokens, max_tokens=15, seed=1)
        assert generator.stats().archive_bytes > 1.5 * half > 0
    invalid: list[tuple[Path, dict[str, Any], str]] = [
        (llama, {"archive_heads": 0.5}, "h2o-cpp heads MODEL --write"),
        (ranked, {"archive_heads": 0}, "archive_heads=0, expected a share above 0 and up to 1"),
        (ranked, {"archive_heads": 1.5}, r"archive_heads=1\.5, expected a share"),
        (ranked, {"archive_heads": "most"}, "archive_heads='most', expected a number"),
        (ranked, {"archive": None, "archive_heads": 0.5}, "archive_heads=0.5 needs archive"),
    ]
    for path, more, message in invalid:
        with pytest.raises(ValueError, match=message):
            Generator(path, **(options | more))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([4], "has head 4, which does not exist"),
        ([-1], "has head -1, which does not exist"),
        ([1, 1], "has head 1 twice"),
        ([], "is empty"),
        ("1", "h2o.retrieval_heads"),
    ],
)
def test_invalid_ranking_matters_only_if_it_is_used(
    llama: Path, tmp_path: Path, heads: Any, message: str
) -> None:
    path = tmp_path / "model.gguf"
    store_metadata(llama, path, {RETRIEVAL_HEADS: heads})
    with Generator(path, hh=8, archive="f16", n_ctx=N_CTX) as generator:
        assert len(generator.logits([1, 2])) == 2
    with pytest.raises(ValueError, match=message):
        Generator(path, hh=8, archive="f16", archive_heads=0.5)


def test_ranked_head_with_a_window_is_rejected(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    store_metadata(data / "golden" / "gemma2.gguf", path, {RETRIEVAL_HEADS: [2, 0]})
    with pytest.raises(ValueError, match="has head 0, whose layer has a window"):
        Generator(path, hh=8, archive="f16", archive_heads=0.5)


def test_states_of_other_heads_are_apart(ranked: Path, tmp_path: Path) -> None:
    """In a prefix cache on disk, each is found again."""
    options: dict[str, Any] = {
        "hh": 8, "archive": "f16", "n_ctx": N_CTX, "n_batch": 8, "prefix_cache": "1MiB",
        "prefix_cache_disk": tmp_path,
    }  # fmt: skip
    prompt = [int(token) for token in random_tokens(0)[:36]]
    for cached in (False, True):
        for share in (0.5, 0.25, None):
            with Generator(ranked, **options, archive_heads=share) as generator:
                found = generator.generate(prompt, max_tokens=2, seed=1)
                assert (found.cached_tokens > 0) == cached


class TestCommand:
    OPTIONS = ("-c", "200", "--samples", "1", "-t", "1")

    def test_stores_the_ranking(
        self, tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "model.gguf"
        assert main(["heads", str(tiny_opt), *self.OPTIONS, "--json", "-o", str(output)]) == 0
        out, err = capsys.readouterr()
        shown = json.loads(out)
        assert err.endswith(f"wrote {output}, for --archive-heads\n")
        n_heads = len(shown)
        model = _core.Model(output, device="cpu", threads=1)
        assert n_heads == model.n_layers * model.n_kv_heads
        stored = GGUFReader(output).fields[RETRIEVAL_HEADS].contents()
        assert stored == [one["layer"] * model.n_kv_heads + one["kv_head"] for one in shown]
        assert main(["heads", str(output), *self.OPTIONS, "--write"]) == 0
        table = capsys.readouterr().out
        assert f"| 1 | {shown[0]['layer']} | {shown[0]['kv_head']} | " in table
        assert (
            f"of {n_heads} heads, by their share of the attention to the facts of 3 prompts"
            in table
        )
        assert GGUFReader(output).fields[RETRIEVAL_HEADS].contents() == stored

        options = ["-c", "200", "--hh", "20", "--archive", "q8_0", "--archive-heads", "0.5"]
        assert main(["run", "The", "-m", str(output), "-n", "40", *options]) == 0
        measured = ["-c", "200", "--samples", "1", "--tasks", "needle", "--hh", "0.1", "--archive"]
        assert main(["retrieve", str(output), *measured, "q8_0", "--archive-heads", "0.5"]) == 0

    def test_errors(
        self, tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "model.gguf"
        output.write_bytes(b"")
        for options, message in (
            (["-o", str(output)], "already exists"),
            (["--samples", "0"], "--samples 0, expected an integer, 1 or more"),
            (["-c", "30"], "--n-ctx 30, expected at least"),
        ):
            status = 2 if message.startswith("-") else 1
            assert main(["heads", str(tiny_opt), *self.OPTIONS, *options]) == status
            assert message in capsys.readouterr().err
        with pytest.raises(SystemExit, match="2"):
            main(["heads", str(tiny_opt), "-o", str(output), "--write"])
        assert "not allowed with argument" in capsys.readouterr().err
        assert output.read_bytes() == b""
