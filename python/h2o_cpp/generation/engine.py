"""Engine: concurrent requests of threads and asyncio tasks, by continuous batching."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from h2o_cpp import _core
from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.completion import Completion
from h2o_cpp.generation.record import Record
from h2o_cpp.generation.request import Pooling, StreamOptions, make_request, show_options
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.generation.stats import EngineStats
from h2o_cpp.model.arguments import INT32_MAX, check_float, check_int
from h2o_cpp.model.policy import Policy, choose_policy
from h2o_cpp.model.runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Unpack

_GROUP = 1  # of an Engine's requests, cancelled with it; the Generator's own are 0


class Engine(Closing):
    """Runs the requests of many threads and asyncio tasks on a Generator's sequences.

    Created by Generator.engine(). It is a context manager and thread-safe. A thread of the core
    runs the requests in the order of submit(), each as soon as a sequence is free. On the CPU, an
    output equals that of Generator.generate() bit for bit.
    """

    def __init__(
        self, runtime: Callable[[], Runtime], seeds: random.Random, *, max_queue: int
    ) -> None:
        """`runtime` keeps the Generator alive."""
        from h2o_cpp.generation.event_loops import EventLoops

        self._generator = runtime
        self._runtime = runtime()
        self._seeds = seeds
        self._max_queue = check_int("max_queue", max_queue, 1)
        self._loops = EventLoops()
        self._closed = False
        self._runtime.engine.set_max_queue(self._max_queue)

    @show_options
    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        hh: float | None = None,
        policy: str | Policy | Sequence[Policy] | None = None,
        after: Snapshot | None = None,
        record: Record | None = None,
        spelled: Sequence[int] = (),
        pooling: Pooling | None = None,
        around_form: str | None = None,
        timeout: float | None = None,
        **options: Unpack[StreamOptions],
    ) -> Completion:
        """Submit a prompt; blocks while the queue is full. Options as for Generator.stream().

        hh, policy: for this request's cache, as in Generator; default: the Generator's. They must
            fit the slots and scores of the Generator's policy.
        record: a new Record that collects data about this sequence.
        spelled: special tokens to include in the text, as h2o_cpp.reply needs.
        pooling: compute the prompt's embedding ("mean" or "last") instead of an output; see
            Completion.embedding.
        around_form: a grammar in llguidance's Lark of the whole output, in which @form is what
            schema, grammar, regex or choice describes; default: that alone.
        timeout: block for at most this many seconds; 0: do not block. Default: no limit.

        Raises ValueError and TypeError as stream() does, queue.Full after `timeout`, and
        RuntimeError if the Engine is closed. If the policy does not fit, reading the Completion
        raises ValueError.
        """
        if timeout is not None and not check_float("timeout", timeout) >= 0:
            raise ValueError(f"timeout={timeout!r}, expected 0 or more seconds")
        state = self._enqueue(
            prompt,
            hh,
            policy,
            record,
            options,
            after=after,
            spelled=spelled,
            pooling=pooling,
            around_form=around_form,
        )
        try:
            admitted = state.wait_admitted(timeout)
        except BaseException:  # KeyboardInterrupt too
            state.cancel()
            raise
        if not admitted:
            state.cancel()
            raise queue.Full(f"the queue is full: {self._max_queue} requests are waiting")
        self._check_open()
        return Completion(self, state, self._loops)

    @show_options
    async def submit_async(
        self,
        prompt: str | Sequence[int],
        *,
        hh: float | None = None,
        policy: str | Policy | Sequence[Policy] | None = None,
        after: Snapshot | None = None,
        record: Record | None = None,
        pooling: Pooling | None = None,
        **options: Unpack[StreamOptions],
    ) -> Completion:
        """As submit(), without blocking the event loop while the queue is full."""
        state = self._enqueue(prompt, hh, policy, record, options, after=after, pooling=pooling)
        try:
            while not state.admitted:
                await self._loops.wait(state)
        except BaseException:  # CancelledError too
            state.cancel()
            raise
        self._check_open()
        return Completion(self, state, self._loops)

    def _enqueue(
        self,
        prompt: str | Sequence[int],
        hh: float | None,
        policy: str | Policy | Sequence[Policy] | None,
        record: Record | None,
        options: StreamOptions,
        **more: Any,
    ) -> _core.Generation:
        if record is not None and not isinstance(record, Record):
            raise TypeError(f"record={record!r}, expected a Record")
        if record is not None and record.used:
            raise ValueError("the record has data of another sequence, expected a new one")
        if hh is not None or policy is not None:
            policy = choose_policy(hh, None, policy, self._runtime.engine.session.n_ctx)
        request = make_request(
            self._runtime, self._seeds, prompt, options, policy=policy, record=record, **more
        )
        self._check_open()
        return request.submit(self._runtime.engine, eager=True, group=_GROUP)

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this Engine is closed")

    @property
    def closed(self) -> bool:
        """Whether close() was called, on the Engine or its Generator."""
        return self._closed or self._runtime.engine.closed

    def stats(self) -> EngineStats:
        """Current state and counters. Does not block."""
        return EngineStats(*self._runtime.engine.stats())

    def close(self) -> None:
        """Cancel all unfinished requests, after the current step."""
        if not self._closed:
            self._closed = True
            self._runtime.engine.cancel_group(_GROUP)
            self._runtime.engine.set_max_queue(INT32_MAX)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # __init__ may have failed
            self.close()
