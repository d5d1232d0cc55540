"""The Python examples run and print what their descriptions promise."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import BUNDLED_MODEL, capacity
from support.needs import packages

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
NOTEBOOK = EXAMPLES / "python" / "what_it_keeps.ipynb"

Example = Callable[..., str]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """Runs an example with arguments and lines on stdin; returns its output."""

    def run(name: str, *arguments: str, lines: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        runpy.run_path(str(EXAMPLES / "python" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_tour(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Heavy hitters, the 32 tokens kept, the loss compared with a window, and memory."""
    monkeypatch.setattr(sys, "argv", ["tour.py"])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    runpy.run_path(str(EXAMPLES / "tour.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert int(re.findall(r"received (\d+)% of the attention", out)[0]) > 40
    lines = re.findall(r"^ *(\d+) tokens  ([#.]+)$", out, re.MULTILINE)
    assert len(lines) == 10
    for n, marks in lines:
        assert len(marks) == int(n)
        assert marks.count("#") in (min(int(n), 32), min(int(n), 33))
        assert marks.endswith("#" * 16)
    h2o, window = (
        [float(value) for value in re.findall(rf"{name} .* kept +([\d.]+)$", out, re.MULTILINE)]
        for name in ("h2o", "window")
    )
    assert len(h2o) == 3
    assert all(a < b for a, b in zip(h2o, window, strict=True))
    sizes = [float(size) for size in re.findall(r"([\d.]+) MiB", out)]
    assert sizes[0] > 4 * sizes[1] > 12 * sizes[2]


def test_all_examples_are_listed_and_tested() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8")
    names = [path.name for path in (EXAMPLES / "python").iterdir() if path.is_file()]
    assert len(names) == 6
    for name in names:
        assert f"(python/{name})" in page
        assert name in tests


def test_stream(example: Example) -> None:
    out = example("stream.py", str(BUNDLED_MODEL), "It was")
    assert out.startswith("It was ")
    seen, kept = re.findall(r"(\d+) tokens read, (\d+) kept", out)[0]
    assert int(kept) == min(204, int(seen))


def test_endless_chat(example: Example) -> None:
    """Far beyond the context in the same memory; the instructions are kept."""
    lines = "Good morning.\nWhere is the ship?\n" * 15
    for model, memory in ((BUNDLED_MODEL, "50MB"), (LLAMA, "0.01MB")):
        out = example("endless_chat.py", str(model), memory, lines=lines)
        found = re.findall(
            r"^\[message (\d+): (\d+) tokens kept in ([\d.]+) MB "
            r"\| instructions: (\d+)% kept \| (\d+) messages forgotten\]$",
            out,
            re.MULTILINE,
        )
        assert [int(message) for message, *_ in found] == [*range(3, 63, 2)]
        [size] = {float(size) for *_, size, _, _ in found}
        assert size <= float(memory.removesuffix("MB"))
        assert {int(kept) for *_, kept, _ in found} == {100}
        assert int(found[0][-1]) == 0 < int(found[-1][-1])


def test_compare_policies(example: Example) -> None:
    rows = re.findall(
        r"^(\w+) +(\d+) tokens kept +perplexity +([\d.]+)$",
        example("compare_policies.py"),
        re.MULTILINE,
    )
    assert [name for name, *_ in rows] == ["full", "h2o", "mean", "sinks", "window"]
    assert all(int(kept) == int(rows[0][1]) // 10 for _, kept, _ in rows[1:])
    assert float(rows[0][2]) < min(float(value) for *_, value in rows[1:])


def test_snapshot(example: Example) -> None:
    assert "the same as without a stop: True" in example("snapshot.py")


def test_batch(example: Example) -> None:
    out = example("batch.py")
    full, tenth = map(int, re.findall(r"(\d+) full caches fit in 20MiB, (\d+) of a tenth", out)[0])
    assert (full, tenth) == (
        capacity(BUNDLED_MODEL, "20MiB"),
        capacity(BUNDLED_MODEL, "20MiB", hh=0.1),
    )
    assert 1 < 8 * full < tenth
    for prompt in ("The old man", "It was a dark night", "She opened the letter", "At sea,"):
        assert f"\n{prompt}" in out


class TestNotebook:
    def test_cells_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Runs its code cells in order."""
        document = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
        names: dict[str, Any] = {}
        for cell in document["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == []
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
        out = capsys.readouterr().out
        assert "64 kept in each layer and KV head" in out
        maps = re.findall(r"^\d ([#.]+)$", out, re.MULTILINE)
        assert len(maps) == names["stats"].n_layers
        assert all(line.endswith("#" * 15) and "." in line for line in maps)
        assert re.search(r"^advice: hh=0\.\d+, policy='(h2o|mean)'$", out, re.MULTILINE)

    @packages("nbformat")
    def test_notebook_is_valid(self) -> None:
        import nbformat

        nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))

    @packages("nbformat", "nbclient", "ipykernel")
    def test_notebook_runs_in_kernel(self) -> None:
        import nbclient
        import nbformat

        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(notebook, timeout=120).execute()
        assert all(cell.outputs for cell in notebook.cells[1:2])
