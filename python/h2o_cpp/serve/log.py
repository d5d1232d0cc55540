"""The server's log, as text or JSON, with the id of the request that a line is about."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Literal
from uuid import uuid4

from uvicorn.config import LOGGING_CONFIG

LogFormat = Literal["text", "json"]

request_id: ContextVar[str] = ContextVar("request_id", default="")

_CLIENTS_ID = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)
_ACCESS = ("client", "method", "path", "http_version", "status")  # uvicorn's arguments


def id_of(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The id of a request: the client's X-Request-Id, or a new one."""
    given = dict(headers).get(b"x-request-id", b"")
    return given.decode("ascii") if _CLIENTS_ID.fullmatch(given) else f"req_{uuid4().hex}"


def log_config(kind: LogFormat) -> dict[str, Any]:
    """A configuration for logging.config.dictConfig."""
    handlers = {
        name: {**handler, "filters": ["request"], "formatter": kind if kind == "json" else name}
        for name, handler in LOGGING_CONFIG["handlers"].items()
    }
    formatters = {
        name: {**formatter, "fmt": formatter["fmt"] + "%(request)s"}
        for name, formatter in LOGGING_CONFIG["formatters"].items()
    }
    return {
        **LOGGING_CONFIG,
        "filters": {"request": {"()": _AddRequest}},
        "formatters": {**formatters, "json": {"()": _JsonFormatter}},
        "handlers": handlers,
    }


class _AddRequest(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Add the id to a line of text."""
        record.request = f" [{id}]" if (id := request_id.get()) else ""
        return True


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """A record as an object in one line."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if id := request_id.get():
            line["request_id"] = id
        if record.name == "uvicorn.access" and isinstance(record.args, tuple):
            line |= dict(zip(_ACCESS, record.args, strict=False))
        if record.exc_info:
            line["exception"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps(line, default=str)
