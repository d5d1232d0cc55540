"""Stdin and stdout: as the file "-", and closed."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_cpp import BUNDLED_MODEL
from h2o_cpp.cli import main
from support.needs import LINUX

TEXT = "The old man and the sea, and the boy. " * 3
MODEL = str(BUNDLED_MODEL)


def run(
    *arguments: str, stdin: bytes | str = b"", shell: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """A command; shell: how it is redirected."""
    command = [sys.executable, "-m", "h2o_cpp", *arguments]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    data = stdin.encode() if isinstance(stdin, str) else stdin
    return subprocess.run(command, input=data, capture_output=True, check=False)


class TestStdin:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["perplexity", MODEL, "-", "-c", "20", "--hh", "0.5", "--policy", "h2o", "-t", "1"],
            ["run", "-f", "-", "-n", "3", "--temperature", "0"],
            ["run", "-p", "-", "-n", "3", "--temperature", "0"],
        ],
        ids=lambda arguments: " ".join(arguments[::2][:2]),
    )
    def test_stdin_equals_a_file(
        self, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With line breaks of every kind."""
        (tmp_path / "text").write_bytes(f"é{TEXT}\r\n\r{TEXT}".encode())
        of_file = [str(tmp_path / "text") if word == "-" else word for word in arguments]
        assert main(["-f" if word == "-p" else word for word in of_file]) == 0
        done = run(*arguments, stdin=(tmp_path / "text").read_bytes())
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode() == capsys.readouterr().out

    def test_other_encodings_are_rejected(self) -> None:
        for arguments in (["run", "-"], ["perplexity", MODEL, "-"]):
            done = run(*arguments, stdin=b"ab\xff")
            assert (done.returncode, done.stdout) == (1, b"")
            assert done.stderr == b"error: stdin: not UTF-8 text: invalid start byte at byte 2\n"

    @pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # by the locale
    def test_chat_rejects_only_the_message(
        self, errors: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONIOENCODING", f"utf-8:{errors}")
        arguments = ["chat", "-m", MODEL, "--template", "chatml", "-n", "3"]
        done = run(*arguments, stdin=b"a\xff\nHi\n")
        assert done.returncode == 1
        error, last = done.stderr.splitlines()
        assert error == b"error: the message is not UTF-8 text"
        assert last.startswith(b"[prompt ")


class TestStdout:
    def test_inspect(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Stdout has only the document."""
        monkeypatch.chdir(tmp_path)
        assert main(["inspect", TEXT, "-t", "1", "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["pieces"]
        assert main(["inspect", TEXT, "-t", "1", "--html", "-"]) == 0
        assert capsys.readouterr().out.endswith("</html>\n")
        assert main(["inspect", TEXT, "-t", "1", "--html", "-", "--json", "-"]) == 2
        assert "--html and --json would write to stdout" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_csv(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "text").write_text(TEXT, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        arguments = ["perplexity", MODEL, "text", "-c", "20", "--policy", "h2o", "-t", "1"]
        arguments += ["--hh", "0.5", "--csv"]
        assert main([*arguments, "file"]) == 0
        capsys.readouterr()
        assert main([*arguments, "-"]) == 0
        out = capsys.readouterr().out
        assert list(csv.reader(io.StringIO(out))) == list(
            csv.reader(Path("file").read_text().splitlines())
        )
        assert main([*arguments, "-", "--json"]) == 2
        assert not Path("-").exists()


@LINUX
class TestClosed:
    @pytest.mark.parametrize("shell", [">&-", "> /dev/full"])
    @pytest.mark.parametrize(
        "arguments", [["run", "x", "-n", "3"], ["info", MODEL], ["--help"]], ids="-".join
    )
    def test_lost_output_is_an_error(self, arguments: list[str], shell: str) -> None:
        done = run(*arguments, shell=shell)
        assert done.returncode == 1
        assert done.stderr.startswith((b"error: No space left", b"error: Bad file descriptor"))
        assert done.stderr.count(b"\n") == 1

    def test_closed_stderr_does_not_reach_stdout(self) -> None:
        done = run("run", "x", "-n", "3", shell="2>&-")
        assert done.returncode == 0
        assert b"tokens" not in done.stdout

    def test_closed_stdin_is_empty(self) -> None:
        done = run("run", "-", shell="<&-")
        assert done.returncode == 1
        assert b"the prompt is empty" in done.stderr

    def test_all_closed(self, tmp_path: Path) -> None:
        output = tmp_path / "page.html"
        done = run("inspect", "x", "--html", str(output), shell="<&- >&- 2>&-")
        assert done.returncode == 1  # the table
        assert output.stat().st_size > 1000
