"""Output constrained by a schema, a grammar, a regular expression or a choice."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.cli import main
from h2o_cpp.generation.grammar import FORMS
from support.example_schema import SCHEMA, conforms

pytest.importorskip("llguidance", reason="grammars need llguidance")

LONG: dict[str, Any] = {"max_tokens": 300}


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Iterator[Generator]:
    with Generator(tiny_opt, threads=1, hh=60) as generator:
        yield generator


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "temperature": 2.0, "top_k": 0}]
)
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["dict", "text"])
def test_schema_output_conforms(
    generator: Generator, schema: Any, sampling: dict[str, Any]
) -> None:
    result = generator.generate("The old man", schema=schema, **LONG, **sampling)
    assert result.finish_reason == "stop"
    assert conforms(result.text)


@pytest.mark.parametrize("seed", range(8))
def test_properties_that_the_schema_does_not_name_are_not_written(
    generator: Generator, seed: int
) -> None:
    """And integers end: a model without a taste for either fills its context with them."""
    named = {"near": {"type": "boolean"}, "masts": {"type": "integer"}}
    schema = {"type": "object", "properties": named, "required": ["near", "masts"]}
    both = {"allOf": [schema, {"properties": {"sails": {"type": "null"}}, "required": ["sails"]}]}
    for given, names in ((schema, {*named}), (both, {*named, "sails"})):
        result = generator.generate("A ship:", schema=given, seed=seed, temperature=2.0, **LONG)
        assert result.finish_reason == "stop"
        assert json.loads(result.text).keys() == names
        assert abs(json.loads(result.text)["masts"]) < 2**53


@pytest.mark.parametrize("schema", [True, "true", {}])
def test_schema_of_any_json(generator: Generator, schema: Any) -> None:
    result = generator.generate("The old man", schema=schema, seed=1, temperature=2.0, max_tokens=9)
    assert result.text.lstrip()[0] in '{["-0123456789tfn'


def test_unique_items_false_has_no_effect(generator: Generator) -> None:
    items: dict[str, Any] = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"uniqueItems": {**items, "uniqueItems": False}},
        "required": ["uniqueItems"],
        "additionalProperties": False,
    }
    found = json.loads(generator.generate("A", schema=schema, seed=1, max_tokens=60).text)
    assert found == {"uniqueItems": [1, 1]}
    schema = {"const": {"uniqueItems": False}}
    found = json.loads(generator.generate("A", schema=schema, seed=1, max_tokens=60).text)
    assert found == {"uniqueItems": False}


def test_grammar_may_end_in_failure(generator: Generator) -> None:
    with pytest.raises(ValueError, match=r"^the grammar failed: no text matches it$"):
        generator.generate("A", grammar='start: "a" x "b"\nx: x', max_tokens=9)


def test_batched_constraints_equal_separate_ones(generator: Generator) -> None:
    """The batch mixes constrained and unconstrained prompts, each with its own matcher."""
    each: list[Any] = [
        {"schema": SCHEMA, "seed": 1},
        {"seed": 2, "max_tokens": 30},
        {"choice": ["yes", "no"], "seed": 3},
        {"regex": r"[a-c]{3,9}-\d+", "seed": 4, "max_tokens": 40},
        {"schema": SCHEMA, "seed": 5, "temperature": 0},
    ]
    prompts = ["The old man"] * len(each)
    together = generator.generate(prompts, each=each, max_tokens=300)
    alone = [generator.generate("The old man", **{**LONG, **own}) for own in each]
    assert [result.text for result in together] == [result.text for result in alone]
    assert conforms(together[0].text)
    assert conforms(together[4].text)
    assert together[2].text in ("yes", "no")


def test_threads_share_compiled_grammar(generator: Generator) -> None:
    texts: list[str] = []

    def work(seed: int) -> None:
        texts.append(generator.generate("The old man", schema=SCHEMA, seed=seed, **LONG).text)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 6
    assert all(map(conforms, texts))


@pytest.mark.parametrize(
    ("form", "value", "pattern"),
    [
        ("regex", r"\d{3}-[ab]{1,4}", r"\d{3}-[ab]{1,4}"),
        ("choice", ["left", 'to the "right"', "no\\way"], r'left|to the "right"|no\\way'),
        ("grammar", 'root ::= "a" [0-9]{1,3} ("," [xyz]){2}', r"a[0-9]{1,3}(,[xyz]){2}"),
        ("grammar", 'start: "hello " NAME\nNAME: /[A-Z][a-z]{1,4}/', r"hello [A-Z][a-z]{1,4}"),
    ],
    ids=["regex", "choice", "GBNF", "Lark"],
)
def test_output_matches_pattern(generator: Generator, form: str, value: Any, pattern: str) -> None:
    for seed in range(5):
        result = generator.generate("The old man", seed=seed, **{form: value}, **LONG)
        assert result.finish_reason == "stop"
        assert re.fullmatch(pattern, result.text)


def test_max_tokens_truncates_constrained_output(generator: Generator) -> None:
    result = generator.generate("The old man", schema=SCHEMA, seed=1, max_tokens=3)
    assert result.finish_reason == "length"
    assert result.completion_tokens == 3


def test_logit_bias_cannot_violate_constraint(generator: Generator) -> None:
    [token] = generator.tokenize("z", add_special=False)
    result = generator.generate("A", regex="[a-c]{2,5}", logit_bias={token: 1000.0}, **LONG)
    assert re.fullmatch("[a-c]{2,5}", result.text)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"schema": {"type": "nope"}}, ValueError, "^schema: Invalid type: nope$"),
        ({"schema": "{"}, ValueError, "^schema is not JSON"),
        ({"schema": 5}, TypeError, "^schema=5, expected a dict"),
        ({"schema": "[]"}, ValueError, r"^schema is \[\], expected an object, true or false$"),
        ({"schema": "null"}, ValueError, "^schema is None, expected an object"),
        ({"schema": '"a"'}, ValueError, "^schema is 'a', expected an object"),
        ({"schema": False}, ValueError, "^schema: Unsatisfiable"),
        ({"schema": {"$ref": "#"}}, ValueError, "^schema: no text matches it$"),
        ({"grammar": "start: start"}, ValueError, "^grammar: no text matches it$"),
        ({"schema": {"$ref": "http://a.test/b"}}, ValueError, "^schema: Resource"),
        ({"schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, ValueError, "Unsat"),
        ({"regex": "("}, ValueError, "^regex: .*unclosed group"),
        ({"regex": 5}, TypeError, "^regex=5, expected text"),
        ({"grammar": "start: foo"}, ValueError, "^grammar: .*unknown name"),
        ({"grammar": "root ::= foo"}, ValueError, "^grammar: .*foo"),
        ({"choice": []}, ValueError, "^choice="),
        ({"choice": [""]}, ValueError, "^choice="),
        ({"choice": [1]}, TypeError, "^choice="),
        ({"choice": "yes"}, TypeError, "^choice="),
        ({"schema": {}, "regex": "a"}, ValueError, "^give either schema or regex"),
        ({"regex": "a", "constraint": print}, ValueError, "^give either regex or constraint"),
        ({"regex": "a", "ignore_eos": True}, ValueError, "^regex= determines"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_constraints_are_rejected(
    generator: Generator, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generator.stream("A", **options)


def test_deeply_nested_schema_is_rejected(generator: Generator) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="schema"):
        generator.generate("A", schema=schema, max_tokens=2)


def test_grammar_forms_are_stream_options() -> None:
    from h2o_cpp.generation.request import StreamOptions

    assert set(FORMS) <= StreamOptions.__annotations__.keys()


def test_run_command_with_constraints(
    tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    run = ["run", "-m", str(tiny_opt), "The old man", "-n", "300", "--seed", "1"]
    assert main([*run, "--json-schema-file", str(file)]) == 0
    text = capsys.readouterr().out.removeprefix("The old man")
    assert conforms(text)
    assert main([*run, "--json-schema", json.dumps(SCHEMA)]) == 0
    assert capsys.readouterr().out.removeprefix("The old man") == text
    assert main([*run, "--grammar", 'root ::= "ab" "c"+']) == 0
    assert re.fullmatch("abc+", capsys.readouterr().out.removeprefix("The old man").strip())
    assert main([*run, "--grammar", "root ::= foo"]) == 2
    assert "foo" in capsys.readouterr().err


@pytest.mark.parametrize("schema", ["[]", "null", '"a"', "1"])
def test_schema_that_is_no_schema_is_one_line(
    schema: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "A", "-j", schema]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch("error: --json-schema is .*, expected an object, true or false\n", error)
