"""The archive recalls evicted tokens and changes nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_cpp import Chat, Generator, Policy, _core
from h2o_cpp.cli import main
from h2o_cpp.convert import convert
from h2o_cpp.model.session import open_session, read_tokens
from support.needs import LINUX, packages
from support.random_models import RECIPES, make_model, save_checkpoint

N_CTX = 40  # of the golden models
ALL = 1000  # more pages than there are
POLICY = Policy.h2o(4, 4)  # 8 tokens


def session_of(model: _core.Model, policy: Policy, **options: Any) -> _core.Session:
    return open_session(model, policy, **{"n_ctx": N_CTX, "n_batch": 8, **options})


def logits(session: _core.Session, tokens: list[int]) -> NDArray[np.float32]:
    """The logits after the last token."""
    return read_tokens(session, np.array(tokens, np.int32))


TOKENS = [(7 * i * i + 3 * i) % 61 for i in range(N_CTX)]


def test_recalling_all_pages_equals_full_cache(llama_model: _core.Model) -> None:
    """In f32, up to the order of sums; without the archive the logits differ."""
    full = logits(session_of(llama_model, Policy.full(), kv_dtype="f32"), TOKENS)
    archived = session_of(llama_model, POLICY, kv_dtype="f32", archive="f32", archive_pages=ALL)
    evicted = session_of(llama_model, POLICY, kv_dtype="f32", positions="original")
    np.testing.assert_allclose(logits(archived, TOKENS), full, atol=1e-4)
    assert np.abs(logits(evicted, TOKENS) - full).max() > 0.01


def test_archive_bytes(llama_model: _core.Model) -> None:
    """K and V of the evicted tokens, and 2 x head_dim 16-bit numbers per page of 16 tokens."""
    session = session_of(llama_model, POLICY, archive="f16")
    logits(session, TOKENS[:8])
    assert session.archive_bytes == 0
    logits(session, TOKENS[8:])
    heads = llama_model.n_layers * llama_model.n_kv_heads
    rows = heads * (N_CTX - 8) * 2 * 2 * llama_model.head_dim
    page = heads * 2 * 2 * llama_model.head_dim
    assert rows + page <= session.archive_bytes <= rows + 3 * page
    session.reset(0)
    assert session.archive_bytes == 0


class TestArchiveDir:
    def test_files_equal_memory(self, llama_model: _core.Model, tmp_path: Path) -> None:
        """Bit for bit; the files are unlinked, so that none is left behind."""
        memory, files = (
            session_of(llama_model, POLICY, archive="f16", archive_pages=1, archive_dir=directory)
            for directory in (None, tmp_path)
        )
        for _ in range(2):
            np.testing.assert_array_equal(logits(memory, TOKENS), logits(files, TOKENS))
            assert files.archive_bytes == memory.archive_bytes > 0
            files.reset(0)
            memory.reset(0)
        assert list(tmp_path.iterdir()) == []

    def test_snapshots_of_files_and_memory_are_alike(self, tiny_opt: Path, tmp_path: Path) -> None:
        options: dict[str, Any] = {"hh": 16, "archive": "q8_0", "n_ctx": 400, "threads": 1}
        more: dict[str, Any] = {"max_tokens": 20, "seed": 1, "ignore_eos": True}
        prompt = "The old man and the sea " * 5
        texts = []
        for directory in (tmp_path, None):
            with Generator(tiny_opt, archive_dir=directory, **options) as source:
                source.read(prompt).save(tmp_path / "snapshot")
                texts.append(source.generate("Who?", after=source.read(prompt), **more).text)
            for other in (tmp_path, None):
                with Generator(tiny_opt, archive_dir=other, **options) as generator:
                    after = generator.load(tmp_path / "snapshot")
                    texts.append(generator.generate("Who?", after=after, **more).text)
        assert len(texts) == 6
        assert len(set(texts)) == 1

    @LINUX  # reads /proc
    def test_files_are_in_archive_dir(self, llama: Path, tmp_path: Path) -> None:
        def mapped() -> bool:
            return f"{tmp_path}/h2o-scratch" in Path("/proc/self/maps").read_text()

        options: dict[str, Any] = {"hh": 8, "archive": "f16", "n_ctx": N_CTX}
        with Generator(llama, archive_dir=tmp_path, **options) as generator:
            assert mapped()
            text = generator.generate(TOKENS[:20], max_tokens=20, seed=1).text
            assert generator.stats().archive_bytes > 0
        assert not mapped()
        with Generator(llama, **options) as generator:
            assert generator.generate(TOKENS[:20], max_tokens=20, seed=1).text == text

    def test_requests_wait_if_no_more_files_can_be_made(self, llama: Path, tmp_path: Path) -> None:
        """The caches of more sequences are allocated when they are needed."""
        directory = tmp_path / "archive"
        directory.mkdir()
        options: dict[str, Any] = {"hh": 8, "archive": "f16", "n_ctx": N_CTX, "threads": 1}
        prompts = [TOKENS[:20], TOKENS[20:40]]
        more: dict[str, Any] = {"max_tokens": 20, "seed": 1}
        with Generator(llama, archive_dir=directory, **options) as generator:
            directory.rmdir()  # the file of the first sequence is open, and has no name
            found = generator.generate(prompts, **more)
            assert generator.stats().n_sequences == 1
        with Generator(llama, **options) as generator:
            expected = [generator.generate(prompt, **more) for prompt in prompts]
        assert [one.text for one in found] == [one.text for one in expected]

    def test_invalid_archive_dir_is_rejected(self, llama: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="archive_dir='x' needs archive"):
            Generator(llama, hh=8, archive_dir="x")
        with pytest.raises(ValueError, match="archive_dir is empty"):
            Generator(llama, hh=8, archive="f16", archive_dir="")
        with pytest.raises(FileNotFoundError, match="nowhere"):
            Generator(llama, hh=8, archive="f16", archive_dir=tmp_path / "nowhere")

    @LINUX  # RLIMIT_FSIZE
    def test_file_size_limit_is_memory_error(self, llama: Path, tmp_path: Path) -> None:
        program = f"""
