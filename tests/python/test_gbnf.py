"""Grammars in llama.cpp's format (GBNF)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from h2o_cpp.generation.constraint_process import setup_of
from h2o_cpp.generation.grammar import _source, make_constraint
from h2o_cpp.grammars.worker import Vocabulary, compile_grammar
from h2o_cpp.model.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="grammars need llguidance")

JSON = r"""
# llama.cpp's grammars/json.gbnf
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def matches(tokenizer: Tokenizer) -> Callable[[str, str], bool]:
    """Whether a grammar matches a complete text."""
    vocabulary = Vocabulary(*setup_of(tokenizer), tokenizer.core).build()

    def match(grammar: str, text: str) -> bool:
        matcher = compile_grammar(vocabulary, _source("grammar", grammar, tokenizer))
        tokens = _bytes(tokenizer, text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    return match


def _bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each byte."""
    of_byte = {tokenizer.token_bytes(token): token for token in range(tokenizer.n_vocab)}
    return [of_byte[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (r'root ::= "\u00e9\U0001F600\xe9"', ["é😀é"], ["e"]),
        (r'root ::= "\n\t\r\\\"\[\]\-"', ['\n\t\r\\"[]-'], []),
        (r"root ::= [\u00e0-\u00ff\U0001F600]+", ["éÿ", "😀"], ["e", ""]),
        (r"root ::= [^\]\[a-f\\\n-]", ["x", "é", "^", "&"], ["]", "[", "b", "\\", "\n", "-", "xx"]),
        ("root ::= [a&&b~|/.-]+", ["a&~|/.-"], ["c"]),
        ("root ::= [ぁ-ゟ]", ["の"], ["a"]),
        ("root ::= .{2}", ["\n\r", "é\x00"], ["a"]),
        ("root ::= start\nstart ::= [a]", ["a"], ["b"]),
        (
            'root ::= my-rule myRule My_Rule 1r rule_1\nmy-rule ::= "a"\nmyRule ::= "b"\n'
            'My_Rule ::= "c"\n1r ::= "d"\nrule_1 ::= "e"',
            ["abcde"],
            [],
        ),
        ('# c\nroot ::= ( # "x"\n "a" |\n\n "b"\n "#"\n)+ |\n "d" # e\n\n\n', ["ab#a", "d"], ["b"]),
        ('root ::= "a"{2} "b"{2,} "c"{0,2} "d"{1 , 3}', ["aabbd", "aabbbccddd"], ["abbd", "aabd"]),
        ('root ::= "a"{0} "b"? "c"* ("de")+', ["bccdede", "de"], ["ade", "b", "dee"]),
        ('root ::= "ab"{2}+', ["abab", "abababab"], ["ab", "ababab"]),
        ('root ::= "(" ")"? ("(" "a")*', ["(", "()(a"], ["(a"]),
        ("root ::= x\r\nx ::= | [y] x\r\n", ["", "yy"], ["x"]),
        ("root ::= [a]\nroot ::= [b]", ["b"], ["a"]),
        ('root ::= word "x"\nword ::= [a-z]+', ["abx", "xx"], ["x", "ab"]),
        ('root ::= w "bc" | "a" "d"\nw ::= "a" | "ab"', ["abc", "abbc", "ad"], ["abb"]),
        ('root ::= list\nlist ::= "(" (list | [0-9]+)* ")"', ["(12(3)())"], ["(", "1"]),
        (JSON, ['{"a": [1, -2.5e3, true, "\\u00e9 x"]}', "{}"], ["[1]", '{"a"}', '{"\n": 1}']),
    ],
)  # fmt: skip
def test_gbnf_matches(
    matches: Callable[[str, str], bool], grammar: str, yes: list[str], no: list[str]
) -> None:
    assert [text for text in yes if not matches(grammar, text)] == []
    assert [text for text in no if matches(grammar, text)] == []


def test_gbnf_names_tokens(tokenizer: Tokenizer) -> None:
    end = min(tokenizer.end_tokens)
    [a, b] = _bytes(tokenizer, "ab")
    allowed = np.zeros((tokenizer.n_vocab + 31) // 32, np.uint32)

    def first(grammar: str) -> set[int]:
        constraint = make_constraint(tokenizer, "grammar", f"root ::= {grammar} [x]")
        constraint(np.zeros(1, np.int32), allowed)
        return {*np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")).tolist()}

    assert first(f"<[{a}]>") == {a}
    assert first(tokenizer.token_text(end)) == {end}
    assert {a, end, b} & first(f"!<[{a}]>") == {b}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a', "grammar: line 1, at '\"a': expected a string, "),
        ('root ::= "a"\n"b"', "line 2, at '\"b\"': expected NAME ::="),
        ("root ::= x ::= y", "line 1, at 'x ::= y': expected a line break"),
        ("root ::= (", r"expected '\)'"),
        ("root ::= [a])", r"at '\)': expected '\(' before it"),
        ("root ::= | *", r"rule root: expected an item before \*"),
        ("root ::= foo", "grammar: there is no rule 'foo'"),
        ("foo ::= [a]", "grammar: there is no rule 'root'"),
        (r'root ::= "\uD83D"', r"rule root: \\uD83D is not a character"),
        (r'root ::= "\UFFFFFFFF"', r"\\UFFFFFFFF is not a character"),
        (r'root ::= "\q"', "line 1, at "),
        ("root ::= [z-a]", "grammar: .*range"),
        ('root ::= "a"{3,1}', "grammar: .*range"),
        ("root ::= <a b c>", "rule root: <a b c> is not a token"),
        ("root ::= <[99999999999]>", "grammar: "),
        ("root ::= [a]" + "+" * 200, "nested more than 100 times"),
        ("root ::= " + "(" * 5000 + "[a]" + ")" * 5000, "grammar: .*nested"),
        ("root ::= root", "grammar: no text matches it$"),
    ],
)  # fmt: skip
def test_invalid_gbnf_is_rejected(tokenizer: Tokenizer, grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make_constraint(tokenizer, "grammar", grammar)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
