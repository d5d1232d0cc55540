"""Commands with a time limit, and a log of their output."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

OK = "ok"
NOT_SUPPORTED = "not supported"  # by the machine; not a failure


@dataclass(frozen=True)
class Command:
    """A command of a step."""

    name: str
    words: list[str]
    seconds: float  # time limit
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """The result of a command: a row of the table."""

    step: str
    name: str
    status: str
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing needs to be done."""
        return self.status in (OK, NOT_SUPPORTED)


class Log:
    """An append-only log. If it cannot be written, that is reported once and the check continues.

    `complaint` is the reason, or "".
    """

    def __init__(self, path: Path) -> None:
        """Keep the file's contents."""
        self._path = path
        self.complaint = ""

    def write(self, output: bytes) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(output)
        except OSError as error:
            if not self.complaint:
                self.complaint = f"{self._path.name}: {error.strerror}"
                print(f"the log is not complete: {self.complaint}", flush=True)


def run(
    step: str, command: Command, log: Log, limit: float, variables: Mapping[str, str], cwd: Path
) -> tuple[Result, str]:
    """Run a command; returns its result and its output.

    The command and its children are killed at the limit and when this process is interrupted.
    """
    if limit <= 0:
        return Result(step, command.name, "no time"), ""
    begin = perf_counter()
    log.write(f"$ {' '.join(command.words)}\n".encode())
    output = bytearray()
    stopped = False
    process = None
    code = None
    # A signal before `process` is set would leave it running.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})

    def prepare() -> None:
        os.setpgrp()  # not a session, so that signals to this process's session reach it
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        try:
            process = subprocess.Popen(
                command.words,
                cwd=cwd,
                env={**os.environ, **variables, **command.variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=prepare,
            )
        except OSError as error:
            log.write(f"{error}\n".encode())
            return Result(step, command.name, "cannot start"), str(error)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        stopped = not _read(process, output, log, begin + limit)
    finally:
        # Its children are in its process group.
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if process.stdout is not None:
                process.stdout.close()
    text = output.decode(errors="replace")
    status = OK if code == 0 else f"exit {code}"
    if stopped:
        status = f"stopped at {limit:.0f} s"
    elif "***Skipped" in text:
        status = "skipped"
    return Result(step, command.name, status, perf_counter() - begin, counts_of(text)), text


def _read(process: subprocess.Popen[bytes], output: bytearray, log: Log, end: float) -> bool:
    """Read the output until the process ends; False at the time limit."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    ended = False
    while True:
        left = end - perf_counter()
        if left <= 0:
            return ended
        # Children may keep the pipe open after the process ends; only read what is available.
        wait = 0.0 if ended else min(left, 0.2)
        if select.select([pipe], [], [], wait)[0]:
            some = os.read(pipe, 1 << 16)
            output += some
            log.write(some)
            if not some:
                try:
                    process.wait(left)
                except subprocess.TimeoutExpired:
                    return False
                return True
        elif ended:
            return True
        elif process.poll() is not None:
            ended = True


def counts_of(log: str) -> dict[str, int]:
    """Passed, failed and skipped tests, from the summary of doctest or pytest at the end of "
    "`log`."""
    doctest = re.findall(r"test cases: +\d+ \| +(\d+) passed \| +(\d+) failed", log)
    if doctest:  # per entry of CTest
        passed, failed = (sum(map(int, column)) for column in zip(*doctest, strict=True))
        return {"passed": passed, "failed": failed}
    summary = re.findall(r"^.*\d+ (?:passed|failed|skipped|errors?).* in [\d.]+s.*$", log, re.M)
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", summary[-1]) if summary else []
    counts: dict[str, int] = {}
    for number, word in found:
        word = "failed" if word == "error" else word
        counts[word] = counts.get(word, 0) + int(number)
    return counts
