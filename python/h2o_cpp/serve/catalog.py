"""The models that are served, by name: loaded when they are first asked for, unloaded when idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from h2o_cpp.serve.errors import ApiError, closed
from h2o_cpp.serve.intake import Intake
from h2o_cpp.serve.service import Service

_log = logging.getLogger("uvicorn.error")  # the server's own


@dataclass
class Entry:
    """A model that can be served.

    load: makes its Service, in a thread, and has what must be closed after it on the stack.
    n_bytes: what it takes of memory, about.
    spec: what it is made of: one that is equal need not be loaded again.
    """

    name: str
    load: Callable[[ExitStack], Service]
    n_bytes: int = 0
    spec: object = None
    created: int = field(default_factory=lambda: int(time.time()))
    service: Service | None = None
    n_users: int = 0
    last_used: float = 0.0
    open: ExitStack = field(default_factory=ExitStack)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Catalog:
    """Which models there are, and which of them are loaded. Used by the event loop alone.

    Attributes: `entries` by name; while run() lasts `intake`.
    """

    intake: Intake

    def __init__(
        self, entries: Iterable[Entry], *, max_loaded: int | None = None, idle: float | None = None
    ) -> None:
        """max_loaded: models at once; idle: seconds after which an unused one is unloaded."""
        self.entries = {entry.name: entry for entry in entries}
        self._retired: list[Entry] = []  # that are gone from the list, but in use
        self._max_loaded = max_loaded
        self._idle = idle
        self._closed = False

    @classmethod
    def of(cls, service: Service) -> Catalog:
        """The catalog of one model that is loaded, and stays so."""
        entry = Entry(service.name, lambda _: service, created=service.created)
        entry.service = service
        return cls([entry])

    @contextmanager
    def run(self) -> Iterator[None]:
        """Have engines; what they have not finished is cancelled at the end."""
        self.intake = Intake()
        self._closed = False
        with closing(self.intake), ExitStack() as all_of_them:
            for entry in self.entries.values():
                if entry.service is not None:
                    entry.open.enter_context(entry.service.run())
            all_of_them.callback(self._close_all)
            all_of_them.callback(self.close_engines)
            yield

    async def replace(self, entries: Iterable[Entry]) -> None:
        """Serve these from now on. What is in use and gone is unloaded when it no longer is."""
        old, self.entries = self.entries, {entry.name: entry for entry in entries}
        for name, entry in old.items():
            if name in self.entries and self.entries[name].spec == entry.spec:
                self.entries[name] = entry
            else:
                self._retired.append(entry)
        await self._unload_retired()

    @property
    def loaded(self) -> list[Service]:
        """Those that are."""
        known = [*self.entries.values(), *self._retired]
        return [entry.service for entry in known if entry.service is not None]

    @property
    def closed(self) -> bool:
        """Whether requests are refused."""
        return self._closed or any(service.engine.closed for service in self.loaded)

    def close_engines(self) -> None:
        """End all generations; nothing more is taken. Waits for a step."""
        self._closed = True
        for service in self.loaded:
            service.engine.close()

    async def take(self, name: str | None) -> Service:
        """The model of this name, which stays loaded until it is given back. Raises ApiError."""
        entry = self._find(name)
        async with entry.loading:
            if self._closed or entry in self._retired:
                raise closed()
            if entry.service is None:
                await self._load(entry)
            service = entry.service
            assert service is not None
            entry.n_users += 1
        return service

    def give_back(self, service: Service) -> None:
        """A response has ended."""
        known = [*self.entries.values(), *self._retired]
        [entry] = [one for one in known if one.service is service]
        entry.n_users -= 1
        entry.last_used = time.monotonic()
        if entry in self._retired and entry.n_users == 0:
            self._unloading = asyncio.ensure_future(self._unload_retired())

    async def _unload_retired(self) -> None:
        for entry in [one for one in self._retired if one.n_users == 0]:
            await self._unload(entry)
            if entry in self._retired:
                self._retired.remove(entry)

    async def unload_idle(self) -> None:
        """Unload what nobody has used for a while, again and again."""
        while self._idle is not None:
            await asyncio.sleep(self._idle / 4)
            before = time.monotonic() - self._idle
            for entry in self._unused():
                if entry.last_used <= before:
                    await self._unload(entry)

    def _find(self, name: str | None) -> Entry:
        if name is None and len(self.entries) == 1:
            [entry] = self.entries.values()
            return entry
        if name is None:
            raise ApiError(400, "model is missing: there are several", param="model")
        if name not in self.entries and name.removesuffix(":latest") in self.entries:
            name = name.removesuffix(":latest")  # as Ollama's clients say it
        if name not in self.entries:
            known = ", ".join(repr(one) for one in self.entries)
            message = f"there is no model {name!r}, only {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.entries[name]

    async def _load(self, entry: Entry) -> None:
        while not self._has_room(entry):
            unused = self._unused()
            if not unused:
                raise ApiError(503, "other models are in use, with no room beside them")
            await self._unload(unused[0])
        opened = ExitStack()
        try:
            service = await asyncio.to_thread(entry.load, opened)
        except (OSError, ValueError, MemoryError) as error:
            opened.close()
            _log.error("the model %r cannot be loaded: %s", entry.name, error)
            raise ApiError(503, f"the model {entry.name!r} cannot be loaded") from error
        opened.enter_context(service.run())
        entry.open, entry.service, entry.last_used = opened, service, time.monotonic()

    def _has_room(self, entry: Entry) -> bool:
        n_loaded = len(self.loaded)
        if n_loaded == 0:
            return True
        if self._max_loaded is not None and n_loaded >= self._max_loaded:
            return False
        available = _available_memory()
        return available is None or entry.n_bytes <= available or not self._unused()

    def _unused(self) -> list[Entry]:
        """Those that are loaded, the one that was used longest ago first."""
        loaded = [one for one in self.entries.values() if one.service is not None]
        return sorted((e for e in loaded if e.n_users == 0), key=lambda e: e.last_used)

    async def _unload(self, entry: Entry) -> None:
        async with entry.loading:
            if entry.service is not None and entry.n_users == 0:
                opened, entry.open, entry.service = entry.open, ExitStack(), None
                await asyncio.to_thread(opened.close)

    def _close_all(self) -> None:
        for entry in [*self.entries.values(), *self._retired]:
            entry.open.close()
            entry.open = ExitStack()


def _available_memory() -> int | None:
    """Bytes that can be allocated, files that are cached counted; None where nobody says."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
