"""Snapshots: exact continuation, rejected files, cached prompts, and forks."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_cpp import Chat, Generator, Policy, Snapshot, _core
from h2o_cpp.model.session import open_session, read_tokens
from support.random_search import examples
from support.snapshots import checksum, sealed

N_TRAIN = 40  # positions of the golden models
N_VOCAB = 61
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<reply>"


def read(session: _core.Session, tokens: list[int]) -> None:
    read_tokens(session, np.array(tokens, np.int32))


POLICIES = st.one_of(
    st.just(Policy.full()),
    st.builds(Policy.window, st.integers(1, 12)),
    st.builds(Policy.sinks, st.integers(0, 3), st.integers(1, 12)),
    st.builds(
        Policy.h2o,
        st.integers(1, 8),
        st.integers(0, 8),
        st.integers(0, 2),
        score=st.sampled_from(["sum", "mean"]),
        decay=st.sampled_from([1.0, 0.5]),
        value_norm=st.sampled_from([None, "l1"]),
    ),
)


@given(
    policy=POLICIES,
    kv_dtype=st.sampled_from(["f32", "f16", "bf16"]),
    n_batch=st.integers(1, 40),
    n_before=st.integers(1, 100),
    n_after=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_restored_session_continues_identically(
    llama_model: _core.Model,
    policy: Policy,
    kv_dtype: str,
    n_batch: int,
    n_before: int,
    n_after: int,
    seed: int,
) -> None:
    """Bit-identical, also past the trained length and after other tokens in the target session."""
    sessions = [
        open_session(llama_model, policy, n_ctx=N_TRAIN, n_batch=n_batch, kv_dtype=kv_dtype)
        for _ in range(2)
    ]
    original, copy = sessions
    if not original.can_roll(0):
        n_before, n_after = min(n_before, 20), min(n_after, 20)
    tokens = np.random.default_rng(seed).integers(0, N_VOCAB, n_before + n_after).tolist()
    read(original, tokens[:n_before])
    read(copy, tokens[: n_after + 1])
    data = original.save(0, tokens[:n_before], "a note")
    copy.load(0, data)
    assert _core.read_snapshot(data) == (tokens[:n_before], b"a note", n_before, None)
    assert copy.save(0, tokens[:n_before], "a note") == data
    for token in tokens[n_before:]:
        expected, found = (s.step([(0, np.array([token], np.int32))]) for s in sessions)
        np.testing.assert_array_equal(found, expected)
    for layer in range(llama_model.n_layers):
        for head in range(llama_model.n_kv_heads):
            for a, b in zip(*(s.kept(layer, head, 0) for s in sessions), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def saved(llama_model: _core.Model) -> bytes:
    session = open_session(llama_model, Policy.h2o(4, 4), n_ctx=N_TRAIN, n_batch=8)
    read(session, [1, 2, 3] * 20)
    return session.save(0, [1, 2, 3] * 20, "{}")


@given(st.data())
@settings(max_examples=examples(60))
def test_damaged_snapshots_are_rejected(
    llama_model: _core.Model, saved: bytes, data: st.DataObject
) -> None:
    session = open_session(llama_model, Policy.h2o(4, 4), n_ctx=N_TRAIN, n_batch=8)
    read(session, [5, 6, 7] * 9)
    before = session.save(0, [5] * 27, "")
    damaged = bytearray(saved)
    match data.draw(st.sampled_from(["flip", "cut", "longer", "empty"])):
        case "flip":
            i = data.draw(st.integers(0, len(saved) - 1))
            damaged[i] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            damaged = damaged[: data.draw(st.integers(0, len(saved) - 1))]
        case "longer":
            damaged += data.draw(st.binary(min_size=1, max_size=9))
        case "empty":
            damaged = bytearray(data.draw(st.binary(max_size=40)))
    with pytest.raises(ValueError, match="snapshot"):
        session.load(0, bytes(damaged))
    assert session.save(0, [5] * 27, "") == before  # unchanged


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (
            Policy.h2o(5, 4),
            {},
            "another policy: in layer 0 it keeps 0 sinks, 4 heavy hitters and 4 recent",
        ),
        (Policy.h2o(4, 4, score="mean"), {}, "another policy"),
        (Policy.h2o(4, 4, decay=0.5), {}, "another policy"),
        (Policy.h2o(4, 4), {"kv_dtype": "f32"}, "keys in F16, this cache in F32"),
        (Policy.h2o(4, 4), {"kv_dtype": ("f16", "bf16")}, "values in F16, this cache in BF16"),
        (Policy.h2o(4, 4), {"positions": "original"}, "has auto positions, this session original"),
        (Policy.h2o(4, 4), {"positions": "rolling"}, "has auto positions, this session rolling"),
    ],
    ids=str,
)
def test_snapshots_of_other_options_are_rejected(
    llama_model: _core.Model, saved: bytes, policy: Policy, options: dict[str, str], message: str
) -> None:
    session = open_session(llama_model, policy, n_ctx=N_TRAIN, n_batch=8, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        session.load(0, saved)


def test_snapshots_of_other_models_and_contexts_are_rejected(
    data: Path, llama_model: _core.Model, saved: bytes
) -> None:
    other = _core.Model(data / "golden" / "qwen3.gguf", device="cpu", threads=1)
    session = open_session(other, Policy.h2o(4, 4), n_ctx=N_TRAIN, n_batch=8)
    with pytest.raises(ValueError, match="the snapshot belongs to another model"):
        session.load(0, saved)
    full = open_session(llama_model, Policy.full(), n_ctx=30, n_batch=8)
    read(full, [1] * 30)
    small = open_session(llama_model, Policy.full(), n_ctx=29, n_batch=8)
    with pytest.raises(ValueError, match="the snapshot has 30 tokens, n_ctx is 29"):
        small.load(0, full.save(0, [1] * 30, ""))
    with pytest.raises(ValueError, match="29 tokens for sequence 0, which has read 30"):
        full.save(0, [1] * 29, "")
    bounded = [
        open_session(llama_model, Policy.window(9), n_ctx=n, n_batch=8, positions="original")
        for n in (30, 20)
    ]
    read(bounded[0], [1] * 21)
    with pytest.raises(ValueError, match="the snapshot has 21 tokens, n_ctx is 20"):
        bounded[1].load(0, bounded[0].save(0, [1] * 21, ""))


# ---- Generators ----


@pytest.mark.parametrize("hh", [None, 16, 60])
def test_stream_continues_in_another_generator(tiny_opt: Path, tmp_path: Path, hh: int) -> None:
    """With the same random numbers."""
    with Generator(tiny_opt, hh=hh, n_ctx=200, seed=5) as generator:
        options = {"temperature": 1.0, "repeat_penalty": 1.1, "ignore_eos": True}
        stream = generator.stream("The old man", max_tokens=60, **options)  # type: ignore[arg-type]
        for _ in stream:
            if len(stream.tokens) == 25:
                stream.save(tmp_path / "a.snapshot")
        list(stream)
        expected_tokens = stream.tokens.tolist()
    with Generator(tiny_opt, hh=hh, n_ctx=200) as generator:
        snapshot = generator.load(tmp_path / "a.snapshot")
        assert list(snapshot.tokens) == stream.history[: 25 + len(stream.history) - 60]
        rest = generator.stream("", after=snapshot, max_tokens=35, **options)  # type: ignore[arg-type]
        list(rest)
        assert rest.tokens.tolist() == expected_tokens[25:]
        assert rest.history == stream.history
        other = generator.stream("", after=snapshot, max_tokens=35, seed=1, **options)  # type: ignore[arg-type]
        list(other)
        assert other.tokens.tolist() != expected_tokens[25:]


def test_save_after_the_stream_is_deleted(tiny_opt: Path, tmp_path: Path) -> None:
    with Generator(tiny_opt, n_ctx=100) as generator:
        with pytest.raises(RuntimeError, match="nothing has been streamed yet"):
            generator.save()
        generator.generate("The old man", max_tokens=5, temperature=0, ignore_eos=True)
        snapshot = generator.save(tmp_path / "a.snapshot")
        assert Snapshot.open(tmp_path / "a.snapshot") == snapshot
        assert snapshot.n_read == len(snapshot.tokens) - 1
        assert (
            repr(snapshot) == f"<Snapshot: {len(snapshot.tokens)} tokens, {snapshot.nbytes} bytes>"
        )
        first_result = generator.generate(" and", after=snapshot, max_tokens=9, temperature=0)
        generator.generate("Something else", max_tokens=3)
        restored = generator.generate(
            " and", after=generator.load(snapshot), max_tokens=9, temperature=0
        )
        assert first_result.text == restored.text
        assert (
            first_result.prompt_tokens
            == restored.prompt_tokens
            == len(generator.tokenize(" and", add_special=False)) + 1
        )


def test_save_of_a_replaced_stream_fails(tiny_opt: Path) -> None:
    with Generator(tiny_opt, n_ctx=100) as generator:
        first = generator.stream("One", max_tokens=3)
        with pytest.raises(RuntimeError, match="nothing has been read yet"):
            first.save()
        list(first)
        first.save()
        generator.generate("Two", max_tokens=3)
        with pytest.raises(RuntimeError, match="does not hold this sequence"):
            first.save()


def test_invalid_prompts_after_a_snapshot(tiny_opt: Path) -> None:
    with Generator(tiny_opt, n_ctx=50) as generator:
        snapshot = generator.read("The old man")
        assert snapshot.n_read == len(snapshot.tokens)
        with pytest.raises(ValueError, match="empty, and the snapshot has no unprocessed token"):
            generator.stream("", after=snapshot)
        with pytest.raises(ValueError, match="the prompt has 54 tokens, n_ctx is 50"):
            generator.stream([5] * 50, after=snapshot)


def test_read_is_cached(tiny_opt: Path) -> None:
    text = "The old man looked at the sea for a long time, and then he said:"
    with Generator(tiny_opt, hh=8, n_ctx=100) as generator:
        first = generator.read(text)
        generator.generate("Something else", max_tokens=3)
        assert generator.read(text) is first
        # The text is processed and evicted first, then the question, as in the session.
        expected = open_session(
            _core.Model(tiny_opt, device="cpu", threads=1), Policy.h2o(4, 4), n_ctx=100, n_batch=99
        )
        read(expected, generator.tokenize(text))
        more = generator.tokenize(" Listen", add_special=False)
        logits = expected.step([(0, np.array(more, np.int32))])
        answer = generator.generate(" Listen", after=first, max_tokens=1, temperature=0)
        assert answer.text == generator.detokenize([int(logits.argmax())])
        assert answer.prompt_tokens == len(more)
    with Generator(tiny_opt, hh=8, n_ctx=100, snapshot_bytes=first.nbytes) as generator:
        kept = generator.read(text)
        generator.read("Another text")  # replaces it in the cache
        assert generator.read(text) is not kept


def test_invalid_snapshot_files(tiny_opt: Path, tmp_path: Path) -> None:
    with Generator(tiny_opt, n_ctx=50) as generator:
        with pytest.raises(FileNotFoundError):
            generator.load(tmp_path / "none")
        with pytest.raises(ValueError, match=r"tiny-opt.gguf: this is no snapshot"):
            generator.load(tiny_opt)
        session = open_session(
            _core.Model(tiny_opt, device="cpu", threads=1), Policy.full(), n_ctx=50, n_batch=9
        )
        for note in ("[", "{]", "\udc80".encode("utf-8", "surrogatepass").decode("latin-1")):
            (tmp_path / "a").write_bytes(session.save(0, [], note))
            with pytest.raises(ValueError, match="not saved by h2o_cpp"):
                generator.load(tmp_path / "a")


def version_2(snapshot: bytes, note: bytes) -> bytes:
    """A session's snapshot without a note, in the format of version 2 with this note."""
    n_tokens = int.from_bytes(snapshot[36:44], "little")
    offset = 44 + 4 * n_tokens
    assert snapshot[offset : offset + 8] == bytes(8)  # no note
    n_read, rest = snapshot[offset + 8 : offset + 12], snapshot[offset + 12 :]
    n_logits = int.from_bytes(rest[:8], "little")
    assert rest[8 + 4 * n_logits :][:24] == bytes(24)  # no random state, no held text
    body = snapshot[28 : 44 + 4 * n_tokens] + len(note).to_bytes(8, "little") + note + n_read
    body += rest[: 8 + 4 * n_logits] + rest[8 + 4 * n_logits + 24 :]
    return b"h2o snap" + struct.pack("<IQQ", 2, len(body), checksum(body)) + body


