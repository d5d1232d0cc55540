"""Engine with threads and asyncio tasks: order, back pressure, cancellation, closing."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Completion, Engine, Generator, Policy
from support.background import PATIENCE, PROMPT, Background

FOREVER: dict[str, Any] = {"max_tokens": 10**9, "ignore_eos": True, "seed": 1}
SHORT: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """A deadlock ends the process with a traceback."""
    faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def generator(llama: Path) -> Generator:
    return Generator(llama, hh=12, n_batch=8, max_sequences=2, threads=1)


@pytest.fixture
def single(llama: Path) -> Generator:
    """A Generator with one sequence, which an endless generation occupies."""
    return Generator(llama, hh=12, n_batch=8, max_sequences=1, threads=1)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.001)


def begin(engine: Engine) -> Completion:
    """An endless generation that has started."""
    completion = engine.submit([5, 6], **FOREVER)
    wait_until(lambda: len(completion.tokens) > 0)
    return completion


def idle(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.n_active == stats.n_waiting == 0


class TestThreads:
    def test_concurrent_submit(self, generator: Generator) -> None:
        rng = random.Random(1)
        prompts = [[rng.randrange(3, 61) for _ in range(rng.randint(1, 30))] for _ in range(48)]
        expected = [generator.generate(prompt, seed=3, max_tokens=9).text for prompt in prompts]
        with generator.engine(max_queue=3) as engine:
            barrier = threading.Barrier(16)

            def submit(first: int) -> list[str]:
                barrier.wait(PATIENCE)
                some = prompts[first::16]
                completions = [engine.submit(prompt, seed=3, max_tokens=9) for prompt in some]
                return ["".join(completion) for completion in completions]

            threads = [Background(lambda n=n: submit(n)) for n in range(16)]  # type: ignore[misc]
            for n, thread in enumerate(threads):
                assert thread.result() == expected[n::16]

    def test_requests_begin_in_order_of_arrival(self, single: Generator) -> None:
        with single.engine() as engine:
            first = begin(engine)
            later = [engine.submit([5 + n], **SHORT) for n in range(5)]
            assert [completion.finish_reason for completion in later] == [None] * 5
            first.close()
            for n, completion in enumerate(later):
                completion.result()
                assert [completion.finish_reason for completion in later[:n]] == ["length"] * n

    def test_requests_with_other_policies(self, llama: Path, generator: Generator) -> None:
        policies = [Policy.window(5), Policy.h2o(2, 3), Policy.h2o(6, 6)]
        expected = []
        for policy in policies:
            with Generator(llama, policy=policy, n_batch=8, threads=1) as alone:
                expected.append(alone.generate([7] * 20, **SHORT).text)
        before = generator.generate([7] * 20, **SHORT).text
        with generator.engine() as engine:
            own = [engine.submit([7] * 20, policy=policy, **SHORT) for policy in policies]
            assert [completion.result().text for completion in own] == expected
            tokens = engine.submit([7] * 20, hh=6, **SHORT)
            large = engine.submit([5], hh=14, **SHORT)
            with pytest.raises(ValueError, match="slots"):
                large.result()
            assert tokens.result().finish_reason == "length"
        assert generator.generate([7] * 20, **SHORT).text == before

    def test_submit_validates_arguments(self, generator: Generator) -> None:
        with generator.engine() as engine:
            good = engine.submit([5], **SHORT)
            with pytest.raises(ValueError, match="token 61 is not in the vocabulary"):
                engine.submit([61], **SHORT)
            with pytest.raises(ValueError, match="temperature"):
                engine.submit([5], temperature=-1)
            assert good.result().completion_tokens == 6

    def test_error_is_raised_by_its_request_only(self, generator: Generator) -> None:
        """Other requests of the same batch continue."""
        expected = generator.generate([5, 6], **SHORT).text

        def fail(tokens: Any, mask: Any) -> None:
            raise MemoryError("no more of it")

        with generator.engine() as engine:
            good = engine.submit([5, 6], **SHORT)
            bad = engine.submit([5, 6], constraint=fail, **SHORT)
            with pytest.raises(MemoryError, match="no more of it"):
                bad.result()
            assert (bad.finish_reason, next(bad, None)) == ("cancelled", None)
            assert good.result().text == expected
            assert engine.submit([5, 6], **SHORT).result().text == expected


class TestBackPressure:
    def test_submit_waits_in_order(self, single: Generator) -> None:
        with single.engine(max_queue=2) as engine:
            first = begin(engine)
            queued = [engine.submit([5], **SHORT) for _ in range(2)]
            with pytest.raises(queue.Full, match="2 requests are waiting"):
                engine.submit([5], timeout=0)
            with pytest.raises(queue.Full):
                engine.submit([5], timeout=0.01)
            assert engine.stats().n_waiting == 2
            waiting = Background(lambda: engine.submit([6], **SHORT))
            assert waiting.runs(0.1)
            first.close()
            assert waiting.result().result().finish_reason == "length"
            assert [completion.finish_reason for completion in queued] == ["length"] * 2
            assert engine.submit([5], timeout=0, **SHORT).result().completion_tokens == 6

    def test_cancelled_requests_leave_the_queue(self, single: Generator) -> None:
        with single.engine(max_queue=1) as engine:
            first = begin(engine)
            for _ in range(3):
                dropped = engine.submit([5], **SHORT)
                assert dropped.finish_reason is None
                del dropped
            first.close()

    @pytest.mark.parametrize("n", [0, -1, 1.5])
    def test_max_queue_is_validated(self, generator: Generator, n: Any) -> None:
        with pytest.raises(ValueError, match="max_queue"):
            generator.engine(max_queue=n)
        assert generator.generate([5], **SHORT).completion_tokens == 6


class TestCancelling:
    @pytest.mark.parametrize("how", ["close", "drop", "with", "cycle"])
    def test_cancelling_frees_sequence(self, single: Generator, how: str) -> None:
        with single.engine() as engine:
            completion = begin(engine)
            if how == "close":
                completion.close()
                assert list(completion) == []
                assert completion.finish_reason == "cancelled"
            elif how == "with":
                with completion:
                    next(completion)
                assert completion.result().finish_reason == "cancelled"
            elif how == "cycle":
                cycle: list[Any] = [completion]
                cycle.append(cycle)
                del completion, cycle
                gc.collect()
            else:
                del completion
            assert engine.submit([5], **SHORT).result().finish_reason == "length"
            wait_until(lambda: idle(engine))

    def test_cancelling_from_another_thread(self, single: Generator) -> None:
        with single.engine() as engine:
            completion = begin(engine)
            pieces = Background(lambda: len(list(completion)))
            wait_until(lambda: completion.n_read > 0)
            assert pieces.runs(0.05)
            completion.close()
            assert pieces.result() > 0
            assert completion.finish_reason == "cancelled"

    def test_finished_completion_is_not_cancelled(self, single: Generator) -> None:
        with single.engine() as engine:
            completion = engine.submit([5], **SHORT)
            generation = completion.result()
            completion.close()
            assert completion.finish_reason == generation.finish_reason == "length"
            assert completion.result() == generation


class TestClosing:
    def test_close_cancels_requests_in_flight(self, single: Generator) -> None:
        engine = single.engine(max_queue=1)
        running = begin(engine)
        queued = engine.submit([5], **SHORT)
        blocked = Background(lambda: engine.submit([5], **SHORT))
        reading = Background(lambda: len(list(running)))
        assert blocked.runs(0.1)
        engine.close()
        assert reading.result() > 0
        with pytest.raises(RuntimeError, match="this Engine is closed"):
            blocked.result()
        assert [c.finish_reason for c in (running, queued)] == ["cancelled"] * 2
        assert queued.result().text == ""
        with pytest.raises(RuntimeError, match="this Engine is closed"):
            engine.submit([5])
        engine.close()
        assert single.generate([5], **SHORT).completion_tokens == 6

    def test_streams_continue_during_engine(self, generator: Generator) -> None:
        expected = generator.generate([5], **SHORT).text
        stream = generator.stream([5], **SHORT)
        pieces = [next(stream)]
        with generator.engine() as engine:
            with pytest.raises(RuntimeError, match="already has an open Engine"):
                generator.engine()
            running = begin(engine)
            assert generator.generate([5], **SHORT).text == expected
            assert "".join([*pieces, *stream]) == expected
            assert running.finish_reason is None
        with generator.engine() as engine:
            assert engine.submit([5], **SHORT).result().text == expected

    def test_dropped_engine_is_closed(self, single: Generator) -> None:
        n_threads = threading.active_count()
        engine = single.engine()
        begin(engine)
        del engine
        gc.collect()
        wait_until(lambda: threading.active_count() == n_threads)
        single.engine().close()  # there is no other one
        assert single.generate([5], **SHORT).completion_tokens == 6

    def test_program_exits_without_closing_engine(self, llama: Path) -> None:
        program = f"""
