"""What `import h2o_cpp` imports."""

from __future__ import annotations

import subprocess
import sys


def test_only_numpy_at_once() -> None:
    """The other packages take longer to import than all of h2o_cpp; they wait for their use."""
    packages = ["gguf", "google.protobuf", "jinja2", "sentencepiece", "tokenizers", "tqdm"]
    code = f"import sys, h2o_cpp; print([p for p in {packages} if p in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
