"""Threads that share a Generator: concurrent streams, closed by other threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator
from support.background import GREEDY, PATIENCE, PROMPT, Background, assert_usable, greedy


class TestConcurrentUse:
    @pytest.mark.parametrize("n_threads", [2, 4])
    @pytest.mark.parametrize("hh", [None, 0.01])
    def test_outputs_equal_those_of_separate_generators(
        self, tiny_opt: Path, n_threads: int, hh: float | None
    ) -> None:
        def texts(generator: Generator, thread: int) -> list[str]:
            """Outputs of several methods, with abandoned streams in between."""
            out = []
            for n in range(4):
                options: dict[str, Any] = {"seed": 10 * thread + n, "max_tokens": 30}
                stream = generator.stream(f"Chapter {n}. The", **options)
                out.append("".join(stream))
                out.append(generator.generate(f"The {n}. chapter", **options).text)
                next(generator.stream("Another text"))
            return out

        outputs = [texts(Generator(tiny_opt, hh=hh, threads=1), n) for n in range(n_threads)]
        assert len(set(itertools.chain(*outputs))) == 8 * n_threads
        shared = Generator(tiny_opt, hh=hh, threads=1)
        together = [Background(lambda n=n: texts(shared, n)) for n in range(n_threads)]  # type: ignore[misc]
        assert [thread.result() for thread in together] == outputs

    def test_logits_during_streams(self, generator: Generator, expected: str) -> None:
        """While other threads stream and read the cache's statistics."""
        tokens = np.arange(5, 105)
        logits = generator.logits(tokens)
        done = threading.Event()

        def read_stats() -> int:
            n_reads = 0
            while True:
                stats = generator.stats()
                assert stats.tokens_seen - stats.tokens_kept == stats.evictions
                n_reads += generator.kept(1, 2)[0].size <= 2048
                if done.is_set():
                    return n_reads

        n_reads = Background(read_stats)
        texts = [Background(lambda: greedy(generator)) for _ in range(5)]
        scores = [Background(lambda: generator.logits(tokens)) for _ in range(5)]
        for score in scores:
            np.testing.assert_array_equal(score.result(), logits)
        assert {text.result() for text in texts} == {expected}
        done.set()
        assert n_reads.result() > 0

    def test_streams_continue_beside_a_paused_one(
        self, generator: Generator, expected: str
    ) -> None:
        first = generator.stream("Another text", max_tokens=50, seed=1)
        next(first)
        assert Background(lambda: greedy(generator)).result() == expected
        assert greedy(generator) == expected
        alone = Generator(generator.path, threads=1)
        text = alone.generate("Another text", max_tokens=50, seed=1).text
        for _ in first:
            pass
        assert first.text == text

    @pytest.mark.parametrize("n_sequences", [1, 2, 4])
    def test_interleaved_streams_of_one_thread(self, tiny_opt: Path, n_sequences: int) -> None:
        """With fewer sequences than streams, paused streams are copied out and back in."""
        prompts = ["The old man", "It was", "Once upon a time"]
        options: dict[str, Any] = {"max_tokens": 25, "seed": 2, "ignore_eos": True}
        with Generator(tiny_opt, hh=20, threads=1) as alone:
            expected = [alone.generate(prompt, **options).text for prompt in prompts]
        with Generator(tiny_opt, hh=20, threads=1, max_sequences=n_sequences) as generator:
            streams = [generator.stream(prompt, **options) for prompt in prompts]
            for pieces in itertools.zip_longest(*streams):
                assert any(pieces)
            assert [stream.text for stream in streams] == expected

    def test_stream_may_change_threads(self, generator: Generator, expected: str) -> None:
        stream = generator.stream(PROMPT, **GREEDY)
        pieces = [Background(lambda: next(stream)).result() for _ in range(3)]
        assert "".join(pieces + list(stream)) == expected

    def test_generators_of_one_file_are_independent(self, tiny_opt: Path, expected: str) -> None:
        generators = [Generator(tiny_opt, threads=1) for _ in range(2)]
        streams = [generator.stream(PROMPT, **GREEDY) for generator in generators]
        pairs = list(zip(*streams, strict=True))
        assert ["".join(pieces) for pieces in zip(*pairs, strict=True)] == [expected] * 2