import resource
from h2o_cpp import Generator
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    Generator({str(llama)!r}, hh=8, archive="f16", archive_dir={str(tmp_path)!r})
except MemoryError as error:
    print(error)
"""
        stdout = subprocess.check_output([sys.executable, "-c", program], text=True)
        assert f"bytes in {tmp_path}: File too large" in stdout
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("archive", ["f32", "f16", ("bf16", "f16")])
def test_snapshot_with_archive_continues_identically(
    llama_model: _core.Model, archive: Any
) -> None:
    one, other = (
        session_of(llama_model, POLICY, archive=archive, archive_pages=1) for _ in range(2)
    )
    logits(one, TOKENS[:25])
    logits(other, TOKENS[:33][::-1])
    data = one.save(0, TOKENS[:25], "")
    other.load(0, data)
    assert other.save(0, TOKENS[:25], "") == data
    assert other.archive_bytes == one.archive_bytes
    for token in TOKENS[25:]:
        np.testing.assert_array_equal(logits(one, [token]), logits(other, [token]))


def test_default_archive_pages(llama_model: _core.Model) -> None:
    """16 in a short context: the snapshot loads into a session with 16 pages."""
    default, fixed = (
        session_of(llama_model, POLICY, archive="f16", **pages)
        for pages in ({}, {"archive_pages": 16})
    )
    logits(default, TOKENS[:25])
    fixed.load(0, default.save(0, TOKENS[:25], ""))
    assert fixed.archive_bytes == default.archive_bytes > 0


def test_snapshot_of_another_archive_is_rejected(llama_model: _core.Model) -> None:
    def saved(**options: Any) -> bytes:
        session = session_of(llama_model, POLICY, positions="original", **options)
        logits(session, TOKENS[:25])
        return session.save(0, TOKENS[:25], "")

    plain, archived = saved(), saved(archive="f16")
    with_archive = session_of(llama_model, POLICY, archive="f16")
    without_archive = session_of(llama_model, POLICY, positions="original")
    with pytest.raises(ValueError, match="has no archive, this cache has one"):
        with_archive.load(0, plain)
    with pytest.raises(ValueError, match="has an archive, this cache has none"):
        without_archive.load(0, archived)
    for other in ({"archive": "f32"}, {"archive": "f16", "archive_pages": 2}):
        with pytest.raises(
            ValueError, match="an archive of other types, heads or number of recalled pages"
        ):
            with_archive.load(0, saved(**other))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"archive": "q9"}, "archive is 'q9', expected one of f32.*, q4_0, q3"),
        ({"archive": "q3"}, "archive, as the type of values, is 'q3', expected .*, q4_0, q2"),
        ({"archive": ("f16", "q2")}, "head_dim is [0-9]+, expected a multiple of 64"),
        ({"archive": ("f16",)}, "expected a type or a pair of types"),
        ({"archive": True}, "archive=True"),
        ({"archive": "f16", "archive_pages": 0}, "archive_pages=0"),
        ({"archive_pages": 4}, "archive_pages=4 needs archive"),
        ({"archive": "q8_0"}, "head_dim is [0-9]+, expected a multiple of 32"),
        ({"archive": "f16", "positions": "rolling"}, "leave positions at auto"),
    ],
)
def test_invalid_options_are_rejected(llama: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Generator(llama, hh=8, threads=1, **options)


def test_archive_without_a_budget_is_rejected(llama: Path) -> None:
    """Nothing would be evicted. A budget may be larger than the text."""
    with pytest.raises(ValueError, match=r"archive='f16' needs a budget such as hh=0\.2"):
        Generator(llama, archive="f16", threads=1)
    for budget in ({"hh": 1.0}, {"cache_memory": 1.0}, {"policy": Policy.window(8)}):
        Generator(llama, archive="f16", threads=1, **budget).close()


@packages("torch", "transformers")
def test_alibi_is_rejected(tmp_path: Path) -> None:
    """ALiBi needs the distances of positions, which pages do not store."""
    model = make_model(RECIPES["bloom"], seed=0)
    save_checkpoint(model, tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", tmp_path / "bloom.gguf", "f32")
    with pytest.raises(ValueError, match="ALiBi"):
        Generator(tmp_path / "bloom.gguf", hh=8, archive="f16", threads=1)


def test_output_with_archive(tiny_opt: Path) -> None:
    """The output does not depend on threads; with all pages it equals the full cache's."""
    prompt = "It was a dark night, and the captain of the ship said: " * 4
    evicting: dict[str, Any] = {"hh": 24, "n_batch": 16}

    def text(**options: Any) -> str:
        with Generator(tiny_opt, **{"threads": 1, "kv_dtype": "f32", **options}) as generator:
            generation = generator.generate(prompt, max_tokens=40, temperature=0)
            stats = generator.stats()
            assert not generator.endless
            assert (stats.archive_bytes > 0) == ("archive" in options)
            return generation.text

    assert text(**evicting, archive="q8_0") == text(**evicting, archive="q8_0", threads=2)
    full = text()
    assert text(**evicting) != full
    assert text(**evicting, archive="f32", archive_pages=ALL) == full


