"""Downloads models from the Hugging Face Hub into the directory of pulled models."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from h2o_cpp.model.file_lock import lock_file
from h2o_cpp.model.gguf_names import all_parts
from h2o_cpp.model.hub import HubSource, hub_errors
from h2o_cpp.model.library import models_directory

_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 30  # without a byte


class Bar(Protocol):
    """What shows how far a download is, as tqdm does."""

    def update(self, n: int) -> object:
        """`n` more bytes are there; fewer if it is negative."""

    def close(self) -> None:
        """It is over."""


MakeBar = Callable[[str, int, int], Bar]  # of a file's name, its bytes, and those already there


class _Remote(NamedTuple):
    """A file of a repository."""

    name: str
    url: str
    n_bytes: int
    content: str  # names the content: its SHA-256, or what git calls it
    sha256: str | None


def pull(source: str, make_bar: MakeBar) -> Path:
    """Download a model, and return its file; of a split one the first.

    source: hf://org/name[/file.gguf][:TYPE][@revision].

    What is there is not downloaded again. An interrupted download is continued by the next one of
    the same file. Raises as find_model does, and OSError where the content is not what the Hub
    says, the disk is full or another process downloads the file.
    """
    hub_source = HubSource.parse(source)
    with hub_errors(hub_source.text):
        remotes = _remote_files(hub_source)
        directory = models_directory() / hub_source.repository
        missing = [each for each in remotes if not _is_there(directory / each.name, each)]
        _check_space(directory, missing)
        for remote in missing:
            _download(remote, directory / remote.name, make_bar)
    return directory / remotes[0].name


def _remote_files(source: HubSource) -> list[_Remote]:
    """The files of a model, as the Hub describes them."""
    from huggingface_hub import HfApi, hf_hub_url

    api = HfApi()
    info = api.model_info(source.repository, revision=source.revision, files_metadata=True)
    siblings = {each.rfilename: each for each in info.siblings or ()}
    found = []
    for name in all_parts(source.choose(list(siblings))):
        if name not in siblings:
            raise ValueError(f"{source.text}: {name}, a part of the model, is missing")
        each = siblings[name]
        url = hf_hub_url(source.repository, name, revision=info.sha, endpoint=api.endpoint)
        sha256 = each.lfs.sha256 if each.lfs is not None else None
        content = sha256 or each.blob_id or str(info.sha)
        found.append(_Remote(name, url, each.size or 0, content, sha256))
    return found


def _is_there(path: Path, remote: _Remote) -> bool:
    return path.is_file() and path.stat().st_size == remote.n_bytes


def _check_space(directory: Path, remotes: list[_Remote]) -> None:
    """Raises OSError if the files will not fit on the disk."""
    directory.mkdir(parents=True, exist_ok=True)
    there = sum(_size(_unfinished(directory / each.name, each)) for each in remotes)
    needed = sum(each.n_bytes for each in remotes) - there
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(
            f"{directory}: {needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free"
        )


def _unfinished(path: Path, remote: _Remote) -> Path:
    """Where a file is until it is complete; another content is another file."""
    return path.with_name(f".{path.name}.{remote.content[:16]}.part")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _download(remote: _Remote, path: Path, make_bar: MakeBar) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unfinished(path, remote)
    with unfinished.open("a+b") as file:
        try:
            lock_file(file)
        except BlockingIOError:
            raise OSError(f"{path}: another process is downloading it") from None
        bar = make_bar(path.name, remote.n_bytes, file.seek(0, os.SEEK_END))
        try:
            _fetch(remote, file, bar)
        finally:
            bar.close()
        if remote.sha256 is not None and _sha256(file) != remote.sha256:
            file.truncate(0)
            raise OSError(f"{path.name}: what came is not what the Hub has: pull it again")
    os.replace(unfinished, path)


def _fetch(remote: _Remote, file: IO[bytes], bar: Bar) -> None:
    """Append what the file lacks. A connection that breaks after it brought something is made
    again."""
    from huggingface_hub import errors

    while (begin := file.seek(0, os.SEEK_END)) < remote.n_bytes:
        try:
            _append(remote, file, begin, bar)
        except errors.HfHubHTTPError:
            raise
        except errors.HTTPError as error:
            if file.seek(0, os.SEEK_END) == begin:
                raise OSError(
                    f"{remote.name}: {error}, after {begin} of {remote.n_bytes} bytes; "
                    "pull it again to continue"
                ) from None
    if file.tell() > remote.n_bytes:
        file.truncate(0)
        raise OSError(f"{remote.name}: more came than the Hub has: pull it again")


def _append(remote: _Remote, file: IO[bytes], begin: int, bar: Bar) -> None:
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = build_hf_headers() | {"Range": f"bytes={begin}-", "Accept-Encoding": "identity"}
    client: Any = get_session()
    with client.stream(
        "GET", remote.url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_SECONDS
    ) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:  # it sends all of it
            file.truncate(0)
            bar.update(-begin)
        for data in response.iter_bytes():
            file.write(data)
            bar.update(len(data))
            if file.tell() > remote.n_bytes:
                return


def _sha256(file: IO[bytes]) -> str:
    found = hashlib.sha256()
    file.seek(0)
    while data := file.read(_CHUNK):
        found.update(data)
    return found.hexdigest()
