"""Importing in a subinterpreter is an error; the main interpreter continues."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.background import PATIENCE

PROGRAM = """
import sys
try:
    import _interpreters as interpreters  # 3.13
except ImportError:
    import _xxsubinterpreters as interpreters
import h2o_cpp
other = interpreters.create()
error = None
source = f"import sys; sys.path[:] = {sys.path}; import h2o_cpp._core"
try:
    error = interpreters.run_string(other, source)
except Exception as raised:
    error = raised
assert "subinterpreter" in str(error), error
interpreters.destroy(other)
generator = h2o_cpp.Generator(sys.argv[1], threads=1)
print(generator.generate("a", max_tokens=3, ignore_eos=True).completion_tokens)
"""


def test_import_in_a_subinterpreter_fails(tiny_opt: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tiny_opt)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "3\n"), result.stderr
