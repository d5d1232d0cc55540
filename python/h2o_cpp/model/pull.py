"""Downloading models from the Hugging Face Hub into the directory of pulled models.

huggingface_hub's own download (2.4) deletes what an interrupted one has received.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp.model.file_lock import lock_file
from h2o_cpp.model.gguf_names import all_parts
from h2o_cpp.model.hub import HubSource, hub_errors
from h2o_cpp.model.model_files import models_directory

_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 30  # without receiving data


class _Remote(NamedTuple):
    """A file of a repository."""

    name: str
    url: str
    n_bytes: int
    content: str  # identifies the content: SHA-256 or git's hash
    sha256: str | None


def pull(source: str) -> Path:
    """Download a model and return its path; for a split model, the first file. On a terminal, a
    progress bar appears.

    source: hf://org/name[/file.gguf][:TYPE][@revision].

    Complete files are not downloaded again; interrupted downloads continue. Raises as find_model
    does, and OSError if a checksum is wrong, the disk is full or another process downloads the
    file.
    """
    hub_source = HubSource.parse(source)
    with hub_errors(hub_source.text):
        remotes = _remote_files(hub_source)
        directory = models_directory() / hub_source.repository
        missing = [each for each in remotes if not _is_there(directory / each.name, each)]
        _check_space(directory, missing)
        for remote in missing:
            _download(remote, directory / remote.name)
    return directory / remotes[0].name


def _remote_files(source: HubSource) -> list[_Remote]:
    """The files of a model, from the Hub's metadata."""
    from huggingface_hub import HfApi, hf_hub_url

    api = HfApi()
    info = api.model_info(source.repository, revision=source.revision, files_metadata=True)
    siblings = {each.rfilename: each for each in info.siblings or ()}
    found = []
    for name in all_parts(source.choose(list(siblings))):
        if name not in siblings:
            raise ValueError(f"{source.text}: {name}, a part of the split model, is missing")
        each = siblings[name]
        url = hf_hub_url(source.repository, name, revision=info.sha, endpoint=api.endpoint)
        sha256 = each.lfs.sha256 if each.lfs is not None else None
        content = sha256 or each.blob_id or str(info.sha)
        found.append(_Remote(name, url, each.size or 0, content, sha256))
    return found


def _is_there(path: Path, remote: _Remote) -> bool:
    return path.is_file() and path.stat().st_size == remote.n_bytes


def _check_space(directory: Path, remotes: list[_Remote]) -> None:
    """Raises OSError if the files do not fit on the disk."""
    directory.mkdir(parents=True, exist_ok=True)
    there = sum(_size(_unfinished(directory / each.name, each)) for each in remotes)
    needed = sum(each.n_bytes for each in remotes) - there
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(f"{directory}: {needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free")


def _unfinished(path: Path, remote: _Remote) -> Path:
    """The path of an incomplete download; it depends on the content."""
    return path.with_name(f".{path.name}.{remote.content[:16]}.part")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _download(remote: _Remote, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unfinished(path, remote)
    with unfinished.open("a+b") as file:
        try:
            lock_file(file)
        except BlockingIOError:
            raise OSError(f"{path}: another process is downloading it") from None
        with tqdm(
            desc=path.name, total=remote.n_bytes, initial=file.seek(0, os.SEEK_END), unit="B",
            unit_scale=True, unit_divisor=1024, disable=None,
        ) as bar:  # fmt: skip
            _fetch(remote, file, bar)
        if remote.sha256 is not None and _sha256(file) != remote.sha256:
            file.truncate(0)
            raise OSError(f"{path.name}: the checksum differs from the Hub's; pull it again")
    os.replace(unfinished, path)


def _fetch(remote: _Remote, file: IO[bytes], bar: tqdm) -> None:
    """Append the missing bytes. After a broken connection, retry if any data was received."""
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
        raise OSError(f"{remote.name}: received more than {remote.n_bytes} bytes; pull it again")


def _append(remote: _Remote, file: IO[bytes], begin: int, bar: tqdm) -> None:
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = build_hf_headers() | {"Range": f"bytes={begin}-", "Accept-Encoding": "identity"}
    client: Any = get_session()
    with client.stream(
        "GET", remote.url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_SECONDS
    ) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:  # it sends the whole file
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
