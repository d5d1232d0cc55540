"""Snapshots: a text and the cache it left, exactly, in memory or in a file."""

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
from h2o_cpp.model.arguments import short
from h2o_cpp.model.atomic import atomic_output


@dataclass(frozen=True, repr=False)
class Snapshot:
    """A text and what the cache kept of it: keys, values, positions, scores.

    It goes with one model, policy and cache type, and whatever follows it is what would have
    followed the text, bit for bit. Where the cache has evicted, it is the memory of *this* text
    read in *this* order of chunks: not a prefix that a longer prompt could have been read from.
    """

    data: bytes
    tokens: tuple[int, ...]  # of the text
    n_read: int  # of them, those the cache has read; continuing reads the others
    random_state: str | None  # of the text's sampler
    note: Any  # what else was saved with it

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.data)

    def __repr__(self) -> str:
        return f"<Snapshot: {len(self.tokens)} tokens, {self.nbytes} bytes>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which appears whole or not at all."""
        with atomic_output(Path(path)) as temporary:
            temporary.write_bytes(self.data)

    @staticmethod
    def of(data: bytes) -> Snapshot:
        """The snapshot with these bytes. Raises ValueError for others."""
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
        """The snapshot in a file. Raises FileNotFoundError, and ValueError for another file."""
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path={short(path)}, expected the path of a snapshot, or a Snapshot")
        try:
            return Snapshot.of(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    @staticmethod
    def take(state: _core.Generation, note: Any = None) -> Snapshot:
        """Of what has been computed. Raises RuntimeError if the cache does not hold it."""
        return Snapshot.of(state.save("" if note is None else json.dumps(note)))


class SnapshotCache:
    """The snapshots used last, by the tokens of their texts; as many as fit in some bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._mutex = threading.RLock()  # for signal handlers and destructors
        self._snapshots: OrderedDict[tuple[int, ...], Snapshot] = OrderedDict()

    def get(self, tokens: Sequence[int]) -> Snapshot | None:
        """The snapshot of a text, if it is still here."""
        with self._mutex:
            found = self._snapshots.get(tuple(tokens))
            if found is not None:
                self._snapshots.move_to_end(found.tokens)
            return found

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; those that were not used for longest make room."""
        with self._mutex:
            self._snapshots.pop(snapshot.tokens, None)
            self._snapshots[snapshot.tokens] = snapshot
            while self._bytes() > self._max_bytes:
                self._snapshots.popitem(last=False)

    def _bytes(self) -> int:
        copy = [*self._snapshots.values()]  # which a signal handler may change
        return sum(map(len, [snapshot.data for snapshot in copy]))
