"""Rendering chat templates with Jinja2 in a sandbox, in subprocesses with limits."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from h2o_cpp.model import template_worker
from h2o_cpp.model.marked_text import MarkedText

_MAX_SECONDS = 10.0  # to load or render a template
_MAX_MEMORY = 1 << 28  # bytes, where the system supports limits
_TOO_MUCH_MEMORY = f"the chat template takes more than {_MAX_MEMORY >> 20} MiB of memory"
_MAX_IDLE = 2  # processes kept for the next template

# A frozen application has no interpreter to start.
_HAS_INTERPRETER = bool(sys.executable) and not getattr(sys, "frozen", False)


class JinjaTemplate:
    """A template with the environment of Hugging Face transformers."""

    def __init__(self, source: str) -> None:
        """Raises ValueError if it is not valid Jinja2 or takes too long to compile."""
        self._source = source
        _ask({"source": source, "variables": None})

    def render(
        self, variables: dict[str, Any], *, own: dict[str, str], origins: Sequence[Any]
    ) -> MarkedText:
        """Render the template. Raises ValueError if it rejects the variables or exceeds a limit.

        variables: JSON values. own: more variables, which are part of the template's own text.
        origins: of each message: that of its texts, runs() of its content, or None for a VALUE's.
        """
        given = {"variables": variables, "own": own, "origins": [*origins]}
        answer = _ask({"source": self._source, **given})
        return MarkedText.of_runs(answer["text"], answer["runs"])


def _ask(request: dict[str, Any]) -> Any:
    ask = _Worker.take().ask if _HAS_INTERPRETER else template_worker.answer
    answer = ask(request)
    if "error" in answer:
        raise ValueError(answer["error"] or _TOO_MUCH_MEMORY)
    return answer


class _Worker:
    """A process that renders templates, one at a time."""

    _idle: list[_Worker] = []  # noqa: RUF012 - of all threads: taking and giving back is atomic

    def __init__(self) -> None:
        """Start the process. Raises OSError."""
        folders = {str(Path(_origin(name)).parents[1]) for name in ("jinja2", "markupsafe")}
        command = [sys.executable, "-I", "-S", template_worker.__file__]
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [*command, json.dumps(sorted(folders)), str(_MAX_MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not stop it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        try:
            template_worker.read(self._answers)
        except EOFError:
            self.end()
            raise RuntimeError(f"{sys.executable} does not run chat templates") from None
        except BaseException:
            self.end()
            raise

    @classmethod
    def take(cls) -> _Worker:
        """An idle worker, which the caller may use once."""
        while True:
            try:
                worker = cls._idle.pop()
            except IndexError:
                return cls()
            if worker._owner != os.getpid():  # belongs to the parent of a fork
                worker._process.returncode = 0
            elif worker._process.poll() is None:
                return worker
            else:
                worker.end()

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to a request. Raises ValueError if there is none, and then ends the
        process."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(_MAX_SECONDS, stop)
        timer.daemon = True
        answer = None
        try:
            timer.start()
            template_worker.write(self._requests, request)
            answer = template_worker.read(self._answers)
        except (EOFError, OSError):
            slow = f"the chat template takes more than {_MAX_SECONDS:g} seconds"
            raise ValueError(slow if late.is_set() else _TOO_MUCH_MEMORY) from None
        except (TypeError, RecursionError) as error:
            raise ValueError(f"messages are not JSON: {error}") from None
        finally:
            timer.cancel()
            if timer.ident is not None:
                timer.join()  # it may be killing the process
            if answer is None or answer.get("error", "") is None or late.is_set():
                self.end()
            else:
                self._keep()
        return answer

    def _keep(self) -> None:
        self._idle.append(self)
        if len(self._idle) > _MAX_IDLE:  # now, so that other threads count this one
            with suppress(ValueError):  # taken meanwhile
                self._idle.remove(self)
                self.end()

    def end(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with suppress(OSError):  # unread data
                pipe.close()


def _origin(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"chat templates need {module}, which is not installed")
    return spec.origin


@atexit.register
def _end_idle() -> None:
    while _Worker._idle:
        worker = _Worker._idle.pop()
        if worker._owner == os.getpid():
            worker.end()