def test_saved_chat_with_archive_continues_identically(tiny_opt: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    options: dict[str, Any] = {"hh": 24, "n_batch": 16, "archive": "q8_0", "threads": 1}
    with Generator(tiny_opt, **options) as generator, Generator(tiny_opt, **options) as another:
        chat = Chat(generator, template=template)
        for part in ("The ship had been at sea for a year.", "And then a storm came up."):
            assert "".join(chat.say(part, max_tokens=20, temperature=0))
        chat.save(tmp_path / "chat")
        loaded = Chat.load(another, tmp_path / "chat", template=template)
        one, other = (
            "".join(chat.say("What then?", max_tokens=20, temperature=0)) for chat in (chat, loaded)
        )
        assert one == other


def test_run_command_reports_archive(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "Once upon a time there was a ship " * 8
    given = ["-m", str(tiny_opt), "-t", "1", "--archive", "q8_0,q4_0", "--archive-pages", "2"]
    assert main(["run", words, "-n", "4", "--hh", "20", "--n-batch", "16", "--json", *given]) == 0
    assert json.loads(capsys.readouterr().out)["archive_bytes"] > 0
    assert main(["run", words, "-n", "4", "--hh", "20", "--n-batch", "16", *given]) == 0
    assert ", archive " in capsys.readouterr().err
