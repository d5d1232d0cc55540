"""Grammars that take too much time, memory or stack end with an error, and end nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator
from h2o_cpp.generation import constraint_process
from h2o_cpp.generation.constraint_process import CompilingError, LocalConstraint, compiler_of
from h2o_cpp.generation.grammar import MAX_BYTES, MAX_DEPTH, make_constraint
from h2o_cpp.grammars import processes, worker
from h2o_cpp.grammars.checking import Checker
from h2o_cpp.reply.rules import supported
from support.background import PATIENCE
from support.needs import needs

pytest.importorskip("llguidance", reason="grammars need llguidance")
pytestmark = needs("fork()", processes.CAN_ISOLATE)

ENDLESS = 'start: /a+/ /a+/ "x"\n'  # 22 bytes, whose first mask takes for ever


def chain(n: int) -> str:
    """Rules that each refer to the next one."""
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(n))
    return f'start: r0\n{rules}r{n}: "a"\n'


def references(n: int) -> dict[str, Any]:
    """A schema whose definitions each refer to the next one."""
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{n}": {"type": "null"}}}


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Iterator[Generator]:
    with pytest.MonkeyPatch.context() as patch, Generator(tiny_opt, threads=1) as generator:
        patch.setattr(worker, "COMPILE_SECONDS", 0.5)  # by default, 2
        yield generator


def test_grammar_without_end_is_a_timeout(generator: Generator) -> None:
    with pytest.raises(TimeoutError, match=r"takes more than 0.5 s of processor time$"):
        generator.generate("A", grammar=ENDLESS, max_tokens=3)


@pytest.mark.parametrize(
    "options",
    [
        {"grammar": chain(9000)},
        {"schema": references(4000)},
        {"regex": "a?b*" * 20000},
        {"regex": "(a{1,1000}){1,1000}"},
        {"grammar": "start: " + "x" * 100000 + "\n"},
        {"choice": [f"{'ab' * 50}{i}" for i in range(2000)]},
    ],
    ids=["rules", "references", "regex", "repeats", "name", "choices"],
)
def test_large_grammars_work_or_raise(generator: Generator, options: dict[str, Any]) -> None:
    """The message names what was given, or the limit."""
    message = ""
    try:
        generator.generate("A", max_tokens=2, **options)
    except (ValueError, TimeoutError) as error:
        message = str(error)
    assert len(message) < 1000
    assert generator.generate("A", choice=["yes"], max_tokens=9).text == "yes"


def test_stack_overflow_is_an_error(generator: Generator) -> None:
    with pytest.raises(ValueError, match=r"^grammar: .*nest too deeply$"):
        generator.generate("A", grammar=chain(16000), max_tokens=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a" * (MAX_BYTES + 1)}, f"^regex: {MAX_BYTES + 1} bytes .* at most {MAX_BYTES}"),
        ({"choice": ["é" * MAX_BYTES]}, f"^choice: .* at most {MAX_BYTES}"),
        ({"schema": {"enum": ["a" * MAX_BYTES]}}, "^schema: .* bytes"),
        ({"grammar": "root ::= " + "a" * MAX_BYTES}, "^grammar: .* bytes"),
        ({"regex": "(" * 201 + ")" * 201}, f"^regex: .*201 deep, expected at most {MAX_DEPTH}$"),
        ({"grammar": "root ::= " + "(" * 300 + '"a"' + ")" * 300}, "^grammar: .*300 deep"),
        ({"schema": {"enum": [json.loads("[" * 99 + "]" * 99)]}, "max_tokens": 5}, None),
    ],
    ids=["regex", "choice", "schema", "grammar", "deep regex", "deep grammar", "within"],
)
def test_size_and_depth_are_checked_first(
    generator: Generator, options: dict[str, Any], message: str | None
) -> None:
    if message is None:
        generator.generate("A", **options)
        return
    with pytest.raises(ValueError, match=message):
        generator.stream("A", **options)


@pytest.mark.parametrize("n_bytes", [1000, MAX_BYTES - 100])
@pytest.mark.parametrize("form", ["schema", "regex", "lark", "gbnf", "choice"])
def test_brackets_that_are_text_are_not_nested(
    generator: Generator, form: str, n_bytes: int
) -> None:
    """The long texts may exceed other limits."""
    n = n_bytes // 3
    faces, escaped = ":([{" * (n // 4), r"\(" * n
    forms: dict[str, list[dict[str, Any]]] = {
        "schema": [{"schema": {"enum": [faces]}}, {"schema": {"const": '"\\' + "{" * n}}],
        "regex": [{"regex": escaped}, {"regex": "[((]|[^](]|[]([(a]]" * (n // 20)}],
        "lark": [
            {"grammar": f'start: "{faces}"'},
            {"grammar": f"start: /{escaped}/"},
            {"grammar": "start: " + '/[({"]/ ' * (n // 8)},
            {"grammar": 'start: "a" // ' + "(" * n},
            {"grammar": 'start: "a"\n# ' + "(" * n},
        ],
        "gbnf": [
            {"grammar": f'root ::= "{faces}"'},
            {"grammar": "root ::= " + r'[("\]] ' * (n // 8)},
            {"grammar": 'root ::= "a" # ' + "(" * n},
        ],
        "choice": [{"choice": [faces]}, {"choice": ['"((' * (n // 4)]}],
    }
    for options in forms[form]:
        message = ""
        try:
            generator.generate("A", max_tokens=1, **options)
        except (ValueError, TimeoutError) as error:
            message = str(error)
        assert "nested" not in message
        assert not message or n_bytes > 1000


@pytest.mark.parametrize("n", [201, MAX_BYTES // 3 - 100])
def test_deep_brackets_are_refused_beside_strings(generator: Generator, n: int) -> None:
    many: list[dict[str, Any]] = [
        {"regex": "(" * n + "a" + ")" * n},
        {"regex": r"\[" + "(" * n + "a" + ")" * n},
        {"regex": "[" * n + "a" + "]" * n},
        {"regex": r"\[" * n + "(" * n},
        {"grammar": 'start: "\\"" ' + "(" * n + '"a"' + ")" * n},
        {"grammar": 'start: "//" ' + "(" * n + '"a"' + ")" * n},
        {"grammar": "start: /" + "(" * n + "a" + ")" * n + "/"},
        {"grammar": "start: %json " + '{"items":' * (n // 4 + 201) + "true" + "}" * (n // 4 + 201)},
        {"grammar": 'root ::= "#" ' + "(" * n + '"a"' + ")" * n},
        {"grammar": "root ::= [#] " + "(" * n + '"a"' + ")" * n},
    ]
    for options in many:
        with pytest.raises(ValueError, match=r"deep, expected at most 200|bytes of text"):
            generator.stream("A", **options)


def test_process_of_a_mask_without_end_is_stopped() -> None:
    script = """
