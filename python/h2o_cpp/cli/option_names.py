"""Errors in the words of the command line: --n-ctx instead of the library's n_ctx."""

from __future__ import annotations

import argparse
import re
from collections.abc import Container, Iterable, Sequence

from h2o_cpp.generation.sampling import NUMBERS

# Attributes of parsed arguments by the library's other names for them.
_ATTRIBUTES = {
    "path": ("model",),
    "type_name": ("type",),
    "schema": ("json_schema", "json_schema_file"),
    "grammar": ("grammar", "grammar_file"),
    "prompt": ("prompt_tokens",),
    "context": ("depth",),
    "n": ("max_tokens",),
    "length": ("n_ctx",),
    "sequences": ("max_sequences",),
    "n_chunks": ("chunks",),
    "flops": ("gflops",),
    "kv_dtype": ("kv_dtype", "kv_dtypes"),
    "task": ("tasks",),
    "family": ("tasks",),
    "cors_origins": ("cors_origin",),
    "allowed_hosts": ("allowed_host",),
}


def with_option_names(
    message: str, parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[str, bool]:
    """The message of a ValueError, and whether it is about an argument of the command.

    Messages name arguments of the library as "n_ctx=5", and at their beginning as "n_ctx is 5".
    Here these become options, if possible as spelled in `words`, the command line.
    """
    names = _names(parser, words)
    # Without "=", other names may be words of English, or samplers.
    distinct = (n for n in names if n == "hh" or ("_" in n and n not in NUMBERS))
    before, text = r"(?<![\w./'\"-])", message
    for pattern, after in (
        (rf"{before}{_any(names)}=(?=[\s,;:)]|$)", ""),
        (rf"{before}{_any(names)}=True\b", ""),
        (rf"{before}{_any(names)}=", " "),
        (rf"^{_any(names)}(?= (?:is|are|has|needs|cannot)\b)", ""),
        (r"^(grammar|schema)(?=: )", ""),
        (rf"{before}{_any(distinct)}(?!\w|[./'\"]\w)", ""),
    ):
        text = re.sub(pattern, lambda m, end=after: names.get(m[1], m[1]) + end, text)  # type: ignore[misc]
    first = re.split("[ =]|: ", text, maxsplit=1)[0]
    return text, first in {*parser._option_string_actions, *names.values()}


def with_limit_names(message: str) -> str:
    """A message about the end of the context, with --n-ctx and --max-tokens."""
    named = message.replace("n_ctx", "--n-ctx").replace("max_tokens", "--max-tokens")
    return named.replace("--max-tokens=", "--max-tokens ")


def _any(names: Iterable[str]) -> str:
    return f"({'|'.join(map(re.escape, names)) or '(?!)'})"


def _names(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, str]:
    """Long options by the library's names of them; of several options, the one that is given."""
    given = {word.partition("=")[0] for word in words}
    names = {}
    for name in {*(action.dest for action in parser._actions), *_ATTRIBUTES}:
        attributes = _ATTRIBUTES.get(name, (name,))
        actions = [one for one in parser._actions if one.dest in attributes]
        if not actions:
            continue
        typed = {_long(one, given) for one in actions if given.intersection(one.option_strings)}
        positional = [str(one.metavar) for one in actions if not one.option_strings]
        names[name] = typed.pop() if len(typed) == 1 else (positional or [_long(actions[0])])[0]
    return names


def _long(action: argparse.Action, given: Container[str] = ()) -> str:
    """A long name of an option, if possible one that is given."""
    long = [option for option in action.option_strings if option.startswith("--")]
    return next((option for option in long if option in given), long[0])
