"""`python -m h2o_cpp` is `h2o-cpp`."""

import os
import signal
import sys
from typing import TYPE_CHECKING

from h2o_cpp.cli import main
from h2o_cpp.files.visible_text import make_process_visible

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def _print_unraisable(found: "UnraisableHookArgs") -> None:
    """Ignore Ctrl-C in destructors or while its handler changes, where Python cannot raise it."""
    race = found.exc_type is OSError and "due to race condition" in str(found.exc_value)
    if found.exc_type is not KeyboardInterrupt and not race:
        sys.__unraisablehook__(found)


def _replace_closed() -> None:
    """Open the standard streams that are closed, which are None in Python.

    print() would write nothing to a closed stdout, where it must fail, and to stdout what is meant
    for a closed stderr.
    """
    for name, flags, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))


def run() -> int:
    """Run the command line; returns the exit status."""
    _replace_closed()
    make_process_visible()
    sys.unraisablehook = _print_unraisable
    try:
        status = main()
        # At exit, Python runs code of threads and libraries, which prints a traceback if Ctrl-C
        # interrupts it. From here on, Ctrl-C ends the process.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # between main() and signal()
        return 130
    return status


if __name__ == "__main__":
    sys.exit(run())
