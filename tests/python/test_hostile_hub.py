"""`pull` from a hub that is hostile: it writes one folder, and only what the hub promised."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from h2o_cpp.cli import main
from h2o_cpp.files import hub_requests
from h2o_cpp.files.hub import hub_path
from h2o_cpp.files.model_files import find_model
from h2o_cpp.files.pull import pull
from support.hostile_hub import COMMIT, Answer, HostileHub, hostile_hub, listing, sibling, whole

DATA = b"GGUF" + bytes(range(256)) * 9
OTHER = DATA[::-1]
BAD_NAMES = (
    *("/etc/x.gguf", "//host/x.gguf", "../x.gguf", "a/../../x.gguf", "a/./x.gguf", "a//x.gguf"),
    *("a/..", "\\x.gguf", "..\\x.gguf", "a\\..\\..\\x.gguf", "C:x.gguf", "C:/x.gguf"),
    *("x\0.gguf", "x\x1b[2J.gguf", "x\n.gguf", "x\x7f.gguf", "x\x9b.gguf", "x\u202e.gguf"),
    *("x\udcff.gguf", "nul.gguf", "a/CON/x.gguf", "com1.x.gguf", "a /x.gguf", "a./x.gguf"),
    "x?.gguf",
)  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[HostileHub]:
    with pytest.MonkeyPatch.context() as patch, hostile_hub(patch) as hub:
        yield hub


@pytest.fixture
def hub(running: HostileHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostileHub:
    """A hub with DATA as m.gguf; models are stored below tmp_path, beside a file of the user's."""
    monkeypatch.setenv("H2O_MODELS", str(tmp_path / "models"))
    (tmp_path / "mine.gguf").write_bytes(b"mine")
    running.asked.clear()
    running.has("m.gguf", DATA)
    return running


def stored(folder: Path) -> Path:
    return folder / "models" / "org" / "name" / "m.gguf"


def outside(folder: Path) -> dict[str, bytes]:
    """The files that are not of the repository."""
    allowed = folder / "models" / "org" / "name"
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(f): f.read_bytes() for f in files if allowed not in f.parents}


class TestNames:
    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_bad_name_is_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError, match="expected a relative path"):
            hub_path(tmp_path, "org/name", name)

    @pytest.mark.parametrize(
        "name", ["m.gguf", "a/b/m.gguf", "größe 1.gguf", ".m.gguf", "..m.gguf"]
    )
    def test_plain_name_is_joined(self, tmp_path: Path, name: str) -> None:
        assert hub_path(tmp_path, "org/name", name) == tmp_path / "org" / "name" / name

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_pull_of_a_bad_name(
        self, hub: HostileHub, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = outside(tmp_path)
        hub.has(name, DATA)
        for source in ("hf://org/name", f"hf://org/name/{name}"):
            for command in ("pull", "info"):
                assert main([command, source]) == 1
        assert outside(tmp_path) == before
        assert not list(tmp_path.rglob("*x*.gguf"))
        assert capsys.readouterr().err.count("error: ") == 4
        assert not any("/resolve/" in path for path in hub.asked)

    @pytest.mark.parametrize("source", ["hf://../name", "hf://org/..", "hf://./name@main"])
    def test_repository_is_no_path(self, source: str) -> None:
        with pytest.raises(ValueError, match="expected hf://org/name"):
            pull(source)

    @pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege")
    @pytest.mark.parametrize("linked", ["org", "org/name", "org/name/sub"])
    def test_linked_folder(self, hub: HostileHub, tmp_path: Path, linked: str) -> None:
        (tmp_path / "elsewhere").mkdir()
        link = tmp_path / "models" / linked
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path / "elsewhere")
        hub.has("sub/m.gguf", DATA)
        with pytest.raises(ValueError, match="a symbolic link leads out of"):
            pull("hf://org/name")
        assert list((tmp_path / "elsewhere").iterdir()) == []

    @pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege")
    def test_linked_files_are_not_written_through(self, hub: HostileHub, tmp_path: Path) -> None:
        path = stored(tmp_path)
        path.parent.mkdir(parents=True)
        path.symlink_to(tmp_path / "mine.gguf")
        assert pull("hf://org/name") == path
        assert path.read_bytes() == DATA
        assert not path.is_symlink()
        hub.has("m.gguf", OTHER)
        key = hashlib.sha256(OTHER).hexdigest()[:16]
        path.with_name(f".m.gguf.{key}.part").symlink_to(tmp_path / "mine.gguf")
        with pytest.raises(OSError, match="symbolic link"):
            pull("hf://org/name")
        assert (tmp_path / "mine.gguf").read_bytes() == b"mine"
        assert path.read_bytes() == DATA


