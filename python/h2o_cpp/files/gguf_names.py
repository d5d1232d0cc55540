"""Names of GGUF files: which are models, parts of split models, types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

_MOST_LISTED = 5  # names in an error
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# GGUF files next to models: vision encoders and importance matrices.
_NO_MODEL = re.compile(r".*mmproj.*|imatrix.*|.*[-_.]imatrix\.gguf", re.IGNORECASE)


class Part(NamedTuple):
    """A part of a split model."""

    stem: str  # common to all parts
    number: int  # from 1
    total: int

    def names(self) -> list[str]:
        """The file names of all parts."""
        return [f"{self.stem}-{i:05}-of-{self.total:05}.gguf" for i in range(1, self.total + 1)]


def split_part(name: str) -> Part | None:
    """The part of a split model that a file is; None for a whole model."""
    match = _PART.search(name)
    return match and Part(name[: match.start()], int(match[1]), int(match[2]))


def all_parts(name: str) -> list[str]:
    """All files of the model that `name` belongs to."""
    part = split_part(name)
    return [name] if part is None else part.names()


def is_model(name: str) -> bool:
    """Whether a GGUF file is a model and not hidden."""
    path = PurePosixPath(name)
    return not (_NO_MODEL.fullmatch(path.name) or any(part[0] == "." for part in path.parts))


def model_stem(name: str) -> str | None:
    """A model's name without .gguf and part numbers; None for other files and later parts."""
    part = split_part(name)
    if not is_model(name) or (part is not None and part.number > 1):
        return None
    return name.removesuffix(".gguf") if part is None else part.stem


def has_type(name: str, quant: str) -> bool:
    """Whether a file's name contains a type such as Q4_K_M."""
    pattern = rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])"
    return re.search(pattern, name.removesuffix(".gguf"), re.IGNORECASE) is not None


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many there are besides."""
    shown, rest = names[:_MOST_LISTED], len(names) - _MOST_LISTED
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "") if names else "none"


def choose_model(names: Sequence[str], where: str, quant: str | None = None) -> str:
    """The only model among GGUF files, or the only one of a type; the first file of a split model.

    Raises ValueError if there are several, or none.
    """
    models = [name for name in names if model_stem(name) is not None]
    if quant is not None:
        there = _listed(models)
        models = [name for name in models if has_type(name, quant)]
        if not models:
            raise ValueError(f"{where}: no model of type {quant}, expected one of: {there}")
    if len(models) > 1:
        raise ValueError(f"{where}: {len(models)} models, expected one of: {_listed(models)}")
    if models:
        return models[0]
    later = [name for name in names if is_model(name)]
    if later:
        raise ValueError(f"{where}: the first part of the split model {later[0]} is missing")
    raise ValueError(f"{where}: no GGUF model found")
