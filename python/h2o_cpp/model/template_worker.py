"""The subprocess that renders chat templates with Jinja2, in a sandbox with limits.

python -I -S template_worker.py FOLDERS_OF_JINJA2 MEMORY_BYTES

Imports nothing from the package. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jinja2

MAX_CHARACTERS = 1 << 24  # in a rendered conversation

_CPU_SECONDS = 60.0  # per template, in case the parent has died


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request {"source": ..., "variables": ...}.

    Without variables: {"literals": [...]}, the template's constants as text. With variables:
    {"text": ...}. After an error: {"error": message}, or {"error": None} if memory ran out.
    """
    try:
        template, literals = _load(request["source"])
    except MemoryError:
        return {"error": None}
    except Exception as error:  # from jinja2, or from compiling its Python code
        return {"error": f"the chat template is not valid Jinja2: {_message(error)}"}
    if request["variables"] is None:
        return {"literals": literals}
    try:
        return {"text": _render(template, request["variables"])}
    except _TooLongError:
        return {"error": f"the chat template makes more than {MAX_CHARACTERS} characters"}
    except MemoryError:
        return {"error": None}
    except Exception as error:
        return {"error": f"the chat template refuses these messages: {_message(error)}"}


class _TooLongError(Exception):
    pass


@lru_cache(maxsize=8)
def _load(source: str) -> tuple[jinja2.Template, list[str]]:
    from jinja2 import nodes

    environment = _environment()
    parsed = environment.parse(source)
    literals = {str(constant.value) for constant in parsed.find_all(nodes.Const)}
    return environment.from_string(source), sorted(literals)


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise _TooLongError
    return "".join(pieces)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """The environment of Hugging Face transformers."""
    from jinja2 import ext, sandbox

    class Generation(ext.Extension):
        """{% generation %}, which marks the assistant's text for training."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Any) -> Any:
            """Parse the block's content."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, Generation]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__


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
    _environment()  # import jinja2 before the limits apply
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
