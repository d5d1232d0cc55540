"""The processes that compile grammars and compute masks with llguidance, within limits.

python -I -S worker.py SOCKET < SETUP

SETUP is a line of JSON, see `Setup`, then the bytes of all tokens. The first process builds the
vocabulary and forks one process per grammar, which compiles it and forks one process per output,
which computes the masks. So whatever a grammar does, it does to its own process. Imports only the
core from the package. `processes.py` is the other side.
"""

from __future__ import annotations

import array
import gc
import importlib.util
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

if TYPE_CHECKING:
    import llguidance

COMPILE_SECONDS = 2.0  # processor time for a grammar
TOKEN_SECONDS = 1.0  # processor time for a token, at most
FIRST_SECONDS = 2.0  # processor time for an output, to which each token adds MEAN_SECONDS
MEAN_SECONDS = 0.05
COMPILE_BYTES = 1 << 28  # address space, besides the vocabulary's
OUTPUT_BYTES = 1 << 26  # address space, besides the compiled grammar's

FORK, KILL, SLOW, STATUS = b"FKSW"  # commands of a Forker
COMMAND = struct.Struct("=Bi")  # a command and the number of a process
STATUS_OF = struct.Struct("=i")  # a wait status
SIZE = struct.Struct("=I")  # the bytes of a message that follow
FAILED, DONE = 0, 1  # begin an answer; then an error message follows, or what was asked for

_MAX_ERROR = 300  # characters
_LOW_PRIORITY = 19

# White space in JSON, as in llama.cpp; small models would not stop adding it.
_JSON = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}


class Setup(TypedDict):
    """The first process's data; without a core, it has no vocabulary and checks schemas."""

    folders: list[str]  # for imports of llguidance
    core: str  # the extension module
    model: str  # the GGUF file, for its tokenizer
    sizes: list[int]  # bytes of each token
    special: list[int]  # tokens that match no text
    bos: int | None
    ends: list[int]
    compile_seconds: float


class Vocabulary:
    """The tokenizer interface of llguidance."""

    def __init__(self, setup: Setup, text: bytes, tokenizer: Any) -> None:
        """Raises ValueError if `tokenizer`, of the core, has other tokens than `text`."""
        self.special_token_ids = setup["special"]
        self.bos_token_id, self.eos_token_id = setup["bos"], setup["ends"][0]
        self.tokens: list[bytes] = []
        at = 0
        for size in setup["sizes"]:
            self.tokens.append(text[at : at + size])
            at += size
        special = set(self.special_token_ids)
        for token, found in enumerate(self.tokens):
            if token not in special and found != tokenizer.token_bytes(token, begins=False):
                raise ValueError("the model's file was replaced after it was loaded")
        self._ends = setup["ends"]
        self._tokenizer = tokenizer

    def build(self) -> llguidance.LLTokenizer:
        """The vocabulary as llguidance has it."""
        import llguidance

        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self._ends
        )

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text, for texts that the grammar prescribes."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        tokens: list[int] = self._tokenizer.encode(
            text, add_special=False, parse_special=False, begins=False, most=None
        )
        return tokens


def compile_grammar(vocabulary: llguidance.LLTokenizer, source: dict[str, str]) -> Any:
    """A matcher of {"form": ..., "text": ...}; form: schema, regex or lark.

    With "around", this Lark grammar refers to the other one as @form. Raises ValueError.
    """
    from llguidance import LLMatcher

    form, text = source["form"], source["text"]
    if form == "schema":
        grammar = str(LLMatcher.grammar_from_json_schema(text, defaults=_JSON))  # type: ignore[arg-type]
    elif form == "regex":
        grammar = str(LLMatcher.grammar_from_regex(text))
    else:
        grammar = str(LLMatcher.grammar_from_lark(text))
    if "around" in source:
        if grammar.startswith("{"):
            [inner] = json.loads(grammar)["grammars"]
        else:
            inner = {"lark_grammar": grammar}
        outer = {"lark_grammar": source["around"]}
        grammar = json.dumps({"grammars": [outer, {**inner, "name": "form"}]})
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # reports some errors, and fills the lexer's cache
    if matcher.is_error():
        raise ValueError(error_of(matcher))
    return matcher


def error_of(matcher: Any) -> str:
    """A matcher's error in one line, without its state and the rest of a long grammar."""
    text = " ".join(str(matcher.get_error()).partition("<state>")[0].split())
    if text == "NoExtensionBias":
        return "no text matches it"
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


