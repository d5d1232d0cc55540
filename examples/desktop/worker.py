"""The worker thread: opens models, streams replies and reports to the window."""

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

# Minimum time between reports: a tiny model generates thousands of tokens per second, and showing
# them takes time from a large one.
_SAY_SECONDS = 0.06
_LOOK_SECONDS = 0.2
# Prompt tokens per chunk, which delays "stop".
_N_BATCH = 128


@dataclass(frozen=True)
class Opened:
    """A loaded model."""

    path: Path
    budget: float | None  # a fraction of the context; None: the full cache
    chat: bool  # whether it answers messages; otherwise it continues a text
    policy: Policy | Sequence[Policy]
    stats: Stats


class Worker(QObject):
    """A thread with one model and one conversation, which processes tasks in order.

    Methods may be called from the window's thread and return at once, except close(). Qt queues the
    signals, which come from the worker's thread. `done` follows each task.
    """

    opened = Signal(object)  # Opened
    began = Signal(str)  # the message, as it appears in the text
    wrote = Signal(str)  # more of the reply
    looked = Signal(object)  # a Look at the cache
    forgot = Signal()  # the conversation was cleared
    told = Signal(str)  # a sentence: why a task failed or a reply ended
    done = Signal()

    def __init__(self, parent: QObject, *, seed: int | None = None) -> None:
        """`seed` makes the replies reproducible."""
        super().__init__(parent)
        self._seed = seed
        self._path: Path | None = None
        self._generator: Generator | None = None
        self._conversation: Conversation | None = None
        self._looks: Looks | None = None
        self._stream: Stream | None = None  # being read
        self._stopping = threading.Event()  # stops the last task
        self._closing = threading.Event()
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    def open(self, path: Path, budget: float | None) -> None:
        """Open a model; the conversation continues if the file is the same."""
        stopping = self._stopping = threading.Event()
        self._jobs.put(lambda: self._open(path, budget, stopping))

    def say(self, text: str, max_tokens: int) -> None:
        """Reply to a message."""
        stopping = self._stopping = threading.Event()
        self._jobs.put(lambda: self._say(text, max_tokens, stopping))

    def forget(self) -> None:
        """Stop, and clear the conversation."""
        self.stop()
        self._jobs.put(self._forget)

    def stop(self) -> None:
        """End the reply after the current token or prompt chunk."""
        self._stopping.set()
        stream = self._stream
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Stop, wait for the thread to end, and free the model."""
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
            except Exception as error:  # the thread must survive any error
                self.told.emit(_sentence(error))
            self.done.emit()
        if self._generator is not None:
            self._generator.close()

    def _open(self, path: Path, budget: float | None, stopping: threading.Event) -> None:
        # Keep the former model until this one is loaded, in case the file is invalid.
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
            # Shows what this cache keeps of the text. The next token is discarded.
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
        """Read a stream to its end, with periodic reports."""
        self._stream = stream
        try:
            if stopping.is_set():  # stopped before there was a stream to close
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