def test_snapshots_of_version_2(tiny_opt: Path) -> None:
    with Generator(tiny_opt, hh=20, n_ctx=100, threads=1) as generator:
        stream = generator.stream("The old man", max_tokens=30, seed=5, ignore_eos=True)
        for _ in itertools.islice(stream, 6):
            pass
        new = stream.save()
        assert new.random_state is not None
        rest = "".join(stream)
        state = new.data.index(new.random_state.encode())
        n = len(new.random_state)
        without_state = sealed(new.data[: state - 8] + bytes(8) + new.data[state + n :])
        note = f'{{"random_state": "{new.random_state}", "note": [1, "a"]}}'
        old = Snapshot.of(version_2(without_state, note.encode()))
        assert (old.note, old.random_state, old.tokens) == ([1, "a"], new.random_state, new.tokens)
        for snapshot in (new, old):
            restored = generator.stream("", after=snapshot, max_tokens=30 - 6, ignore_eos=True)
            assert "".join(restored).startswith(rest[:20])
        for damaged in (b"", b"[]", b"{}", b'{"random_state": "x"'):
            with pytest.raises(ValueError, match=r"the snapshot was not saved by h2o"):
                Snapshot.of(version_2(without_state, damaged))
        invalid = Snapshot.of(version_2(without_state, b'{"random_state": "x", "note": null}'))
        with pytest.raises(ValueError, match="random state is invalid"):
            next(generator.stream("a", after=invalid))


