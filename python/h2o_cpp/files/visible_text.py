"""Texts of files and of the network, as terminals and logs may receive them."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Mapping
from numbers import Number
from types import TracebackType
from typing import Any

MAX_MESSAGE = 2000  # characters of an error

# Control characters (C0, DEL, C1), those that separate lines or turn the direction of a text, and
# unpaired surrogates, which have no encoding.
_UNSAFE = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff"
_ONE_LINE = re.compile(f"[{_UNSAFE}]")
_format_warning = warnings.formatwarning
_LINES = re.compile(f"(?![\n\t])[{_UNSAFE}]")


def visible(text: str, *, lines: bool = False) -> str:
    """The text with unsafe characters as escapes such as \\x1b.

    lines: keep line breaks and tabs.
    """
    return (_LINES if lines else _ONE_LINE).sub(_escape, text)


def visible_json(document: Any, *, indent: int | None = None) -> str:
    """JSON in printable ASCII."""
    return json.dumps(document, indent=indent).replace("\x7f", "\\u007f")


def message_line(text: str) -> str:
    """A message of an error as one visible line of at most MAX_MESSAGE characters."""
    return shortened(visible(shortened(text)))


def has_unsafe(text: str) -> bool:
    """Whether visible() would change a text of one line."""
    return _ONE_LINE.search(text) is not None


def shortened(text: str) -> str:
    """The text, cut after MAX_MESSAGE characters."""
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def make_process_visible() -> None:
    """Let all logs, warnings and uncaught exceptions of this process show only visible texts, also
    those of other packages."""
    logging.setLogRecordFactory(_visible_record)
    warnings.formatwarning = _visible_warning
    sys.excepthook = _print_exception


def visible_log(name: str) -> logging.Logger:
    """A log that receives only visible texts in any process, cut as errors are."""
    log = logging.getLogger(name)
    if _clean not in log.filters:
        log.addFilter(_clean)
    return log


def _visible_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = logging.LogRecord(*args, **kwargs)
    _clean(record)
    return record


def _clean(record: logging.LogRecord) -> bool:
    """Make a record's texts visible in place; True, as for a filter that keeps it."""
    record.msg = visible(str(record.msg), lines=True)
    if isinstance(record.args, Mapping):
        record.args = {key: _clean_argument(value) for key, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_clean_argument, record.args))
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        record.exc_text = _traceback(record.exc_info[1]).rstrip("\n")
    return True


def _clean_argument(value: object) -> object:
    return value if value is None or isinstance(value, Number) else message_line(str(value))


def _traceback(error: BaseException) -> str:
    return visible("".join(traceback.format_exception(error)), lines=True)


def _print_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.stderr.write(_traceback(error.with_traceback(trace)))


def _visible_warning(*args: Any, **kwargs: Any) -> str:
    return visible(_format_warning(*args, **kwargs), lines=True)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
