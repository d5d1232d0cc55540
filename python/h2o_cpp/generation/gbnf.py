"""llama.cpp's grammars (GBNF) in llguidance's format (Lark)."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from h2o_cpp.model.tokenizer import Tokenizer

_ESCAPE = r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[ntr\\"\[\]-])'
_LEXEME = re.compile(
    rf"""
      (?P<space>(?:[ \t]|\#[^\r\n]*)+)
    | (?P<newline>[\r\n]+)
    | (?P<rule>[\w-]+)[ \t]*::=
    | (?P<name>[\w-]+)
    | "(?P<string>(?:{_ESCAPE}|[^\\"])*)"
    | \[(?P<set>\^?(?:{_ESCAPE}|[^\\\]])+)\]
    | (?P<token>!?<(?:\[\d+\]|[^>\r\n]+)>)
    | (?P<repeat>[*+?]|\{{\s*\d+\s*(?:,\s*\d*\s*)?\}})
    | (?P<any>\.)
    | (?P<sign>[()|])
    """,
    re.VERBOSE | re.ASCII,
)
_CHAR = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_RANGE = re.compile(rf"({_CHAR.pattern})(?:-({_CHAR.pattern}))?", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}

_MAX_NESTED = 100

_Rule = list[tuple[str, str]]  # the kinds and texts of its lexemes


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is GBNF; Lark can have ::= only in quotes."""
    return re.search(r"^\s*[\w-]+[ \t]*::=", grammar, re.MULTILINE | re.ASCII) is not None


def gbnf_to_lark(grammar: str, tokenizer: Tokenizer) -> str:
    """The grammar in Lark. Rules without recursion become terminals, which are fast.

    tokenizer: for tokens in the grammar, such as <think>.

    Raises ValueError.
    """
    rules = _parse(grammar)
    terminals = _without_recursion(rules)
    names = {
        name: f"{'TERMINAL' if name in terminals else 'rule'}_{i}" for i, name in enumerate(rules)
    }
    lines = [f"start: {names['root']}"]
    for name, rule in rules.items():
        try:
            lines.append(f"{names[name]}: {_lark_of(rule, names, tokenizer)}")
        except ValueError as error:
            raise ValueError(f"rule {name}: {error}") from None
    return "\n".join(lines)


def _parse(grammar: str) -> dict[str, _Rule]:
    """The rules by name. Raises ValueError."""
    rules: dict[str, _Rule] = {}
    rule: _Rule | None = None  # None: between two rules
    position = n_open = 0
    while position < len(grammar):
        match = _LEXEME.match(grammar, position)
        if match is None:
            raise _error(grammar, position, "a string, a class, a name or an operator")
        kind = str(match.lastgroup)
        text = match[kind]
        if kind == "rule":
            if rule is not None:
                raise _error(grammar, position, "a line break")
            rule = rules[text] = []  # the last definition counts
        elif kind == "newline":
            if rule and rule[-1] != ("sign", "|") and not n_open:
                rule = None
        elif kind != "space":
            if rule is None:
                raise _error(grammar, position, "NAME ::=")
            if kind == "sign":
                n_open += {"(": 1, ")": -1, "|": 0}[text]
                if n_open < 0:
                    raise _error(grammar, position, "'(' before it")
            rule.append((kind, text))
        position = match.end()
    if n_open:
        raise _error(grammar, position, "')'")
    used = (text for rule in rules.values() for kind, text in rule if kind == "name")
    for name in ("root", *used):
        if name not in rules:
            raise ValueError(f"there is no rule {name!r}")
    return rules


def _error(grammar: str, position: int, expected: str) -> ValueError:
    line = grammar.count("\n", 0, position) + 1
    text = grammar[position : position + 20].partition("\n")[0]
    return ValueError(f"line {line}, at {text!r}: expected {expected}")


def _without_recursion(rules: dict[str, _Rule]) -> set[str]:
    """The rules that are regular expressions: without recursion and tokens."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, rule in rules.items():
        needs = {"name": "", "token": name}  # a token is as a recursion
        sorter.add(name, *(needs[kind] or text for kind, text in rule if kind in needs))
    with suppress(CycleError):
        sorter.prepare()
    found: set[str] = set()
    while ready := sorter.get_ready():  # until the rest is in cycles
        found.update(ready)
        sorter.done(*ready)
    return found


def _lark_of(rule: _Rule, names: dict[str, str], tokenizer: Tokenizer) -> str:
    """A rule's right side. Raises ValueError."""
    parts: list[str] = []
    groups: list[int] = []  # where the open ones begin
    last: int | None = None  # where the last item begins
    for kind, text in rule:
        if kind == "repeat":
            if last is None:
                raise ValueError(f"expected an item before {text}")
            parts[last:] = [_repeated(" ".join(parts[last:]), "".join(text.split()))]
            continue
        last = len(parts)
        parts.append(_convert(kind, text, names, tokenizer))
        if kind == "sign":
            if text == "(":
                groups.append(last)
            last = groups.pop() if text == ")" else None
    return " ".join(parts)


def _repeated(item: str, times: str) -> str:
    if item.startswith("(" * _MAX_NESTED):
        raise ValueError(f"groups and operators are nested more than {_MAX_NESTED} times")
    return "()" if times in ("{0}", "{0,0}") else f"({item}{times})"  # Lark has no {0}


def _convert(kind: str, text: str, names: dict[str, str], tokenizer: Tokenizer) -> str:
    """A lexeme in Lark. Raises ValueError."""
    if kind == "name":
        return names[text]
    if kind == "string":
        return json.dumps("".join(map(_char, _CHAR.findall(text))), ensure_ascii=False)
    if kind == "set":
        negation = "^" * text.startswith("^")
        ranges = _RANGE.findall(text, len(negation))
        return f"/[{negation}{''.join(_code(a) + (b and f'-{_code(b)}') for a, b in ranges)}]/"
    if kind == "token":
        return _token(text, tokenizer)
    return "/(?s:.)/" if kind == "any" else text


def _token(text: str, tokenizer: Tokenizer) -> str:
    """<[ID]> or <text>; with ! before it, any other token that does not end the output."""
    name = text.removeprefix("!")
    if name.startswith("<["):
        tokens = [int(name[2:-2])]
    else:
        tokens = tokenizer.encode(name, add_special=False, parse_special=True)
    if len(tokens) != 1:
        raise ValueError(f"{name} is not a token")
    if name == text:
        return f"<[{tokens[0]}]>"
    return f"<[^{','.join(map(str, sorted({*tokens, *tokenizer.end_tokens})))}]>"


def _char(text: str) -> str:
    """A character, which may be escaped. Raises ValueError if it does not exist."""
    if len(text) == 1:
        return text
    if text[1] not in "xuU":
        return _CONTROLS.get(text[1], text[1])
    code = int(text[2:], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"{text} is not a character")
    return chr(code)


def _code(text: str) -> str:
    """A character as a regular expression."""
    return rf"\x{{{ord(_char(text)):x}}}"
