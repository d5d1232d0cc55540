"""The C library through ctypes: the part of h2o.h that test_c_library.py calls."""

from __future__ import annotations

import ctypes as c
import os
from pathlib import Path
from typing import ClassVar


class _Struct(c.Structure):
    """A structure whose first field is its size."""

    def __init__(self, **fields: object) -> None:
        super().__init__(size=c.sizeof(self), **fields)


class SessionOptions(_Struct):
    _fields_: ClassVar = [
        ("size", c.c_size_t),
        ("hh", c.c_double),
        ("recent", c.c_double),
        ("n_sinks", c.c_int32),
        ("n_ctx", c.c_int32),
        ("n_batch", c.c_int32),
        ("positions", c.c_int32),
        ("k_type", c.c_char_p),
        ("v_type", c.c_char_p),
    ]


class Sampling(_Struct):
    _fields_: ClassVar = [
        ("size", c.c_size_t),
        ("temperature", c.c_float),
        ("top_k", c.c_int32),
        ("top_p", c.c_float),
        ("min_p", c.c_float),
        ("repeat_penalty", c.c_float),
        ("repeat_last_n", c.c_int32),
        ("seeded", c.c_int32),
        ("seed", c.c_uint64),
    ]


class StreamOptions(_Struct):
    _fields_: ClassVar = [
        ("size", c.c_size_t),
        ("max_tokens", c.c_int32),
        ("ignore_end", c.c_int32),
        ("parse_special", c.c_int32),
        ("n_stop", c.c_size_t),
        ("stop", c.POINTER(c.c_char_p)),
    ]


class ModelOptions(_Struct):
    _fields_: ClassVar = [
        ("size", c.c_size_t),
        ("device", c.c_char_p),
        ("n_threads", c.c_int32),
        ("reserved", c.c_int32),
    ]


_CALLBACK = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_char_p, c.c_size_t)


class CSession:
    """A session with its own model."""

    def __init__(self, library: Path, model: Path, **options: float) -> None:
        self._library = c.CDLL(os.fspath(library))
        self._library.h2o_session_error.restype = c.c_char_p
        self._model, self._session = c.c_void_p(), c.c_void_p()
        on = ModelOptions(device=b"cpu")  # bit-exact, unlike other devices
        self.call("h2o_model_load", os.fsencode(model), c.byref(on), c.byref(self._model))
        made = SessionOptions(**({"recent": -1.0, "n_batch": 512} | options))
        self.call("h2o_session_open", self._model, c.byref(made), c.byref(self._session))

    def __del__(self) -> None:
        self._library.h2o_session_free(self._session)
        self._library.h2o_model_free(self._model)

    def call(self, name: str, *arguments: object) -> None:
        status = self._library[name](*arguments)
        assert status == 0, (name, status, self._library.h2o_session_error(self._session))

    def set_sampling(self, **options: float) -> None:
        self.call("h2o_set_sampling", self._session, c.byref(Sampling(**options)))

    def stream(self, prompt: str, **options: int) -> str:
        pieces: list[bytes] = []

        def keep(user: None, piece: bytes, n_bytes: int) -> int:
            del user, n_bytes
            pieces.append(piece)
            return 0

        data, made = prompt.encode(), StreamOptions(**options)
        size = c.c_size_t(len(data))
        callback = _CALLBACK(keep)
        self.call("h2o_stream", self._session, data, size, c.byref(made), callback, None, None)
        return "".join(piece.decode() for piece in pieces)

    def save(self) -> bytes:
        data, size = c.c_void_p(), c.c_size_t()
        self.call("h2o_snapshot_save", self._session, c.byref(data), c.byref(size))
        assert data.value is not None
        saved = c.string_at(data.value, size.value)
        self._library.h2o_snapshot_free(data)
        return saved

    def load(self, snapshot: bytes) -> None:
        self.call("h2o_snapshot_load", self._session, snapshot, c.c_size_t(len(snapshot)))
