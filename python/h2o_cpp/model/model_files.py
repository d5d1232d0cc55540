"""Where people keep models: finds the GGUF file in a directory, a cache or the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from shlex import quote

_HUB = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:/([^@]+\.gguf))?(?:@(.+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_WEIGHTS = re.compile(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?")
# Beside a model, and none: what sees pictures, and statistics for quantisers.
_NO_MODEL = re.compile(r".*mmproj.*|imatrix.*|.*[-_.]imatrix\.gguf", re.IGNORECASE)


def find_model(source: str | os.PathLike[str]) -> str:
    """The path of a model's GGUF file.

    source: the file itself; a directory that has one, of its own or one level below, such as a
        downloaded repository, or a repository in the Hub's cache (models--org--name, or a snapshot
        in it); or hf://org/name[/file.gguf][@revision], which is downloaded unless it is in the
        cache, by the extra `hub`. Of a split model it is the first part.

    Raises ValueError if there are several (it names them) or none (of a checkpoint it says how to
    convert it), and OSError if the Hub cannot be reached or refuses. A path that does not exist is
    given back: to open it says so.
    """
    path = os.fsdecode(source)
    if path.startswith("hf:"):
        path = re.sub("^hf:/+", "hf://", path)  # pathlib makes one slash of two
        match = _HUB.fullmatch(path)
        if match is None:
            raise ValueError(f"{path}: expected hf://org/name[/file.gguf][@revision]")
        return _download(path, *match.groups())
    if os.path.isdir(path):
        return _in_directory(Path(path))
    if _WEIGHTS.fullmatch(os.path.basename(path)) and os.path.isfile(path):
        raise _not_converted(Path(path).parent)
    return path


def _in_directory(directory: Path) -> str:
    roots = _snapshots(directory) if directory.name.startswith("models--") else [directory]
    names: list[str] = []
    for root in roots:
        found = (f for pattern in ("*.gguf", "*/*.gguf") for f in root.glob(pattern))
        names += sorted(f.relative_to(directory).as_posix() for f in found)
    if not any(map(_is_model, names)):
        for root in roots:
            if any(_WEIGHTS.fullmatch(file.name) for file in root.iterdir()):
                raise _not_converted(root)
    return str(directory / _choose(names, str(directory)))


def _snapshots(repository: Path) -> list[Path]:
    """Of a repository in the Hub's cache: the one that is `main`, or all that there are."""
    snapshots = repository / "snapshots"
    try:
        main = snapshots / (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        main = snapshots / "main"
    return [main] if main.is_dir() else sorted(s for s in snapshots.glob("*") if s.is_dir())


def _is_model(name: str) -> bool:
    """Of a GGUF file that is not hidden."""
    path = PurePosixPath(name)
    return not (_NO_MODEL.fullmatch(path.name) or any(part[0] == "." for part in path.parts))


def _choose(names: Sequence[str], where: str) -> str:
    """The one model among GGUF files."""
    models: list[str] = []
    parts: list[str] = []
    for name in filter(_is_model, names):
        part = _PART.search(name)
        (models if part is None or int(part[1]) == 1 else parts).append(name)
    if len(models) > 1:
        raise ValueError(f"{where}: {len(models)} models, give one of them: {', '.join(models)}")
    if not models and parts:
        raise ValueError(f"{where}: the first part of the split model of {parts[0]} is missing")
    if not models:
        raise ValueError(f"{where}: no GGUF model is in it")
    return models[0]


def _not_converted(checkpoint: Path) -> ValueError:
    """What to do with a directory of a checkpoint."""
    where = checkpoint.absolute()
    name = where.name
    if where.parent.name == "snapshots":  # of the Hub's cache, whose own name is a hash
        name = where.parent.parent.name.rpartition("--")[2]
    return ValueError(
        f"{checkpoint}: a checkpoint, not GGUF; convert it by: "
        f"h2o-cpp convert {quote(str(checkpoint))} -o {quote(name)}-F16.gguf"
    )


def _download(source: str, repository: str, file: str | None, revision: str | None) -> str:
    try:
        from huggingface_hub import HfApi, errors
    except ImportError as error:
        raise ValueError(
            f"{source}: {error}: install the extra, pip install 'h2o-cpp[hub]'"
        ) from None
    api = HfApi()
    offline = False
    try:
        try:
            info = api.model_info(repository, revision=revision)
        except errors.HfHubHTTPError:
            raise
        except (errors.HTTPError, OSError):  # no network: what has been downloaded before
            offline = True
        else:
            file = _choose_of_hub([each.rfilename for each in info.siblings or ()], source, file)
        if file is None:
            directory = api.snapshot_download(repository, revision=revision, local_files_only=True)
            return _in_directory(Path(directory))
        paths = [
            api.hf_hub_download(repository, part, revision=revision, local_files_only=offline)
            for part in _all_parts(file)
        ]
    except FileNotFoundError:
        raise OSError(
            f"{source}: the Hub cannot be reached, and the file is not in its cache"
        ) from None
    except errors.GatedRepoError:
        raise OSError(f"{source}: access is granted on its page, and needs hf auth login") from None
    except errors.RepositoryNotFoundError:
        raise OSError(
            f"{source}: no such repository, or a private one, which needs hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise OSError(f"{source}: no such revision") from None
    except errors.HTTPError as error:
        raise OSError(f"{source}: {str(error).partition(chr(10))[0]}") from None
    return str(paths[0])


def _choose_of_hub(names: Sequence[str], source: str, file: str | None) -> str:
    models = [name for name in names if name.endswith(".gguf") and _is_model(name)]
    if file in names:
        return str(file)
    if file is not None:
        raise ValueError(f"{source}: no such file; there are: {', '.join(models) or 'none'}")
    if not models and any(_WEIGHTS.fullmatch(name) for name in names):
        repository = source.removeprefix("hf://").partition("@")[0]
        name = repository.rpartition("/")[2]
        raise ValueError(
            f"{source}: a checkpoint, not GGUF; download and convert it by: "
            f"hf download {repository} --local-dir {name} && "
            f"h2o-cpp convert {name} -o {name}-F16.gguf"
        )
    return _choose(models, source)


def _all_parts(file: str) -> list[str]:
    match = _PART.search(file)
    if match is None:
        return [file]
    stem, n = file[: match.start()], int(match[2])
    return [f"{stem}-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]
