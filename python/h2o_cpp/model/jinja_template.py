"""Runs chat templates by Jinja2: in a sandbox, for a limited time and to a limited size."""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_CHARACTERS = 1 << 24  # of a rendered conversation
_MAX_SECONDS = 10.0  # that rendering one takes

# What running a template on messages that it does not expect can raise.
_ERRORS = (
    TemplateError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


class JinjaTemplate:
    """A template, with what Hugging Face transformers gives it.

    Attributes: `literals`, the constants in it as text.
    """

    def __init__(self, source: str) -> None:
        """Raises ValueError if it is not Jinja2."""
        try:
            self._environment = _Environment()
            parsed = self._environment.parse(source)
            self.literals = {str(constant.value) for constant in parsed.find_all(nodes.Const)}
            self._template = self._environment.from_string(_with_checks(parsed))
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is not valid Jinja2: {error}") from None

    def render(self, **variables: Any) -> str:
        """The text; raises ValueError if the template refuses, or makes too much or too slowly."""
        pieces: list[str] = []
        size = 0
        self._environment.begin()
        try:
            for piece in self._template.generate(**variables):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_CHARACTERS:
                    raise ValueError(
                        f"the chat template makes more than {_MAX_CHARACTERS} characters"
                    )
        except _ERRORS as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return "".join(pieces)


class _Generation(Extension):
    """{% generation %}, by which templates for training mark what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """What templates run in. It knows how long they have been at it, in each thread."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._deadline = threading.local()

    def begin(self) -> None:
        self._deadline.at = time.monotonic() + _MAX_SECONDS

    def check(self) -> None:
        if time.monotonic() > self._deadline.at:
            raise TemplateError(f"it takes more than {_MAX_SECONDS:g} seconds")


def _with_checks(template: nodes.Template) -> nodes.Template:
    """The template, which looks at the time in each round of a loop and call of a macro."""
    blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *template.find_all(nodes.For),
        *template.find_all(nodes.Macro),
        *template.find_all(nodes.CallBlock),
    ]
    for block in blocks:
        check = nodes.Call(nodes.EnvironmentAttribute("check"), [], [], None, None)
        block.body.insert(0, nodes.ExprStmt(check, lineno=block.lineno))
    return template


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
