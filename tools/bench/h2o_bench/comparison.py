"""Engines that take turns: each is asked once before any is asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

from h2o_bench.engine_process import Answer, EngineError, EngineProcess
from h2o_bench.records import Record, Results

_PAUSE = 0.2  # seconds in which threads of the engine before go to sleep
_WARM_UP = 8  # tokens


class Baseline(NamedTuple):
    """An engine, by what it is called in the report, and how to open it."""

    name: str
    module: str
    options: Mapping[str, Any]


class Request(NamedTuple):
    """Read n tokens, or (context is not None) decode n after so many, and that `repeats` times."""

    n: int
    context: int | None = None
    repeats: int = 1

    @property
    def measure(self) -> str:
        """Its name in the results."""
        return f"prefill {self.n}" if self.context is None else f"decode {self.context}"

    def put_to(self, engine: EngineProcess) -> Iterator[Answer]:
        """An answer for each repeat, which go on from each other. Raises EngineError."""
        for i in range(self.repeats):
            if self.context is None:
                yield engine.prefill(self.n)
            else:
                yield engine.decode(self.context + i * self.n, self.n)


class Comparison:
    """One model in several engines, all of them loaded."""

    def __init__(self, results: Results, section: int, model: str) -> None:
        """What is measured is added to `results`, under this section and model."""
        self._results = results
        self._section = section
        self._model = model
        self._engines: dict[str, EngineProcess] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def open(self, engines: Iterable[Baseline]) -> None:
        """Start them; one that cannot be started is recorded as not measured."""
        for baseline in engines:
            begun = perf_counter()
            try:
                engine = EngineProcess(baseline.module, baseline.options)
            except EngineError as error:
                self.absent(baseline.name, str(error))
                continue
            seconds = perf_counter() - begun
            self._engines[baseline.name] = self._stack.enter_context(engine)
            self.record(baseline.name, "start", seconds, str(engine.description["version"]))
            for key in ("load_seconds", "import_seconds", "cache_bytes"):
                if key in engine.description:
                    self.record(baseline.name, key, engine.description[key])

    def warm_up(self) -> None:
        """Have them read and decode for the first time; nothing is recorded."""
        for name in list(self._engines):
            self._attempt(name, lambda engine: engine.decode(_WARM_UP, _WARM_UP))

    def close(self, name: str) -> None:
        """End one of them."""
        if name in self._engines:
            self._engines.pop(name).close()

    def ask(self, requests: Sequence[Request], rounds: int = 1) -> None:
        """Put each request to every engine, in turn; those that fail leave the comparison.

        Tokens per second are recorded as the request's measure, the peak of resident memory with
        " rss" after it, and the median step of decoding.
        """
        for _ in range(rounds):
            for request in requests:
                for name in list(self._engines):
                    sleep(_PAUSE)
                    self._attempt(name, partial(self._put, request, name))

    def record(self, engine: str, measure: str, value: float, note: str = "") -> None:
        """A value, measured elsewhere."""
        self._results.add(
            Record(self._section, self._model, engine, measure, (float(value),), note)
        )

    def absent(self, engine: str, reason: str) -> None:
        """An engine that is not measured."""
        self._results.add(Record(self._section, self._model, engine, "absent", note=reason))

    def _put(self, request: Request, name: str, engine: EngineProcess) -> None:
        for answer in request.put_to(engine):
            self.record(name, request.measure, request.n / sum(answer.seconds))
            self.record(name, f"{request.measure} rss", answer.peak_rss_bytes)
            if request.context is not None:
                self.record(name, f"step seconds after {request.context}", median(answer.seconds))

    def _attempt(self, name: str, what: Callable[[EngineProcess], object]) -> None:
        try:
            what(self._engines[name])
        except EngineError as error:
            self.absent(name, str(error))
            self.close(name)
