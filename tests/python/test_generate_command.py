"""h2o-cpp generate: from a file of prompts to a file of outputs, resumable."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.cli import main
from h2o_cpp.jobs import Output, line_seed

OPTIONS = ["-n", "12", "--seed", "5", "--threads", "1", "--n-ctx", "200", "--hh", "0.2"]


def write(path: Path, *lines: Any) -> Path:
    """Write lines: objects as JSON, str and bytes unchanged."""
    with path.open("wb") as file:
        for line in lines:
            data = line.encode() if isinstance(line, str) else line
            data = data if isinstance(data, bytes) else json.dumps(data).encode()
            file.write(data + b"\n")
    return path


def read(path: Path) -> dict[int, dict[str, Any]]:
    """The output lines by index; checks that indices are unique."""
    text = path.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    by_index = {line.pop("index"): line for line in lines}
    assert len(by_index) == len(lines)
    return by_index


def arguments(prompts: Path, output: Path, *options: str) -> list[str]:
    return ["generate", "--input", str(prompts), "--output", str(output), *OPTIONS, *options]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"id": f"p{n}", "prompt": f"Chapter {n}. The old"} for n in range(25)]
    return write(tmp_path / "prompts.jsonl", *lines)


def test_outputs_equal_separate_generation(
    tiny_opt: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    assert main(arguments(prompts, output)) == 0
    err = capsys.readouterr().err
    lines = read(output)
    assert sorted(lines) == list(range(25))
    with Generator(tiny_opt, hh=0.2, n_ctx=200, threads=1) as generator:
        for n, line in lines.items():
            alone = generator.generate(f"Chapter {n}. The old", max_tokens=12, seed=line_seed(5, n))
            assert line.pop("input_crc32")
            assert line == {
                "id": f"p{n}",
                "text": alone.text,
                "finish_reason": alone.finish_reason,
                "prompt_tokens": alone.prompt_tokens,
                "completion_tokens": alone.completion_tokens,
            }
    n_tokens = sum(line["completion_tokens"] for line in lines.values())
    assert f"[25 outputs written, 0 already done, 0 bad lines | {n_tokens} tokens, " in err


@pytest.mark.parametrize("sequences", [["--max-sequences", "1"], ["--memory", "20MiB"]])
def test_outputs_do_not_depend_on_number_of_sequences(
    prompts: Path, tmp_path: Path, sequences: list[str]
) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    assert main(arguments(prompts, one)) == 0
    assert main(arguments(prompts, other, *sequences)) == 0
    assert read(one) == read(other)


def test_lines_with_grammars_are_skipped_without_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    lines = {"prompt": "A", "grammar": "root ::= [a]"}, {"prompt": "B"}
    prompts, output = write(tmp_path / "prompts.jsonl", *lines), tmp_path / "out.jsonl"
    assert main(arguments(prompts, output)) == 1
    assert f"{prompts}:1: grammars need llguidance" in capsys.readouterr().err
    assert sorted(read(output)) == [1]


def test_bad_lines_are_reported_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(
        tmp_path / "prompts.jsonl",
        {"question": "Who", "id": 7},
        "",
        "no JSON",
        {"prompt": "Who"},
        b'{"question": "caf\xe9"}',
        '["question"]',
        {"question": ""},
        {"question": 5},
        '{"question": "Who", "id": "\\ud800"}',
        "[" * 100_000,
        {"question": [5, 6, 4096]},
        {"question": "word " * 300},
        {"question": [5, 6]},
    )
    output = tmp_path / "out.jsonl"
    for n_written, n_found in ((2, 0), (0, 2)):
        assert main(arguments(prompts, output, "--field", "question")) == 1
        *reports, summary = capsys.readouterr().err.splitlines()
        numbers = [int(line.removeprefix(f"{prompts}:").split(":")[0]) for line in reports]
        assert numbers == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
        counts = f"[{n_written} outputs written, {n_found} already done, 10 bad lines | "
        assert summary.startswith(counts)
        lines = read(output)
        assert sorted(lines) == [0, 12]
        assert lines[0]["id"] == 7
        assert "id" not in lines[12]
    assert reports[1].endswith("the object has no 'question'")
    assert reports[3].endswith("expected a JSON object")
    assert reports[8].endswith("token 4096 is not in the vocabulary of 4096")


class TestLineOptions:
    def test_line_options_override_defaults(self, tiny_opt: Path, tmp_path: Path) -> None:
        own: list[dict[str, Any]] = [
            {"max_tokens": 3},
            {"temperature": 0, "top_k": 5, "max_tokens": 20},
            {"seed": 7, "stop": ["e"], "temperature": 1},
            {"seed": None, "ignore_eos": True},
        ]
        lines = [{"prompt": "The old man", **options} for options in own]
        prompts, output = write(tmp_path / "prompts.jsonl", *lines), tmp_path / "out.jsonl"
        assert main(arguments(prompts, output)) == 0
        found = read(output)
        with Generator(tiny_opt, hh=0.2, n_ctx=200, threads=1) as generator:
            for n, options in enumerate(own):
                options = {"max_tokens": 12, "seed": line_seed(5, n)} | {
                    name: value for name, value in options.items() if value is not None
                }
                assert found[n]["text"] == generator.generate("The old man", **options).text
        assert [found[n]["completion_tokens"] for n in (0, 1)] == [3, 20]
        assert found[2]["finish_reason"] == "stop"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_tokens": "3"}, "max_tokens='3', expected an integer"),
            ({"ignore_eos": "1"}, "ignore_eos='1', expected True or False"),
            ({"top_p": [0.5]}, "top_p=[0.5], expected a number"),
            ({"stop": {"a": 1}}, "stop={'a': 1}, expected a string or a list of strings"),
            ({"samplers": 3}, "samplers=3, expected a list of strings"),
            ({"temperature": -1}, "temperature"),
            ({"seed": -5}, "seed=-5"),
        ],
    )
    def test_invalid_line_options_are_a_bad_line(
        self,
        tmp_path: Path,
        options: dict[str, Any],
        message: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        prompts = write(tmp_path / "p.jsonl", {"prompt": "a", **options}, {"prompt": "b"})
        assert main(arguments(prompts, tmp_path / "out.jsonl")) == 1
        error, summary = capsys.readouterr().err.splitlines()
        assert error.startswith(f"{prompts}:1: ")
        assert message in error
        assert "1 outputs written, 0 already done, 1 bad lines" in summary
        assert sorted(read(tmp_path / "out.jsonl")) == [1]


class TestStandardStreams:
    def run(self, prompts: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "h2o_cpp", "generate", *OPTIONS, *arguments]
        return subprocess.run(command, input=prompts.read_bytes(), capture_output=True, check=False)

    def test_stdin_to_stdout(self, prompts: Path, tmp_path: Path) -> None:
        expected, output = tmp_path / "expected.jsonl", tmp_path / "out.jsonl"
        assert main(arguments(prompts, expected)) == 0
        piped = self.run(prompts, "-i", "-", "-o", "-")
        assert piped.returncode == 0
        output.write_bytes(piped.stdout)
        assert read(output) == read(expected)
        assert b"[25 outputs written" in piped.stderr
        assert not (tmp_path / "-").exists()

    def test_stdin_is_resumed(self, prompts: Path, tmp_path: Path) -> None:
        output = tmp_path / "out.jsonl"
        for n_written in (25, 0):
            done = self.run(prompts, "-i", "-", "-o", str(output))
            assert done.returncode == 0
            assert f"[{n_written} outputs written".encode() in done.stderr

    def test_bad_line_of_stdin(self, tmp_path: Path) -> None:
        done = self.run(write(tmp_path / "p.jsonl", "no JSON"), "-i", "-", "-o", "-")
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.startswith(b"stdin:1: ")

    def test_json_summary_needs_output_file(
        self, prompts: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["generate", "-i", str(prompts), "-o", "-", "--json"]) == 2
        assert "--json and --output would write to stdout" in capsys.readouterr().err


class TestResumeWithOtherOptions:
    @pytest.fixture
    def output(self, prompts: Path, tmp_path: Path) -> Path:
        """The output of an interrupted job."""
        output = tmp_path / "out.jsonl"
        assert main(arguments(prompts, output)) == 0
        output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:7]))
        return output

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--temperature", "0"], "--temperature 0.8, now 0.0"),
            (["--hh", "0.3"], "--hh 0.2, now 0.3"),
            (["--hh", "0.3", "--stop", "a"], "--hh 0.2, now 0.3; --stop [], now ['a']"),
            (["-s", "6"], "--seed 5, now 6"),
            (["--archive", "q8_0"], "--archive None, now 'q8_0'"),
            (["--exact"], "--exact None, now True"),
        ],
    )
    def test_changed_options_are_rejected(
        self,
        prompts: Path,
        output: Path,
        options: list[str],
        message: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        before = output.read_bytes()
        assert main(arguments(prompts, output, *options)) == 1
        assert f"{output} was made with {message}: give another" in capsys.readouterr().err
        assert output.read_bytes() == before
        assert main(arguments(prompts, output, *options, "--allow-other-options")) == 0
        assert len(read(output)) == 25
        assert main(arguments(prompts, output, *options)) == 0  # now these are the stored options

    def test_another_model_is_rejected(
        self, prompts: Path, output: Path, tiny_opt: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "other.gguf").symlink_to(tiny_opt)
        assert main(arguments(prompts, output, "-m", str(tmp_path / "other.gguf"))) == 1

    def test_options_without_effect_on_outputs_are_allowed(
        self, prompts: Path, output: Path
    ) -> None:
        assert main(arguments(prompts, output, "--max-sequences", "2", "-t", "2")) == 0

    def test_output_without_a_complete_line_takes_new_options(
        self, prompts: Path, output: Path
    ) -> None:
        output.write_bytes(output.read_bytes()[:20])  # as after a kill
        assert main(arguments(prompts, output, "--temperature", "0")) == 0
        assert main(arguments(prompts, output)) == 1

    def test_output_without_job_file_takes_new_options(self, prompts: Path, output: Path) -> None:
        output.with_name("out.jsonl.job").unlink()
        assert main(arguments(prompts, output, "--temperature", "0")) == 0
        assert main(arguments(prompts, output)) == 1

    def test_job_file_without_a_newer_option_is_accepted(self, prompts: Path, output: Path) -> None:
        file = output.with_name("out.jsonl.job")
        settings = json.loads(file.read_text())
        del settings["archive"]
        file.write_text(json.dumps(settings))
        assert main(arguments(prompts, output)) == 0

    def test_invalid_job_file_is_rejected(
        self, prompts: Path, output: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output.with_name("out.jsonl.job").write_text("notes")
        assert main(arguments(prompts, output)) == 1
        assert "out.jsonl.job: not the settings of a job" in capsys.readouterr().err


def test_partial_last_line_is_regenerated(prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert main(arguments(prompts, output)) == 0
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (1, 5, len(lines[7]) // 2, len(lines[7]) - 1):
        output.write_bytes(b"".join(lines[:7]) + lines[7][:cut])
        assert main(arguments(prompts, output)) == 0
        assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize(
    "content",
    [
        b"my notes",
        b"my notes\n",
        b'{"index": 1}\nmy notes\n',
        b'{"index": 1}\nmy notes',
        b'{"index": 1}\n{"index": 1}\n',
        b'{"index": "1"}\n',
        b'{"prompt": "The"}\n',
        b"[]\n",
    ],
)
def test_other_files_are_not_overwritten(
    prompts: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(content)
    assert main(arguments(prompts, output)) == 1
    assert "not an output line of a job" in capsys.readouterr().err
    assert output.read_bytes() == content


def test_concurrent_job_on_same_output_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Output(path):
        program = f"from h2o_cpp.cli import main; main(['generate', '--input', {str(path)!r}, "
        program += f"'--output', {str(path)!r}])"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
    assert f"error: {path}: another job is writing this file" in done.stderr
    with Output(path) as output:
        assert output.finished == {}


def test_repeatedly_killed_job_completes(prompts: Path, tmp_path: Path) -> None:
    """Killed at random times while writing, the jobs together write the output of a single job."""
    expected, output = tmp_path / "expected.jsonl", tmp_path / "out.jsonl"
    options = ["-n", "60", "--ignore-eos", "--max-sequences", "3"]
    assert main(arguments(prompts, expected, *options)) == 0
    rng = random.Random(2)
    n_killed = 0
    for _ in range(25):
        before = output.stat().st_size if output.exists() else 0
        job = subprocess.Popen(
            [sys.executable, "-m", "h2o_cpp", *arguments(prompts, output, *options)],
            stderr=subprocess.DEVNULL,
        )
        while job.poll() is None and (not output.exists() or output.stat().st_size == before):
            time.sleep(0.001)
        time.sleep(rng.random() * 0.005)
        job.send_signal(signal.SIGKILL)
        if job.wait() == 0:
            break
        n_killed += 1
    else:
        assert main(arguments(prompts, output, *options)) == 0
    assert n_killed > 1
    assert sorted(output.read_bytes().splitlines()) == sorted(expected.read_bytes().splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1KiB"], "--memory '1KiB' is too small for the cache of one sequence"),
        (["--max-sequences", "0"], "--max-sequences 0, expected"),
        (["--temp", "-1"], "--temp is -1, expected"),
    ],
)
def test_invalid_options_are_rejected(
    prompts: Path,
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments(prompts, tmp_path / "out.jsonl", *options)) == 2
    assert message in capsys.readouterr().err


def test_missing_files(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path / "none", tmp_path / "out.jsonl")) == 1
    assert main(arguments(prompts, tmp_path / "none" / "out.jsonl")) == 1
    err = capsys.readouterr().err
    assert f"error: {tmp_path / 'none'}: No such file or directory" in err
    assert f"{tmp_path / 'none'}: no such directory" in err
