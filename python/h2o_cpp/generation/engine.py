"""Engine: many requests at once, of any threads and asyncio tasks, by continuous batching."""

from __future__ import annotations

import concurrent.futures
import queue
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.completion import Channel, Completion
from h2o_cpp.generation.continuation import Continuation
from h2o_cpp.generation.places import Places
from h2o_cpp.generation.record import Record
from h2o_cpp.generation.request import Request, StreamOptions, make_request
from h2o_cpp.generation.runtime import Runtime
from h2o_cpp.generation.scheduler import Scheduler
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.generation.stats import EngineStats
from h2o_cpp.generation.turn import Turn
from h2o_cpp.model.arguments import check_int
from h2o_cpp.model.policy import Policy, choose_policy

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The sleeping thread looks again after this long: a wake-up may be lost to an interrupt.
_PATIENCE_SECONDS = 1.0


class Engine(Closing):
    """Continues the requests of many threads and tasks at once, with the sequences of a Generator.

    One thread of its own computes while there is work, and sleeps otherwise. Requests wait in a
    queue and begin in the order in which submit() took them, each as soon as a sequence is free,
    while the others go on; see Scheduler. A request gets the tokens that Generator.generate gives
    for it alone, bit for bit.

    Made by Generator.engine(); a context manager. Safe to use from any thread.
    """

    def __init__(
        self, runtime: Callable[[], Runtime], turn: Turn, seeds: random.Random, *, max_queue: int
    ) -> None:
        """`turn` is that of the sequences; it is given back by close()."""
        self._runtime = runtime()
        self._seeds = seeds
        self._worker = _Worker(self._runtime, turn, check_int("max_queue", max_queue, 1))
        self._finalizer = weakref.finalize(self, self._worker.stop)  # at exit of Python, too
        self._worker.start()

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        hh: float | None = None,
        policy: str | Policy | Sequence[Policy] | None = None,
        after: Snapshot | None = None,
        record: Record | None = None,
        timeout: float | None = None,
        **options: Unpack[StreamOptions],
    ) -> Completion:
        """Have a prompt continued; waits while the queue is full. Options as for stream().

        Without max_tokens a text ends at n_ctx, endless or not.

        hh, policy: of this request's cache, as Generator has them; default: the Generator's. It
            must do with the slots, and the scores, that the Generator's policy has.
        record: a new Record, for what is to be written down of this text.
        timeout: wait that many seconds at most, 0: not at all.

        Raises ValueError and TypeError as stream() does, queue.Full when the time is up, and
        RuntimeError when the Engine is closed. A policy that does not fit is a ValueError where the
        pieces are read.
        """
        request = self._request(prompt, hh, policy, after, record, options)
        place = self._worker.places.ask()
        try:
            place.result(timeout)
        except BaseException as error:
            self._worker.places.withdraw(place)
            if isinstance(error, concurrent.futures.TimeoutError):
                raise queue.Full(f"{self._worker.max_queue} requests are waiting") from None
            raise
        return self._enqueue(request)

    async def submit_async(
        self,
        prompt: str | Sequence[int],
        *,
        hh: float | None = None,
        policy: str | Policy | Sequence[Policy] | None = None,
        after: Snapshot | None = None,
        record: Record | None = None,
        **options: Unpack[StreamOptions],
    ) -> Completion:
        """submit() for asyncio: other tasks go on while the queue is full."""
        # Whoever awaits has loaded it; others are spared the time that it takes.
        from asyncio import wrap_future

        request = self._request(prompt, hh, policy, after, record, options)
        place = self._worker.places.ask()
        try:
            await wrap_future(place)
        except BaseException:
            self._worker.places.withdraw(place)
            raise
        return self._enqueue(request)

    def _request(
        self,
        prompt: str | Sequence[int],
        hh: float | None,
        policy: str | Policy | Sequence[Policy] | None,
        after: Snapshot | None,
        record: Record | None,
        options: StreamOptions,
    ) -> Request:
        n_ctx = self._runtime.session.n_ctx
        own = None if hh is None and policy is None else choose_policy(hh, None, policy, n_ctx)
        request = make_request(
            self._runtime, self._seeds, prompt, after=after, policy=own, record=record, **options
        )
        return request.within(n_ctx)

    def _enqueue(self, request: Request) -> Completion:
        channel = Channel(request)
        completion = Completion(self, channel)  # before it is queued: dropping it cancels
        self._worker.enqueue(channel)
        return completion

    @property
    def closed(self) -> bool:
        """Whether it has been closed, or has failed."""
        return self._worker.stopping

    def stats(self) -> EngineStats:
        """What it is doing, and has done. Waits for nothing."""
        scheduler = self._worker.scheduler
        return EngineStats(
            n_sequences=self._runtime.n_sequences,
            n_active=scheduler.n_active,
            n_waiting=self._worker.n_waiting,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            evictions=scheduler.evictions,
        )

    def close(self) -> None:
        """Cancel what has not ended, after the step that is being computed; free the Generator."""
        self._worker.stop()


