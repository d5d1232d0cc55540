"""The Hugging Face Hub: parsing hf://org/name, and choosing the model in a repository."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from h2o_cpp.model.gguf_names import choose_model, has_type, is_model

_SOURCE = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:/([^:@]+\.gguf))?(?::([\w.-]+))?(?:@(.+))?")
_WEIGHTS = re.compile(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?")
_DEFAULT = "Q4_K_M"  # the default among several models


class HubSource(NamedTuple):
    """The parts of hf://org/name[/file.gguf][:TYPE][@revision]."""

    text: str
    repository: str
    file: str | None
    quant: str | None
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> HubSource:
        """Raises ValueError for any other form."""
        text = re.sub("^hf:/+", "hf://", text)  # pathlib joins slashes
        match = _SOURCE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text}: expected hf://org/name[/file.gguf][:TYPE][@revision]")
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
        raise OSError(f"{source}: {str(error).partition(chr(10))[0]}") from None
    except errors.HTTPError as error:
        raise OSError(f"{source}: the Hub cannot be reached: {error}") from None