class Forker:
    """Forks processes, each with a socket, and ends them when it is told to."""

    def __init__(self, commands: socket.socket, *, keeps_spare: bool = False) -> None:
        """keeps_spare: a process is forked before it is needed."""
        self._commands = commands
        self._keeps_spare = keeps_spare
        self._spare: tuple[int, socket.socket] | None = None  # a process that waits for its socket
        self._pids: dict[int, int] = {}
        self._ended: dict[int, int] = {}  # number -> wait status

    def run(self, work: Callable[[socket.socket], None]) -> None:
        """Serve commands until the other side closes the socket; `work` runs in the children."""
        gc.freeze()  # so that collections write to fewer shared pages
        while True:
            if self._keeps_spare and self._spare is None:
                self._spare = self._fork_spare(work)
            message, fds, _, _ = socket.recv_fds(self._commands, COMMAND.size, 1)
            if len(message) < COMMAND.size:
                return
            command, number = COMMAND.unpack(message)
            if command == STATUS:
                self._commands.sendall(STATUS_OF.pack(self._status(number)))
                continue
            self._reap()
            if command == FORK:
                self._fork(number, fds[0], work)
            elif number in self._pids:
                with suppress(OSError):
                    if command == KILL:
                        os.kill(self._pids[number], signal.SIGKILL)
                    else:
                        os.setpriority(os.PRIO_PROCESS, self._pids[number], _LOW_PRIORITY)

    def _fork(self, number: int, fd: int, work: Callable[[socket.socket], None]) -> None:
        try:
            if self._spare is not None:
                (pid, spare), self._spare = self._spare, None
                with spare:
                    socket.send_fds(spare, [b"1"], [fd])
            elif (pid := os.fork()) == 0:
                self._be_child(lambda: work(socket.socket(fileno=fd)))
            self._pids[number] = pid
        except OSError:  # the other side finds the socket closed
            pass
        finally:
            os.close(fd)

    def _fork_spare(
        self, work: Callable[[socket.socket], None]
    ) -> tuple[int, socket.socket] | None:
        ours, theirs = socket.socketpair()

        def wait() -> None:
            ours.close()
            with theirs:
                _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
            if fds:
                work(socket.socket(fileno=fds[0]))

        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                return None
            if pid == 0:
                self._be_child(wait)
        return pid, ours

    def _be_child(self, work: Callable[[], None]) -> NoReturn:
        code = 1
        try:
            self._commands.close()
            work()
            code = 0
        except (EOFError, ConnectionError):  # the other side has ended
            code = 0
        finally:
            os._exit(code)

    def _reap(self) -> None:
        for number, pid in [*self._pids.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[number]
                self._ended[number] = status
                while len(self._ended) > 1000:
                    del self._ended[next(iter(self._ended))]

    def _status(self, number: int) -> int:
        """The status of a process that has ended or is about to."""
        if number in self._pids:
            self._ended[number] = os.waitpid(self._pids.pop(number), 0)[1]
        return self._ended.pop(number, 0)


def send(to: socket.socket, message: bytes) -> None:
    """Send a message."""
    to.sendall(SIZE.pack(len(message)) + message)


def receive(source: socket.socket) -> bytes:
    """Receive a message. Raises EOFError at the end."""
    [size] = SIZE.unpack(receive_exactly(source, SIZE.size))
    return receive_exactly(source, size)


def receive_exactly(source: socket.socket, size: int) -> bytes:
    """Receive this many bytes. Raises EOFError at the end."""
    parts = bytearray()
    while len(parts) < size:
        part = source.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _compile(vocabulary: llguidance.LLTokenizer, seconds: float, asker: socket.socket) -> None:
    """Compile a grammar and fork a process for each of its outputs."""
    source = json.loads(receive(asker))
    _limit_memory(COMPILE_BYTES)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        matcher = compile_grammar(vocabulary, source)
    except ValueError as error:
        _refuse(asker, str(error))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    asker.sendall(bytes([DONE]))
    Forker(asker).run(lambda output: _serve_masks(matcher, vocabulary.vocab_size, output))


def schema_error(text: str) -> str:
    """Returns llguidance's objection to a schema, JSON text; empty if it supports it."""
    from llguidance import LLMatcher

    found: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    return " ".join(found.split())


def _check_schemas(seconds: float, asker: socket.socket) -> None:
    """Answer each message, a schema, with its error if it has one."""
    _limit_memory(COMPILE_BYTES)
    while True:
        text = receive(asker).decode()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        error = schema_error(text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if error:
            _refuse(asker, error)
        else:
            asker.sendall(bytes([DONE]))


def _serve_masks(matcher: Any, n_vocab: int, asker: socket.socket) -> None:
    """Answer each message, tokens as int32, with the mask of the tokens that may follow."""
    _limit_memory(OUTPUT_BYTES)
    words = array.array("I", [0]) * (1 + (n_vocab + 31) // 32)
    mask = words.buffer_info()[0] + words.itemsize
    answer = memoryview(words).cast("B")[words.itemsize - 1 :]  # a byte before the mask
    answer[0] = DONE
    allowance = FIRST_SECONDS - time.process_time()
    while True:
        tokens = array.array("i", receive(asker))
        allowance += MEAN_SECONDS
        left = min(allowance - time.process_time(), TOKEN_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, max(left, 1e-3))
        if tokens:
            matcher.consume_tokens(tokens.tolist())
        matcher.unsafe_compute_mask_ptr(mask, len(answer) - 1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if matcher.is_error():
            _refuse(asker, error_of(matcher))
            return
        asker.sendall(answer)


def _refuse(asker: socket.socket, error: str) -> None:
    text = error.encode(errors="replace")
    asker.sendall(bytes([FAILED]) + SIZE.pack(len(text)) + text)


def _limit_memory(more: int) -> None:
    """Limit further address space; without effect where the system has no such limit."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = pages * resource.getpagesize() + more
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _load_core(path: str) -> Any:
    """The core without the package around it, which imports much more."""
    spec = importlib.util.spec_from_file_location("_core", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> NoReturn:
    """Build the vocabulary and fork a process per grammar."""
    [fd] = sys.argv[1:]
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # in case the parent ignores it
    commands = socket.socket(fileno=int(fd))
    try:
        setup: Setup = json.loads(sys.stdin.buffer.readline())
        sys.path += setup["folders"]
        seconds = setup["compile_seconds"]
        if not setup["core"]:
            import llguidance  # noqa: F401 - before limits apply

            Forker(commands, keeps_spare=True).run(partial(_check_schemas, seconds))
            sys.exit(0)
        core = _load_core(setup["core"])
        tokenizer = core.Tokenizer(core.GgufFile(setup["model"]), len(setup["sizes"]))
        vocabulary = Vocabulary(setup, sys.stdin.buffer.read(), tokenizer).build()
        Forker(commands, keeps_spare=True).run(partial(_compile, vocabulary, seconds))
    except (EOFError, ConnectionError):
        pass
    sys.exit(0)


if __name__ == "__main__":
    main()