class _Worker:
    """The thread of an Engine, which does not keep the Engine alive."""

    def __init__(self, runtime: Runtime, turn: Turn, max_queue: int) -> None:
        self.max_queue = max_queue
        self.places = Places(max_queue)
        self._turn = turn
        self.scheduler = Scheduler(runtime)
        self._channels: dict[Continuation, Channel] = {}  # of those who have a sequence
        self._queue: list[Channel] = []
        self._changed = threading.Condition()  # the queue, or:
        self._stopping = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="h2o_cpp.Engine", daemon=True)

    def start(self) -> None:
        """Take the turn, and begin."""
        try:
            self._turn.take(self, _refuse)
            self._thread.start()
        except BaseException:
            self._turn.give_back(self)
            raise

    def enqueue(self, channel: Channel) -> None:
        """Add a request, which has a place. Raises RuntimeError when it is too late."""
        with self._changed:
            if not self._stopping:
                self._queue.append(channel)
                self._changed.notify()
                return
        raise self._closed()

    def stop(self) -> None:
        """End it, and all requests; wait until it has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def stopping(self) -> bool:
        """Whether nothing more is begun."""
        return self._stopping

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                self._admit()
                self._step()
        except Exception as error:  # nothing is known of any sequence after it
            self._error = error
        finally:
            self._end_all()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._stopping or self._queue or self._channels):
                self._changed.wait(_PATIENCE_SECONDS)
            return not self._stopping

    def _admit(self) -> None:
        """Give free sequences to those who wait; forget who has been cancelled."""
        for continuation, channel in [*self._channels.items()]:
            if channel.cancelled:
                self.scheduler.cancel(continuation)
                self._end(continuation)
        with self._changed:
            gone: list[Channel] = []
            wanted: list[Channel] = []
            for channel in self._queue:  # each is asked once: it may be cancelled meanwhile
                (gone if channel.cancelled else wanted).append(channel)
            n_free = self.scheduler.n_free
            first, self._queue = wanted[:n_free], wanted[n_free:]
        for channel in gone:
            channel.end("cancelled")
        for channel in first:
            self._begin(channel)
        for _ in (*gone, *first):
            self.places.give_back()

    def _begin(self, channel: Channel) -> None:
        try:
            continuation = self.scheduler.start(channel.request)
        except Exception as error:  # it is about this one
            channel.end("cancelled", error)
            return
        channel.continuation = continuation
        self._channels[continuation] = channel

    def _step(self) -> None:
        for continuation, piece in self.scheduler.step():
            if piece:
                self._channels[continuation].put(piece, len(continuation.tokens))
            if continuation.finish_reason is not None:
                self._end(continuation)

    def _end(self, continuation: Continuation) -> None:
        reason = continuation.finish_reason or "cancelled"
        self._channels.pop(continuation).end(reason, continuation.error)

    def _end_all(self) -> None:
        with self._changed:
            self._stopping = True
            waiting, self._queue = self._queue, []
        self.places.close(self._closed())
        for channel in (*waiting, *self._channels.values()):
            channel.end("cancelled", None if self._error is None else self._closed())
        try:
            for continuation in self._channels:
                self.scheduler.cancel(continuation)
        finally:
            self._channels.clear()
            self._turn.give_back(self)

    def _closed(self) -> RuntimeError:
        if self._error is None:
            return RuntimeError("this Engine is closed")
        error = RuntimeError(f"this Engine has failed: {self._error}")
        error.__cause__ = self._error
        return error


def _refuse() -> bool:
    raise RuntimeError("an Engine has this Generator; close it first")
