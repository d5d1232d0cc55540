"""Engine: concurrent requests of threads and asyncio tasks, by continuous batching."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from h2o_cpp import _core
from h2o_cpp.arguments import INT32_MAX, check_float, check_int
from h2o_cpp.budget.policy import choose_policy
from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.completion import Completion
from h2o_cpp.generation.record import Record
from h2o_cpp.generation.request import (
    StreamOptions,
    SubmitOptions,
    make_request,
    show_options,
)
from h2o_cpp.generation.stats import EngineStats
from h2o_cpp.model.runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ENGINE_OPTIONS = SubmitOptions.__annotations__.keys() - StreamOptions.__annotations__.keys()
_show_options = partial(show_options, kind=SubmitOptions)
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

    @_show_options
    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        timeout: float | None = None,
        **options: Unpack[SubmitOptions],
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
        replies: (begin, end) of the parts of the prompt that earlier outputs generated. Their
            tokens are read as they were then, evicting after each, so that the prompt continues
            from the stored end of that output.
        timeout: block for at most this many seconds; 0: do not block. Default: no limit.

        Raises ValueError and TypeError as stream() does; after `timeout`, queue.Full, or
        CompilingError for a grammar that is still being compiled; and RuntimeError if the Engine
        is closed. If the policy does not fit, reading the Completion
        raises ValueError.
        """
        if timeout is not None and not check_float("timeout", timeout) >= 0:
            raise ValueError(f"timeout={timeout!r}, expected 0 or more seconds")
        state = self._enqueue(prompt, options, timeout)
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

    @_show_options
    async def submit_async(
        self, prompt: str | Sequence[int], **options: Unpack[SubmitOptions]
    ) -> Completion:
        """Does as submit(), without blocking the event loop while the queue is full or a grammar is
        compiled."""
        from h2o_cpp.generation.constraint_process import CompilingError

        state = None
        while state is None:
            try:
                state = self._enqueue(prompt, options, timeout=0)
            except CompilingError as compiling:
                await compiling.wait()
        try:
            while not state.admitted:
                await self._loops.wait(state)
        except BaseException:  # CancelledError too
            state.cancel()
            raise
        self._check_open()
        return Completion(self, state, self._loops)

    def _enqueue(
        self, prompt: str | Sequence[int], options: SubmitOptions, timeout: float | None
    ) -> _core.Generation:
        output = cast(StreamOptions, {n: o for n, o in options.items() if n not in _ENGINE_OPTIONS})
        record, pooling = options.get("record"), options.get("pooling")
        if record is not None and not isinstance(record, Record):
            raise TypeError(f"record={record!r}, expected a Record")
        if record is not None and record.used:
            raise ValueError("the record has data of another sequence, expected a new one")
        if pooling is not None:
            output = {**output, "max_tokens": None}  # there is no output
        policy, hh = options.get("policy"), options.get("hh")
        if hh is not None or policy is not None:
            policy = choose_policy(hh, None, policy, self._runtime.engine.session.n_ctx)
        request = make_request(
            self._runtime,
            self._seeds,
            prompt,
            output,
            after=options.get("after"),
            around_form=options.get("around_form"),
            timeout=timeout,
        )
        if pooling is not None:
            request = replace(request, pooling=pooling, max_tokens=0)
        request = replace(
            request,
            policy=policy,
            record=record,
            spelled=options.get("spelled", ()),
            replies=options.get("replies", ()),
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