from h2o_cpp import Generator
engine = Generator({str(llama)!r}, hh=12, threads=1).engine()
completion = engine.submit([5, 6], **{FOREVER!r})
next(completion)
print("end")
"""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)


class TestAsyncio:
    def test_tasks_read_the_same_text(self, tiny_opt: Path) -> None:
        with Generator(tiny_opt, hh=0.1, n_ctx=200, max_sequences=3, threads=1) as generator:
            prompts = [PROMPT, "It was", "Once upon a time", "He", "She said"]
            options: dict[str, Any] = {"max_tokens": 20, "seed": 4}
            expected = [generator.generate(prompt, **options) for prompt in prompts]

            async def read(engine: Engine, prompt: str) -> str:
                completion = await engine.submit_async(prompt, **options)
                return "".join([piece async for piece in completion])

            async def read_all() -> tuple[list[str], list[str]]:
                with generator.engine(max_queue=1) as engine:
                    pieces = await asyncio.gather(*(read(engine, prompt) for prompt in prompts))
                    completions = [
                        await engine.submit_async(prompt, **options) for prompt in prompts
                    ]
                    generations = await asyncio.gather(*completions)
                return pieces, [generation.text for generation in generations]

            texts = [generation.text for generation in expected]
            assert Background(lambda: asyncio.run(read_all())).result() == (texts, texts)

    def test_cancelled_tasks(self, single: Generator) -> None:
        """A task that reads, one that waits for its first piece, one that waits for the queue."""

        async def run() -> list[str | None]:
            with single.engine(max_queue=1) as engine:
                running = await engine.submit_async([5, 6], **FOREVER)
                read = asyncio.create_task(count(running))
                await asyncio.sleep(0.05)
                queued = await engine.submit_async([5], **SHORT)
                wait = asyncio.create_task(count(queued))
                full = asyncio.create_task(engine.submit_async([5], **SHORT))
                await asyncio.sleep(0.05)
                for task in (full, wait, read):
                    assert not task.done()
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                after = await engine.submit_async([5], **SHORT)
                reason = (await after).finish_reason
                while not idle(engine):
                    await asyncio.sleep(0.001)
                return [running.finish_reason, queued.finish_reason, reason]

        async def count(completion: Completion) -> int:
            return len([piece async for piece in completion])

        reasons = Background(lambda: asyncio.run(run())).result()
        assert reasons == ["cancelled", "cancelled", "length"]

    def test_break_from_async_for_frees_sequence(self, single: Generator) -> None:
        async def run() -> str | None:
            with single.engine() as engine:
                async for _ in await engine.submit_async([5, 6], **FOREVER):
                    break
                return (await (await engine.submit_async([5], **SHORT))).finish_reason

        assert Background(lambda: asyncio.run(run())).result() == "length"


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads that never release the GIL keep it for 10 us instead of 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("quick_switches")
def test_unread_errors_of_constraints_are_destroyed_while_other_threads_call(
    generator: Generator,
) -> None:
    """Destroying one takes the GIL, which another thread may hold as it waits for the engine."""

    def fail(tokens: object, mask: object) -> None:
        raise ValueError

    ended = threading.Event()
    with generator.engine() as engine:

        def call() -> None:
            while not ended.is_set():
                engine.stats()

        def drop_errors() -> None:
            for _ in range(300):
                completion = engine.submit([5, 6], constraint=fail, **SHORT)
                wait_until(lambda c=completion: c.finish_reason is not None)  # type: ignore[misc]

        callers = [Background(call) for _ in range(2)]
        try:
            Background(drop_errors).result()
        finally:
            ended.set()
        for caller in callers:
            caller.result()


def test_mixed_random_use_leaks_nothing(generator: Generator) -> None:
    """Requests end or are closed or dropped; threads and cache memory stay the same."""
    n_threads = threading.active_count()
    cache_bytes = generator.stats().cache_bytes
    expected = {n: generator.generate([5] * n, **SHORT).text for n in range(1, 30)}
    with generator.engine(max_queue=4) as engine:

        def use(seed: int) -> int:
            rng, right = random.Random(seed), 0
            for _ in range(60):
                n = rng.randint(1, 29)
                options = rng.choice([SHORT, FOREVER])
                completion = engine.submit([5] * n, **options)
                if options is SHORT:
                    right += completion.result().text == expected[n]
                    continue
                if rng.random() < 0.5:
                    next(completion, None)
                right += 1
                if rng.random() < 0.5:
                    completion.close()
                del completion
            return right

        users = [Background(lambda n=n: use(n)) for n in range(4)]  # type: ignore[misc]
        assert [user.result() for user in users] == [60] * 4
        wait_until(lambda: idle(engine))
    assert threading.active_count() == n_threads
    assert generator.stats().cache_bytes == cache_bytes
