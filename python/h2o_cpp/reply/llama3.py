"""Llama 3: {"name": ..., "parameters": {...}}; several calls are separated by semicolons."""

from __future__ import annotations

from functools import partial

from h2o_cpp.reply.calls import Tools, read_call
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Scanner, Steps

_TAG = "<|python_tag|>"
MARKERS = (_TAG,)


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Parse calls at the beginning, then content. Calls of unknown tools are content.

    Models also separate calls by commas, line breaks or nothing.
    """
    s.keep()
    yield from s.spaces()
    yield from s.starts(_TAG)
    while (yield from read_call(s, tools.has)):
        s.end_call()
        yield from s.space_after_call()
        s.keep()
        if (yield from s.starts(";")) or (yield from s.starts(",")):
            yield from s.spaces()
    s.not_a_call()
    yield from s.remainder()


def grammar(r: Rules) -> str:
    """A grammar of calls."""
    call = partial(r.json_call, arguments="parameters")
    return r.calls(call, between=r.text("; "))
