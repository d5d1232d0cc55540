"""An engine in a subprocess, so that engines take turns and their memory can be measured."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple


class EngineError(RuntimeError):
    """An engine could not be opened or failed."""


class Answer(NamedTuple):
    """The measurements of a request."""

    seconds: list[float]  # per step
    peak_rss_bytes: int  # of the process


def module_environment() -> dict[str, str]:
    """The environment for running a module of this package."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class EngineProcess(AbstractContextManager["EngineProcess"]):
    """A subprocess that runs a module of `engines`."""

    def __init__(self, module: str, options: Mapping[str, Any], *, timeout: float = 1800) -> None:
        """Start the process and load the model.

        timeout: seconds per answer.

        Raises EngineError.
        """
        self._timeout = timeout
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=module_environment(),
        )
        try:
            self.version: str = self._ask(options, "ready")
        except BaseException:
            self.close()
            raise

    def prefill(self, n: int) -> Answer:
        """Reset and read n tokens."""
        return self._measure({"prefill": n}, n_steps=1, n_tokens=n)

    def decode(self, n_context: int, n: int) -> Answer:
        """Decode n tokens one by one after n_context tokens."""
        return self._measure({"decode": [n_context, n]}, n_steps=n, n_tokens=n_context + n)

    def batch(self, n_texts: int, n_prompt: int, n: int) -> Answer:
        """Continue prompts by n tokens each, in one batch; the last token of each is not read."""
        n_tokens = n_texts * (n_prompt + n - 1)
        return self._measure({"batch": [n_texts, n_prompt, n]}, n_steps=1, n_tokens=n_tokens)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # an unread request
                    pipe.close()

    def _measure(self, request: Mapping[str, Any], *, n_steps: int, n_tokens: int) -> Answer:
        answer = self._ask(request, None)
        seconds, tokens = answer["seconds"], answer["tokens"]
        if len(seconds) != n_steps or tokens != n_tokens:
            raise EngineError(
                f"{json.dumps(request)}: {len(seconds)} steps and {tokens} tokens,"
                f" expected {n_steps} and {n_tokens}"
            )
        return Answer(seconds, answer["peak_rss_bytes"])

    def _ask(self, request: Mapping[str, Any], key: str | None) -> Any:
        """The answer, or its value for a key."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, perhaps with a message
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], self._timeout)[0]:
            raise EngineError(f"no answer within {self._timeout:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"the process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer if key is None else answer[key]
