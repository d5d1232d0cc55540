"""Refuses subinterpreters, in which the core would wait for a lock that it never gets."""

from importlib import import_module


def is_main() -> bool:
    """Whether this is the interpreter that Python began with."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # since Python 3.13, and before
        try:
            found = import_module(name)
        except ImportError:
            continue
        main, current = found.get_main(), found.get_current()
        if isinstance(main, tuple):  # with where they come from
            main, current = main[0], current[0]
        return bool(main == current)
    return True


if not is_main():
    raise ImportError("h2o_cpp runs in Python's main interpreter, not in a subinterpreter")
