"""Downloading files from the Hugging Face Hub, or a mirror, whose answers are not trusted.

huggingface_hub's own download (2.4) deletes what an interrupted one has received, and joins headers
of the answer to paths.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, cast

from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp.files.file_lock import lock_file
from h2o_cpp.files.gguf_names import all_parts
from h2o_cpp.files.hub import HubSource, hub_path
from h2o_cpp.files.hub_requests import Listing, open_url
from h2o_cpp.files.visible_text import visible

_CHUNK = 1 << 20


class RemoteFile(NamedTuple):
    """A file of a repository on the Hub, and where it is stored here.

    content: changes with the content, if the Hub tells; sha256: of the content, if the Hub tells.
    """

    name: str
    url: str
    path: Path
    n_bytes: int
    content: str
    sha256: str | None

    @property
    def unfinished(self) -> Path:
        """An incomplete download."""
        key = self.sha256 or hashlib.sha256(self.content.encode("utf-8", "replace")).hexdigest()
        return self.path.with_name(f".{self.path.name}.{key[:16]}.part")

    @property
    def origin(self) -> Path:
        """Facts of a complete download whose SHA-256 the Hub does not tell."""
        return self.path.with_name(f".{self.path.name}.origin")


def model_files_of(
    source: HubSource, listing: Listing, root: Path, folder: str, revision: str
) -> list[RemoteFile]:
    """The files of the model that `source` chooses from a listing; of a split model all parts.

    root, folder: they are stored in this folder of `root`, which they must not leave. revision: of
    the repository, from which they are downloaded.

    Raises ValueError for a choice or a name that is wrong, and OSError for one without a size.
    """
    from huggingface_hub import constants, hf_hub_url

    found = []
    for name in all_parts(source.choose(list(listing.files))):
        if name not in listing.files:
            raise ValueError(f"{source.text}: {name}, a part of the split model, is missing")
        file = listing.files[name]
        path = hub_path(root, folder, name)
        if file.n_bytes is None:
            raise OSError(f"{source.text}: the Hub does not tell the size of {name}")
        url = hf_hub_url(source.repository, name, revision=revision, endpoint=constants.ENDPOINT)
        content = file.content or listing.commit
        found.append(RemoteFile(name, url, path, file.n_bytes, content, file.sha256))
    return found


def is_there(remote: RemoteFile) -> bool:
    """Whether the file has the content that the Hub tells, or else what was downloaded, unless the
    Hub has another one since."""
    if not remote.path.is_file() or remote.path.stat().st_size != remote.n_bytes:
        return False
    sha256 = remote.sha256
    if sha256 is None:
        try:
            origin = json.loads(remote.origin.read_text(encoding="utf-8"))
            if origin["content"] != remote.content or origin["etag"] != _etag(remote):
                return False
            sha256 = origin["sha256"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return False
    with remote.path.open("rb") as file, _bar(remote, f"checking {remote.path.name}") as bar:
        return _sha256(file, bar) == sha256


def _etag(remote: RemoteFile) -> str:
    with open_url(remote.url) as response:
        return str(response.headers.get("ETag", ""))


def check_space(directory: Path, remotes: list[RemoteFile]) -> None:
    """Raises OSError if the files do not fit on the disk."""
    directory.mkdir(parents=True, exist_ok=True)
    needed = sum(each.n_bytes - _size(each.unfinished) for each in remotes)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(f"{directory}: {needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _bar(remote: RemoteFile, what: str, done: int = 0) -> tqdm:
    return tqdm(
        desc=visible(what), total=remote.n_bytes, initial=done, unit="B", unit_scale=True,
        unit_divisor=1024, disable=None,
    )  # fmt: skip


def download(remote: RemoteFile) -> None:
    """Download a file, or what an interrupted download lacks.

    Raises OSError if a checksum is wrong or another process downloads the file.
    """
    remote.path.parent.mkdir(parents=True, exist_ok=True)
    with _open_unfinished(remote) as file:
        try:
            lock_file(file)
        except BlockingIOError:
            raise OSError(f"{remote.path}: another process is downloading it") from None
        if remote.sha256 is None:  # what is there may be of another content
            file.truncate(0)
        with _bar(remote, remote.path.name, file.seek(0, os.SEEK_END)) as bar:
            etag = _fetch(remote, file, bar)
        sha256 = _sha256(file)
        if remote.sha256 not in (None, sha256):
            file.truncate(0)
            raise OSError(f"{remote.path.name}: the checksum differs from the Hub's; pull it again")
        if remote.sha256 is None:
            origin = {"content": remote.content, "etag": etag, "sha256": sha256}
            remote.origin.unlink(missing_ok=True)  # it may be a link
            remote.origin.write_text(json.dumps(origin), encoding="utf-8")
    os.replace(remote.unfinished, remote.path)
    with suppress(OSError):
        if remote.sha256 is not None:
            remote.origin.unlink(missing_ok=True)


def _open_unfinished(remote: RemoteFile) -> BinaryIO:
    """Open the incomplete download to append; a symbolic link is an error."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    if remote.unfinished.is_symlink():  # where the flag is missing
        raise OSError(f"{remote.unfinished}: a symbolic link, expected an incomplete download")
    return cast(BinaryIO, os.fdopen(os.open(remote.unfinished, flags, 0o666), "a+b"))


def _fetch(remote: RemoteFile, file: IO[bytes], bar: tqdm) -> str:
    """Append the missing bytes, and return their ETag. After a broken connection, retry if any data
    was received."""
    from huggingface_hub import errors

    etag: str | None = None
    most = begin = file.seek(0, os.SEEK_END)
    while begin < remote.n_bytes:
        reason = "the Hub sends no more"
        try:
            found = _append(remote, file, begin, bar)
            if found != etag and etag is not None:
                file.truncate(0)
                raise OSError(f"{remote.name}: it has changed on the Hub meanwhile; pull it again")
            etag = found
        except errors.HfHubHTTPError:
            raise
        except errors.HTTPError as error:
            reason = str(error)
        begin = file.seek(0, os.SEEK_END)
        if begin <= most:
            raise OSError(
                f"{remote.name}: {reason}, after {begin} of {remote.n_bytes} bytes; "
                "pull it again to continue"
            )
        most = begin
    if begin > remote.n_bytes:
        file.truncate(0)
        raise OSError(f"{remote.name}: received more than {remote.n_bytes} bytes; pull it again")
    return etag or ""


def _append(remote: RemoteFile, file: IO[bytes], begin: int, bar: tqdm) -> str:
    """Append what the Hub sends from `begin` on, or replace the file if it sends the whole one.

    Stops after the bytes that the file may have and one chunk more. Returns the ETag.
    """
    with open_url(remote.url, {"Range": f"bytes={begin}-"}) as response:
        if response.status_code != 206:  # it sends the whole file
            file.truncate(0)
            bar.update(-begin)
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
            raise OSError(f"{remote.name}: the Hub sends other bytes than from {begin} on")
        for data in response.iter_raw():
            file.write(data)
            bar.update(len(data))
            if file.tell() > remote.n_bytes:
                break
        return str(response.headers.get("ETag", ""))


def _sha256(file: IO[bytes], bar: tqdm | None = None) -> str:
    found = hashlib.sha256()
    file.seek(0)
    while data := file.read(_CHUNK):
        found.update(data)
        if bar is not None:
            bar.update(len(data))
    return found.hexdigest()
