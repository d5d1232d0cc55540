"""Engines that take turns, so that changes of the machine affect all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from time import sleep
from typing import Any, NamedTuple

from h2o_bench.engine_process import EngineError, EngineProcess
from h2o_bench.results import Row

_PAUSE = 0.2  # seconds for the previous engine's threads to sleep
_WARM_UP = 8  # tokens


class Baseline(NamedTuple):
    """An engine: its name in results, and how to open it, or why that is not possible."""

    name: str
    module: str
    options: Mapping[str, Any]
    absent: str = ""


class Request(NamedTuple):
    """Read n tokens; with `context`, decode n tokens after as many, `repeats` times."""

    n: int
    context: int | None = None
    repeats: int = 1

    @property
    def measure(self) -> str:
        """The name of its column."""
        what = f"prefill {self.n}" if self.context is None else f"decode after {self.context}"
        return f"{what}, tokens/s"

    def put_to(self, engine: EngineProcess) -> Iterator[tuple[float, list[float], int]]:
        """Tokens/s, seconds of each step and peak memory, for each repeat. Raises EngineError."""
        for i in range(self.repeats):
            if self.context is None:
                answer = engine.prefill(self.n)
            else:
                answer = engine.decode(self.context + i * self.n, self.n)
            yield self.n / sum(answer.seconds), answer.seconds, answer.peak_rss_bytes


def compare(
    engines: Iterable[Baseline], requests: Sequence[Request], rounds: int, **about: Any
) -> Iterator[Row]:
    """A row for each engine, with tokens/s of each round; an engine that fails is absent.

    Requests after the first with a context are only asked in the first round. about: cells of rows.
    """
    asked = next((i for i, one in enumerate(requests) if one.context is not None), 0)
    with ExitStack() as stack:
        running: dict[str, EngineProcess] = {}
        rows: dict[str, dict[str, Any]] = {}
        failed: list[Row] = []

        def fail(name: str, reason: str) -> None:
            failed.append({**about, "engine": name, "absent": reason})
            rows.pop(name, None)
            if name in running:
                running.pop(name).close()

        for one in engines:
            try:
                if one.absent:
                    raise EngineError(one.absent)
                engine = stack.enter_context(EngineProcess(one.module, one.options))
                running[one.name] = engine
                engine.decode(_WARM_UP, _WARM_UP)
            except EngineError as error:
                fail(one.name, str(error))
                continue
            rows[one.name] = {**about, "engine": one.name, "version": engine.version}
        for i in range(rounds):
            for request in requests if i == 0 else requests[: asked + 1]:
                for name in list(running):
                    sleep(_PAUSE)
                    try:
                        for rate, seconds, rss in request.put_to(running[name]):
                            row = rows[name]
                            row.setdefault(request.measure, []).append(rate)
                            if request.context is not None:
                                row.setdefault("ms per step", []).append(1e3 * median(seconds))
                            row["MiB"] = max(row.get("MiB", 0.0), rss / 2**20)
                    except EngineError as error:
                        fail(name, str(error))
    yield from [*rows.values(), *failed]


def use_processors(n: int) -> None:
    """Compute on n processors only, also in the engines' processes, which inherit it."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n])
