"""Behavior common to all commands: help, shell completion, JSON, colors."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from h2o_cpp import BUNDLED_MODEL, Generator, Stream
from h2o_cpp.cli import _GROUPS, main
from h2o_cpp.cli.token_colors import color_wanted
from support.needs import programs
from support.short_text import TEXT

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [name for group in _GROUPS.values() for name in group]
PROMPT = "The old man"


def help_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--help"])
    return capsys.readouterr().out


def test_help_and_docs_list_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help in groups, one line each; docs/commands.md with the same summaries."""
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys=capsys)
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    folder = ROOT / "python" / "h2o_cpp" / "cli"
    modules = [
        p.stem
        for p in folder.glob("*.py")
        if "\ndef add_arguments" in p.read_text(encoding="utf-8")
    ]
    assert sorted(COMMANDS) == sorted(modules)
    for group in _GROUPS.values():
        for name, (summary, _) in group.items():
            assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE)
            assert re.search(rf"^- \[`{name}`\]\(\S+\): {re.escape(summary)}$", page, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("generate text:") < text.index("  run ") < text.index("model files:")
    assert re.search(r"exit status:\n  0 +success\n  1 .*\n  2 .*\n  130 ", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_examples_parse(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example at the end of each command's help."""
    text = help_of(command, capsys=capsys)
    line = text.splitlines()[-1]
    assert text.splitlines()[-2] == "example:"
    arguments = shlex.split(line.partition(" > ")[0])
    assert arguments[:2] == ["h2o-cpp", command]
    module = import_module(f"h2o_cpp.cli.{command}")
    monkeypatch.setattr(module, "run", lambda args: 77)
    assert main(arguments[1:]) == 77


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_whole_words(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines fit, except the example, and do not break inside a word or an option's name."""
    texts = []
    for columns in (1000, 80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = help_of(command, capsys=capsys).partition("\nexample:\n")[0]
        texts.append(text.split())
        assert max(map(len, text.splitlines())) <= columns
    assert texts[0] == texts[1] == texts[2]


def test_example_of_inspect_runs(capsys: pytest.CaptureFixture[str]) -> None:
    line = help_of("inspect", capsys=capsys).splitlines()[-1]
    assert main(shlex.split(line)[1:]) == 0
    assert "heavy hitter" in capsys.readouterr().out


@programs("bash")
@pytest.mark.parametrize(("options", "status"), [(["--help"], 0), ([], 2)])
def test_help_of_the_platforms_script(options: list[str], status: int) -> None:
    """It needs no other program."""
    script = [str(ROOT / "tests" / "platforms" / "run"), *options]
    done = subprocess.run(
        script, capture_output=True, text=True, check=False, env={"PATH": "/bin:/usr/bin"}
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.startswith("Builds h2o for another system")
    assert "windows-x86_64" in done.stdout


class TestCompletion:
    @pytest.fixture
    def scripts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
        for shell in ("bash", "zsh", "fish"):
            assert main(["completion", shell]) == 0
            (tmp_path / shell).write_text(capsys.readouterr().out)
        return tmp_path

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_scripts_contain_commands(self, scripts: Path, shell: str) -> None:
        text = (scripts / shell).read_text()
        assert all(name in text for name in COMMANDS)

    @pytest.mark.parametrize(
        "shell", [pytest.param(name, marks=programs(name)) for name in ("bash", "zsh", "fish")]
    )
    def test_scripts_are_valid(self, scripts: Path, shell: str) -> None:
        subprocess.run([shell, "-n", str(scripts / shell)], check=True)

    @programs("bash")
    @pytest.mark.parametrize(
        ("typed", "expected"),
        [("ad", "advise"), ("advise --lo", "--loss"), ("completion z", "zsh"), ("info ./m", "./m")],
    )
    def test_bash_completes(self, scripts: Path, typed: str, expected: str) -> None:
        (scripts / "m").touch()
        words = typed.split()
        completion_script = (
            f"source ./bash; COMP_WORDS=(h2o-cpp {typed}); COMP_CWORD={len(words)}; "
            '_shtab_h2o_cpp; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", completion_script],
            cwd=scripts,
            capture_output=True,
            text=True,
            check=True,
        )
        assert [line.strip() for line in done.stdout.splitlines()] == [expected]

    def test_missing_extra(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "shtab", None)
        assert main(["completion", "bash"]) == 1
        assert "pip install 'h2o-cpp[completion]'" in capsys.readouterr().err


class TestJson:
    def test_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--hh", "10", "-n", "20", "-s", "3", "-t", "1", "--ignore-eos"]
        assert main(["run", PROMPT, *options, "--json"]) == 0
        out, err = capsys.readouterr()
        document = json.loads(out)
        with Generator(BUNDLED_MODEL, hh=10, threads=1) as generator:
            expected = generator.generate(PROMPT, max_tokens=20, seed=3, ignore_eos=True)
        assert err == ""
        assert (document["prompt"], document["text"]) == (PROMPT, expected.text)
        assert (document["finish_reason"], document["generated_tokens"]) == ("length", 20)
        assert document["evictions"] == document["tokens_seen"] - 10

    def test_interrupted_run(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The text generated so far is printed."""
        next_piece = Stream.__next__

        def interrupted(stream: Stream) -> str:
            if len(stream.tokens) == 3:
                stream.close()  # as Ctrl-C during generation does
                raise KeyboardInterrupt
            return next_piece(stream)

        monkeypatch.setattr(Stream, "__next__", interrupted)
        assert main(["run", PROMPT, "-n", "20", "--ignore-eos", "--json"]) == 130
        document = json.loads(capsys.readouterr().out)
        assert (document["finish_reason"], document["generated_tokens"]) == ("cancelled", 3)

    def test_perplexity(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "text").write_text(TEXT)
        arguments = ["perplexity", str(BUNDLED_MODEL), str(tmp_path / "text"), "-c", "20"]
        arguments += ["--budget", "0.5", "--policy", "h2o"]
        assert main([*arguments, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert main(arguments) == 0
        table = capsys.readouterr().out
        assert [row["policy"] for row in document["measured"]] == ["full", "h2o"]
        for row in document["measured"]:
            assert f"| {row['kept']} | {row['perplexity']:.3f} |" in table

    def test_generate(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "in").write_text('{"prompt": "The"}\n\nnonsense\n{"prompt": "It"}\n')
        arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
        assert main(["generate", *arguments, "-n", "2", "--json"]) == 1  # a bad line
        document = json.loads(capsys.readouterr().out)
        assert document.pop("seconds") > 0
        assert document == {"written": 2, "found": 0, "bad_lines": 1, "tokens": 4}


@pytest.mark.parametrize(
    ("terminal", "environment", "wanted"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_color_depends_on_terminal_and_environment(
    terminal: bool, environment: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: terminal)
    assert color_wanted(file) == wanted
