"""The quantize command and tools/quantize."""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from h2o_cpp import _core
from h2o_cpp.cli import main
from h2o_cpp.quantize import quantize
from support.llama_gguf import types, write_llama


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_llama(tmp_path / "in.gguf")
    return tmp_path / "in.gguf"


def run_cli(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    status = main(["quantize", *map(str, args)])
    captured = capsys.readouterr()
    assert captured.out == ""
    return status, captured.err


def test_command_writes_the_file(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.gguf"
    status, err = run_cli(capsys, source, output, "q4_k_m", "--threads", "1")
    assert (status, err) == (0, f"wrote {output} ({output.stat().st_size / 2**20:.2f} MiB)\n")
    assert types(output)["blk.0.ffn_up.weight"] == "Q4_K"


def test_force_is_needed_to_overwrite(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.gguf"
    output.write_text("mine")
    (tmp_path / "link.gguf").symlink_to(output)
    for path in (output, tmp_path / "link.gguf"):
        status, err = run_cli(capsys, source, path, "Q8_0")
        assert status == 1
        assert err == f"error: {path}: the file already exists (--force replaces it)\n"
    assert output.read_text() == "mine"
    assert run_cli(capsys, source, output, "Q8_0", "--force")[0] == 0
    assert types(output)["blk.0.ffn_up.weight"] == "Q8_0"
    assert "the output is the input" in run_cli(capsys, source, source, "Q8_0", "--force")[1]


def test_errors_are_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.gguf"

    def fails(*args: object, expected: int = 1) -> str:
        status, message = run_cli(capsys, *args)
        assert status == expected
        assert message.startswith("error: ")
        assert message.count("\n") == 1
        return message

    message = fails(source, output, "Q9_K", expected=2)
    assert message.startswith("error: TYPE 'Q9_K', expected one of Q8_0, Q6_K, Q5_K_M")
    assert "missing.gguf" in fails(tmp_path / "missing.gguf", output, "Q4_0")
    (tmp_path / "text.gguf").write_text("not a model")
    assert "text.gguf" in fails(tmp_path / "text.gguf", output, "Q4_0")
    assert "the output is the input" in fails(source, source, "Q4_0")
    (tmp_path / "link.gguf").symlink_to(source)
    assert "the output is the input" in fails(source, tmp_path / "link.gguf", "Q4_0")
    assert "no such directory" in fails(source, tmp_path / "none" / "out.gguf", "Q4_0")
    assert "not a regular file" in fails(source, tmp_path, "Q4_0")
    for threads in ("0", "99999999999"):
        message = fails(source, output, "Q4_0", "--threads", threads, expected=2)
        assert f"--threads {threads}" in message
    assert not output.exists()


def test_requantizing_needs_allow_requantize(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, requantized = tmp_path / "small.gguf", tmp_path / "again.gguf"
    quantize(source, small, "Q5_0")
    status, message = run_cli(capsys, small, requantized, "Q4_0")
    assert status == 1
    assert "token_embd.weight is Q5_0 already" in message
    assert "--allow-requantize" in message
    assert not requantized.exists()
    assert run_cli(capsys, small, requantized, "Q4_0", "--allow-requantize")[0] == 0
    assert types(requantized)["token_embd.weight"] == "Q4_0"
    quantize(small, requantized, "Q5_0")  # already of this type: not an error
    assert requantized.read_bytes() == small.read_bytes()


def test_unreadable_type_is_rejected(tmp_path: Path) -> None:
    with closing(GGUFWriter(tmp_path / "in.gguf", "llama")) as writer:
        type = GGMLQuantizationType.Q8_K
        writer.add_tensor("a.weight", np.zeros((2, 292), np.uint8), raw_dtype=type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    with pytest.raises(ValueError, match=r"a\.weight is Q8_K, which cannot be read"):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0", allow_requantize=True)


def test_importance_matrix_is_not_a_model(tmp_path: Path) -> None:
    with closing(GGUFWriter(tmp_path / "in.gguf", "imatrix")) as writer:
        writer.add_type("imatrix")
        writer.add_tensor("a.weight", np.zeros((2, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    with pytest.raises(ValueError, match=r"in\.gguf: an importance matrix, expected a model"):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0")


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="names of files are Unicode there")
def test_file_names_that_are_not_utf8(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = (tmp_path / os.fsdecode(name) for name in (b"m\xff.gguf", b"o\xfe.gguf"))
    source.rename(model)
    for _ in range(2):
        assert run_cli(capsys, model, output, "Q8_0", "--force") == (
            0,
            f"wrote {tmp_path}/o\\udcfe.gguf ({output.stat().st_size / 2**20:.2f} MiB)\n",
        )
    assert types(output)["output.weight"] == "Q8_0"
    assert "the output is the input" in run_cli(capsys, model, model, "Q8_0", "--force")[1]
    assert _core.GgufFile(model).path == str(model)


def test_tool(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Path(__file__).parents[2] / "tools" / "quantize"
    assert os.access(tool, os.X_OK)
    monkeypatch.setattr(sys, "argv", ["quantize", str(source), str(tmp_path / "o.gguf"), "Q8_0"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(tool), run_name="__main__")
    assert types(tmp_path / "o.gguf")["output.weight"] == "Q8_0"
