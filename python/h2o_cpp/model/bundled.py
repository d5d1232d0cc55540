"""The bundled model."""

from __future__ import annotations

from pathlib import Path

from h2o_cpp import _core

# A tiny OPT to try things with. CMake installs it next to the extension.
BUNDLED_MODEL = Path(_core.__file__).parent / "models" / "tiny-opt.gguf"
