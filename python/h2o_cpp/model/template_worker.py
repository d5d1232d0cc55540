"""The subprocess that renders chat templates with Jinja2, in a sandbox with limits.

python -I -S template_worker.py FOLDERS_OF_JINJA2 MEMORY_BYTES

Imports only marked_text from the package. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import count
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING or __package__:
    from h2o_cpp.model.marked_text import (
        MESSAGE,
        NAME,
        REPLY,
        TEMPLATE,
        VALUE,
        MarkedText,
        checked,
        joined,
        marked,
        runs,
    )
else:
    sys.path.append(os.path.dirname(__file__))
    from marked_text import (
        MESSAGE,
        NAME,
        REPLY,
        TEMPLATE,
        VALUE,
        MarkedText,
        checked,
        joined,
        marked,
        runs,
    )

if TYPE_CHECKING:
    import jinja2

MAX_MESSAGE = 2000  # characters of an error
MAX_CHARACTERS = 1 << 24  # in a rendered conversation

_CPU_SECONDS = 60.0  # per template, in case the parent has died


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request {"source": ..., "variables": {...}, "own": {...}, "origins": [...]}.

    variables: None to compile the template only. own: variables that are the template's text.
    origins: of each message: that of its texts, the runs of its content, or None.

    The answer is {"text": ..., "runs": as for MarkedText.of_runs}. After an error it is {"error":
    message}, or {"error": None} if memory ran out.
    """
    try:
        template = _load(request["source"])
    except MemoryError:
        return {"error": None}
    except Exception as error:  # from jinja2, or from compiling its Python code
        return {"error": f"the chat template is not valid Jinja2: {_message(error)}"}
    if request["variables"] is None:
        return {}
    try:
        text = _render(template, _marked_variables(request))
        return {"text": text, "runs": runs(text)}
    except _TooLongError:
        return {"error": f"the chat template makes more than {MAX_CHARACTERS} characters"}
    except MemoryError:
        return {"error": None}
    except Exception as error:
        return {"error": f"the chat template refuses these messages: {_message(error)}"}


class _TooLongError(Exception):
    pass