import socket
from h2o_cpp.grammars import worker

class Matcher:
    def unsafe_compute_mask_ptr(self, pointer, n_bytes):
        while True:
            pass

worker.TOKEN_SECONDS = 0.1
ours, theirs = socket.socketpair()
worker.send(ours, b"")
worker._serve_masks(Matcher(), 64, theirs)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=PATIENCE)
    assert done.returncode == -signal.SIGPROF


def test_output_whose_process_fails_ends_alone(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    fork = processes.Forks.fork

    def remember(*args: Any, **options: Any) -> Any:
        made.append(fork(*args, **options))
        return made[-1]

    schema: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 99}
    with generator.engine() as engine:
        monkeypatch.setattr(processes.Forks, "fork", remember)
        failing = engine.submit("A", schema=schema, max_tokens=200)
        made[-1].send(b"12")  # not whole tokens: its worker ends
        monkeypatch.undo()
        other = engine.submit("A", choice=["yes", "no"], max_tokens=9)
        assert other.result().text in ("yes", "no")
        with pytest.raises(ValueError, match=r"^the grammar failed: "):
            failing.result()
    assert generator.generate("A", schema=schema, max_tokens=5).completion_tokens == 5


def test_submit_does_not_wait_for_a_grammar(generator: Generator) -> None:
    grammar = f"{ENDLESS}// without a compiled copy\n"
    with generator.engine() as engine:
        with pytest.raises(CompilingError) as raised:
            engine.submit("A", grammar=grammar, timeout=0)
        assert engine.submit("A", max_tokens=2).result().completion_tokens == 2
        assert asyncio.run(raised.value.wait())
        with pytest.raises(TimeoutError, match="processor time"):
            engine.submit("A", grammar=grammar, timeout=0)


