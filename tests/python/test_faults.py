"""Commands on a full disk, interrupted, and running concurrently."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from h2o_cpp import BUNDLED_MODEL
from support.gguf_files import is_whole
from support.opt_checkpoint import make_checkpoint

Arguments = Callable[[Path], list[str]]  # of a command that writes to this path

SAVE = """
import sys
from h2o_cpp import BUNDLED_MODEL, Generator
with Generator(BUNDLED_MODEL, threads=1) as generator:
    stream = generator.stream("The old man", max_tokens=20)
    for _ in stream:
        pass
    stream.save(sys.argv[1])
"""


def program(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "h2o_cpp", *map(str, arguments)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a prompt file and a text."""
    path = tmp_path_factory.mktemp("work")
    make_checkpoint(path / "checkpoint")
    lines = [json.dumps({"id": i, "prompt": f"It was {i}"}) for i in range(60)]
    (path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (path / "book.txt").write_text("The old man went down to the sea. " * 40, encoding="utf-8")
    return path


def writers(work: Path) -> dict[str, Arguments]:
    """All commands that write a file, and a program that saves a snapshot."""
    prompts, book = work / "prompts.jsonl", work / "book.txt"
    one_search = ("-c", "100", "--policy", "mean", "--kv-dtypes", "f16")
    return {
        "convert": lambda to: program("convert", work / "checkpoint", "-o", to, "--force"),
        "quantize": lambda to: program("quantize", BUNDLED_MODEL, to, "Q4_0", "--force"),
        "advise": lambda to: program(
            "advise", BUNDLED_MODEL, book, *one_search, "--output", to, "--force"
        ),
        "generate": lambda to: program(
            "generate", "--input", prompts, "--output", to, "-n", "40", "--ignore-eos"
        ),
        "save": lambda to: [sys.executable, "-c", SAVE, str(to)],
    }


NAMES = ("convert", "quantize", "advise", "generate", "save")


@pytest.mark.parametrize("name", NAMES)
def test_file_size_limit_leaves_existing_file(name: str, work: Path, tmp_path: Path) -> None:
    """With a file size limit of 2000 bytes: one clear error, and an existing file is unchanged."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    output = tmp_path / "output"
    before = None if name == "generate" else b"what was there"
    if before is not None:
        output.write_bytes(before)
    done = subprocess.run(
        writers(work)[name](output), preexec_fn=limit, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr or "is the disk full?" in done.stderr
    if name != "save":  # that program does not catch the error
        assert "Traceback" not in done.stderr
        [line] = [line for line in done.stderr.splitlines() if "error: " in line]
        assert str(output) in line
    if before is not None:
        assert output.read_bytes() == before
        assert [*tmp_path.iterdir()] == [output]
    else:  # only complete lines; running it again continues
        subprocess.run(writers(work)[name](output), capture_output=True, check=True)
        lines = output.read_text(encoding="utf-8").splitlines()
        assert len({json.loads(line)["id"] for line in lines}) == 60


@pytest.mark.parametrize("name", ["convert", "quantize"])
def test_interrupt_at_random_time_leaves_no_partial_output(
    name: str, work: Path, tmp_path: Path
) -> None:
    """After Ctrl-C at a random time, the output is complete or absent; exit status 130 or 0."""
    rng = random.Random(1)
    output = tmp_path / "output.gguf"
    for _ in range(4):
        job = subprocess.Popen(
            writers(work)[name](output), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        while job.poll() is None and not [*tmp_path.iterdir()]:
            time.sleep(0.0005)
        time.sleep(rng.random() * 0.01)
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=60)
        assert "Traceback" not in err
        # -SIGINT: the interpreter was shutting down and no longer handled signals.
        assert job.returncode in (0, 130, -signal.SIGINT)
        left = [*tmp_path.iterdir()]
        assert left in ([], [output])
        if left:
            assert is_whole(output)
            output.unlink()


def test_concurrent_commands_with_same_output(work: Path, tmp_path: Path) -> None:
    """Two processes write the same file; it is complete, and no temporary file is left."""
    output = tmp_path / "output.gguf"
    for name in ("convert", "quantize"):
        command = writers(work)[name](output)
        jobs = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
        assert [job.wait(60) for job in jobs] == [0, 0]
        assert is_whole(output)
        assert [*tmp_path.iterdir()] == [output]
