"""Rejects subinterpreters, in which the core would deadlock."""

from importlib import import_module


def is_main() -> bool:
    """Whether this is Python's main interpreter."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # Python 3.13 and later, and before
        try:
            found = import_module(name)
        except ImportError:
            continue
        main, current = found.get_main(), found.get_current()
        if isinstance(main, tuple):  # (id, origin)
            main, current = main[0], current[0]
        return bool(main == current)
    return True


if not is_main():
    raise ImportError(
        "h2o_cpp cannot be imported in a subinterpreter, expected Python's main interpreter"
    )
