"""ModelFile: the GGUF file of a model, opened once and handed down."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from h2o_cpp import _core
from h2o_cpp.files.model_files import find_model


class ModelFile:
    """The GGUF file of a model, or all files of a split one; the first has the metadata."""

    def __init__(self, shards: _core.GgufShards) -> None:
        self.shards = shards
        self.header = shards.files[0]

    @staticmethod
    def find(source: str | os.PathLike[str] | ModelFile) -> ModelFile:
        """Open a model; source: as for find_model().

        Raises as find_model() does, and ValueError for an invalid file.
        """
        if isinstance(source, ModelFile):
            return source
        return ModelFile(_core.GgufShards(find_model(source)))

    @property
    def path(self) -> str:
        """The first file."""
        return self.header.path

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(Path(file.path).stat().st_size for file in self.shards.files)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """All metadata by key."""
        return self.header.metadata()

    @cached_property
    def config(self) -> _core.Config:
        """The parameters. Raises ValueError if it is not a model that can be run."""
        return _core.Config(self.shards)
