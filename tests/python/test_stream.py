"""Streams: detokenization, stop strings and how they end."""

from __future__ import annotations

import time
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from h2o_cpp import Generator, Stream
from h2o_cpp._core import Detokenizer
from support.random_search import examples
from support.scripted_opt import END, scripted_opt, u32

file_ids = count()
PROMPT = [ord("?")]  # one token; the output starts with the script

texts = st.one_of(st.text("ab"), st.text("abé🦙", max_size=20), st.text(max_size=20))
stops = st.lists(
    st.one_of(st.text("abé🦙", min_size=1, max_size=4), st.text(min_size=1, max_size=4)), max_size=3
)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({0, len(data), *(truncate % (len(data) + 1) for truncate in cuts)})
    return [data[begin:end] for begin, end in pairwise(ends)]


def cut(text: str, stop: list[str]) -> tuple[str, str]:
    """The text before the stop string that ends first, of several the longest; that string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def truncate(text: str, stop: list[str]) -> str:
    return cut(text, stop)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripted")


def scripted(folder: Path, script: bytes | list[int], n_ctx: int = 32) -> Generator:
    """A Generator that outputs these bytes or tokens, then end of text."""
    path = folder / f"{next(file_ids)}.gguf"  # a new file: a Generator may have mapped the old one
    return Generator(scripted_opt(list(script), n_ctx).write(path), threads=1)


class TestDetokenizer:
    @given(texts.map(str.encode) | st.binary(max_size=20), st.lists(st.integers(0, 99)), stops)
    @example(b"abab", [1, 2, 3], ["abb", "bab"])
    @example(b"xaby", [], ["b", "a"])
    @example("a🦙".encode(), [1, 2, 3, 4], ["🦙"])
    @example("a🦙".encode()[:-1], [2, 3], ["\ufffd"])
    @example("a🦙a".encode(), [1, 5], ["🦙", "a🦙a"])
    @example(b"abc", [], ["bc", "abc", "c"])
    def test_random_bytes_splits_and_stop_strings(
        self, data: bytes, cuts: list[int], stop: list[str]
    ) -> None:
        pieces = Detokenizer(stop)
        out, seen = [], b""
        for chunk in split(data, cuts):
            out.append(pieces.push(chunk))
            seen += chunk
            if pieces.stopped:  # as in Stream
                break
        out.append(pieces.finish())
        text = (seen if pieces.stopped else data).decode("utf-8", "replace")
        assert "".join(out) == truncate(text, stop)
        assert pieces.stopped == any(s in text for s in stop)
        for piece in out:
            piece.encode()
        assert pieces.finish() == ""

    @given(texts, st.lists(st.integers(0, 99)), stops)
    def test_only_possible_stop_strings_are_held_back(
        self, text: str, cuts: list[int], stop: list[str]
    ) -> None:
        pieces, shown, seen = Detokenizer(stop), "", b""
        for chunk in split(text.encode(), cuts):
            shown += pieces.push(chunk)
            seen += chunk
            if pieces.stopped:
                return
            whole = seen.decode("utf-8", "ignore")  # without an incomplete character at the end
            assert whole.startswith(shown)
            held = whole[len(shown) :]
            assert not held or any(s.startswith(held) and s != held for s in stop)

    @given(texts, st.lists(st.integers(0, 99)), st.text("abé🦙", min_size=1, max_size=4))
    def test_text_does_not_depend_on_the_split(self, text: str, cuts: list[int], stop: str) -> None:
        pieces = Detokenizer([stop])
        shown = "".join(pieces.push(chunk) for chunk in split(text.encode(), cuts))
        assert shown + pieces.finish() == truncate(text, [stop])
        assert pieces.stopped == (stop in text)

    def test_no_text_after_a_stop_string(self) -> None:
        pieces = Detokenizer(["b"])
        assert [pieces.push(b"ab"), pieces.push(b"cc"), pieces.finish()] == ["a", "", ""]
        assert pieces.stopped


class TestOutputText:
    @settings(max_examples=examples(60))
    @given(texts.filter(lambda text: len(text.encode()) < 32), stops)
    @example("a🦙a", ["🦙", "a🦙a"])
    def test_random_text_and_stop_strings(self, folder: Path, text: str, stop: list[str]) -> None:
        """The model outputs one byte per token, so characters and stop strings span tokens."""
        generator = scripted(folder, text.encode())
        stream = generator.stream(PROMPT, temperature=0, stop=stop)
        pieces = list(stream)
        assert ("".join(pieces), stream.stop_string) == cut(text, stop)
        assert stream.finish_reason == "stop"
        assert all(pieces)  # none is empty
        data = bytes(list(stream.tokens))
        assert text.encode().startswith(data)
        assert any(s in text for s in stop) or data == text.encode()

    def test_pieces_are_whole_characters(self, folder: Path) -> None:
        generator = scripted(folder, "né 🦙!".encode())
        stream = generator.stream(PROMPT, temperature=0)
        assert list(stream) == ["n", "é", " ", "🦙", "!"]
        assert bytes(list(stream.tokens)).decode() == "né 🦙!"

    def test_invalid_utf8_becomes_replacement_characters(self, folder: Path) -> None:
        data = b"a\xff\xe2\x82b\xf0\x9f\xa6"
        generator = scripted(folder, data)
        stream = generator.stream(PROMPT, temperature=0)
        pieces = list(stream)
        assert "".join(pieces) == data.decode("utf-8", "replace") == "a\ufffd\ufffdb\ufffd"
        assert "".join(pieces) == generator.detokenize(stream.tokens)

    @pytest.mark.parametrize(
        ("stop", "text", "n_tokens"),
        [
            ((), "one two three", 13),
            ("two", "one ", 7),
            (["o t"], "one tw", 9),
            (["three", "wo"], "one t", 7),
            (["e t"], "on", 5),
            (["threes", "4"], "one two three", 13),
            (["ee"], "one two thr", 13),
            (("one two three",), "", 13),
            (["e"], "on", 3),
            (["o"], "", 1),
        ],
    )
    def test_stop_strings(
        self, folder: Path, stop: str | list[str], text: str, n_tokens: int
    ) -> None:
        generator = scripted(folder, b"one two three")
        stream = generator.stream(PROMPT, temperature=0, stop=stop)
        assert ("".join(stream), len(stream.tokens)) == (text, n_tokens)
        assert stream.finish_reason == "stop"

    def test_incomplete_stop_string_is_output_at_the_end(self, folder: Path) -> None:
        generator = scripted(folder, b"ab")
        result = generator.generate(PROMPT, temperature=0, stop="abc")
        assert (result.text, result.stop_string) == ("ab", "")
        result = generator.generate(PROMPT, temperature=0, stop="abc", max_tokens=1)
        assert (result.text, result.finish_reason) == ("a", "length")

    def test_stop_strings_in_the_prompt_do_not_count(self, folder: Path) -> None:
        generator = scripted(folder, b"...ab")
        result = generator.generate("x.a.", temperature=0, stop=["x", ".a"])
        assert result.text == "ab"


class TestEnd:
    def test_end_of_text(self, folder: Path) -> None:
        result = scripted(folder, b"bye").generate(PROMPT, temperature=0)
        assert (result.text, result.finish_reason, result.completion_tokens) == ("bye", "stop", 3)

    def test_immediate_end_of_text(self, folder: Path) -> None:
        stream = scripted(folder, b"").stream(PROMPT, temperature=0)
        assert list(stream) == []
        assert (stream.finish_reason, list(stream.tokens)) == ("stop", [])
        assert stream.tokens_per_second == 0

    def test_eot_token_ends_the_output(self, folder: Path) -> None:
        file = scripted_opt([*b"one", ord("."), *b"two"])
        file.keys["tokenizer.ggml.eot_token_id"] = u32(ord("."))
        with Generator(file.write(folder / "eot.gguf")) as generator:
            assert generator.generate(PROMPT, temperature=0).text == "one"
            assert generator.generate(list(b"?one."), temperature=0).text == "two"

    def test_ignore_eos(self, folder: Path) -> None:
        generator = scripted(folder, [*b"one", END, *b"two", END, END, *b"three"], n_ctx=16)
        result = generator.generate(PROMPT, temperature=0, ignore_eos=True)
        assert (result.text, result.finish_reason) == ("onetwothree", "length")
        assert result.completion_tokens == 16  # one after the prompt and each of the 15 that fit
        assert generator.generate(PROMPT, temperature=0).text == "one"

    @pytest.mark.parametrize("n", [1, 2, 12, 13])
    def test_max_tokens(self, folder: Path, n: int) -> None:
        result = scripted(folder, b"one two three").generate(PROMPT, temperature=0, max_tokens=n)
        assert (result.text, result.finish_reason) == ("one two three"[:n], "length")
        assert result.completion_tokens == n

    def test_end_of_text_before_max_tokens(self, folder: Path) -> None:
        result = scripted(folder, b"one").generate(PROMPT, temperature=0, max_tokens=4)
        assert (result.text, result.finish_reason, result.completion_tokens) == ("one", "stop", 3)

    @pytest.mark.parametrize("n_prompt", [1, 5, 8])
    def test_context_is_full(self, folder: Path, n_prompt: int) -> None:
        """The prompt and every generated token but the last take a position."""
        path = scripted_opt(b"abcdefghijklmnop", n_ctx=16).write(folder / "context.gguf")
        with Generator(path, n_ctx=8) as generator:
            stream = generator.stream([1] * n_prompt, temperature=0)
            assert "".join(stream) == "abcdefgh"[n_prompt - 1 :]
            assert stream.finish_reason == "length"
            assert generator.stats().tokens_seen == 8

    def test_stop_string_in_the_last_token(self, folder: Path) -> None:
        result = scripted(folder, b"abcd").generate(PROMPT, temperature=0, max_tokens=3, stop="c")
        assert (result.text, result.finish_reason, result.stop_string) == ("ab", "stop", "c")

    def test_cancelled(self, folder: Path) -> None:
        stream = scripted(folder, b"abcd").stream(PROMPT, temperature=0)
        assert [next(stream), next(stream)] == ["a", "b"]
        stream.close()
        assert list(stream) == []
        assert stream.finish_reason == "cancelled"
        stream.close()
        assert stream.finish_reason == "cancelled"

    def test_closing_a_finished_stream_changes_nothing(self, folder: Path) -> None:
        stream = scripted(folder, b"ab").stream(PROMPT, temperature=0)
        assert "".join(stream) == "ab"
        stream.close()
        assert stream.finish_reason == "stop"
        assert next(stream, None) is None


class TestStream:
    def test_stream_is_an_iterator_and_a_context_manager(self, folder: Path) -> None:
        generator = scripted(folder, b"abcd")
        with generator.stream(PROMPT, temperature=0) as stream:
            assert isinstance(stream, Stream)
            assert iter(stream) is stream
            assert next(stream) == "a"
            assert stream.finish_reason is None
        assert stream.finish_reason == "cancelled"

    def test_tokens_are_computed_on_demand(self, folder: Path) -> None:
        generator = scripted(folder, b"abcd")
        stream = generator.stream(PROMPT, temperature=0)
        assert generator.stats().tokens_seen == 0
        assert (stream.prompt_tokens, stream.prompt_seconds, len(stream.tokens)) == (1, 0, 0)
        next(stream)
        assert generator.stats().tokens_seen == 1
        next(stream)
        assert generator.stats().tokens_seen == 2

    def test_timings(self, tiny_opt: Path) -> None:
        stream = Generator(tiny_opt, threads=1).stream("Once upon a time", max_tokens=20)
        assert stream.prompt_tokens_per_second == stream.tokens_per_second == 0
        begin = time.perf_counter()
        next(stream)
        assert stream.prompt_seconds > 0
        assert stream.prompt_tokens_per_second == stream.prompt_tokens / stream.prompt_seconds
        for _ in stream:
            pass
        elapsed = time.perf_counter() - begin
        assert stream.decode_seconds > 0
        assert stream.prompt_seconds + stream.decode_seconds < elapsed
        assert stream.tokens_per_second == pytest.approx(19 / stream.decode_seconds)

    @pytest.mark.parametrize("hh", [None, 0.05])
    def test_pieces_join_to_the_text_of_the_tokens(self, tiny_opt: Path, hh: float | None) -> None:
        generator = Generator(tiny_opt, hh=hh, threads=1)
        stream = generator.stream("“Naïve café” ", max_tokens=300, seed=3, temperature=2)
        pieces = list(stream)
        assert "".join(pieces) == generator.detokenize(stream.tokens)
        assert len(stream.tokens) == 300
        for piece in pieces:
            piece.encode()
