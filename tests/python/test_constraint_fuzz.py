"""Random grammars of up to 200 KB: they work or raise, and the next output works.

H2O_FUZZ_CONSTRAINTS=10000 tries more of them; the seeds continue where a run of fewer ends.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.grammars import processes, worker
from support.needs import needs

pytest.importorskip("llguidance", reason="grammars need llguidance")
pytestmark = needs("fork()", processes.CAN_ISOLATE)

N_CASES = int(os.environ.get("H2O_FUZZ_CONSTRAINTS", "60"))
MAX_SIZE = 200_000

ATOMS = [
    "a",
    "[a-z]",
    "[^x]",
    ".",
    "\\d",
    "\\w",
    "\\p{L}",
    "é",
    "😀",
    "\\x00",
    "(?:)",
    "a|b",
    "^",
    "$",
]
REPEATS = ["", "", "*", "+", "?", "{3}", "{2,}", "{0,9}", "{1000}", "{0,100000}", "*?", "**"]
NAMES = ["start", "root", "x", "y", "z1", "X", "Y", "ws"]


def regex(rng: random.Random, depth: int = 0) -> str:
    """A regular expression, sometimes an invalid one."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        if depth < 6 and rng.random() < 0.3:
            parts.append(f"({regex(rng, depth + 1)})" + rng.choice(REPEATS))
        else:
            parts.append(rng.choice(ATOMS) + rng.choice(REPEATS))
    return rng.choice(["", "|"]).join(parts)


def lark(rng: random.Random) -> str:
    """Rules in llguidance's Lark."""

    def term() -> str:
        kind = rng.randrange(6)
        if kind == 0:
            return json.dumps(rng.choice(["a", "ab", "é", '"', "\n"]))
        if kind == 1:
            return f"/{regex(rng)}/"
        if kind == 2:
            return f"%json {json.dumps(schema(rng))}"
        return rng.choice(NAMES) + rng.choice(["", "", "*", "+", "?", "{2,5}"])

    def body() -> str:
        return rng.choice([" ", " | "]).join(term() for _ in range(rng.randint(1, 5)))

    return "".join(f"{name}: {body()}\n" for name in rng.sample(NAMES, rng.randint(1, 8)))


def gbnf(rng: random.Random) -> str:
    """Rules in llama.cpp's GBNF."""

    def term(depth: int = 0) -> str:
        if depth < 5 and rng.random() < 0.3:
            return f"({term(depth + 1)} {term(depth + 1)})" + rng.choice(REPEATS[:7])
        found = rng.choice(['"a"', "[a-z]", "[^\\n]", ".", "<[5]>", "é", *NAMES[:5]])
        return found + rng.choice(REPEATS[:7])

    def body() -> str:
        return rng.choice([" ", " | "]).join(term() for _ in range(rng.randint(1, 5)))

    return "".join(f"{name} ::= {body()}\n" for name in rng.sample(NAMES[1:5], rng.randint(1, 4)))


def schema(rng: random.Random, depth: int = 0) -> Any:
    """A JSON Schema, sometimes an unsatisfiable or invalid one."""
    kind = rng.randrange(9 if depth < 4 else 5)
    if kind == 0:
        return rng.choice([True, False, {}, {"type": "null"}, {"type": "nope"}])
    if kind == 1:
        return {"type": "string", "pattern": regex(rng)}
    if kind == 2:
        low = rng.randint(-1000, 10**9)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(-2, 10**12)}
    if kind == 3:
        return {
            "enum": [rng.choice([1, "a", None, [], {"a": 1.5}]) for _ in range(rng.randint(0, 9))]
        }
    if kind == 4:
        return {"$ref": rng.choice(["#", "#/$defs/a", "#/$defs/b", "#/none", "http://a.test/"])}
    if kind == 5:
        names = [f"p{rng.randrange(20)}" for _ in range(rng.randint(0, 6))]
        found = {name: schema(rng, depth + 1) for name in names}
        return {"type": "object", "properties": found, "required": names[:2]}
    if kind == 6:
        most = rng.choice([0, 3, 1000, 10**7])
        return {
            "type": "array",
            "items": schema(rng, depth + 1),
            "minItems": most,
            "maxItems": most,
        }
    if kind == 7:
        combined = rng.choice(["anyOf", "allOf", "oneOf"])
        return {combined: [schema(rng, depth + 1) for _ in range(rng.randint(0, 4))]}
    definitions = {name: schema(rng, depth + 1) for name in "ab"}
    return {"$ref": "#/$defs/a", "$defs": definitions}


def grown(rng: random.Random, text: str) -> str:
    """The text, sometimes repeated, cut and changed, with at most MAX_SIZE characters."""
    if rng.random() < 0.3:
        text = (text + rng.choice(["", "\n", "|", " "])) * rng.choice([2, 30, 3000])
    text = text[: rng.choice([MAX_SIZE, MAX_SIZE, len(text) // 2 + 1])][:MAX_SIZE]
    for _ in range(rng.choice([0, 0, 1, 5])):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice("()[]{}|*+?\\/\"'\n:^$\x00é") + text[at + rng.randint(0, 3) :]
    return text


def random_options(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(5)
    if kind == 0:
        return {"regex": grown(rng, regex(rng))}
    if kind == 1:
        return {"grammar": grown(rng, lark(rng))}
    if kind == 2:
        return {"grammar": grown(rng, gbnf(rng))}
    if kind == 3:
        return {"schema": schema(rng)}
    n = rng.choice([1, 10, 1000])
    return {"choice": [grown(rng, rng.choice(ATOMS))[:100] for _ in range(n)]}


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Iterator[Generator]:
    with pytest.MonkeyPatch.context() as patch, Generator(tiny_opt, threads=1, hh=60) as generator:
        patch.setattr(worker, "COMPILE_SECONDS", 0.3)
        yield generator


def test_random_constraints(generator: Generator) -> None:
    n_working = 0
    for seed in range(N_CASES):
        options = random_options(random.Random(seed))
        try:
            result = generator.generate("A", max_tokens=8, seed=seed, **options)
            n_working += result.completion_tokens > 0
        except (ValueError, TimeoutError) as error:
            assert 0 < len(str(error)) < 2000, (seed, options)  # noqa: PT017
            assert "was ended" not in str(error)  # noqa: PT017 - the process of the vocabulary
        if seed % 10 == 0:
            assert generator.generate("A", choice=["yes"], max_tokens=9).text == "yes"
    assert n_working > N_CASES // 10
