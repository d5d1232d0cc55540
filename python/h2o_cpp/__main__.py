"""`python -m h2o_cpp` is `h2o-cpp`."""

import signal
import sys

from h2o_cpp.cli import main


def run() -> int:
    """Run the command line as a program; returns its exit status."""
    try:
        status = main()
        # Python's own way out runs threads' and libraries' code, which prints a traceback when
        # Ctrl-C interrupts it. From here on Ctrl-C ends the process.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # between the two
        return 130
    return status


if __name__ == "__main__":
    sys.exit(run())
