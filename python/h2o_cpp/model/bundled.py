"""The model that comes with the package."""

from __future__ import annotations

from pathlib import Path

from h2o_cpp import _core

# A tiny OPT, to try things with. The CMake install puts it beside the extension.
BUNDLED_MODEL = Path(_core.__file__).parent / "models" / "tiny-opt.gguf"
