"""The last responses of the Responses API, which later requests refer to."""

from __future__ import annotations

import json
from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple

from h2o_cpp.serve.errors import ApiError

_MAX_BYTES = 8 * 2**20  # of all responses of a client


class _Stored(NamedTuple):
    previous: str | None  # the response before it
    input: str  # JSON: its own items
    response: str  # JSON

    @property
    def n_bytes(self) -> int:
        return len(self.input) + len(self.response)

    @property
    def output(self) -> list[dict[str, Any]]:
        """Its items."""
        items: list[dict[str, Any]] = json.loads(self.response)["output"]
        return items


class StoredResponses:
    """The last responses of one client; the least recently used are dropped first.

    Several threads may use it.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._all: OrderedDict[str, _Stored] = OrderedDict()
        self._n_bytes = 0
        self._lock = Lock()

    def add(self, id: str, previous: str | None, given: str, response: str) -> None:
        """Store a response, as JSON; given: its own items, as JSON."""
        one = _Stored(previous, given, response)
        with self._lock:
            self._all[id] = one
            self._n_bytes += one.n_bytes
            while self._n_bytes > self._max_bytes:
                _, oldest = self._all.popitem(last=False)
                self._n_bytes -= oldest.n_bytes

    def response(self, id: str) -> str:
        """A response, as JSON. Raises ApiError."""
        return self._found(id).response

    def input(self, id: str) -> list[dict[str, Any]]:
        """The items before the output of a response. Raises ApiError."""
        one = self._found(id)
        earlier = [] if one.previous is None else self.conversation(one.previous)
        return [item for items in (*earlier, one.input) for item in json.loads(items)]

    def remove(self, id: str) -> None:
        """Forget a response. Raises ApiError."""
        self._found(id)
        with self._lock:
            if (one := self._all.pop(id, None)) is not None:
                self._n_bytes -= one.n_bytes

    def conversation(self, id: str) -> list[str]:
        """The items of all responses up to this one, in JSON lists. Raises ApiError."""
        found: list[str] = []
        name: str | None = id
        while name is not None:
            one = self._use(name)
            if one is None:
                raise ApiError(
                    400,
                    f"Previous response with id {id!r} not found. Only the last responses are "
                    "kept; send the whole conversation in input instead",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            found += [json.dumps(one.output), one.input]
            name = one.previous
        return found[::-1]

    def item(self, id: str) -> str:
        """An item of a response's output, as a JSON list. Raises ApiError."""
        one = self._use(id.partition("_")[2].rpartition("_")[0])  # of item_id()
        found = [item for item in (one.output if one else ()) if item["id"] == id]
        if not found:
            raise ApiError(
                404,
                f"Item with id {id!r} not found. Only the items of the last responses are kept; "
                "send the item itself instead, as clients do with store: false",
                param="input",
            )
        return json.dumps(found)

    def _found(self, id: str) -> _Stored:
        one = self._use(id)
        if one is None:
            message = f"Response with id {id!r} not found. Only the last responses are kept"
            raise ApiError(404, message, param="id")
        return one

    def _use(self, id: str) -> _Stored | None:
        with self._lock:
            if id in self._all:
                self._all.move_to_end(id)
            return self._all.get(id)


def item_id(kind: str, response: str, index: int) -> str:
    """The id of an item of a response's output."""
    return f"{kind}_{response}_{index}"
