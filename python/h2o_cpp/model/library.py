"""The directory of pulled models, and their names."""

from __future__ import annotations

import os
from pathlib import Path

from h2o_cpp.model.gguf_names import model_stem


def models_directory() -> Path:
    """$H2O_MODELS, or h2o-cpp/models in the user's cache; it need not exist."""
    if chosen := os.environ.get("H2O_MODELS"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "h2o-cpp" / "models"


def pulled_models() -> dict[str, Path]:
    """The models in the directory by name, sorted; of a split model the first file.

    A name is the file's name without .gguf, or its relative path if two files share the name.
    """
    root = models_directory()
    files: dict[str, list[str]] = {}
    for found in root.rglob("*.gguf"):
        path = found.relative_to(root).as_posix()
        if (stem := model_stem(path)) is not None:
            files.setdefault(stem.rpartition("/")[2], []).append(path)
    named = {
        name if len(paths) == 1 else path.removesuffix(".gguf"): root / path
        for name, paths in files.items()
        for path in paths
    }
    return dict(sorted(named.items(), key=lambda item: item[0].lower()))


def find_pulled(name: str) -> Path | None:
    """The pulled model with this name, or the only one whose name begins with it, ignoring case.

    Raises ValueError if it is ambiguous.
    """
    models = pulled_models()
    wanted = name.lower()
    exact = [
        path for known, path in models.items() if known.lower() == wanted.removesuffix(".gguf")
    ]
    if len(exact) == 1:
        return exact[0]
    begun = {known: path for known, path in models.items() if known.lower().startswith(wanted)}
    if len(begun) > 1:
        raise ValueError(f"{name}: ambiguous, expected one of the pulled models {', '.join(begun)}")
    return next(iter(begun.values()), None)
