"""Documents far longer than the context, which are read in bounded memory."""

from __future__ import annotations

import io
import signal
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Chat, Generator
from h2o_cpp.cli import main
from h2o_cpp.generation.stream import Stream
from support.scripted_chat import PLAIN

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"  # trained on 40
SENTENCE = "Once upon a time there was an old man. "
GREEDY: Any = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
OPTIONS = ["-m", str(LLAMA), "--threads", "1", "--hh", "12", "--temperature", "0", "-n", "5"]
CHAT = ["chat", *OPTIONS, "--template", PLAIN, "--ignore-eos"]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    file = tmp_path / "book.txt"
    file.write_text(SENTENCE * 200)
    return file


def asked(generator: Generator, text: str) -> tuple[str, int]:
    """The reply to a message, and the tokens of its prompt."""
    stream = Chat(generator, template=PLAIN).say(text, **GREEDY)
    return "".join(stream), stream.prompt_tokens


def test_python_memory_is_linear() -> None:
    """Up to the first step; the process that renders the template has a limit of its own.

    A token is an int of 32 bytes, which four lists of 8 bytes per token share; where messages are
    needs its length and three int64. A character is in eight texts: the message's, the rendered
    one, with origins, escaped, as JSON, and in parts.
    """
    with Generator(LLAMA, hh=12, threads=1) as generator:
        for n in (10, 2_000, 4_000):  # the first for what is loaded once
            text = SENTENCE * n
            tracemalloc.start()
            stream = Chat(generator, template=PLAIN).say(text)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert stream.prompt_tokens > 9 * n
            most = 100_000 + 8 * len(text) + (32 + 4 * 8 + 28) * stream.prompt_tokens
            assert n == 10 or peak < most


def test_the_cache_stays_as_it_is() -> None:
    with Generator(LLAMA, hh=12, threads=1) as generator:
        before = generator.stats()
        stream = generator.stream(SENTENCE * 200, **GREEDY)
        assert stream.prompt_tokens_read == 0
        list(stream)
        assert stream.prompt_tokens_read == stream.prompt_tokens == 45 * before.n_ctx
        after = generator.stats()
        assert (after.cache_bytes, after.tokens_kept) == (before.cache_bytes, 12)


def test_run_reads_a_file(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *OPTIONS, "--file", str(book), "--no-display-prompt"]) == 0
    with Generator(LLAMA, hh=12, threads=1) as generator:
        stream = generator.stream(SENTENCE * 200, temperature=0, max_tokens=5)
        assert capsys.readouterr().out == "".join(stream) + "\n"


@pytest.mark.parametrize("how", ["option", "command"])
def test_chat_reads_a_file(
    how: str, book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first message, or the next one."""
    lines = "Who?\nWhere?\n"
    options = ["--file", str(book)] if how == "option" else []
    if how == "command":
        lines = f"/file {book}\n{lines}"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main([*CHAT, *options]) == 0
    out, err = capsys.readouterr()
    with Generator(LLAMA, hh=12, threads=1) as generator:
        reply, n = asked(generator, f"{(SENTENCE * 200).rstrip()}\n\nWho?")
    assert out.startswith(f"{reply}\n")
    assert f"the next message begins with {book}, {200 * len(SENTENCE)} characters" in err
    first, second = (line for line in err.splitlines() if line.startswith("[prompt"))
    assert first.startswith(f"[prompt {n} tokens")
    assert int(second.split()[1]) < 40


def test_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHAT, "--file", str(tmp_path / "none.txt")]) == 1
    (tmp_path / "bytes").write_bytes(b"\xff")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/file {tmp_path / 'bytes'}\nHi\n"))
    assert main(CHAT) == 1
    err = capsys.readouterr().err
    assert "none.txt: No such file or directory" in err
    assert "bytes: not UTF-8 text" in err


def test_a_file_that_is_longer_than_the_context(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next message is without it."""
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/file {book}\nWho?\nWho?\n"))
    assert main([option for option in CHAT if option not in ("--hh", "12")]) == 1
    out, err = capsys.readouterr()
    assert "the next message begins without the file\n" in err
    with Generator(LLAMA, threads=1) as generator:
        assert out == f"{asked(generator, 'Who?')[0]}\n"


def test_interrupted_reading_goes_on_with_the_next_message(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens that were read are not read again; the result is that of one without a stop."""
    book.write_text(SENTENCE * 2000)
    streams: list[Stream] = []
    say = Chat.say

    def interrupted(self: Chat, text: str, **options: Any) -> Stream:
        stream = say(self, text, **options)
        streams.append(stream)
        if len(streams) == 1:
            threading.Thread(target=press_ctrl_c, daemon=True).start()
        return stream

    def press_ctrl_c() -> None:
        while not streams[0].prompt_tokens_read:
            time.sleep(0.0001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(Chat, "say", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\nWhere?\n"))
    assert main([*CHAT, "-b", "8", "--file", str(book)]) == 0
    first, second = streams
    n_read, n = first.prompt_tokens_read, first.prompt_tokens
    assert 0 < n_read < n
    note = f"note: stopped after {n_read} of {n} tokens; the next message goes on, or /reset"
    assert note in capsys.readouterr().err
    assert second.prompt_tokens == len(second.history) - 5 - n_read
    with Generator(LLAMA, hh=12, n_batch=8, threads=1) as generator:
        whole = generator.generate(second.history[:-5], **GREEDY)
    assert second.text == whole.text


def test_an_archive_in_files_has_what_is_evicted(tmp_path: Path, book: Path) -> None:
    """Within n_ctx: an archive needs positions in the text."""
    archive: Any = {"archive": "f16", "archive_dir": tmp_path, "threads": 1}
    with Generator(LLAMA, hh=12, **archive) as generator:
        stream = Chat(generator, template=PLAIN).say(SENTENCE[:30] * 2, **GREEDY)
        list(stream)
        memory = stream.prompt_memory
        assert 0 < memory.archived_tokens == memory.evicted_tokens
        with pytest.raises(ValueError, match="n_ctx is 40"):
            generator.stream(book.read_text())
