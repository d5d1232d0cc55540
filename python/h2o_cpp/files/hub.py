"""The Hugging Face Hub: parsing hf://org/name, and choosing the model in a repository."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from h2o_cpp.files.gguf_names import choose_model, has_type, is_model
from h2o_cpp.files.visible_text import has_unsafe

_SOURCE = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:/([^:@]+\.gguf))?(?::([\w.-]+))?(?:@(.+))?")
_PAGE = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/+")
# A page of a repository's files, or of one of them, at a revision.
_AT_REVISION = re.compile(r"^(hf://[^/]+/[^/]+)/(?:tree|blob|resolve)/([^/?]+)(/[^?]*)?(?:\?.*)?$")
_WEIGHTS = re.compile(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?")
_DEFAULT = "Q4_K_M"  # the default among several models

# Names that Windows takes as devices, in any folder and with any suffix.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class HubSource(NamedTuple):
    """The parts of hf://org/name[/file.gguf][:TYPE][@revision]."""

    text: str
    repository: str
    file: str | None
    quant: str | None
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> HubSource:
        """Also of the address of a repository's page. Raises ValueError for any other form."""
        given = text
        text = re.sub("^hf:/+", "hf://", text)  # pathlib joins slashes
        if is_page(text):
            text = _AT_REVISION.sub(
                lambda m: m[1] + (m[3] or "") + ("" if m[2] == "main" else f"@{m[2]}"),
                _PAGE.sub("hf://", text, count=1).rstrip("/"),
            )
        match = _SOURCE.fullmatch(text)
        if match is None or not all(map(_is_plain, match[1].split("/"))):
            of_ollama = re.fullmatch(r"(hf://)?(\S*ollama\.com/\S*|[\w.:-]+)", text)
            hint = "; Ollama's library is not the Hub, which has its models too" * bool(of_ollama)
            raise ValueError(f"{given}: expected hf://org/name[/file.gguf][:TYPE][@revision]{hint}")
        return cls(text, *match.groups())

    def choose(self, names: Sequence[str]) -> str:
        """The model among a repository's files; of a split model the first file.

        Raises ValueError if it does not exist or is ambiguous.
        """
        models = [name for name in names if name.endswith(".gguf") and is_model(name)]
        if self.file in names:
            return str(self.file)
        if self.file is not None:
            there = ", ".join(models) or "none"
            raise ValueError(f"{self.text}: no such file, expected one of: {there}")
        if not models and any(is_checkpoint_file(name) for name in names):
            name = self.repository.rpartition("/")[2]
            raise ValueError(
                f"{self.text}: a checkpoint, not GGUF; download and convert it by: "
                f"hf download {self.repository} --local-dir {name} && "
                f"h2o-cpp convert {name} -o {name}-F16.gguf"
            )
        quant = self.quant
        if quant is None and any(has_type(name, _DEFAULT) for name in models):
            quant = _DEFAULT
        return choose_model(models, self.text, quant)


def is_page(text: str) -> bool:
    """Whether a text is the address of a page of the Hub, with or without https://."""
    return _PAGE.match(text) is not None


def hub_path(root: Path, repository: str, name: str) -> Path:
    """The path below `root` of a file that the Hub names; its directories need not exist.

    Raises ValueError unless the name is relative, with no empty part, `.` or `..`, no control
    character, and nothing that Windows reads otherwise; and if symbolic links lead out of `root`.
    """
    if (
        has_unsafe(name)
        or re.search(r'[\\:<>"|?*]', name)
        or not all(map(_is_plain, name.split("/")))
    ):
        raise ValueError(f"{repository}: the Hub names a file {name!r}, expected a relative path")
    path = root.joinpath(repository, name)
    if not path.parent.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{path}: a symbolic link leads out of {root}")
    return path


def _is_plain(part: str) -> bool:
    """Whether every system takes a part of a path as the name of a file or directory."""
    return part not in ("", ".", "..") and part[-1] not in " ." and not _DEVICES.fullmatch(part)


def is_checkpoint_file(name: str) -> bool:
    """Whether a file contains weights of a Hugging Face checkpoint."""
    return _WEIGHTS.fullmatch(name) is not None


@contextmanager
def hub_errors(source: str) -> Iterator[None]:
    """Translate errors of huggingface_hub to OSError naming `source`; ValueError if it is missing.

    FileNotFoundError is not translated.
    """
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise ValueError(
            f"{source}: {error}: install the extra, pip install 'h2o-cpp[pull]'"
        ) from None
    try:
        yield
    except errors.GatedRepoError:
        raise OSError(
            f"{source}: access must be requested on its page, and needs hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise OSError(
            f"{source}: no such repository, or it is private and needs hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise OSError(f"{source}: no such revision") from None
    except errors.HfHubHTTPError as error:
        raise OSError(f"{source}: {str(error).strip().partition(chr(10))[0]}") from None
    except errors.HTTPError as error:
        raise OSError(f"{source}: the Hub cannot be reached: {error}") from None
