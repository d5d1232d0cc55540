"""h2o-cpp pull with a mock of the Hub, and the names of pulled models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from h2o_cpp import Generator
from h2o_cpp.cli import main
from h2o_cpp.files.file_lock import lock_file
from h2o_cpp.files.model_files import find_model, find_pulled, models_directory, pulled_models
from support.hub import COMMIT, Hub, at


def h2o(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command."""
    status = main(arguments)
    return status, *capsys.readouterr()


def partial_files(folder: Path) -> list[Path]:
    return [*folder.rglob("*.part")]


class Usage(NamedTuple):
    """Disk usage in bytes, as shutil.disk_usage returns it."""

    total: int
    used: int
    free: int


class TestPull:
    def test_pulled_model_is_found_by_name(
        self, hub: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, out, err = h2o(capsys, "pull", "hf://org/name")
        assert (status, out) == (0, "small\n")
        assert err.startswith("pulled ")
        assert "h2o-cpp run -m small" in err
        path = tmp_path / "models" / "org" / "name" / "small.gguf"
        assert path.read_bytes() == hub.files["small.gguf"]
        for name in ("small", "SMALL", "sm", "small.gguf", "hf://org/name", path):
            assert Path(find_model(name)) == path
        assert Generator("small", threads=1).path == path
        assert h2o(capsys, "run", "x", "-m", "small", "-n", "1")[0] == 0
        assert f"GET /org/name/resolve/{COMMIT}/small.gguf" in hub.asked
        assert len([line for line in hub.asked if line.startswith("GET /org")]) == 1

    def test_pulled_model_is_not_downloaded_again(
        self, hub: type[Hub], capsys: pytest.CaptureFixture[str]
    ) -> None:
        for _ in range(2):
            assert h2o(capsys, "pull", "org/name")[:2] == (0, "small\n")
        assert len(hub.ranges) == 1

    def test_pull_and_models_in_subprocesses(self, hub: type[Hub]) -> None:
        command = [sys.executable, "-m", "h2o_cpp"]
        pulled = subprocess.run(
            [*command, "pull", "hf://org/name"], capture_output=True, text=True, check=True
        )
        assert pulled.stdout == "small\n"
        assert pulled.stderr.count("\n") == 1  # no progress bar without a terminal
        listed = subprocess.run([*command, "models"], capture_output=True, text=True, check=True)
        assert listed.stdout.splitlines()[1].split()[0] == "small"

    @pytest.mark.parametrize("cut", [1, 1000])
    def test_broken_connection_is_resumed(
        self, hub: type[Hub], cut: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.cuts += [cut, cut]
        assert h2o(capsys, "pull", "hf://org/name")[0] == 0
        assert hub.ranges == [f"bytes={n * cut}-" for n in range(3)]
        assert Path(find_model("small")).read_bytes() == hub.files["small.gguf"]

    def test_next_pull_resumes_an_interrupted_one(
        self, hub: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.cuts += [1000, 0]  # then an empty response
        status, out, err = h2o(capsys, "pull", "hf://org/name")
        assert (status, out) == (1, "")
        assert f"after 1000 of {len(hub.files['small.gguf'])} bytes; pull it again" in err
        assert pulled_models() == {}
        [part] = partial_files(tmp_path)
        assert part.read_bytes() == hub.files["small.gguf"][:1000]
        assert h2o(capsys, "pull", "hf://org/name")[0] == 0
        assert hub.ranges[-1] == "bytes=1000-"
        assert partial_files(tmp_path) == []
        assert Path(find_model("small")).read_bytes() == hub.files["small.gguf"]

    def test_server_without_range_requests(
        self, hub: type[Hub], capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.cuts += [1000]
        hub.knows_ranges = False
        assert h2o(capsys, "pull", "hf://org/name")[0] == 0
        assert Path(find_model("small")).read_bytes() == hub.files["small.gguf"]

    def test_changed_file_is_not_resumed(
        self, hub: type[Hub], capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.cuts += [1000, 0]
        assert h2o(capsys, "pull", "hf://org/name")[0] == 1
        hub.files["small.gguf"] = hub.files["small.gguf"][::-1]
        h2o(capsys, "pull", "hf://org/name")
        assert hub.ranges[-1] == "bytes=0-"

    def test_checksum_of_a_resumed_file_is_verified(
        self, hub: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.cuts += [1000, 0]
        assert h2o(capsys, "pull", "hf://org/name")[0] == 1
        [part] = partial_files(tmp_path)
        part.write_bytes(bytes(1000))
        status, _, err = h2o(capsys, "pull", "hf://org/name")
        assert status == 1
        assert "the checksum differs" in err
        assert pulled_models() == {}
        assert h2o(capsys, "pull", "hf://org/name")[0] == 0

    def test_concurrent_pull_is_an_error(
        self, hub: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.cuts += [1000, 0]
        assert h2o(capsys, "pull", "hf://org/name")[0] == 1
        [part] = partial_files(tmp_path)
        with part.open("a+b") as file:
            lock_file(file)
            status, _, err = h2o(capsys, "pull", "hf://org/name")
        assert status == 1
        assert "another process is downloading it" in err

    def test_full_disk(
        self,
        hub: type[Hub],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 0))
        status, _, err = h2o(capsys, "pull", "hf://org/name")
        assert status == 1
        assert "GiB needed, 0.0 GiB free" in err

    def test_unsupported_architecture_is_reported(
        self, hub: type[Hub], capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.files["small.gguf"] = hub.files["small.gguf"].replace(b"opt", b"owl")
        status, out, err = h2o(capsys, "pull", "hf://org/name")
        assert (status, out) == (0, "small\n")
        assert "owl, is not supported; these are: opt, llama, " in err
        assert "owl (cannot be run)" in h2o(capsys, "models")[1]

    def test_offline_finds_pulled_models(
        self, hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert h2o(capsys, "pull", "hf://org/name")[0] == 0
        at("http://127.0.0.1:9", monkeypatch)  # no server listens on this port
        assert Path(find_model("hf://org/name")).name == "small.gguf"
        status, _, err = h2o(capsys, "pull", "hf://org/name")
        assert status == 1
        assert "the Hub cannot be reached" in err

    def test_without_huggingface_hub(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        status, _, err = h2o(capsys, "pull", "hf://org/name")
        assert status == 1
        assert "pip install 'h2o-cpp[pull]'" in err

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("hf://org/other", "no such repository"),
            ("hf://org/name@never", "no such revision"),
            ("hf://org/name/none.gguf", "no such file, expected one of: small.gguf\n"),
            ("hf://org/name:Q4_0", "no model of type Q4_0, expected one of: small.gguf\n"),
            ("small", "expected hf://org/name"),
        ],
    )
    def test_not_found_on_the_hub(
        self, hub: type[Hub], source: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, out, err = h2o(capsys, "pull", source)
        assert (status, out) == (1, "")
        assert message in err
        assert err.count("\n") == 1
        assert pulled_models() == {}


class TestTypes:
    NAMES = ("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-q8_0.gguf", "m-IQ4_XS.gguf")

    @pytest.fixture(autouse=True)
    def files(self, hub: type[Hub]) -> None:
        hub.files |= dict.fromkeys(self.NAMES, hub.files.pop("small.gguf"))

    @pytest.mark.parametrize(
        ("source", "name"),
        [
            ("hf://org/name:Q8_0", "m-q8_0"),
            ("hf://org/name:q4_k_s", "m-Q4_K_S"),
            ("hf://org/name:IQ4_XS@main", "m-IQ4_XS"),
            ("hf://org/name/m-q8_0.gguf", "m-q8_0"),
            ("hf://org/name", "m-Q4_K_M"),
        ],
    )
    def test_pull_selects_a_type(
        self, source: str, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert h2o(capsys, "pull", source)[:2] == (0, f"{name}\n")
        assert Path(find_model(source.partition("@")[0])).stem == name

    @pytest.mark.parametrize("quant", ["Q4_K", "XS", "4_K_M"])
    def test_partial_type_name_does_not_match(
        self, quant: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, _, err = h2o(capsys, "pull", f"hf://org/name:{quant}")
        assert status == 1
        assert f"no model of type {quant}" in err

    def test_error_lists_several_models_without_a_default(
        self, hub: type[Hub], capsys: pytest.CaptureFixture[str]
    ) -> None:
        del hub.files["m-Q4_K_M.gguf"]
        status, _, err = h2o(capsys, "pull", "hf://org/name")
        assert status == 1
        assert "3 models, expected one of: m-Q4_K_S.gguf, m-q8_0.gguf, m-IQ4_XS.gguf" in err

    def test_all_parts_of_a_split_model_are_pulled(
        self, hub: type[Hub], capsys: pytest.CaptureFixture[str]
    ) -> None:
        data = hub.files["m-q8_0.gguf"]
        hub.files |= {f"F16/m-F16-0000{i}-of-00002.gguf": data for i in (1, 2)}
        assert h2o(capsys, "pull", "hf://org/name:F16")[:2] == (0, "m-F16\n")
        assert sorted(path.name for path in models_directory().rglob("*.gguf")) == [
            "m-F16-00001-of-00002.gguf",
            "m-F16-00002-of-00002.gguf",
        ]
        assert [*pulled_models()] == ["m-F16"]
        del hub.files["F16/m-F16-00002-of-00002.gguf"]
        assert (
            "00002-of-00002.gguf, a part of the split model, is missing"
            in (h2o(capsys, "pull", "hf://org/name:F16")[2])
        )


class TestNames:
    @pytest.fixture(autouse=True)
    def library(self, tmp_path: Path, tiny_opt: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("H2O_MODELS", str(tmp_path))
        for name in ("a/x/Big-1B-Q4_0", "a/x/Big-3B-Q4_0", "b/y/small", "c/z/small", "own"):
            path = tmp_path / f"{name}.gguf"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(tiny_opt)
        (tmp_path / "a" / "x" / ".cache").mkdir()
        (tmp_path / "a" / "x" / ".cache" / "hidden.gguf").touch()
        return tmp_path

    def test_equal_names_are_qualified(self) -> None:
        assert [*pulled_models()] == ["b/y/small", "Big-1B-Q4_0", "Big-3B-Q4_0", "c/z/small", "own"]

    @pytest.mark.parametrize(
        ("name", "path"),
        [
            ("big-1", "a/x/Big-1B-Q4_0.gguf"),
            ("BIG-3B-Q4_0", "a/x/Big-3B-Q4_0.gguf"),
            ("c/z/small", "c/z/small.gguf"),
            ("o", "own.gguf"),
        ],
    )
    def test_prefix_of_a_name(self, library: Path, name: str, path: str) -> None:
        assert find_pulled(name) == library / path
        assert Path(find_model(name)) == library / path

    def test_exact_name_has_priority_over_prefix(self, library: Path) -> None:
        (library / "own-2.gguf").touch()
        assert find_pulled("own") == library / "own.gguf"

    def test_error_lists_ambiguous_names(self) -> None:
        with pytest.raises(
            ValueError,
            match=r"big: ambiguous, expected one of the pulled models Big-1B-Q4_0, Big-3B",
        ):
            find_model("big")

    def test_file_has_priority_over_pulled_model(
        self, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(library / "a" / "x")
        Path("own").touch()
        assert find_model("own") == "own"

    def test_unknown_name(self) -> None:
        with pytest.raises(FileNotFoundError, match=r"nothing: no such file or pulled model"):
            Generator("nothing")
        assert find_model("nothing.gguf") == "nothing.gguf"  # opening it reports that it is missing

    def test_models_directory_follows_xdg(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("H2O_MODELS")
        monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
        assert models_directory() == Path("/cache/h2o-cpp/models")
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setenv("HOME", "/home/me")
        assert models_directory() == Path("/home/me/.cache/h2o-cpp/models")


class TestModels:
    def test_table(
        self,
        tmp_path: Path,
        tiny_opt: Path,
        llama: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("H2O_MODELS", str(tmp_path))
        status, out, err = h2o(capsys, "models")
        assert (status, out) == (0, "")
        assert f"no models in {tmp_path}" in err
        shutil.copy(tiny_opt, tmp_path / "tiny.gguf")
        shutil.copy(llama, tmp_path / "Llama.gguf")
        status, out, err = h2o(capsys, "models")
        assert (status, err) == (0, "")
        assert [line.split() for line in out.splitlines()] == [
            ["NAME", "SIZE", "ARCHITECTURE", "TYPE"],
            ["Llama", f"{llama.stat().st_size / 2**20:.2f}", "MiB", "llama", "F32"],
            ["tiny", f"{tiny_opt.stat().st_size / 2**20:.2f}", "MiB", "opt", "Q8_0"],
        ]
        [_, tiny] = json.loads(h2o(capsys, "models", "--json")[1])
        assert tiny == {
            "name": "tiny",
            "path": str(tmp_path / "tiny.gguf"),
            "n_bytes": tiny_opt.stat().st_size,
            "architecture": "opt",
            "type": "Q8_0",
            "chat": False,
            "can_run": True,
        }

    def test_models_reports_an_invalid_file(
        self,
        tmp_path: Path,
        tiny_opt: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("H2O_MODELS", str(tmp_path))
        (tmp_path / "none.gguf").write_text("none")
        shutil.copy(tiny_opt, tmp_path / "tiny.gguf")
        status, out, err = h2o(capsys, "models")
        assert status == 1
        assert "tiny" in out
        assert "none.gguf" in err
        assert err.count("\n") == 1
