"""Processes with limits, forked by others, which answer messages; `worker.py` is their side."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple
from weakref import finalize

from h2o_cpp.grammars import worker

MAX_SECONDS = 30.0  # of wall time for an answer, on a machine that is busy
SLOW_SECONDS = 0.05  # after which a process gets a lower priority than the model

# Windows has no fork(), and a frozen application no interpreter to start.
CAN_ISOLATE = (
    hasattr(os, "fork")
    and hasattr(socket, "send_fds")
    and bool(sys.executable)
    and not getattr(sys, "frozen", False)
)


def find_llguidance() -> str:
    """The folder that llguidance is imported from. Raises ImportError without it."""
    spec = find_spec("llguidance")
    if spec is None or spec.origin is None:
        raise ImportError("grammars need llguidance: pip install 'h2o-cpp[grammar]'")
    return str(Path(spec.origin).parents[1])


class Worker:
    """The first process of worker.py, which forks the others; it ends with this object.

    Attributes: `forks`, and `pid`.
    """

    def __init__(self, setup: worker.Setup, text: bytes = b"") -> None:
        """text: the bytes of the vocabulary's tokens. Raises OSError."""
        self._owner = os.getpid()
        ours, theirs = socket.socketpair()
        with theirs, TemporaryFile() as file:
            file.write(json.dumps(setup).encode() + b"\n" + text)
            file.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", worker.__file__, str(theirs.fileno())],
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must not stop it
            )
        self.pid = process.pid
        self.forks = Forks(ours)
        finalize(self, _end, self._owner, process, ours)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or belongs to the parent of this process."""
        return self._owner != os.getpid() or self.forks.failed


class Limits(NamedTuple):
    """The limits of a process, for its errors."""

    work: str
    seconds: float
    n_bytes: int


class Forks:
    """The processes that another process forks."""

    def __init__(self, commands: socket.socket) -> None:
        self._commands = commands
        self._owner = os.getpid()
        self._mutex = threading.RLock()  # a finalizer may send a command meanwhile
        self._n = 0
        self.failed = False

    def fork(self, limits: Limits, *, keeps: object = None) -> Process:
        """A new process, which keeps an object alive."""
        ours, theirs = socket.socketpair()
        with theirs, self._mutex:
            self._n += 1
            number = self._n
            try:
                command = worker.COMMAND.pack(worker.FORK, number)
                socket.send_fds(self._commands, [command], [theirs.fileno()])
            except OSError:
                self.failed = True
        return Process(self, number, ours, limits, keeps)

    def tell(self, command: int, number: int) -> None:
        """Send a command about a process."""
        if self._owner != os.getpid():
            return
        with self._mutex, suppress(OSError):
            self._commands.sendall(worker.COMMAND.pack(command, number))

    def status(self, number: int) -> int | None:
        """The wait status of a process that has ended; None if its parent has ended too."""
        with self._mutex:
            self.tell(worker.STATUS, number)
            try:
                answer = worker.receive_exactly(self._commands, worker.STATUS_OF.size)
            except (EOFError, OSError):
                self.failed = True
                return None
        status: int = worker.STATUS_OF.unpack(answer)[0]
        return status


class Process:
    """A process with limits, which answers messages one at a time."""

    def __init__(
        self, forks: Forks, number: int, socket: socket.socket, limits: Limits, keeps: object
    ) -> None:
        self.socket = socket
        self._forks, self._number, self._limits, self._keeps = forks, number, limits, keeps
        self._is_slow = False
        finalize(self, _end_fork, forks, number, socket)  # a cycle would warn of the socket
        self._poll = select.poll()
        self._poll.register(socket, select.POLLIN)

    def send(self, message: bytes) -> None:
        """Send a message; if the process has ended, reading the answer reports it."""
        with suppress(OSError):
            worker.send(self.socket, message)

    def poll(self, seconds: float) -> bool:
        """Whether there is an answer, or will be within this time."""
        return bool(self._poll.poll(1e3 * seconds))

    def check_time(self, asked_at: float) -> None:
        """Lower its priority if it takes long. Raises TimeoutError if it takes too long."""
        seconds = time.monotonic() - asked_at
        if seconds > SLOW_SECONDS and not self._is_slow:
            self._is_slow = True
            self._forks.tell(worker.SLOW, self._number)
        if seconds > MAX_SECONDS:
            self._forks.tell(worker.KILL, self._number)
            raise TimeoutError(f"{self._limits.work} takes more than {MAX_SECONDS:g} s")

    def read_answer(self, n_bytes: int = 0) -> bytes:
        """The content of an answer. Raises ValueError for its error, and as _ending()."""
        try:
            [state] = worker.receive_exactly(self.socket, 1)
            if state == worker.DONE:
                return worker.receive_exactly(self.socket, n_bytes)
            text = worker.receive(self.socket)
        except (EOFError, OSError):
            raise self._ending() from None
        raise ValueError(text.decode(errors="replace"))

    def _ending(self) -> Exception:
        """The error of a process that has ended."""
        status = self._forks.status(self._number)
        if status is None:
            return RuntimeError("the process that computes grammars was ended")
        by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        work, seconds, n_bytes = self._limits
        if by == signal.SIGPROF:
            return TimeoutError(f"{work} takes more than {seconds:g} s of processor time")
        if by == signal.SIGSEGV:
            return ValueError(f"{work} takes more than the stack: its rules nest too deeply")
        return ValueError(f"{work} takes more than {n_bytes >> 20} MiB of memory")


def _end_fork(forks: Forks, number: int, socket: socket.socket) -> None:
    forks.tell(worker.KILL, number)
    socket.close()


def _end(owner: int, process: subprocess.Popen[bytes], commands: socket.socket) -> None:
    commands.close()
    if owner == os.getpid():
        process.kill()
        process.wait()
    else:  # it belongs to the parent
        process.returncode = 0
