"""Chat: turns that reuse the cache, and the chat command."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from h2o_cpp import Chat, Generator, Policy, Stream, _core
from h2o_cpp.cli import main
from h2o_cpp.model.session import open_session
from support.scripted_chat import PLAIN, says, script, turn, user
from support.scripted_opt import ARRAY, FLOAT32, integers, scripted_opt, string, strings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


class TestConversation:
    def test_generator_chat(self, folder: Path) -> None:
        generator = says(folder, {"Hi": "Hello!"})
        stream = generator.chat(user("Hi"))
        assert "".join(stream) == stream.text == "Hello!"
        assert stream.finish_reason == "stop"
        assert stream.prompt_tokens == turn("Hi")

    def test_options_and_template(self, folder: Path) -> None:
        generator = says(folder, {"Hi": "Hello!"})
        assert generator.chat(user("Hi"), max_tokens=2).text == ""
        assert "".join(generator.chat(user("Hi"), max_tokens=2)) == "He"
        assert generator.chat(user("Hi"), template=PLAIN).prompt_tokens == 19

    def test_turns_reuse_cache(self, folder: Path) -> None:
        turns = {"Hi": "Hello!", "Who are you?": "A script.", "Bye": "."}
        generator = says(folder, turns)
        chat = Chat(generator)
        seen = 0
        for message, reply in turns.items():
            assert "".join(chat.say(message)) == reply
            seen += turn(message) + len(reply)
            assert generator.stats().tokens_seen == seen
            seen += len(")\n")
        assert [m["content"] for m in chat.messages] == [
            *["Hi", "Hello!", "Who are you?", "A script.", "Bye", "."]
        ]
        assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 3

    def test_new_message_cancels_reply(self, folder: Path) -> None:
        generator = says(folder, {"Hi": "Hello!"})
        chat = Chat(generator)
        stream = chat.say("Hi")
        next(stream)
        generated = stream.text
        following = chat.say("Go on")
        assert stream.finish_reason == "cancelled"
        assert [m["content"] for m in chat.messages] == ["Hi", generated, "Go on", ""]
        next(following, None)
        # The last generated token, and the new tokens
        assert following.prompt_tokens == len(generated[-1] + ")\n") + turn("Go on")

    def test_unconsumed_reply_is_replaced(self, tiny_opt: Path) -> None:
        generator = Generator(tiny_opt, threads=1)
        chat = Chat(generator, template=PLAIN)
        first = chat.say("a", max_tokens=3)
        list(first)
        chat.say("b")
        third = chat.say("c", max_tokens=1)
        list(third)
        assert third.prompt_tokens < len(third.history) - len(first.history) + 1
        assert generator.stats().tokens_seen == len(third.history) - 1

    def test_other_use_of_generator_rereads_conversation(self, tiny_opt: Path) -> None:
        """The conversation is then evaluated again as one prompt."""
        generator = Generator(tiny_opt, hh=0.1, n_batch=16, threads=1)
        for interrupt in (
            lambda: generator.generate("The", max_tokens=2),
            lambda: generator.logits([5, 6, 7]),
        ):
            chat = Chat(generator, template=PLAIN)
            list(chat.say("Once", temperature=0, max_tokens=9))
            interrupt()
            stream = chat.say("then", temperature=0, max_tokens=9)
            text = "".join(stream)
            assert stream.prompt_tokens == len(stream.history) - 9
            prompt = stream.history[:-9]
            assert generator.generate(prompt, temperature=0, max_tokens=9).text == text

    def test_two_conversations_alternate(self, folder: Path) -> None:
        turns = {"Hi": "Hello!", "How are you?": "Fine."}
        generator = says(folder, turns)
        chats = [Chat(generator), Chat(generator)]
        for message, reply in turns.items():
            for chat in chats:
                assert "".join(chat.say(message)) == reply

    def test_too_long_message_leaves_conversation_unchanged(self, folder: Path) -> None:
        generator = says(folder, {"Hi": "Hello!"}, n_ctx=64)
        chat = Chat(generator)
        list(chat.say("Hi"))
        before = chat.messages
        with pytest.raises(ValueError, match=r"the prompt has \d+ tokens, n_ctx is 64"):
            chat.say("x" * 64)
        with pytest.raises(ValueError, match="max_tokens"):
            chat.say("x", max_tokens=0)
        assert chat.messages == before
        stream = chat.say("x")
        next(stream, None)
        assert stream.prompt_tokens == len(")\n") + turn("x")

    def test_errors(self, tiny_opt: Path) -> None:
        generator = Generator(tiny_opt, threads=1)
        with pytest.raises(ValueError, match="no chat template"):
            Chat(generator)
        with pytest.raises(ValueError, match="no chat template"):
            generator.chat(user("a"))
        chat = Chat(generator, system="x", template="{{ raise_exception('No system') }}")
        with pytest.raises(ValueError, match="No system"):
            chat.say("a")
        generator.close()
        with pytest.raises(RuntimeError, match="closed"):
            Chat(generator, template=PLAIN)


@pytest.mark.parametrize("n_batch", [512, 7])
def test_turns_are_chunks_of_one_sequence(tiny_opt: Path, n_batch: int) -> None:
    """A chat equals a session: evictions after each chunk, and no reset between turns."""
    generator = Generator(
        tiny_opt, hh=16, recent=8, n_ctx=256, n_batch=n_batch, kv_dtype="f32", threads=2
    )
    model = _core.Model(tiny_opt, device="cpu", threads=1)
    session = open_session(model, Policy.h2o(8, 8), n_ctx=256, n_batch=n_batch, kv_dtype="f32")

    def read(tokens: list[int]) -> int:
        for i in range(0, len(tokens), n_batch):
            logits = session.step([(0, np.asarray(tokens[i : i + n_batch], np.int32))])
        return int(np.argmax(logits))

    chat = Chat(generator, template=PLAIN)
    fed: list[int] = []
    for message in ("Once upon a time", "What then?", "The end."):
        stream = chat.say(message, temperature=0, max_tokens=10, ignore_eos=True)
        list(stream)
        prompt = stream.history[: -len(stream.tokens)]
        assert prompt[: len(fed)] == fed
        new = prompt[len(fed) :]
        assert stream.prompt_tokens == len(new)
        if fed:
            read(new[:1])  # the end of the reply before
            new = new[1:]
        expected = [read(new)]
        while len(expected) < 10:
            expected.append(read(expected[-1:]))
        assert [*stream.tokens] == expected
        fed = [*prompt, *expected[:-1]]  # the last token is evaluated with the next turn
        for layer in range(model.n_layers):
            for head in range(model.n_kv_heads):
                ours, theirs = generator.kept(layer, head), session.kept(layer, head, 0)
                assert len(ours[0]) == 16
                np.testing.assert_array_equal(ours[0], theirs[0])
                np.testing.assert_array_equal(ours[1], theirs[1])
    assert generator.stats().tokens_seen == len(fed)


def floats(values: list[float]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}f", ARRAY, FLOAT32, len(values), *values)


def test_prompt_and_pieces_concatenate_to_detokenized_history(folder: Path) -> None:
    """With SentencePiece, which drops the first space of a text."""
    pieces = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581ab", "\u2581a", "\u2581b"]
    types = [2, 3, 3] + [1] * 7
    padding = 258 - len(pieces)
    model = scripted_opt([7, 6, 8, 3, 7, 2])
    model.keys |= {
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.tokens": strings([*pieces, *(f"[PAD{i}]" for i in range(padding))]),
        "tokenizer.ggml.token_type": integers(types + [5] * padding),
        "tokenizer.ggml.scores": floats([-float(i) for i in range(258)]),
    }
    for key in ("merges", "bos_token_id", "eos_token_id", "add_bos_token"):
        del model.keys[f"tokenizer.ggml.{key}"]
    generator = Generator(model.write(folder / "pieces.gguf"), threads=1)
    for prompt in ([1], [7], [1, 7], [1, 7, 6], [1, 1], [1, 3]):
        stream = generator.stream(prompt, temperature=0)
        pieces_of_text = list(stream)
        text = generator.detokenize(prompt) + "".join(pieces_of_text)
        assert generator.detokenize(stream.history) == text
    assert "".join(generator.stream([1])) == "abab a  ab"
    assert "".join(generator.stream([7])) == " abab a  ab"


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(lines: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        status = main(["chat", *map(str, arguments)])
        return status, *capsys.readouterr()

    return command


class TestCommand:
    def test_each_line_is_a_message(self, folder: Path, run: Run) -> None:
        path = script(folder, {"Hi": "Hello!", "Who are you?": "A script."})
        status, out, err = run("Hi\n\n  \nWho are you?\n", "-m", path, "--threads", 1)
        assert (status, out) == (0, "Hello!\nA script.\n")
        assert err.count("end: stop") == 2

    def test_template_option(self, tiny_opt: Path, tmp_path: Path, run: Run) -> None:
        (tmp_path / "plain.jinja").write_text(PLAIN)
        options = ["-m", tiny_opt, "-n", 3, "--temperature", 0, "--system", "Go"]
        first = run("a\nb\n", *options, "--template", PLAIN)
        assert first[0] == 0
        for given in (tmp_path / "plain.jinja", f"@{tmp_path / 'plain.jinja'}"):
            assert run("a\nb\n", *options, "--template", given)[1] == first[1]

    def test_built_in_template_overrides_file(self, folder: Path, run: Run) -> None:
        """--template chatml equals the file's template; --chat-template vicuna does not."""
        path = script(folder, {"Hi": "Hello!"})
        same = run("Hi\n", "-m", path, "--threads", 1, "--template", "chatml")
        assert same[:2] == (0, "Hello!\n")
        other = run("Hi\n", "-m", path, "--threads", 1, "--chat-template", "vicuna")
        assert other[0] == 0
        assert other[1] != "Hello!\n"

    def test_missing_template_is_an_error(self, tiny_opt: Path, run: Run) -> None:
        status, _, err = run("Hi\n", "-m", tiny_opt, "--template", "plain.jinja")
        assert status == 2
        assert err.startswith("error: --template 'plain.jinja', expected one of chatml, gemma, ")
        assert run("Hi\n", "-m", tiny_opt, "--template", "@plain.jinja")[0] == 1

    def test_reset_and_exit(self, folder: Path, run: Run) -> None:
        path = script(folder, {"Hi": "Hello!", "Bye": "."})
        status, out, err = run("Hi\n/reset\nHi\n /exit \nHi\n", "-m", path, "--threads", 1)
        assert (status, out) == (0, "Hello!\nHello!\n")
        assert err.count(f"prompt {turn('Hi')} tokens") == 2

    def test_continues_after_too_long_message(self, folder: Path, run: Run) -> None:
        path = script(folder, {"Hi": "Hello!", "Bye": "."}, n_ctx=72)
        lines = "Hi\n" + "x" * 99 + "\nBye\n"
        status, out, err = run(lines, "-m", path, "--threads", 1)
        assert (status, out) == (1, "Hello!\n.\n")
        assert [line[:6] for line in err.splitlines()] == ["[promp", "error:", "[promp"]
        assert "--n-ctx is 72" in err
        assert "/budget" not in err  # the model's positions cannot roll
        assert "send a shorter message, or /reset" in err

    def test_continues_after_template_error(self, tiny_opt: Path, run: Run) -> None:
        template = "{% if messages[-1].content == 'a' %}{{ raise_exception('No a') }}{% endif %}"
        status, _, err = run("a\nb\n", "-m", tiny_opt, "-n", 2, "--template", template + PLAIN)
        assert status == 1
        error, summary = err.splitlines()
        assert error.startswith("error: ")
        assert error.endswith("No a")
        assert "generated 2 tokens" in summary

    def test_help_lists_commands(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            run("", "--help")
        out = capsys.readouterr().out
        assert "/reset" in out
        assert "/exit" in out

    def test_without_a_template(self, tiny_opt: Path, run: Run) -> None:
        status, out, err = run("Hi\n", "-m", tiny_opt)
        assert (status, out) == (1, "")
        assert "no chat template" in err
        assert "--template" in err

    def test_bundled_model_needs_template(self, run: Run) -> None:
        status, out, err = run("Hi\n")
        assert (status, out) == (1, "")
        assert "bundled model" in err
        assert "-m MODEL" in err
        assert err.count("\n") == 1
        assert run("Hi\n", "--template", "chatml", "-n", 2)[0] == 0

    def test_interrupt_cancels_reply(
        self, tiny_opt: Path, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        next_piece, calls = Stream.__next__, count()

        def interrupted(stream: Stream) -> str:
            if next(calls) == 3:
                stream.close()  # as Ctrl-C during generation does
                raise KeyboardInterrupt
            return next_piece(stream)

        monkeypatch.setattr(Stream, "__next__", interrupted)
        status, _, err = run("a\nb\n", "-m", tiny_opt, "-n", 9, "--template", PLAIN, "--ignore-eos")
        assert status == 0
        assert [line.split("end: ")[1] for line in err.splitlines()] == ["cancelled]", "length]"]
