"""Tokens of a prompt that are never evicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Chat, Generator, Policy
from h2o_cpp.cli import main

N_CTX = 256
BUDGET = 60
GREEDY: Any = {"temperature": 0.0, "ignore_eos": True}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Generator:
    return Generator(tiny_opt, hh=BUDGET, n_ctx=N_CTX, n_batch=16, threads=1, max_sequences=2)


def kept_sets(generator: Generator) -> list[set[int]]:
    """The kept positions of every layer and KV head."""
    stats = generator.stats(layers=True)
    return [
        set(generator.kept(layer, head)[0].tolist())
        for layer in range(stats.n_layers)
        for head in range(len(stats.layers[layer].heads))
    ]


@pytest.mark.parametrize(
    ("protect", "expected"),
    [
        (20, {*range(20)}),
        ("prompt", {*range(40)}),
        ((10, 8), {*range(10), *range(32, 40)}),
        ((0, 5), {*range(35, 40)}),
        ((100, 100), {*range(40)}),  # more than there are
    ],
)
def test_protected_tokens_are_kept(generator: Generator, protect: Any, expected: set[int]) -> None:
    stream = generator.stream([*range(3, 43)], max_tokens=150, protect=protect, **GREEDY)
    for _ in stream:
        pass
    newest = len(stream.history) - 2
    for kept in kept_sets(generator):
        assert expected <= kept
        assert len(kept) == BUDGET
        assert newest in kept


@pytest.mark.parametrize("policy", ["h2o", "mean", "window", "sinks", "contribution"])
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_prompts_longer_than_the_budget(tiny_opt: Path, policy: str, chunk: int) -> None:
    """The end is protected as it arrives; the beginning never leaves."""
    with Generator(
        tiny_opt, hh=BUDGET, policy=policy, n_ctx=N_CTX, n_batch=chunk, threads=1
    ) as generator:
        prompt = [7 * i % 200 + 3 for i in range(180)]
        for _ in generator.stream(prompt, max_tokens=30, protect=(12, 9), **GREEDY):
            pass
        for kept in kept_sets(generator):
            assert {*range(12), *range(171, 180)} <= kept
            assert len(kept) == BUDGET


def test_equals_a_policy_with_these_positions(tiny_opt: Path, generator: Generator) -> None:
    prompt = [5 * i % 200 + 3 for i in range(50)]
    output = generator.generate(prompt, max_tokens=100, protect=(10, 8), **GREEDY)
    # 42 tokens are left of 30 + 30.
    policy = Policy(n_sinks=10, n_heavy=21, n_recent=21, tail=(42, 50))
    with Generator(tiny_opt, policy=policy, n_ctx=N_CTX, n_batch=16, threads=1) as other:
        assert other.generate(prompt, max_tokens=100, **GREEDY).text == output.text
        expected = kept_sets(other)
    for _ in generator.stream(prompt, max_tokens=100, protect=(10, 8), **GREEDY):
        pass
    assert kept_sets(generator) == expected


def test_full_cache_keeps_everything_anyway(tiny_opt: Path) -> None:
    with Generator(tiny_opt, n_ctx=N_CTX, threads=1) as full:
        options: Any = {"max_tokens": 20, **GREEDY}
        plain = full.generate([*range(3, 33)], **options)
        assert full.generate([*range(3, 33)], protect="prompt", **options).text == plain.text


def test_no_room_is_an_error_with_both_numbers(generator: Generator) -> None:
    for protect in ("prompt", 60, (30, 30)):
        with pytest.raises(
            ValueError, match="protect keeps 60 tokens of the prompt, expected fewer than the 60"
        ):
            generator.stream([*range(3, 63)], protect=protect)


@pytest.mark.parametrize(
    "protect",
    ["system", -1, (1, -1), 2.5],
)
def test_invalid_values(generator: Generator, protect: Any) -> None:
    with pytest.raises(ValueError, match="protect"):
        generator.stream("a", protect=protect)


def test_each_sequence_of_an_engine_has_its_own(generator: Generator) -> None:
    prompt = [3 * i % 200 + 3 for i in range(55)]
    protections: list[Any] = [None, 30, "prompt", (5, 20), 0]
    alone = [
        generator.generate(prompt, max_tokens=60, protect=one, **GREEDY).text for one in protections
    ]
    assert len({*alone}) > 2  # it matters
    with generator.engine() as engine:
        running = [
            engine.submit(prompt, max_tokens=60, protect=one, **GREEDY) for one in protections
        ]
        assert [one.result().text for one in running] == alone
    together = generator.generate(
        [prompt] * len(protections),
        each=[{"protect": one} for one in protections],
        max_tokens=60,
        **GREEDY,
    )
    assert [one.text for one in together] == alone


def test_a_snapshot_stays_protected(generator: Generator, tmp_path: Path) -> None:
    system, rest = [*range(3, 33)], [*range(40, 100)]
    expected = generator.generate([*system, *rest], max_tokens=40, protect=30, **GREEDY)
    snapshot = generator.read(system, protect=30)
    snapshot.save(tmp_path / "system.h2o")
    for one in (snapshot, generator.load(tmp_path / "system.h2o")):
        for protect in (None, 30):
            output = generator.generate(rest, after=one, max_tokens=40, protect=protect, **GREEDY)
            assert output.text == expected.text
            assert all({*range(30)} <= kept for kept in kept_sets(generator))
    whole = generator.generate([*system, *rest], max_tokens=40, **GREEDY)
    assert whole.text != expected.text
    assert not all({*range(30)} <= kept for kept in kept_sets(generator))  # not by itself


def test_a_snapshot_of_another_policy_is_refused(generator: Generator, tiny_opt: Path) -> None:
    snapshot = generator.read([*range(3, 33)], protect=(5, 4))
    for policy in (Policy.h2o(31, 29), Policy.window(BUDGET), Policy.h2o(30, 30, 1)):
        with (
            Generator(tiny_opt, policy=policy, n_ctx=N_CTX, threads=1) as other,
            pytest.raises(ValueError, match="another policy: in layer 0 it keeps 5 sinks, 25"),
        ):
            other.generate([5], after=snapshot, max_tokens=1)


def test_chat_keeps_its_system_prompt(tiny_opt: Path) -> None:
    with Generator(
        tiny_opt, hh=BUDGET, n_ctx=N_CTX, n_batch=16, threads=1, positions="original"
    ) as generator:
        chat = Chat(
            generator, system="Talk like the sea does.", template=TEMPLATE, protect="system"
        )
        n_read = []
        for text in ("Who are you?", "And where is your boat?", "What is it that you see?"):
            stream = chat.say(text, max_tokens=25, **GREEDY)
            for _ in stream:
                pass
            n_read.append(stream.prompt_tokens)
        n_system = len(generator.tokenize("[system] Talk like the sea does.\n[user]"))
        assert n_system < BUDGET // 2
        for kept in kept_sets(generator):
            assert {*range(n_system - 1)} <= kept
        assert n_read[2] < len(chat.tokens) // 2  # the cache of the turns before was continued
        with pytest.raises(TypeError, match="protect is an option of Chat"):
            chat.say("x", protect=3)
        with pytest.raises(
            ValueError, match="protect='all', expected 'system', 'prompt', 'auto' or a number"
        ):
            Chat(generator, template=TEMPLATE, protect="all")  # type: ignore[arg-type]


@pytest.mark.parametrize(("budget", "holds"), [(40, True), (20, False)])
def test_chat_protects_a_short_system_prompt(tiny_opt: Path, budget: int, holds: bool) -> None:
    """A change of the budget decides again."""
    options: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": 16, "threads": 1}
    with Generator(tiny_opt, hh=60 - budget, **options) as other:
        chat = Chat(other, system="Talk like the sea.", template=TEMPLATE, protect="auto")
        for _ in chat.say("Who are you?", max_tokens=5, **GREEDY):
            pass
    with Generator(tiny_opt, hh=budget, **options) as generator:
        n_system = len(generator.tokenize("[system] Talk like the sea.\n[user]"))
        assert 10 < n_system <= 20
        for _ in chat.moved(generator).say("And then?", max_tokens=60, **GREEDY):
            pass
        assert all({*range(n_system - 1)} <= kept for kept in kept_sets(generator)) == holds


def test_chat_protects_what_it_began_with(tiny_opt: Path, tmp_path: Path) -> None:
    """A message that was refused counts for nothing; a loaded chat goes on as it was."""
    with Generator(
        tiny_opt, hh=BUDGET, n_ctx=N_CTX, n_batch=16, threads=1, positions="original"
    ) as generator:
        chat = Chat(generator, system="Be brief.", template=TEMPLATE, protect="prompt")
        with pytest.raises(ValueError, match="protect keeps"):
            chat.say("word " * 60, max_tokens=5, **GREEDY)
        for _ in chat.say("Who are you?", max_tokens=90, **GREEDY):
            pass
        n_prompt = len(generator.tokenize("[system] Be brief.\n[user] Who are you?\n[assistant] "))
        assert all({*range(n_prompt - 1)} <= kept for kept in kept_sets(generator))
        chat.save(tmp_path / "chat.h2o")
        for _ in chat.say("And then?", max_tokens=40, **GREEDY):
            pass
        assert all({*range(n_prompt - 1)} <= kept for kept in kept_sets(generator))
        path = tmp_path / "chat.h2o"
        loaded = Chat.load(generator, path, template=TEMPLATE, protect="prompt")
        for _ in loaded.say("And then?", max_tokens=40, **GREEDY):
            pass
        assert all({*range(n_prompt - 1)} <= kept for kept in kept_sets(generator))
        assert chat.messages == loaded.messages


def test_command_line(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(tiny_opt), "The old man", "--hh", "20", "--temperature", "0"]
    assert main([*words, "--protect", "prompt", "--max-tokens", "5", "-c", "64"]) == 0
    assert main([*words, "--protect", "2,1", "--max-tokens", "5", "-c", "64"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*words, "--protect", "all", "--max-tokens", "5"])
    assert "--protect" in capsys.readouterr().err
