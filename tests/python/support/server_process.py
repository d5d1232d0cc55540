"""A server in a subprocess."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import TextIO


def start_server(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[str], int]:
    """The process and its port, when it listens. Raises RuntimeError."""
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )  # the request log goes to stdout
    assert server.stderr is not None
    log = ""
    for line in server.stderr:
        log += line
        if found := re.search(r"(?:running|listening) on http://127\.0\.0\.1:(\d+)", line):
            Thread(target=_pass_on, args=(server.stderr,)).start()
            return server, int(found[1])
    raise RuntimeError(f"the server did not start:\n{log}")


def _pass_on(log: TextIO) -> None:
    with log:
        for line in log:
            with suppress(ValueError):  # after the end of a test
                sys.stderr.write(line)