class TestContents:
    def test_changed_file_of_equal_size(self, hub: HostileHub, tmp_path: Path) -> None:
        assert pull("hf://org/name") == stored(tmp_path)
        hub.has("m.gguf", OTHER)
        assert pull("hf://org/name").read_bytes() == OTHER

    @pytest.mark.parametrize("etag", ['"1"', None])
    def test_changed_file_without_a_sha256(
        self, hub: HostileHub, etag: str | None, tmp_path: Path
    ) -> None:
        def has(data: bytes, blob: str, etag: str | None) -> None:
            hub.has("m.gguf", data, lfs=None, blobId=blob)
            hub.file = lambda begin: whole(data, **({"ETag": etag} if etag else {}))

        has(DATA, "b", etag)
        first = pull("hf://org/name")
        assert first.read_bytes() == DATA
        first.touch()
        inode = first.stat().st_ino
        assert pull("hf://org/name").stat().st_ino == inode  # not downloaded again
        has(OTHER, "c", etag)
        assert pull("hf://org/name").read_bytes() == OTHER
        has(DATA, "c", '"2"')
        assert pull("hf://org/name").read_bytes() == DATA

    @pytest.mark.parametrize("told", [{}, {"lfs": None}])
    def test_damaged_file_is_downloaded_again(
        self, hub: HostileHub, tmp_path: Path, told: dict[str, object]
    ) -> None:
        hub.has("m.gguf", DATA, **told)
        path = pull("hf://org/name")
        path.write_bytes(DATA[:-1] + b"?")
        assert pull("hf://org/name").read_bytes() == DATA

    def test_file_that_was_not_pulled_is_replaced(self, hub: HostileHub, tmp_path: Path) -> None:
        path = stored(tmp_path)
        path.parent.mkdir(parents=True)
        path.write_bytes(OTHER)
        assert pull("hf://org/name").read_bytes() == DATA

    def test_other_content_than_promised(self, hub: HostileHub, tmp_path: Path) -> None:
        hub.file = lambda begin: whole(OTHER)
        with pytest.raises(OSError, match="the checksum differs"):
            pull("hf://org/name")
        assert not stored(tmp_path).exists()


