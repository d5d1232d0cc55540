"""The input of h2o-cpp generate: fields of a line, lines that change, and files of other kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.cli import main
from h2o_cpp.jobs import Output
from support.needs import LINUX


class Job:
    """A job with the bundled model, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.input, self.output = directory / "in.jsonl", directory / "out.jsonl"

    def run(self, *lines: Any, options: tuple[str, ...] = ()) -> int:
        """The exit status with these lines, objects or text."""
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        self.input.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        files = ["-i", str(self.input), "-o", str(self.output)]
        return main(["generate", *files, "-n", "4", "-t", "1", "--seed", "1", *options])

    def outputs(self) -> dict[int, dict[str, Any]]:
        lines = map(json.loads, self.output.read_text(encoding="utf-8").splitlines())
        return {line["index"]: line for line in lines}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


A, B, C = ({"prompt": text, "id": text} for text in ("The old man", "It was", "She"))


class TestFields:
    def test_logit_bias(self, job: Job, tiny_opt: Path) -> None:
        """Its keys are strings in JSON."""
        line = {"prompt": "The old man", "temperature": 0, "logit_bias": {"77": 1000}}
        assert (
            job.run(line, '{"prompt": "The", "temperature": 0, "logit_bias": {"77": -1e999}}') == 0
        )
        with Generator(tiny_opt, threads=1) as generator:
            assert job.outputs()[0]["text"] == generator.detokenize([77] * 4)

    def test_id_and_metadata_are_copied(self, job: Job) -> None:
        """Whatever they are."""
        carried = {"id": ["a", 5], "metadata": {"answer": 7, "source": None}}
        assert job.run({"prompt": "The", **carried}, {"prompt": "The"}) == 0
        with_them, without = job.outputs()[0], job.outputs()[1]
        assert {name: with_them[name] for name in carried} == carried
        assert with_them.keys() - without.keys() == carried.keys()

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("temprature", 0, "there is no option 'temprature'; did you mean temperature?"),
            ("hh", 0.2, "hh is an option of Generator, not of an output"),
            ("repetition_penalty", 1, "there is no option 'repetition_penalty'; did you mean"),
            ("logit_bias", {"x": 1}, "logit_bias='x', expected an integer, 0 or more"),
            ("logit_bias", [1], "logit_bias=[1], expected a dict from token id to bias"),
            ("constraint", "x", "constraint='x', expected a function"),
        ],
    )
    def test_misspelled_option_is_a_bad_line(
        self, job: Job, field: str, value: Any, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert job.run({"prompt": "The", field: value}, A) == 1
        assert f"{job.input}:1: {message}" in capsys.readouterr().err
        assert job.outputs().keys() == {1}

    def test_other_fields_are_ignored(self, job: Job) -> None:
        """A data set has such lines."""
        line = {"prompt": "The", "answer": 7, "question": "Who?", "text": "x", "model": "y"}
        assert job.run(line) == 0
        assert not job.outputs()[0].keys() & {"answer", "question", "model"}


class TestChangedInput:
    def test_changed_line_of_an_output_is_rejected(
        self, job: Job, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert job.run(A, B, C) == 0
        before = job.output.read_bytes()
        for lines in ((B, A, C), ({**A, "max_tokens": 3}, B, C), (A, B, {**C, "id": 0})):
            assert job.run(*lines) == 1
            assert "has changed since its output was written" in capsys.readouterr().err
            assert job.run(*lines, options=("--allow-other-options",)) == 0
            assert job.output.read_bytes() == before

    def test_lines_without_an_output_may_change(self, job: Job) -> None:
        """Invalid and further ones, as may the white space around each."""
        assert job.run(A, "no JSON", C) == 1
        assert job.run(f"  {json.dumps(A)}", B, C, A) == 0
        assert job.outputs().keys() == {0, 1, 2, 3}
        assert job.outputs()[1]["id"] == "It was"

    def test_output_without_checksums_is_resumed(self, job: Job) -> None:
        job.output.write_text('{"index": 0, "text": ""}\n')
        assert job.run(A, B) == 0
        assert job.outputs()[0] == {"index": 0, "text": ""}


@LINUX
@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])  # /dev/full has no end
def test_output_that_is_no_regular_file_is_rejected(device: str) -> None:
    with pytest.raises(ValueError, match=f"{device}: not a regular file"):
        Output(Path(device))
