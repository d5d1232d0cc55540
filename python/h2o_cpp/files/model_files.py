"""The GGUF files of models: the bundled one, a file, a directory, a pulled one, one on the Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from shlex import quote

from h2o_cpp import _core
from h2o_cpp.files.atomic import atomic_output
from h2o_cpp.files.gguf_names import all_parts, choose_model, is_model, model_stem
from h2o_cpp.files.hub import HubSource, hub_errors, hub_path, is_checkpoint_file, is_page
from h2o_cpp.files.hub_requests import Listing, list_files

# A tiny OPT to try things with. CMake installs it next to the extension.
BUNDLED_MODEL = Path(_core.__file__).parent / "models" / "tiny-opt.gguf"


def find_model(source: str | os.PathLike[str]) -> str:
    """The path of a model's GGUF file.

    source: the file; a directory with a model in it or one level below, such as a downloaded
        repository, or a repository in the Hub's cache (models--org--name, or a snapshot in it); the
        name of a pulled model or its beginning; or hf://org/name[/file.gguf][:TYPE][@revision],
        which the extra `pull` downloads unless it was pulled or cached. For a split model, the
        first part.

    Raises ValueError if there is no model, several or an unconverted checkpoint; FileNotFoundError
    for a name that is neither a file nor a pulled model; OSError if the Hub fails. Any other
    missing path is returned unchanged, so that opening it raises the error.
    """
    if not isinstance(source, str | bytes | os.PathLike):
        raise TypeError(f"path={source!r}, expected the path of a GGUF file")
    path = os.fsdecode(source)
    if not path:
        raise ValueError("path is empty, expected a GGUF file")
    if path.startswith("hf:") or is_page(path):
        return _of_hub(HubSource.parse(path))
    if os.path.isdir(path):
        return _in_directory(Path(path))
    if os.path.exists(path):
        if is_checkpoint_file(os.path.basename(path)):
            raise _not_converted(Path(path).parent)
        return path
    if pulled := find_pulled(path):
        return str(pulled)
    if os.path.basename(path) == path and not path.endswith(".gguf"):
        raise FileNotFoundError(
            f"{path}: no such file or pulled model (h2o-cpp models lists them, h2o-cpp pull "
            "downloads one)"
        )
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:\w+)?", path) and not path.endswith(".gguf"):
        raise FileNotFoundError(f"{path}: no such file; a repository of the Hub is hf://{path}")
    return path


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


def _in_directory(directory: Path, source: HubSource | None = None) -> str:
    """The model in a directory; source: which one, if there are several."""
    roots = _snapshots(directory) if directory.name.startswith("models--") else [directory]
    names: list[str] = []
    for root in roots:
        found = (f for pattern in ("*.gguf", "*/*.gguf") for f in root.glob(pattern))
        names += sorted(f.relative_to(directory).as_posix() for f in found)
    if not any(map(is_model, names)):
        for root in roots:
            if any(is_checkpoint_file(file.name) for file in root.iterdir()):
                raise _not_converted(root)
    chosen = choose_model(names, str(directory)) if source is None else source.choose(names)
    return str(directory / chosen)


def _snapshots(repository: Path) -> list[Path]:
    """The `main` snapshot of a repository in the Hub's cache, or all of them."""
    snapshots = repository / "snapshots"
    try:
        main = snapshots / (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        main = snapshots / "main"
    return [main] if main.is_dir() else sorted(s for s in snapshots.glob("*") if s.is_dir())


def _not_converted(checkpoint: Path) -> ValueError:
    """The error for a checkpoint's directory."""
    where = checkpoint.absolute()
    name = where.name
    if where.parent.name == "snapshots":  # in the Hub's cache, the directory's name is a hash
        name = where.parent.parent.name.rpartition("--")[2]
    return ValueError(
        f"{checkpoint}: a checkpoint, not GGUF; convert it by: "
        f"h2o-cpp convert {quote(str(checkpoint))} -o {quote(name)}-F16.gguf"
    )


def _of_hub(source: HubSource) -> str:
    """The pulled model, else from the Hub's cache, else downloaded."""
    pulled = models_directory() / source.repository
    if source.revision is None and pulled.is_dir():
        try:
            return _in_directory(pulled, source)
        except ValueError:  # another file was pulled
            pass
    with hub_errors(source.text):
        from huggingface_hub import errors

        try:
            listing = list_files(source)
        except errors.HfHubHTTPError:
            raise
        except (errors.HTTPError, errors.OfflineModeIsEnabled):
            return _cached(source)
        return _into_cache(source, listing)


def _cached(source: HubSource) -> str:
    """The model in the Hub's cache. Raises OSError."""
    from huggingface_hub import HfApi

    try:
        if source.file is None:
            directory = HfApi().snapshot_download(
                source.repository, revision=source.revision, local_files_only=True
            )
            return _in_directory(Path(directory), source)
        paths = [
            HfApi().hf_hub_download(
                source.repository, part, revision=source.revision, local_files_only=True
            )
            for part in all_parts(source.file)
        ]
    except FileNotFoundError:
        raise OSError(
            f"{source.text}: the Hub cannot be reached, and the file is not cached"
        ) from None
    return str(paths[0])


def _into_cache(source: HubSource, listing: Listing) -> str:
    """The model in the Hub's cache, downloaded if it is not there."""
    from huggingface_hub import constants

    from h2o_cpp.files.download import check_space, download, model_files_of  # imports tqdm

    cache = Path(constants.HF_HUB_CACHE)
    repository = f"models--{source.repository.replace('/', '--')}"
    revision = source.revision or "main"
    folder = f"{repository}/snapshots/{listing.commit}"
    files = model_files_of(source, listing, cache, folder, revision)
    missing = [file for file in files if not file.path.exists()]
    if missing:
        check_space(cache, missing)
        for file in missing:
            download(file)
        if revision != listing.commit:
            reference = hub_path(cache, f"{repository}/refs", revision)
            reference.parent.mkdir(parents=True, exist_ok=True)
            with atomic_output(reference) as new:
                new.write_text(listing.commit, encoding="utf-8")
    return str(files[0].path)
