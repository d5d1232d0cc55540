"""The served models by name, loaded on their first request and unloaded when idle."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

from h2o_cpp import _core
from h2o_cpp.files.visible_text import visible_log
from h2o_cpp.serve.errors import ApiError, closed
from h2o_cpp.serve.service import Service
from h2o_cpp.serve.worker_pool import WorkerPool

_log = visible_log("uvicorn.error")  # the server's log


@dataclass
class Entry:
    """A model that can be served.

    load: creates its Service, in a thread, and registers on the stack what must be closed.
    n_bytes: approximate memory.
    aliases: other names in requests.
    file, template: what decides the outputs; the file may be a name instead.
    spec: the model's settings. If they are unchanged, replace() keeps the loaded model.
    """

    name: str
    load: Callable[[ExitStack], Service]
    n_bytes: int = 0
    aliases: Sequence[str] = ()
    file: str = ""
    template: str | None = None
    spec: object = None
    created: int = field(default_factory=lambda: int(time.time()))
    service: Service | None = None
    n_users: int = 0
    last_used: float = 0.0
    open: ExitStack = field(default_factory=ExitStack)


class Catalog:
    """The served models, and which of them are loaded. Used only by the event loop.

    Attributes: `entries` by name; `workers`, during run(); `unloaded`, the sums of the EngineStats
    of unloaded models.
    """

    workers: WorkerPool

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        max_loaded: int | None = None,
        idle: float | None = None,
        any_name: bool = False,
    ) -> None:
        """max_loaded: models loaded at once; idle: seconds until an unused model is unloaded;
        any_name: an only model has every name.
        """
        self.entries = {entry.name: entry for entry in entries}
        self._any_name = any_name
        self._retired: list[Entry] = []  # no longer listed, but in use
        self._max_loaded = max_loaded
        self._idle = idle
        self._closed = False
        self.unloaded: Counter[str] = Counter()
        # One model at a time is loaded or unloaded: each needs the room that others leave.
        self._changing = asyncio.Lock()

    @classmethod
    def of(
        cls, service: Service, *, any_name: bool = False, aliases: Sequence[str] = ()
    ) -> Catalog:
        """A catalog of one model, which stays loaded."""
        n_bytes = service.generator.path.stat().st_size
        entry = Entry(service.name, lambda _: service, n_bytes, aliases, created=service.created)
        entry.file = str(service.generator.path)
        entry.template = None if service.template is None else service.template.source
        entry.service, entry.n_users = service, 1
        return cls([entry], any_name=any_name)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run the engines of loaded models; on exit, cancel unfinished requests."""
        self.workers = WorkerPool()
        self._closed = False
        with closing(self.workers), ExitStack() as opened:
            for entry in self.entries.values():
                if entry.service is not None:
                    entry.open.enter_context(entry.service.run())
            opened.callback(self._close_all)
            opened.callback(self.close_engines)
            yield

    async def replace(self, entries: Iterable[Entry]) -> None:
        """Replace the list of models; removed ones are unloaded when no longer in use."""
        old, self.entries = self.entries, {entry.name: entry for entry in entries}
        for name, entry in old.items():
            if name in self.entries and self.entries[name].spec == entry.spec:
                entry.aliases = self.entries[name].aliases
                self.entries[name] = entry
            else:
                self._retired.append(entry)
        await self._unload_retired()

    @property
    def loaded(self) -> list[Service]:
        """The services of all loaded models."""
        return [entry.service for entry in self._known if entry.service is not None]

    @property
    def _known(self) -> list[Entry]:
        return [*self.entries.values(), *self._retired]

    @property
    def closed(self) -> bool:
        """Whether requests are rejected."""
        return self._closed or any(service.engine.closed for service in self.loaded)

    def close_engines(self) -> None:
        """Cancel all generations and reject further requests. Blocks for the current step."""
        self._closed = True
        for service in self.loaded:
            service.engine.close()

    async def take(self, name: str | None) -> Service:
        """The model of this name; it stays loaded until give_back(). Raises ApiError."""
        entry = self.find(name)
        self._check_open(entry)
        if entry.service is None:
            async with self._changing:
                self._check_open(entry)
                if entry.service is None:
                    await self._load(entry)
        service = entry.service
        assert service is not None
        entry.n_users += 1
        return service

    def give_back(self, service: Service) -> None:
        """Release a model after its response has ended."""
        [entry] = [one for one in self._known if one.service is service]
        entry.n_users -= 1
        entry.last_used = time.monotonic()
        if entry in self._retired and entry.n_users == 0:
            self._unloading = asyncio.ensure_future(self._unload_retired())

    async def unload(self, name: str | None) -> None:
        """Unload a model unless it is in use or stays loaded. Raises ApiError."""
        await self._unload(self.find(name))

    async def _unload_retired(self) -> None:
        for entry in [one for one in self._retired if one.n_users == 0]:
            await self._unload(entry)
            if entry.service is None and entry in self._retired:  # a request may have loaded it
                self._retired.remove(entry)

    async def unload_idle(self) -> None:
        """Unload idle models, periodically."""
        while self._idle is not None:
            await asyncio.sleep(self._idle / 4)
            before = time.monotonic() - self._idle
            for entry in self._unused():
                if entry.last_used <= before:
                    await self._unload(entry)

    def find(self, name: str | None) -> Entry:
        """The model of this name, or the only model if `name` is None or any name will do.

        Raises ApiError.
        """
        if len(self.entries) == 1 and (name is None or self._any_name):
            [entry] = self.entries.values()
            return entry
        if name is None:
            raise ApiError(400, "model is missing, expected the name of a model", param="model")
        named = self.named
        found = named.get(name) or named.get(name.removesuffix(":latest"))  # of Ollama's clients
        if found is None:
            known = ", ".join(repr(one) for one in named)
            message = f"there is no model {name!r}, expected one of {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found

    @property
    def named(self) -> dict[str, Entry]:
        """The models by name and by alias."""
        aliases = {alias: one for one in self.entries.values() for alias in one.aliases}
        return {**self.entries, **aliases, **self.entries}

    def _check_open(self, entry: Entry) -> None:
        if self._closed or entry in self._retired:
            raise closed()

    async def _load(self, entry: Entry) -> None:
        while not self._has_room(entry):
            unused = self._unused()
            if not unused:
                raise ApiError(
                    503, "there is no memory for this model while other models are in use"
                )
            await self._close(unused[0])
        opened = ExitStack()
        try:
            service = await asyncio.to_thread(entry.load, opened)
        except (OSError, ValueError, TypeError, MemoryError) as error:
            opened.close()
            _log.error("the model %r cannot be loaded: %s", entry.name, error)
            # Clients try again after 503, which cannot repair a wrong file or option.
            lasts = isinstance(error, ValueError | TypeError | FileNotFoundError)
            message = f"the model {entry.name!r} cannot be loaded"
            raise ApiError(500 if lasts else 503, message) from error
        opened.enter_context(service.run())
        entry.open, entry.service, entry.last_used = opened, service, time.monotonic()

    def _has_room(self, entry: Entry) -> bool:
        if self._max_loaded is not None and len(self.loaded) >= self._max_loaded:
            return False
        return entry.n_bytes <= _core.available_memory() or not self._unused()

    def _unused(self) -> list[Entry]:
        """Loaded models without users, least recently used first."""
        loaded = [one for one in self.entries.values() if one.service is not None]
        return sorted((e for e in loaded if e.n_users == 0), key=lambda e: e.last_used)

    async def _unload(self, entry: Entry) -> None:
        async with self._changing:
            await self._close(entry)

    async def _close(self, entry: Entry) -> None:
        if entry.service is not None and entry.n_users == 0:
            self.unloaded.update(vars(entry.service.engine.stats()))
            opened, entry.open, entry.service = entry.open, ExitStack(), None
            await asyncio.to_thread(opened.close)

    def _close_all(self) -> None:
        for entry in self._known:
            entry.open.close()
