"""A server in a process of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from threading import Thread


def start_server(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[str], int]:
    """The process, when it listens, and its port. Raises RuntimeError if it does not."""
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )  # its log of requests goes to stdout
    assert server.stderr is not None
    log = ""
    for line in server.stderr:
        log += line
        if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
            Thread(target=shutil.copyfileobj, args=(server.stderr, sys.stderr)).start()
            return server, int(found[1])
    raise RuntimeError(f"the server did not start:\n{log}")