class TestCache:
    """`-m hf://...`, which downloads into the Hub's cache."""

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_headers_are_no_paths(self, hub: HostileHub, tmp_path: Path, cache: Path) -> None:
        evil = {"ETag": '"../../../../evil"', "X-Repo-Commit": "../../../evil"}
        hub.file = lambda begin: whole(DATA, **evil)
        path = Path(find_model("hf://org/name"))
        assert path == cache / "models--org--name" / "snapshots" / COMMIT / "m.gguf"
        assert path.read_bytes() == DATA
        assert find_model(cache / "models--org--name") == str(path)
        files = {file for file in tmp_path.rglob("*") if file.is_file()}
        assert files == {path, path.parents[2] / "refs" / "main", tmp_path / "mine.gguf"}

    def test_changed_file_has_another_commit(self, hub: HostileHub) -> None:
        first = Path(find_model("hf://org/name"))
        hub.has("m.gguf", OTHER)
        hub.listing = listing(sibling("m.gguf", OTHER), sha="c" * 40)
        second = Path(find_model("hf://org/name"))
        assert (first.read_bytes(), second.read_bytes()) == (DATA, OTHER)

    @pytest.mark.parametrize("sha", ["../../../evil", "", "a/b", "\x1b", None, 5])
    def test_commit_is_no_path(self, hub: HostileHub, tmp_path: Path, sha: object) -> None:
        hub.listing = listing(sibling("m.gguf", DATA), sha=sha)
        with pytest.raises(OSError, match="not understood"):
            find_model("hf://org/name")
        assert [*tmp_path.iterdir()] == [tmp_path / "mine.gguf"]

    def test_other_content_than_promised(self, hub: HostileHub, cache: Path) -> None:
        hub.file = lambda begin: whole(OTHER)
        with pytest.raises(OSError, match="the checksum differs"):
            find_model("hf://org/name")
        assert not [*cache.rglob("m.gguf")]


