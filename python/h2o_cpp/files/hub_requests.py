"""Requests to the Hugging Face Hub, or to a mirror of it, whose answers are not trusted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from h2o_cpp.arguments import INT64_MAX
from h2o_cpp.files.hub import HubSource
from h2o_cpp.files.visible_text import message_line

TIMEOUT_SECONDS = 30  # without receiving data
MAX_LISTING_BYTES = 16 << 20  # about 50,000 files
MAX_LISTING_SECONDS = 60
_MAX_REDIRECTS = 10
_ERROR_HEADERS = ("X-Error-Code", "X-Error-Message")


class HubFile(NamedTuple):
    """A file of a repository, as its listing says; `content` changes with its content."""

    name: str
    n_bytes: int | None
    sha256: str | None
    content: str


class Listing(NamedTuple):
    """A repository's files by name, at a commit."""

    commit: str
    files: dict[str, HubFile]


def list_files(source: HubSource) -> Listing:
    """The files of a repository. Raises the errors that hub_errors() translates, and OSError for an
    answer that is too long, too slow or not understood."""
    from urllib.parse import quote

    from huggingface_hub import constants

    url = f"{constants.ENDPOINT}/api/models/{source.repository}"
    if source.revision is not None:
        url += f"/revision/{quote(source.revision, safe='')}"
    late = time.monotonic() + MAX_LISTING_SECONDS
    answer = bytearray()
    with open_url(f"{url}?blobs=true") as response:
        for data in response.iter_raw():
            answer += data
            if len(answer) > MAX_LISTING_BYTES:
                limit = f"{MAX_LISTING_BYTES >> 20} MiB"
                raise OSError(f"{source.text}: the Hub's list of files is longer than {limit}")
            if time.monotonic() > late:
                limit = f"{MAX_LISTING_SECONDS} seconds"
                raise OSError(f"{source.text}: the Hub's list of files takes more than {limit}")
    try:
        return _read_listing(json.loads(answer))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise OSError(f"{source.text}: the Hub's list of files is not understood") from None


@contextmanager
def open_url(url: str, headers: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A response of httpx whose body is not encoded and has not been read.

    Redirects are followed to https, and from http also to http. Raises the errors that hub_errors()
    translates, and OSError for other redirects and for an encoded answer.
    """
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    client: Any = get_session()
    sent = build_hf_headers() | {"Accept-Encoding": "identity"} | dict(headers or {})
    request = client.build_request("GET", url, headers=sent, timeout=TIMEOUT_SECONDS)
    for _ in range(1 + _MAX_REDIRECTS):
        response = client.send(request, stream=True, follow_redirects=False)
        try:
            if response.next_request is not None:
                before, request = request, response.next_request
                _check_redirect(before.url, request.url)
                continue
            # A body is read only where it is wanted, as its length is not known.
            shown = {
                name: message_line(response.headers[name])
                for name in _ERROR_HEADERS
                if name in response.headers
            }
            hf_raise_for_status(
                type(response)(response.status_code, headers=shown, request=response.request)
            )
            if not 200 <= response.status_code < 300:
                raise OSError(f"{url}: the Hub answers with status {response.status_code}")
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise OSError(f"{url}: the Hub answers in {encoding}, expected no encoding")
            yield response
            return
        finally:
            response.close()
    raise OSError(f"{url}: more than {_MAX_REDIRECTS} redirects")


def _check_redirect(before: Any, after: Any) -> None:
    if after.scheme not in ("https", before.scheme):
        raise OSError(f"{before}: the Hub redirects to {after}, expected {before.scheme}")


def _read_listing(answer: Any) -> Listing:
    """Raises ValueError, TypeError, KeyError or AttributeError for any other form."""
    files = [_read_file(each) for each in answer.get("siblings") or ()]
    commit = _text(answer["sha"])
    if not re.fullmatch("[0-9A-Za-z]{1,64}", commit):
        raise ValueError(commit)
    return Listing(commit, {file.name: file for file in files})


def _read_file(answer: Any) -> HubFile:
    lfs = answer.get("lfs") or {}
    n_bytes = answer.get("size", lfs.get("size"))
    if n_bytes is not None and (type(n_bytes) is not int or not 0 <= n_bytes <= INT64_MAX):
        raise ValueError(n_bytes)
    sha256 = lfs.get("sha256")
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(sha256)
    content = sha256 or _text(answer.get("blobId") or "")
    return HubFile(_text(answer["rfilename"]), n_bytes, sha256, content)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