class TestClosing:
    def test_close_stream_from_another_thread(self, generator: Generator, expected: str) -> None:
        stream = generator.stream("Another text", max_tokens=500, seed=1)
        next(stream)
        Background(stream.close).result()
        assert stream.finish_reason == "cancelled"
        assert next(stream, None) is None
        assert_usable(generator, expected)

    def test_close_stream_during_generation(self, generator: Generator, expected: str) -> None:
        """close() returns at once; the stream ends after the current token."""
        stream = generator.stream("Another text", ignore_eos=True, seed=1)
        started = threading.Event()

        def consume() -> int:
            for _ in stream:
                started.set()
            return len(stream.tokens)

        n_tokens = Background(consume)
        assert started.wait(PATIENCE)
        stream.close()
        assert n_tokens.result() < 2000
        assert stream.finish_reason == "cancelled"
        assert_usable(generator, expected)

    def test_close_stream_during_prefill(self, llama: Path) -> None:
        generator = Generator(llama, n_batch=1, hh=12, threads=1)
        short: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "seed": 1}
        expected = generator.generate([5], **short).text
        stream = generator.stream([5 + i % 40 for i in range(1_000_000)])
        pieces = Background(lambda: list(stream))
        while not 10 < generator.stats().tokens_seen < 1_000_000:  # not those of `expected`
            time.sleep(0.001)
        stream.close()
        assert pieces.result() == []
        assert generator.stats().tokens_seen < 1_000_000
        again = Background(lambda: generator.generate([5], **short).text)
        assert again.result() == expected
        assert generator.generate([5], **short).text == expected

    def test_close_queued_stream(self, llama: Path) -> None:
        generator = Generator(llama, hh=12, threads=1, max_sequences=1)
        short: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "seed": 1}
        expected = generator.generate([5], **short).text
        with generator.engine() as engine:
            running = engine.submit([5, 6], max_tokens=10**9, ignore_eos=True)
            next(running)
            stream = generator.stream([5], **short)
            waiting = Background(lambda: list(stream))
            assert waiting.runs(0.1)
            stream.close()
            assert waiting.result() == []
            assert stream.finish_reason == "cancelled"
        assert generator.generate([5], **short).text == expected

    def test_close_generator_ends_streams_of_other_threads(self, llama: Path) -> None:
        generator = Generator(llama, hh=12, threads=1)
        stream = generator.stream([5, 6], max_tokens=10**9, ignore_eos=True)
        started = threading.Event()

        def consume() -> None:
            for _ in stream:
                started.set()

        reading = Background(consume)
        assert started.wait(PATIENCE)
        generator.close()
        with pytest.raises(RuntimeError, match="closed"):
            reading.result()
        assert stream.finish_reason == "cancelled"
        for call in (generator.stats, lambda: next(stream), lambda: stream.save()):
            with pytest.raises(RuntimeError, match="closed"):
                call()
        generator.close()

    @pytest.mark.parametrize("round", range(10))
    def test_close_generator_during_other_calls(self, tiny_opt: Path, round: int) -> None:
        """Each call returns what it always does, or raises RuntimeError."""
        tokens = np.arange(5, 105)
        generator = Generator(tiny_opt, hh=200, threads=1, n_batch=4)
        expected = generator.logits(tokens)
        started = threading.Event()

        def repeat(call: Callable[[], object]) -> None:
            while True:
                call()
                started.set()

        calls: list[Callable[[], object]] = [
            lambda: np.testing.assert_array_equal(generator.logits(tokens), expected),
            lambda: generator.stats(layers=True),
            lambda: generator.kept(0, 0),
        ]
        threads = [Background(partial(repeat, call)) for call in calls]
        assert started.wait(PATIENCE)
        generator.close()
        for thread in threads:
            with pytest.raises(RuntimeError, match="closed"):
                thread.result()


@pytest.mark.parametrize("work", ["logits", "prefill"])
def test_gil_is_released(tiny_opt: Path, work: str) -> None:
    """Another thread runs during one call into C++.

    If the GIL were held, the other thread would get almost no processor time; otherwise both get
    equal shares, however busy the machine is.
    """
    generator = Generator(tiny_opt, n_batch=1000, threads=1)
    tokens = [5 + i for i in range(1000)]

    def compute() -> None:
        if work == "logits":
            generator.logits(tokens)
        else:
            next(generator.stream(tokens, temperature=0, max_tokens=1), None)

    def relative_cpu_time() -> float:
        """CPU time of the other thread relative to the computation's."""
        running, done = threading.Event(), threading.Event()

        def run() -> float:
            running.set()
            begin = time.thread_time()
            while not done.is_set():
                pass
            return time.thread_time() - begin

        other = Background(run)
        assert running.wait(PATIENCE)
        begin = time.thread_time()
        compute()
        seconds = time.thread_time() - begin
        done.set()
        return other.result() / seconds

    assert sorted(relative_cpu_time() for _ in range(5))[2] > 0.3
