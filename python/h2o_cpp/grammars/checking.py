"""Checks of JSON Schemas by llguidance, in processes with limits."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from hashlib import blake2b

from h2o_cpp.grammars import worker
from h2o_cpp.grammars.processes import CAN_ISOLATE, Limits, Process, Worker, find_llguidance

_MAX_IDLE = 2  # processes kept for the next schema
_MAX_KNOWN = 4096  # schemas whose answers are kept


class Checker:
    """Checks schemas one after another, within a time for all of them together.

    After this time, it accepts everything: compiling the grammar will find the errors.
    """

    def __init__(self, seconds: float = 0.5) -> None:
        self._end = time.monotonic() + seconds

    def error(self, schema: str) -> str:
        """Returns llguidance's objection to a schema, JSON text; empty if there is none."""
        try:
            find_llguidance()
        except ImportError:  # reported when the grammar is compiled
            return ""
        if not CAN_ISOLATE:
            return worker.schema_error(schema)
        left = self._end - time.monotonic()
        return _ask(schema, left) if left > 0 else ""


def _ask(schema: str, seconds: float) -> str:
    key = blake2b(schema.encode(errors="surrogatepass")).digest()
    with _mutex:
        if key in _known:
            _known.move_to_end(key)
            return _known[key]
        process = _take()
    process.send(schema.encode(errors="surrogatepass"))
    if not process.poll(seconds):
        return ""  # the process ends, as nothing refers to it
    error = ""
    try:
        process.read_answer()
    except (ValueError, TimeoutError) as found:
        error = str(found)
    except RuntimeError:  # its parent was ended
        return ""
    with _mutex:
        _known[key] = error
        if len(_known) > _MAX_KNOWN:
            _known.popitem(last=False)
        if not error and len(_idle) < _MAX_IDLE:
            _idle.append(process)
    return error


def _take() -> Process:
    """An idle process or a new one; the mutex is held."""
    global _worker
    if _worker is None or _worker.has_ended:
        _idle.clear()
        _worker = Worker(
            {
                "folders": [find_llguidance()],
                "core": "",
                "model": "",
                "sizes": [],
                "special": [],
                "bos": None,
                "ends": [],
                "compile_seconds": worker.COMPILE_SECONDS,
            }
        )
    if _idle:
        return _idle.pop()
    return _worker.forks.fork(
        Limits("checking it", worker.COMPILE_SECONDS, worker.COMPILE_BYTES), keeps=_worker
    )


_worker: Worker | None = None
_idle: list[Process] = []
_known: OrderedDict[bytes, str] = OrderedDict()
_mutex = threading.Lock()