def test_held_back_text_is_saved(tiny_opt: Path) -> None:
    """A snapshot after the beginning of a possible stop string."""
    with Generator(tiny_opt, n_ctx=200, threads=1) as generator:
        options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        expected_text = generator.generate("The old man", max_tokens=40, **options).text
        for at in range(3, 25):
            for stop in (expected_text[at : at + 3] + "\0", expected_text[at : at + 4]):
                stream = generator.stream("The old man", max_tokens=40, stop=stop, **options)
                expected = "".join(stream)
                for n in range(1, 8):
                    stream = generator.stream("The old man", max_tokens=40, stop=stop, **options)
                    first = "".join(itertools.islice(stream, n))
                    n_tokens = len(stream.tokens)
                    if stream.finish_reason is not None:
                        break
                    snapshot = stream.save()
                    restored = generator.stream(
                        "", after=snapshot, max_tokens=40 - n_tokens, stop=stop, **options
                    )
                    assert first + "".join(restored) == expected


# ---- Conversations ----


def test_forks_are_independent(tiny_opt: Path, tmp_path: Path) -> None:
    with Generator(tiny_opt, hh=40, n_ctx=400) as generator:
        options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}

        def say(chat: Chat, text: str) -> str:
            return "".join(chat.say(text, **options))  # type: ignore[arg-type]

        chat = Chat(generator, system="Be brief.", template=TEMPLATE)
        with pytest.raises(RuntimeError, match="has not begun"):
            chat.fork()
        say(chat, "Who are you?")
        with pytest.raises(RuntimeError, match="has moved to other options"):
            chat.moved(generator).fork()
        fork = chat.fork()
        chat.save(tmp_path / "chat")
        alone = [say(chat, "And then?"), say(chat, "Why?")]
        assert [say(fork, "And then?"), say(fork, "Why?")] == alone
        assert fork.messages == chat.messages
        loaded = Chat.load(generator, tmp_path / "chat", template=TEMPLATE)
        assert loaded.messages == chat.messages[:3]
        restored = loaded.fork()
        assert [say(loaded, "And then?"), say(loaded, "Why?")] == alone
        assert say(restored, "Something else?") != alone[0]
        assert restored.messages[:3] == chat.messages[:3]
        generator.generate("Once", max_tokens=2)
        with pytest.raises(RuntimeError, match="does not hold"):
            chat.fork()
        generator.save(tmp_path / "text")
        with pytest.raises(ValueError, match="has no conversation"):
            Chat.load(generator, tmp_path / "text", template=TEMPLATE)


def test_system_prompt_is_read_once(tiny_opt: Path) -> None:
    system = "You are an old sailor who tells stories of the sea. " * 5
    with Generator(tiny_opt, hh=40, n_ctx=400) as generator:
        first = Chat(generator, system=system, template=TEMPLATE).say("Hello", max_tokens=3)
        list(first)
        second = Chat(generator, system=system, template=TEMPLATE).say("Who?", max_tokens=3)
        list(second)
        n_system = len(generator.tokenize(system))
        assert first.prompt_tokens < 20 < n_system
        assert second.prompt_tokens < 20
        assert second.history[: n_system // 2] == first.history[: n_system // 2]
