"""Finding models: directories, the Hugging Face cache, and a mock of the Hub."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_cpp import Generator, capacity
from h2o_cpp.cli import main
from h2o_cpp.files.model_files import find_model
from h2o_cpp.measure import speed
from support.hub import COMMIT, Hub, at


def touch(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    return directory


class TestDirectory:
    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            (["model.gguf"], "model.gguf"),
            (["README.md", "Q8_0/model-Q8_0.gguf"], "Q8_0/model-Q8_0.gguf"),
            (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], "m-00001-of-00002.gguf"),
            (["m-imatrix-Q4_K_M.gguf", "mmproj-m-f16.gguf"], "m-imatrix-Q4_K_M.gguf"),
            (["m.gguf", "imatrix_m.gguf", "m.imatrix.gguf", "m-mmproj.gguf"], "m.gguf"),
            (["m.gguf", "._m.gguf", ".cache/m.gguf"], "m.gguf"),
            (["m.gguf", "model.safetensors", "config.json"], "m.gguf"),
        ],
    )
    def test_finds_the_only_model(self, tmp_path: Path, names: list[str], expected: str) -> None:
        found = find_model(touch(tmp_path, *names))
        assert Path(found) == tmp_path / expected

    def test_error_lists_several_models(self, tmp_path: Path) -> None:
        touch(tmp_path, "a-Q4_0.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "x/b.gguf")
        with pytest.raises(ValueError, match="3 models") as error:
            find_model(tmp_path)
        assert str(error.value).endswith(": a-00001-of-00002.gguf, a-Q4_0.gguf, x/b.gguf")

    def test_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no GGUF model found"):
            find_model(touch(tmp_path, "mmproj-m.gguf", "README.md"))

    def test_first_part_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"first part .* m-00002-of-00002.gguf is missing"):
            find_model(touch(tmp_path, "m-00002-of-00002.gguf"))

    def test_file_path_is_returned_unchanged(self, tmp_path: Path) -> None:
        """Regardless of its name, and whether or not it exists."""
        touch(tmp_path, "mmproj.gguf", "sha256-abc")
        for name in ("mmproj.gguf", "sha256-abc", "nowhere.gguf"):
            assert find_model(tmp_path / name) == str(tmp_path / name)

    def test_file_name_that_is_not_utf8(self, tmp_path: Path) -> None:
        path = os.path.join(os.fsencode(tmp_path), b"m\xff.gguf")
        Path(os.fsdecode(path)).touch()
        assert os.fsencode(find_model(os.fsencode(tmp_path))) == path  # type: ignore[arg-type]


class TestCheckpoint:
    @pytest.mark.parametrize(
        "weights",
        ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin.index.json"],
    )
    def test_error_contains_the_convert_command(self, tmp_path: Path, weights: str) -> None:
        directory = touch(tmp_path / "my model", weights, "config.json", "mmproj-F16.gguf")
        command = f"h2o-cpp convert '{directory}' -o 'my model'-F16.gguf"
        for source in (directory, directory / weights):
            if source.suffix == ".json":
                continue
            with pytest.raises(ValueError, match="not GGUF; convert it") as error:
                find_model(source)
            assert str(error.value).endswith(f": {command}")

    def test_convert_command_of_the_error_works(
        self, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapshot = tmp_path / "models--karpathy--stories260K" / "snapshots" / COMMIT
        shutil.copytree(shared / "models" / "stories260K", snapshot)
        with pytest.raises(ValueError, match="convert it by") as error:
            Generator(tmp_path / "models--karpathy--stories260K")
        program, *arguments = shlex.split(str(error.value).rpartition("by: ")[2])
        assert program == "h2o-cpp"
        monkeypatch.chdir(tmp_path)
        assert main(arguments) == 0
        assert Generator("stories260K-F16.gguf", threads=1).n_ctx == 512


class TestCache:
    """The layout of huggingface_hub: symbolic links in snapshots, one directory per revision."""

    def repository(self, root: Path, **snapshots: str) -> Path:
        repository = root / "models--org--name"
        for commit, name in snapshots.items():
            touch(repository / "blobs", commit)
            touch(repository / "snapshots" / commit)
            (repository / "snapshots" / commit).mkdir(parents=True)
            (repository / "snapshots" / commit / name).symlink_to(repository / "blobs" / commit)
        return repository

    def test_revision_of_main(self, tmp_path: Path) -> None:
        repository = self.repository(tmp_path, aaa="a.gguf", bbb="b.gguf")
        touch(repository / "refs", "main")
        (repository / "refs" / "main").write_text("bbb")
        found = repository / "snapshots" / "bbb" / "b.gguf"
        assert Path(find_model(repository)) == found
        assert Path(find_model(found.parent)) == found
        with pytest.raises(ValueError, match="2 models"):
            find_model(repository / "snapshots")

    def test_without_main(self, tmp_path: Path) -> None:
        repository = self.repository(tmp_path, aaa="a.gguf")
        assert Path(find_model(repository)) == repository / "snapshots" / "aaa" / "a.gguf"

    def test_nothing_downloaded(self, tmp_path: Path) -> None:
        (tmp_path / "models--org--name").mkdir()
        with pytest.raises(ValueError, match="no GGUF model found"):
            find_model(tmp_path / "models--org--name")


def test_every_command_accepts_a_directory(
    tmp_path: Path,
    tiny_opt: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed, "_limits", lambda _: (None, None))  # measuring takes seconds
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "tiny.gguf").symlink_to(tiny_opt)
    assert Generator(directory, threads=1).path == directory / "tiny.gguf"
    assert capacity(directory, "1GiB") == capacity(tiny_opt, "1GiB")
    text = tmp_path / "text"
    text.write_text("The old man went down to the sea with his son.")
    for arguments in (
        ["info", directory],
        ["run", "The", "-m", directory, "-n", 1],
        ["inspect", "The", "-m", directory],
        ["bench", "-m", directory, "--prompt", 2, "--context", 2, "-n", 1, "--rounds", 1],
        ["perplexity", directory, text, "-c", 8, "--budget", 0.5, "--policy", "h2o"],
        ["quantize", directory, tmp_path / "small.gguf", "Q8_0"],
    ):
        assert main([*map(str, arguments)]) == 0, capsys.readouterr().err


class TestHub:
    def test_download_is_cached(self, hub: type[Hub]) -> None:
        paths = []
        for _ in range(2):
            generator = Generator("hf://org/name", threads=1)
            assert generator.tokenize("x") == [ord("x")]
            paths.append(generator.path)
        assert paths[0] == paths[1]
        assert paths[0].parts[-3:] == ("snapshots", COMMIT, "small.gguf")
        assert [line for line in hub.asked if line.startswith("GET /org")] == [
            "GET /org/name/resolve/main/small.gguf"
        ]
        assert Path(find_model(paths[0].parents[2])) == paths[0]  # models--org--name

    def test_file_of_a_revision(self, hub: type[Hub]) -> None:
        path = find_model(f"hf://org/name/small.gguf@{COMMIT}")
        assert Path(path).read_bytes() == hub.files["small.gguf"]
        assert Path(find_model(Path("hf://org/name/small.gguf"))).name == "small.gguf"

    def test_all_parts_are_downloaded(self, hub: type[Hub]) -> None:
        names = [f"Q8_0/m-0000{i}-of-00002.gguf" for i in (1, 2)]
        hub.files |= dict.fromkeys(names, b"GGUF")
        del hub.files["small.gguf"]
        first = Path(find_model("hf://org/name"))
        assert first.name == "m-00001-of-00002.gguf"
        assert (first.parent / "m-00002-of-00002.gguf").exists()

    def test_error_lists_several_models_of_a_repository(self, hub: type[Hub]) -> None:
        hub.files["large.gguf"] = b"GGUF"
        with pytest.raises(ValueError, match=r"2 models, expected one of: small.gguf, large.gguf"):
            find_model("hf://org/name")

    def test_checkpoint_without_gguf(self, hub: type[Hub]) -> None:
        hub.files = {"model.safetensors": b"", "config.json": b"{}"}
        with pytest.raises(ValueError, match="hf download org/name --local-dir name && h2o-cpp"):
            find_model("hf://org/name")

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("hf://org/other", "no such repository"),
            ("hf://org/other/small.gguf", "no such repository"),
            ("hf://org/name@never", "no such revision"),
            ("hf://org/name/small.gguf@never", "no such revision"),
            ("hf://org/name/none.gguf", "no such file, expected one of: small.gguf\n"),
        ],
    )
    def test_not_found_on_the_hub(
        self, hub: type[Hub], source: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["info", source]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: {source}: {message}")
        assert err.count("\n") == 1

    def test_offline_uses_the_cache(self, hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
        path = find_model("hf://org/name")
        at("http://127.0.0.1:9", monkeypatch)  # no server listens on this port
        assert find_model("hf://org/name") == path
        assert find_model("hf://org/name/small.gguf") == path
        for source in ("hf://org/other", "hf://org/name/large.gguf"):
            with pytest.raises(OSError, match="the Hub cannot be reached") as error:
                find_model(source)
            assert str(error.value).startswith(f"{source}: ")

    def test_command_downloads_the_model(self, hub: type[Hub], tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "h2o_cpp", "info", "hf://org/name", "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)["file"].startswith(str(tmp_path / "cache"))

    def test_without_huggingface_hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ValueError, match=r"pip install 'h2o-cpp\[pull\]'"):
            find_model("hf://org/name")

    @pytest.mark.parametrize("source", ["hf://", "hf://name", "hf://org/name/", "hf://a/b/c.bin"])
    def test_malformed_hf_url(self, source: str) -> None:
        with pytest.raises(ValueError, match="expected hf://org/name"):
            find_model(source)
