"""The thread that computes: it opens models and streams answers, and the window hears of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

from PySide6.QtCore import QObject, Signal

from desktop.conversation import Conversation, has_template
from desktop.look import Looks
from h2o_cpp import Generator, Policy, Stats, Stream

# Between two reports to the window: a tiny model writes thousands of tokens a second, and what it
# costs to show them is taken from a large one.
_SAY_SECONDS = 0.06
_LOOK_SECONDS = 0.2
# Prompt tokens read at a time: "stop" has to wait for one such chunk.
_N_BATCH = 128


@dataclass(frozen=True)
class Opened:
    """A model that is ready."""

    path: Path
    budget: float | None  # what the cache keeps, a fraction of the context; None: all
    chat: bool  # it answers messages; otherwise it continues a text
    policy: Policy | Sequence[Policy]
    stats: Stats


class Worker(QObject):
    """A thread with one model and one conversation, which does what it is asked in turn.

    Methods may be called from the window's thread and return at once, but for close(). Signals
    come from the other thread, so Qt queues them. After each thing asked for comes `done`.
    """

    opened = Signal(object)  # Opened
    began = Signal(str)  # the answer to this message, which is as it stands in the text
    wrote = Signal(str)  # more of the answer
    looked = Signal(object)  # a Look at the cache
    forgot = Signal()  # the conversation
    told = Signal(str)  # a sentence: why something was refused, or an answer ended
    done = Signal()

    def __init__(self, parent: QObject, *, seed: int | None = None) -> None:
        """`seed` makes the answers repeatable."""
        super().__init__(parent)
        self._seed = seed
        self._path: Path | None = None
        self._generator: Generator | None = None
        self._conversation: Conversation | None = None
        self._looks: Looks | None = None
        self._stream: Stream | None = None  # being read
        self._stopping = threading.Event()  # what was asked for last
        self._closing = threading.Event()
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    def open(self, path: Path, budget: float | None) -> None:
        """Open a model; the conversation goes on if it is the one that is open."""
        stopping = self._stopping = threading.Event()
        self._jobs.put(lambda: self._open(path, budget, stopping))

    def say(self, text: str, max_tokens: int) -> None:
        """Have a message answered."""
        stopping = self._stopping = threading.Event()
        self._jobs.put(lambda: self._say(text, max_tokens, stopping))

    def forget(self) -> None:
        """Stop, and forget the conversation."""
        self.stop()
        self._jobs.put(self._forget)

    def stop(self) -> None:
        """End the answer after the token, or the chunk of the prompt, that is being computed."""
        self._stopping.set()
        stream = self._stream
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Stop, and wait for the thread to end; the model is then freed."""
        self._closing.set()
        self.stop()
        self._jobs.put(lambda: None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if self._closing.is_set():
                break
            try:
                job()
            except Exception as error:  # whatever a file or a text did, the thread lives on
                self.told.emit(_sentence(error))
            self.done.emit()
        if self._generator is not None:
            self._generator.close()

    def _open(self, path: Path, budget: float | None, stopping: threading.Event) -> None:
        # The former model stays until this one is ready: a bad file must not cost it.
        generator = Generator(path, hh=budget, n_batch=_N_BATCH, seed=self._seed)
        before = self._conversation if path == self._path else None
        conversation = Conversation(generator, before)
        if self._generator is not None:
            self._generator.close()
        self._path, self._generator, self._conversation = path, generator, conversation
        self._looks = Looks(generator)
        chat = has_template(generator)
        self.opened.emit(Opened(path, budget, chat, generator.policy, generator.stats()))
        if conversation.tokens:
            # To see what this cache keeps of the text. The token that would follow is not wanted.
            again = generator.stream(conversation.tokens, max_tokens=1)
            self._read(again, stopping, say=lambda piece: None)

    def _say(self, text: str, max_tokens: int, stopping: threading.Event) -> None:
        conversation = self._conversation
        if conversation is None:
            raise ValueError("no model is open")
        stream = conversation.say(text, max_tokens=max_tokens)
        self.began.emit(conversation.paragraph(text))
        try:
            self._read(stream, stopping, say=self.wrote.emit)
        finally:
            conversation.heard(text, stream)
        self.told.emit(stream.finish_message)

    def _forget(self) -> None:
        if self._generator is not None:
            self._conversation = Conversation(self._generator)
            self._looks = Looks(self._generator)
        self.forgot.emit()

    def _read(self, stream: Stream, stopping: threading.Event, say: Callable[[str], None]) -> None:
        """Read a stream to its end, and report now and then."""
        self._stream = stream
        try:
            if stopping.is_set():  # it was asked for before there was a stream to close
                stream.close()
            unsaid, said, looked = "", 0.0, 0.0
            for piece in stream:
                unsaid += piece
                now = perf_counter()
                if now - said > _SAY_SECONDS:
                    say(unsaid)
                    unsaid, said = "", now
                if now - looked > _LOOK_SECONDS:
                    self._look(stream)
                    looked = now
            say(unsaid)
            self._look(stream)
        finally:
            self._stream = None

    def _look(self, stream: Stream) -> None:
        if self._looks is not None and stream.began:
            self.looked.emit(self._looks.take(stream.history, stream.tokens_per_second))


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error).partition("\n")[0] or type(error).__name__
