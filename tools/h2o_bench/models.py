"""Synthetic models for comparisons, written on first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_bench.engine_process import EngineError, module_environment
from support.shapes import config
from support.synthetic import write_model


class Models:
    """Model files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def directory(self) -> Path:
        return self._directory

    def gguf(self, shape: str, type_name: str, **changes: int) -> Path:
        """The model of a shape; changes: config values to override."""
        changed = "".join(f"-{key}={value}" for key, value in changes.items())
        path = self._directory / f"{shape}{changed}-{type_name}.gguf"
        if not path.exists():
            write_model(path, config(shape, **changes), type_name)
        return path

    def ctranslate2(self, shape: str, type_name: str = "int8") -> Path:
        """The directory of an OPT for CTranslate2, in int8 or float32. Raises EngineError."""
        path = self._directory / f"{shape}-ctranslate2-{type_name}"
        if path.exists():
            return path
        with TemporaryDirectory(dir=self._directory) as parent:
            directory = Path(parent) / "model"
            directory.mkdir()
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "h2o_bench.ctranslate2_model"),
                    *(shape, str(directory), type_name),
                ],
                capture_output=True,
                text=True,
                env=module_environment(),
            )
            if done.returncode:
                raise EngineError((done.stderr.splitlines() or ["no output"])[-1])
            directory.rename(path)
        return path


def scale_q8_0(data: NDArray[Any], factor: float) -> None:
    """Multiply a tensor in Q8_0, the bytes of a file, by a factor."""
    blocks = data.reshape(-1, 34)  # each begins with its scale
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16)
    blocks[:, :2] = (scales * np.float16(factor)).view(np.uint8)