def _marked_variables(request: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = request["variables"]["messages"]
    for message, origin in zip(messages, request["origins"], strict=True):
        if isinstance(origin, list):
            message["content"], origin = MarkedText.of_runs(message["content"], origin), None
        keys = {"content"} if origin == REPLY else message.keys() - {"role"}
        for key in keys if origin is not None else ():
            message[key] = _with_origin(message[key], origin)
        message["role"] = _name(message["role"])
    own = {name: MarkedText(text, TEMPLATE) for name, text in request["own"].items()}
    given = {
        name: _name(value) if isinstance(value, str) else value
        for name, value in request["variables"].items()
    }
    return {**own, **given}


def _name(text: str) -> str:
    """A role or variable as a NAME, unless it has more than words."""
    return MarkedText(text, NAME) if re.fullmatch(r"[\w -]+", text) else text


@lru_cache(maxsize=8)
def _load(source: str) -> jinja2.Template:
    return _environment_class()().from_string(source)


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise _TooLongError
    return joined(pieces)


@lru_cache(maxsize=1)
def _environment_class() -> type[jinja2.Environment]:
    from jinja2 import compiler, ext, filters, nodes, pass_eval_context, sandbox
    from markupsafe import Markup

    class Generation(ext.Extension):
        """{% generation %}, which marks the assistant's text for training."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Any) -> Any:
            """Parse the block's content."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Generator(compiler.CodeGenerator):
        """Compiles templates so that their own text is marked."""

        def visit_Const(self, node: nodes.Const, frame: Any) -> None:  # noqa: N802
            if isinstance(node.value, str | list | tuple | dict | set) and not isinstance(
                node.value, Markup
            ):
                self.write(self._own(node.value))
            else:
                super().visit_Const(node, frame)

        def visit_TemplateData(self, node: nodes.TemplateData, frame: Any) -> None:  # noqa: N802
            self.write(self._own(node.data))

        def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
            if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
                super().visit_Concat(node, frame)
                return
            self.write("environment.concat(map(str, (")
            for item in node.nodes:
                self.visit(item, frame)
                self.write(", ")
            self.write(")))")

        def _output_const_repr(self, group: Any) -> str:
            return self._own("".join(map(str, group)))

        def _own(self, value: Any) -> str:
            own: list[Any] = self.environment.own  # type: ignore[attr-defined]
            own.append(_with_origin(value, TEMPLATE))
            return f"environment.own[{len(own) - 1}]"

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        """The environment of Hugging Face transformers, for one template.

        Attributes: `own`, constants in the template's code.
        """

        code_generator_class = Generator
        concat = staticmethod(joined)

        def __init__(self) -> None:
            super().__init__(
                trim_blocks=True,
                lstrip_blocks=True,
                extensions=[ext.loopcontrols, Generation],
            )
            self.own: list[Any] = []
            self.filters |= {"tojson": _to_json, "join": join, "replace": replace}
            self.globals["raise_exception"] = _raise
            self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

        def call(__self, __context: Any, __method: Any, *args: Any, **options: Any) -> Any:  # noqa: N805
            call = super().call
            method = getattr(__method, "__wrapped__", __method)  # jinja2 wraps str.format
            text = getattr(method, "__self__", None)
            if not isinstance(text, str):
                return call(__context, __method, *args, **options)
            if method.__name__ in ("format", "format_map"):
                found = call(__context, __method, *args, **options)
                given = ((), *args) if method.__name__ == "format_map" else (args, options)
                return checked(found, _format_pieces(__self, text, *given))
            if type(text) is str and method.__name__ in ("join", "replace"):
                __method = getattr(MarkedText(text), method.__name__)
            return call(__context, __method, *args, **options)

    @pass_eval_context
    def join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        return filters.do_join(context, value, _marked_unless_escaped(context, d), attribute)

    @pass_eval_context
    def replace(context: Any, s: Any, *args: Any, **options: Any) -> Any:
        return filters.do_replace(context, _marked_unless_escaped(context, s), *args, **options)

    return Environment


def _with_origin(value: Any, origin: int) -> Any:
    """A value whose texts have this origin."""
    if type(value) is str:
        return MarkedText(value, origin)
    if isinstance(value, dict):
        return {_with_origin(k, origin): _with_origin(item, origin) for k, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_with_origin(item, origin) for item in value)
    return value


def _messages_of(value: Any) -> set[int]:
    """The origins of texts in a value that are a message's."""
    if isinstance(value, str):
        return {origin for origin, _ in runs(value) if origin >= MESSAGE}
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return set()
    return set().union(*map(_messages_of, value))


def _marked_unless_escaped(context: Any, value: Any) -> Any:
    return value if context.autoescape else marked(str(value))


def _format_pieces(
    environment: Any, form: str, args: Sequence[Any], options: Mapping[str, Any]
) -> Iterator[str]:
    """Pieces of form.format(*args, **options); not all of them for rare forms."""
    from jinja2.sandbox import SandboxedFormatter

    formatter = SandboxedFormatter(environment)
    origins = {origin for origin, _ in runs(form)}
    origin = min(origins, default=VALUE) if len(origins) == 1 else VALUE
    number = count()
    for literal, field, spec, conversion in formatter.parse(form):
        yield MarkedText(literal, origin)
        if field is None:
            continue
        if "{" in (spec or ""):
            return
        name = field if field and field[0] not in ".[" else f"{next(number)}{field}"
        value, _ = formatter.get_field(name, args, options)
        if conversion:
            value = formatter.convert_field(value, conversion)
        if spec or not isinstance(value, str):
            value = formatter.format_field(value, spec or "")
        yield value


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, **options)
    messages = _messages_of(value)
    return MarkedText(text, messages.pop()) if len(messages) == 1 else text


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _message(error: Exception) -> str:
    return str(error)[:MAX_MESSAGE] or type(error).__name__


def write(file: IO[bytes], message: Any) -> None:
    """Write a message."""
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def read(file: IO[bytes]) -> Any:
    """Read a message. Raises EOFError at the end."""
    line = file.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)


def _limit_memory(more: int) -> None:
    """Limit further memory; not supported on Windows, without effect on macOS."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        with open("/proc/self/statm") as file:  # sanitizers reserve terabytes
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    """Limit the CPU time from now on."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        most = math.ceil(time.process_time() + _CPU_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def main() -> None:
    """Answer requests until the input ends."""
    folders, memory = sys.argv[1:]
    sys.path += json.loads(folders)
    _environment_class()  # import jinja2 before the limits apply
    _limit_memory(int(memory))
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    write(outgoing, {"ready": True})
    try:
        while True:
            request = read(incoming)
            _limit_time()
            write(outgoing, answer(request))
            del request
    except MemoryError:
        sys.exit("there is not enough memory")
    except EOFError:
        pass


if __name__ == "__main__":
    main()