def test_submit_async_leaves_the_event_loop_free(generator: Generator) -> None:
    async def both() -> int:
        with generator.engine() as engine:
            task = asyncio.ensure_future(engine.submit_async("A", grammar=f"{ENDLESS}// 2\n"))
            n = 0
            while not task.done():
                n += 1
                await asyncio.sleep(0.01)
            with pytest.raises(TimeoutError, match="processor time"):
                task.result()
            return n

    assert asyncio.run(asyncio.wait_for(both(), PATIENCE)) > 1


def test_waiting_ends_when_nobody_needs_the_grammar(generator: Generator) -> None:
    async def leave() -> bool:
        with pytest.raises(CompilingError) as raised:
            make_constraint(generator.tokenizer, "grammar", f"{ENDLESS}// 3\n", timeout=0)

        async def stays() -> bool:
            return False

        return await raised.value.wait(stays)

    assert not asyncio.run(leave())


def test_processes_that_are_killed_are_replaced(generator: Generator) -> None:
    generator.generate("A", choice=["yes"], max_tokens=3)
    compiler = compiler_of(generator.tokenizer)
    assert isinstance(compiler, constraint_process.Processes)
    os.kill(compiler.worker.pid, signal.SIGKILL)
    with suppress(RuntimeError):  # of the process that was ended, until it is noticed
        generator.generate("A", choice=["no"], max_tokens=30)
    assert generator.generate("A", choice=["no way"], max_tokens=30).text == "no way"
    assert compiler_of(generator.tokenizer) is not compiler


def test_threads_with_grammars_of_every_kind(generator: Generator) -> None:
    """Rejected and slow ones beside others."""
    texts: list[str] = []
    errors: list[str] = []

    def work(number: int) -> None:
        for i in range(3):
            texts.append(generator.generate("A", choice=[f"n{number}{i}"], max_tokens=30).text)
            try:
                generator.generate("A", regex="(" if i else "a?b*" * 9000, max_tokens=3)
            except (ValueError, TimeoutError) as error:
                errors.append(str(error))

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [f"n{number}{i}" for number in range(4) for i in range(3)]
    assert len(errors) >= 8


@pytest.mark.parametrize("form", ["schema", "regex", "choice"])
def test_masks_equal_those_without_processes(
    generator: Generator, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value: Any = {"schema": {"type": "array"}, "regex": "(ab|c)*d", "choice": ["abc", "ad"]}[form]
    tokenizer = generator.tokenizer
    there = make_constraint(tokenizer, form, value)
    monkeypatch.setattr(constraint_process, "CAN_ISOLATE", False)
    monkeypatch.setattr(constraint_process, "_of_tokenizers", {})
    here = make_constraint(tokenizer, form, value)
    assert isinstance(here, LocalConstraint)
    rng = np.random.default_rng(1)
    tokens = [0]
    for _ in range(60):
        masks = np.zeros((2, (tokenizer.n_vocab + 31) // 32), np.uint32)
        for mask, constraint in zip(masks, (there, here), strict=True):
            constraint(np.array(tokens, np.int32), mask)
        assert np.array_equal(*masks)
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        tokens.append(int(rng.choice(allowed)))
        if tokens[-1] in tokenizer.end_tokens:
            break


def test_replaced_model_file_is_noticed(tiny_opt: Path, generator: Generator) -> None:
    setup, text = constraint_process.setup_of(generator.tokenizer)
    other = text[:-1] + bytes([text[-1] ^ 1])
    with pytest.raises(ValueError, match="was replaced"):
        worker.Vocabulary(setup, other, generator.tokenizer.core)


def test_schemas_are_checked_within_limits() -> None:
    """Tools, and schemas that are not strict, are checked so before they are compiled."""
    checker = Checker(seconds=PATIENCE)
    assert "nope" in checker.error('{"type": "nope"}')
    assert checker.error('{"type": "integer"}') == ""
    assert "nest too deeply" in checker.error(json.dumps(references(8000)))
    assert checker.error('{"type": "integer", "minimum": 2}') == ""
    assert supported(references(8000)) is not None
    assert Checker(seconds=0).error('{"type": "nope"}') == ""  # found when it is compiled
