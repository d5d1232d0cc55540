"""Constrained outputs: JSON by a schema, a grammar, a regular expression or a choice.

The extra `grammar` (llguidance) computes the allowed tokens, in processes with limits; the sampler
chooses from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from h2o_cpp.arguments import check_str, check_strings, short

if TYPE_CHECKING:
    from h2o_cpp.generation.constraint_process import Constraint, LocalConstraint
    from h2o_cpp.model.tokenizer import Tokenizer

FORMS = ("schema", "grammar", "regex", "choice")  # mutually exclusive options

MAX_BYTES = 1 << 18  # of a schema, a grammar, a regular expression or all choices
MAX_DEPTH = 200  # of brackets within brackets

_STRING = r'"(?:\\.|[^"\\])*"?'
# Text in which brackets are characters, by syntax. One that does not end reaches to the end.
_LITERALS = {
    syntax: re.compile(literal, re.DOTALL)
    for syntax, literal in {
        "schema": _STRING,
        "regex": r"\\.|(?P<class>\[)\^?\]?(?:\\.|[^\[\]\\])*",
        "lark": rf"{_STRING}|//[^\n]*|\#[^\n]*|/(?P<regex>(?:\\.|[^/\\])*)/?",
        "gbnf": rf"{_STRING}|\#[^\n]*|\[(?:\\.|[^\]\\])*\]?",
    }.items()
}


def form_of(options: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The given one of FORMS. Raises ValueError for several, or with `constraint`."""
    given = [name for name in (*FORMS, "constraint") if options.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"give either {given[0]} or {given[1]}, not both")
    if not given or given == ["constraint"]:
        return None
    if options.get("ignore_eos"):
        raise ValueError(f"{given[0]}= determines the end of the output, expected ignore_eos=False")
    return given[0], options[given[0]]


def make_constraint(
    tokenizer: Tokenizer,
    form: str,
    value: Any,
    *,
    around: str | None = None,
    timeout: float | None = None,
) -> Constraint | LocalConstraint:
    """A constraint for one output.

    around: as around_form of Engine.submit.
    timeout: seconds to wait until it is compiled; default: no limit but those of a grammar.

    Raises ValueError if it does not compile or exceeds a limit, TimeoutError if compiling takes too
    long, CompilingError after `timeout`, TypeError, and ImportError without llguidance.
    """
    from h2o_cpp.generation.constraint_process import compiler_of  # imports asyncio

    source = _source(form, value, tokenizer)
    if around is not None:
        source["around"] = around
    for part, syntax in (("text", source["form"]), ("around", "lark")):
        _check_size(form, source.get(part, ""))
        _check_depth(form, source.get(part, ""), syntax)
    try:
        return compiler_of(tokenizer).constraint(source, timeout)
    except ValueError as error:
        raise ValueError(f"{form}: {error}") from None


def prepare_grammars(tokenizer: Tokenizer) -> None:
    """Start what compiles grammars, so that the first one does not wait for it."""
    from h2o_cpp.generation.constraint_process import compiler_of

    with suppress(ImportError, ValueError, OSError):
        compiler_of(tokenizer)


def _source(form: str, value: Any, tokenizer: Tokenizer) -> dict[str, str]:
    """The source that grammars.worker.compile_grammar() compiles."""
    if form == "schema":
        return {"form": "schema", "text": _schema(value)}
    if form == "regex":
        return {"form": "regex", "text": check_str(form, value)}
    return {"form": "lark", "text": _choice(value) if form == "choice" else _lark(value, tokenizer)}


def _lark(grammar: Any, tokenizer: Tokenizer) -> str:
    """A grammar in either form as Lark."""
    from h2o_cpp.generation.gbnf import gbnf_to_lark, is_gbnf  # when first used

    _check_size("grammar", check_str("grammar", grammar))
    if not is_gbnf(grammar):
        return str(grammar)
    _check_depth("grammar", grammar, "gbnf")
    try:
        return gbnf_to_lark(grammar, tokenizer)
    except ValueError as error:
        raise ValueError(f"grammar: {error}") from None


def _check_size(form: str, text: str) -> None:
    n_bytes = len(text.encode(errors="surrogatepass"))
    if n_bytes > MAX_BYTES:
        raise ValueError(f"{form}: {n_bytes} bytes of text, expected at most {MAX_BYTES}")


def _check_depth(form: str, text: str, syntax: str) -> None:
    """Refuse early what would take much stack."""
    if sum(map(text.count, "([{")) <= MAX_DEPTH:  # as in almost all of them
        return
    depth = deepest = 0
    for character in _without_literals(text, syntax):
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(depth - 1, 0)
    if deepest > MAX_DEPTH:
        raise ValueError(
            f"{form}: brackets are nested {deepest} deep, expected at most {MAX_DEPTH}"
        )


def _without_literals(text: str, syntax: str) -> str:
    """The text without what _LITERALS finds, except for the brackets of classes and, in Lark, of
    regular expressions.
    """

    def kept(literal: re.Match[str]) -> str:
        groups = literal.groupdict("")
        return groups.get("class", "") + _without_literals(groups.get("regex", ""), "regex")

    return _LITERALS[syntax].sub(kept, text) if text else ""


def _schema(value: Any) -> str:
    """A schema as JSON text."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"schema is not JSON: {error}") from None
        if not isinstance(value, dict | bool):
            raise ValueError(f"schema is {short(value)}, expected an object, true or false")
    if isinstance(value, bool):
        value = {"allOf": [value]}  # llguidance adds options to it
    if not isinstance(value, Mapping):
        raise TypeError(f"schema={short(value)}, expected a dict, JSON text or a pydantic model")
    from h2o_cpp.reply.json_schema import closed, without_defaults  # when first used

    try:
        return json.dumps(closed(without_defaults(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"schema is not JSON: {error}") from None


def _choice(value: Any) -> str:
    strings = check_strings("choice", value)
    if not strings or not all(strings):
        raise ValueError(f"choice={short(value)}, expected one or more non-empty strings")
    return "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in strings)
