"""The model in a thread of its own: it continues a conversation, and looks at its cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from PySide6.QtCore import QObject, Signal

from h2o_cpp import Generator, Policy, Snapshot, Stats, Stream
from h2o_cpp.cli.token_colors import keeper_shares
from h2o_cpp.model.template_messages import Message
from h2o_cpp.model.visible_pieces import VisiblePieces

REPORT_SECONDS = 0.1  # between reports, as showing them takes time from the model


class Look(NamedTuple):
    """The cache at one moment."""

    stats: Stats
    n_recent: int | None  # newest tokens, kept regardless of scores; None: all
    pieces: Sequence[str]  # printable texts of the tokens that it has seen
    shares: Sequence[float]  # of all KV heads, that keep each of them
    tokens_per_second: float  # of the current output; 0 without one


class Worker(QObject):
    """A thread with one model and one conversation; Qt queues its signals.

    A model without a chat template continues a text: each message begins a new paragraph.
    """

    opened = Signal(object, object)  # path, Stats
    began = Signal(str)  # the message, as it appears in the text
    wrote = Signal(str)  # more of the reply
    looked = Signal(object)  # a Look
    forgot = Signal()  # the conversation was cleared
    done = Signal(str)  # with a task; why it failed, or a reply ended

    def __init__(self, parent: QObject, seed: int | None) -> None:
        super().__init__(parent)
        self._seed, self._path, self._is_closing = seed, Path(), False
        self._generator: Generator | None = None
        self._stream: Stream | None = None  # read last
        self.forget()
        self._stopping = threading.Event()  # stops the last task
        self._jobs: SimpleQueue[Callable[[], str]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    def put(self, job: Callable[..., str], *arguments: Any) -> None:
        """Have a task done in the thread, in order: open, say or forget."""
        stopping = self._stopping = threading.Event()
        self._jobs.put(lambda: job(*arguments, stopping=stopping))

    def stop(self) -> None:
        """End the reply after the current token or prompt chunk."""
        self._stopping.set()
        if (stream := self._stream) is not None:
            stream.close()

    def close(self) -> None:
        """Stop, wait for the thread to end, and free the model."""
        self._is_closing = True
        self.stop()
        self._jobs.put(str)
        self._thread.join()

    def _work(self) -> None:
        while not self._is_closing:
            job = self._jobs.get()
            try:
                sentence = "" if self._is_closing else job()
            except Exception as error:  # the thread must survive any error
                sentence = str(error).partition("\n")[0] or type(error).__name__
            self.done.emit(sentence)
        if self._generator is not None:
            self._generator.close()

    def forget(self, stopping: object = None) -> str:
        """Begin an empty conversation."""
        self._tokens: list[int] = []
        self._messages: list[Message] = []
        self._snapshot: Snapshot | None = None  # the cache after the last reply
        self.forgot.emit()
        return ""

    def open(self, path: Path, budget: float | None, stopping: threading.Event) -> str:
        """Open a model; if its file is the same, the conversation continues."""
        generator = Generator(path, hh=budget, n_batch=128, seed=self._seed)  # stops soon
        if self._generator is not None:
            self._generator.close()
        if path != self._path:
            self.forget()
        self._path, self._generator, self._snapshot = path, generator, None
        self.opened.emit(path, generator.stats())
        if self._tokens:  # what this cache keeps of the text; the next token is discarded
            self._read(generator.stream(self._tokens, max_tokens=1), lambda _: None, stopping)
        return ""

    def say(self, text: str, max_tokens: int, stopping: threading.Event) -> str:
        """Reply to a message."""
        generator = self._generator
        assert generator is not None  # the window sends nothing before a model is open
        shown, tokens = self._new(generator, text)
        tokens = tokens if self._snapshot is not None else [*self._tokens, *tokens]
        stream = generator.stream(tokens, after=self._snapshot, max_tokens=max_tokens)
        self.began.emit(shown)
        self._read(stream, self.wrote.emit, stopping)
        if stream.began:
            self._snapshot = stream.save()
            self._tokens = [*self._snapshot.tokens]
            reply: Message = {"role": "assistant", "content": stream.text}
            self._messages += [{"role": "user", "content": text}, reply]
        return stream.finish_message

    def _new(self, generator: Generator, text: str) -> tuple[str, list[int]]:
        """A message as it appears in the text, and its tokens."""
        begins, tokenizer = not self._tokens, generator.tokenizer
        if tokenizer.chat_template is None:
            text = text if begins or not text else f"\n\n{text}"
            return text, tokenizer.encode(text, add_special=begins, begins=begins)
        template = generator.chat_template()
        message: Message = {"role": "user", "content": text}
        if not self._messages:
            return f"{text}\n", template.tokens([message])
        return f"\n{text}\n", template.prompt_after_reply(self._messages[:-1], [message]).tokens

    def _read(self, stream: Stream, say: Callable[[str], None], stopping: threading.Event) -> None:
        """Read a stream to its end, with a report now and then."""
        self._stream = stream
        if stopping.is_set():  # stopped before there was a stream to close
            stream.close()
        unsaid, reported = "", 0.0
        for piece in stream:
            unsaid += piece
            if (now := perf_counter()) - reported > REPORT_SECONDS:
                say(unsaid)
                self.look(stream)
                unsaid, reported = "", now
        say(unsaid)
        self.look(stream)

    def look(self, stream: Stream) -> None:
        """Report what the heads keep."""
        generator = self._generator
        if generator is None or not stream.began:
            return
        stats, policy = generator.stats(), generator.policy
        kept = np.zeros((stats.n_layers, stats.n_kv_heads, stats.tokens_seen), np.bool_)
        for head in np.ndindex(kept.shape[:2]):
            kept[head][generator.kept(*head)[0]] = True
        texts = VisiblePieces(generator.tokenizer)
        pieces = [texts.push(token) for token in stream.history[: stats.tokens_seen]]
        n_recent = (policy if isinstance(policy, Policy) else policy[0]).n_recent
        shares, speed = keeper_shares(kept), stream.tokens_per_second
        self.looked.emit(Look(stats, n_recent, pieces, shares, speed))
