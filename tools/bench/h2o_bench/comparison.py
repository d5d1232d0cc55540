"""Comparing engines in turns, so that changes of the machine affect all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

from h2o_bench.engine_process import Answer, EngineError, EngineProcess
from h2o_bench.records import Record, Results

_PAUSE = 0.2  # seconds for the previous engine's threads to sleep
_WARM_UP = 8  # tokens


class Baseline(NamedTuple):
    """An engine: its name in the report, and how to open it."""

    name: str
    module: str
    options: Mapping[str, Any]


class Request(NamedTuple):
    """Read n tokens; with `context`, decode n tokens after as many, `repeats` times."""

    n: int
    context: int | None = None
    repeats: int = 1

    @property
    def measure(self) -> str:
        """The name of its measure."""
        return f"prefill {self.n}" if self.context is None else f"decode {self.context}"

    def put_to(self, engine: EngineProcess) -> Iterator[Answer]:
        """An answer per repeat. Raises EngineError."""
        for i in range(self.repeats):
            if self.context is None:
                yield engine.prefill(self.n)
            else:
                yield engine.decode(self.context + i * self.n, self.n)


class Comparison:
    """A model loaded in several engines."""

    def __init__(self, results: Results, section: int, model: str) -> None:
        """Add results to `results`, under this section and model."""
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
        """Start the engines; record one that fails as not measured."""
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
        """Read and decode once, without recording."""
        for name in list(self._engines):
            self._attempt(name, lambda engine: engine.decode(_WARM_UP, _WARM_UP))

    def close(self, name: str) -> None:
        """Stop an engine."""
        if name in self._engines:
            self._engines.pop(name).close()

    def ask(self, requests: Sequence[Request], rounds: int = 1) -> None:
        """Measure each request with every engine, in turns; drop engines that fail.

        Records tokens per second, peak resident memory (" rss") and the median decode step.
        """
        for _ in range(rounds):
            for request in requests:
                for name in list(self._engines):
                    sleep(_PAUSE)
                    self._attempt(name, partial(self._put, request, name))

    def record(self, engine: str, measure: str, value: float, note: str = "") -> None:
        """Record a value measured elsewhere."""
        self._results.add(
            Record(self._section, self._model, engine, measure, (float(value),), note)
        )

    def absent(self, engine: str, reason: str) -> None:
        """Record an engine as not measured."""
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