class TestBodies:
    """None of these may be stored, and each ends soon."""

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (Answer(200, {}, repeat(bytes(1 << 16))), "received more than"),
            (Answer(200, {"Content-Length": str(1 << 50)}, repeat(DATA)), "received more than"),
            (whole(DATA + b"x"), "received more than"),
            (Answer(200, {}, [DATA[:-1]]), "the Hub sends no more, after 2307 of 2308 bytes"),
            (whole(DATA[:-1]), "the Hub sends no more"),
            (Answer(206, {"Content-Range": "bytes 5-9/10"}, [DATA]), "other bytes than from 0 on"),
            (Answer(206, {}, [DATA]), "other bytes than from 0 on"),
            (Answer(204), "the Hub sends no more"),
            (Answer(200, {"Content-Encoding": "gzip"}, [gzip.compress(DATA)]), "answers in gzip"),
            (Answer(302, {"Location": "file:///etc/passwd"}), "redirects to file:.*/etc/passwd"),
            (Answer(302, {"Location": "ftp://127.0.0.1/m.gguf"}), "redirects to ftp:"),
            (Answer(307, {"Location": "/org/name/m.gguf"}), "more than 10 redirects"),
            (Answer(302, {"Location": "http://[::/"}), "hf://org/name: |m.gguf: "),
            (Answer(302), "status 302"),
            (Answer(500, {}, repeat(bytes(1 << 16))), "500"),
            (Answer(403, {"X-Error-Message": "no\x1b[2J"}, repeat(b"{" * 999)), "403"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("told", [{}, {"lfs": None}], ids=str)
    def test_wrong_body(
        self, hub: HostileHub, tmp_path: Path, answer: Answer, message: str, told: dict[str, object]
    ) -> None:
        hub.has("m.gguf", DATA, **told)
        hub.file = lambda begin: answer
        with pytest.raises(OSError, match=message) as error:
            pull("hf://org/name")
        assert "\x1b" not in str(error.value)
        assert not stored(tmp_path).exists()
        assert len(hub.asked) < 20
        assert sum(f.stat().st_size for f in tmp_path.rglob("*.part")) <= len(DATA)

    @pytest.mark.parametrize(
        ("size", "message"),
        [
            (1 << 60, "GiB needed"),
            (len(DATA) + 1, "the Hub sends no more"),
            (len(DATA) - 1, "received more than"),
            (0, "the checksum differs"),
            (-1, "not understood"),
            (1 << 70, "not understood"),
            (1.5, "not understood"),
            ("9", "not understood"),
            (True, "not understood"),
        ],
    )
    def test_size_that_lies(
        self, hub: HostileHub, tmp_path: Path, size: object, message: str
    ) -> None:
        hub.has("m.gguf", DATA, size=size)
        with pytest.raises(OSError, match=message):
            pull("hf://org/name")
        assert not stored(tmp_path).exists()

    def test_redirect_is_followed(self, hub: HostileHub, tmp_path: Path) -> None:
        answers = [Answer(302, {"Location": "/there"}), whole(DATA)]
        hub.file = lambda begin: answers.pop(0)
        assert pull("hf://org/name").read_bytes() == DATA
        assert hub.asked[-1] == "/there"

    @pytest.mark.parametrize(
        "answer",
        [
            whole(b""),
            whole(b"{}"),
            whole(b"[]"),
            whole(b'"sha"'),
            whole(b"\xff\xfe{"),
            whole(b"[" * 100_000),
            whole(b'{"sha": ' + b"1" * 10_000 + b"}"),
            listing(None),
            listing({}),
            listing({"rfilename": 1}),
            listing({"rfilename": "m.gguf", "lfs": 5}),
            listing(sibling("m.gguf", DATA, lfs={"sha256": "../../../mine"})),
            listing(sibling("m.gguf", DATA, lfs=None, blobId=["b"])),
            Answer(200, {}, repeat(b" " * (1 << 16))),
            Answer(200, {"Content-Encoding": "gzip"}, [gzip.compress(b"{}")]),
            Answer(302, {"Location": "file:///etc/passwd"}),
            Answer(404, {}, repeat(b" " * (1 << 16))),
        ],
    )
    def test_wrong_listing(
        self, hub: HostileHub, tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hub_requests, "MAX_LISTING_BYTES", 1 << 20)
        hub.listing = answer
        for get in (pull, find_model):
            with pytest.raises(OSError, match="org/name"):
                get("hf://org/name")
        assert not stored(tmp_path).exists()


PIECES = st.sampled_from(
    [
        "..",
        ".",
        "",
        "/",
        "\\",
        "m",
        "-Q4_K_M",
        "C:",
        "nul",
        "\0",
        "\x1b[2J",
        "\n",
        "~",
        "é",
        " ",
        "$",
    ]
)
NAMES = st.lists(PIECES, max_size=6).map(lambda pieces: "".join(pieces) + ".gguf")
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | NAMES,
    lambda some: (
        st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=9), some, max_size=3)
    ),
    max_leaves=5,
)
FILES = st.builds(
    sibling,
    NAMES | st.just("m-Q4_K_M.gguf"),
    st.just(DATA),
) | st.builds(
    lambda name, changed: sibling(name, DATA, **changed),
    NAMES | st.just("m-Q4_K_M.gguf"),
    st.dictionaries(st.sampled_from(["rfilename", "size", "lfs", "blobId"]), VALUES, max_size=2),
)
LISTINGS = st.one_of(
    st.lists(FILES | VALUES, max_size=4).map(lambda some: listing(*some)),
    VALUES.map(lambda value: whole(json.dumps(value).encode())),
    st.binary(max_size=99).map(whole),
)
BODIES = st.sampled_from([DATA, DATA, DATA, DATA[:-1], DATA + b"x", OTHER, b""])


@given(LISTINGS, BODIES, st.lists(st.integers(0, len(DATA)), max_size=2))
def test_any_answer_of_a_hub(
    running: HostileHub, answer: Answer, data: bytes, cuts: list[int]
) -> None:
    """Either a file below the folder with the content that the hub promised, or an error."""
    cuts = [*cuts]  # it may be tried again

    def send(begin: int) -> Answer:
        if not cuts:
            return whole(data)
        return Answer(200, {"Content-Length": "9999"}, [data[: cuts.pop()]])

    running.listing, running.file = answer, send
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name) / "a"
        patch.setenv("H2O_MODELS", str(folder / "models"))
        path = None
        with suppress(ValueError, OSError):
            path = pull("hf://org/name")
        assert outside(folder) == {}
        assert [*Path(name).iterdir()] in ([], [folder])
        files = [each for each in folder.rglob("*") if each.is_file() and each.name[0] != "."]
        assert files == ([] if path is None else [path])
        if path is not None:
            assert path.read_bytes() == data
