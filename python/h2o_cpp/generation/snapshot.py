"""Snapshots: the exact state of a sequence, in memory or in a file."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_cpp import _core
from h2o_cpp.arguments import short
from h2o_cpp.files.atomic import atomic_output


@dataclass(frozen=True, repr=False)
class Snapshot:
    """The tokens of a sequence and its cache: keys, values, positions and scores.

    It requires the same model, policy and cache type. Outputs that continue it are bit-identical to
    those of the uninterrupted sequence. After eviction, the cache depends on the whole text and its
    chunks, so it cannot replace a prefix of another prompt.
    """

    data: bytes
    tokens: tuple[int, ...]
    n_read: int  # tokens in the cache; continuing reads the rest
    random_state: str | None  # of the sampler
    note: Any  # saved with it

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return len(self.data)

    def __repr__(self) -> str:
        return f"<Snapshot: {len(self.tokens)} tokens, {self.nbytes} bytes>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which is complete or unchanged."""
        with atomic_output(Path(path)) as temporary:
            temporary.write_bytes(self.data)

    @staticmethod
    def of(data: bytes) -> Snapshot:
        """The snapshot with these bytes. Raises ValueError if they are invalid."""
        if not isinstance(data, bytes):
            raise TypeError(f"data={short(data)}, expected the bytes of a snapshot")
        tokens, note, n_read, state = _core.read_snapshot(data)
        try:
            found = json.loads(note) if note else None
            random_state = None if state is None else state.decode("ascii")
        except (ValueError, RecursionError):
            raise ValueError("the snapshot was not saved by h2o_cpp") from None
        return Snapshot(data, tuple(tokens), n_read, random_state, found)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Snapshot:
        """The snapshot in a file. Raises FileNotFoundError, and ValueError for an invalid file."""
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path={short(path)}, expected the path of a snapshot, or a Snapshot")
        try:
            return Snapshot.of(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    @staticmethod
    def take(
        state: _core.Generation, path: str | os.PathLike[str] | None = None, note: Any = None
    ) -> Snapshot:
        """A snapshot of a generation, also written to `path`, if given.

        Raises RuntimeError if its cache was reused.
        """
        snapshot = Snapshot.of(state.save("" if note is None else json.dumps(note)))
        if path is not None:
            snapshot.save(path)
        return snapshot


class SnapshotCache:
    """The most recently used snapshots, by tokens, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._mutex = threading.RLock()  # for signal handlers and destructors
        self._snapshots: OrderedDict[tuple[int, ...], Snapshot] = OrderedDict()

    def get(self, tokens: Sequence[int]) -> Snapshot | None:
        """The snapshot of these tokens; None if it is not stored."""
        with self._mutex:
            found = self._snapshots.get(tuple(tokens))
            if found is not None:
                self._snapshots.move_to_end(found.tokens)
            return found

    def add(self, snapshot: Snapshot) -> None:
        """Store a snapshot; drop the least recently used ones beyond the limit."""
        with self._mutex:
            self._snapshots.pop(snapshot.tokens, None)
            self._snapshots[snapshot.tokens] = snapshot
            while self._bytes() > self._max_bytes:
                self._snapshots.popitem(last=False)

    def _bytes(self) -> int:
        copy = [*self._snapshots.values()]  # a signal handler may change it
        return sum(map(len, [snapshot.data for snapshot in copy]))
