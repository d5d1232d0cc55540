"""Rules: a grammar of tool calls in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from h2o_cpp.grammars.checking import Checker
from h2o_cpp.reply.json_schema import closed, loosened, without_defaults

# Calls are on one line, as in templates; small models would continue with spaces.
_SPACE = {"whitespace_pattern": " ?"}
_LENIENT = {**_SPACE, "lenient": True}  # unsupported keywords are ignored

ANY_TEXT = r"[\s\S]*"

_ANY_SPACE = r"/[ \t\n]+/"
_NAME = re.compile(r"[\w.-]+")


class Rules:
    """A grammar under construction. Methods add rules and return references to them.

    Attributes: `tools`, the schemas of the arguments by tool name; `template`, the chat template,
    for families with several forms of calls; `strict`, whether the rules follow all of the schemas,
    rather than what is supported.
    """

    def __init__(
        self,
        tools: Mapping[str, Any],
        *,
        strict: Collection[str] = (),
        template: str,
        token_of: Callable[[str], int | None],
        ends: Collection[int],
        parallel: bool = True,
        spaces: bool = False,
    ) -> None:
        """Start an empty grammar.

        tools: schemas of the arguments by name; None: no arguments.
        strict: tools whose schemas must be supported.
        token_of: the special token of a marker, or None.
        ends: tokens that end an output.
        parallel: whether several calls are allowed.
        spaces: whether any white space, or none, may be where the format has some.

        Raises ValueError for tools that cannot be called.
        """
        self.tools = {name: _arguments(name, schema) for name, schema in tools.items()}
        self.strict = True
        self._strict = strict
        self.template = template
        self._token_of = token_of
        self._ends = ends
        self._parallel = parallel
        self._spaces = spaces
        self._rules: list[str] = []
        self._checker = Checker()

    def text(self, text: str) -> str:
        """Exactly this text."""
        if self._spaces and text.isspace():
            return f"({self.terminal(_ANY_SPACE)})?"
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        """A marker: its special token or its text. Empty if that token ends the output."""
        token = self._token_of(text)
        if token is None:
            return self.text(text)
        return "" if token in self._ends else f"<[{token}]>"

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that follows a self-contained schema. Raises ValueError."""
        schema = {**schema, "x-guidance": _SPACE if self.strict else _LENIENT}
        self.check(schema)
        return self._rule("json", f"%json {json.dumps(schema)}")

    def check(self, schema: Mapping[str, Any]) -> None:
        """Raises ValueError for a schema that is invalid or not supported."""
        check_schema(schema, self._checker)

    def json_call(self, name: str, schema: Mapping[str, Any], arguments: str = "arguments") -> str:
        """{"name": ..., "arguments": {...}}; arguments: the second key.

        Its symbols are those of JSON: the lexer would take one that is longer for the only choice,
        where other JSON is allowed too.
        """
        head = ["{", '"name"', ":", " ", json.dumps(name), ",", " ", f'"{arguments}"', ":", " "]
        return f"{' '.join(map(self.text, head))} {self.json(schema)} {self.text('}')}"

    def up_to(self, marker: str, *others: str) -> str:
        """Text up to and including the marker, without any of the others."""
        return self.matching([ANY_TEXT], marker, *others)

    def matching(self, patterns: Collection[str], marker: str, *others: str) -> str:
        """The same for text that matches all patterns."""
        token = self._token_of(marker)
        if token is None:
            return self.terminal(ends_with(patterns, marker, others))
        found = "|".join(map(escape, (marker, *others)))
        terms = [*(f"/{one}/" for one in patterns), rf"~/{ANY_TEXT}({found}){ANY_TEXT}/"]
        return f"{self.terminal(' & '.join(terms))} <[{token}]>"

    def terminal(self, body: str) -> str:
        """A terminal: a regular expression, or several as in `/a/ & ~/b/`."""
        return self._rule("TERMINAL", body)

    def calls(
        self,
        call: Callable[[str, Mapping[str, Any]], str],
        *,
        begin: str = "",
        between: str = "",
        end: str = "",
    ) -> str:
        """Calls of any tools with `between` in between; call(name, schema) is one call."""
        one = self.one_call(call)
        more = f"({between} {one})*" if self._parallel else ""
        return f"{begin} {one} {more} {end}"

    def one_call(self, call: Callable[[str, Mapping[str, Any]], str]) -> str:
        """A call of any tool. Raises ValueError that names a tool with invalid parameters."""
        calls = [self._call(call, name, schema) for name, schema in self.tools.items()]
        return self._rule("call", " | ".join(calls))

    def _call(
        self,
        call: Callable[[str, Mapping[str, Any]], str],
        name: str,
        schema: Mapping[str, Any],
    ) -> str:
        self.strict = name in self._strict
        try:
            return call(name, schema)
        except ValueError as error:
            for looser in () if self.strict else loosened(schema):
                with suppress(ValueError):
                    return call(name, looser)
            raise ValueError(f"the parameters of tool {name}: {error}") from None

    def grammar(self, start: str) -> str:
        """The complete grammar."""
        return "\n".join([f"start: {start}", *self._rules])

    def _rule(self, kind: str, body: str) -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _arguments(name: str, schema: Any) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are always an object."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"tool name {name!r} is invalid, expected letters, digits, '_', '.' and '-'"
        )
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"the parameters of {name} must have type object")
    return closed({"type": "object", **without_defaults(schema)})


def check_schema(schema: Mapping[str, Any], checker: Checker) -> None:
    """Raises ValueError for an invalid schema; the error of a whole grammar would not say where."""
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"schema is not JSON: {error}") from None
    if found := checker.error(text):
        raise ValueError(found)


def supported(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The closed schema, without what is not supported: unknown keywords, or all patterns."""
    schema = closed(schema)
    lenient = {**schema, "x-guidance": {"lenient": True}}
    checker = Checker()
    for found in (schema, lenient, next(loosened(lenient))):
        with suppress(ValueError):
            check_schema(without_defaults(found), checker)
            return found
    return schema


def ends_with(patterns: Collection[str], marker: str, others: Collection[str]) -> str:
    """A terminal that matches all patterns, then the first marker, without any of `others`."""
    end = escape(marker)
    never = [f"{ANY_TEXT}{escape(one)}{ANY_TEXT}" for one in others]
    never.append(rf"{ANY_TEXT}{end}[\s\S]+")
    found = [*(f"/(?:{one}){end}/" for one in patterns), *(f"~/{one}/" for one in never)]
    return " & ".join(found)


def escape(text: str) -> str:
    """Escape text for a regular expression between slashes."""
    escaped = re.escape(text).replace("\n", "n").replace("/", r"\/")
    return re.sub(r"\\([<>=_ -])", r"\1", escaped)
