"""tools/bench: every measurement runs, results and tables."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

from h2o_bench.chart import Chart, draw
from h2o_bench.main import main, names
from h2o_bench.results import Results, ResultsError, Row, read
from h2o_bench.tables import markdown
from support.needs import LINUX, packages, programs
from support.opt_checkpoint import write_tokenizer_json
from support.shapes import SHAPES, small

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
HEIGHT = 190  # of a panel, in pixels
ABOUT = {"name": "a", "command": "tools/bench a", "machine": "", "version": ""}
SERVE = packages("uvicorn", "fastapi", "prometheus_client")
# Few and small: that each measures, not what.
SMALL = {
    "accuracy": "MODEL DATA --tasks copa --policies h2o --budget 0.5 --limit 2 --examples 1",
    "analyze": "MODEL TEXT --text-tokens 40 --threads 1",
    "archive": "--tokens 600 --decoded 3 --threads 1",
    "attack": "--clients 1 --requests 2 --rounds 1 --prompt 4 --tokens 2 --attacks slow",
    "baselines": "--shapes small --types Q8_0 --prompts 20,30 --context 8 --decoded 2 --rounds 2"
    " --threads 1 --engines h2o --models DIRECTORY",
    "contexts": "--shape small --layers 1 --contexts 16,40 --threads 1 --engines h2o --drawn",
    "conversations": "--users 2 --turns 2 --prompt-tokens 9 --output-tokens 3 --rate 1000 --hh 0.2",
    "dialogue": "--turns 3 --reply 4 --positions auto --threads 1 --template chatml",
    "drafts": "MODEL --tokens 4 --rounds 1 --threads 1",
    "endless": "MODEL --tokens 40 --threads 1",
    "gpu": "--quick --device cpu --sections machine,grid,prefill,scores,long,paper",
    "grammar": "--outputs 1 --step 0 --kinds formats",
    "kvpress": "MODEL -c 200 --samples 1 --tasks needle --threads 1",
    "lossless": "--shape small --layers 1 --tokens 40 --decoded 8 --slots 8 --rounds 1 --threads 1",
    "mix": "--clients 12 --seconds 0.1 --sequences 4",
    "page": "--rate 1000 --tokens 60 --rounds 1 --loads 1",
    "quantize": "--rows 2",
    "ray": "--rows 128 --clients 2 --runs 1",
    "sampler": "--vocab 500 --rounds 2",
    "scores": "--shape small --slots 16 --steps 2 --rounds 1 --threads 1",
    "serve": "--clients 1 2 --requests 1 --prompt 4 --tokens 3",
    "speculation": "--shape small --draft-layers 1 --most 2 --scales 0.1 --n-ctx 512 --prompt 64"
    " --tokens 12 --rounds 1 --threads 1",
    "stream": "--rounds 1 --tokens 20 --window 10 --threads 1",
    "synthetic": "small Q4_K_M DIRECTORY/model.gguf --layers 1 --vocab 300",
    "trained": "TEXT DIRECTORY/tokenizer.json TEXT DIRECTORY --mechanisms dense --steps 1 -c 99"
    " --policies h2o --hh 0.5",
    "throughput": "--shapes small --prompt 20 --lengths 3 --threads 1",
}
NEEDS: dict[str, list[pytest.MarkDecorator]] = {
    "accuracy": [packages("lm_eval")],
    "attack": [SERVE],
    "dialogue": [SERVE],
    "grammar": [packages("llguidance")],
    "mix": [SERVE, packages("llguidance")],
    "page": [SERVE, packages("playwright"), programs("chromium")],
    "quantize": [packages("llama_cpp")],
    "ray": [packages("ray"), pytest.mark.filterwarnings("default")],  # Ray emits warnings
    "serve": [SERVE],
    "trained": [packages("torch", "transformers", "tokenizers")],
}


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line)["row"] for line in path.read_text().splitlines()]


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", small("SmolLM2-135M", num_hidden_layers=2))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: None)  # of this process


@LINUX
@pytest.mark.usefixtures("small_shape")
@pytest.mark.parametrize("name", [pytest.param(n, marks=NEEDS.get(n, [])) for n in SMALL])
def test_measurement(
    name: str, tmp_path: Path, tiny_opt: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The old man went down to the sea, and his son went with him. " * 9)
    characters = {c.replace(" ", "Ġ"): 3 + i for i, c in enumerate(sorted({*text.read_text()}))}
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2} | characters
    changes = {"model.vocab": vocabulary, "model.merges": [], "added_tokens": []}
    write_tokenizer_json(tmp_path, {**changes, "pre_tokenizer.trim_offsets": True})
    document = {"premise": "It rained.", "question": "effect", "choice1": "a", "choice2": "b"}
    lines = "".join(json.dumps({**document, "label": i % 2}) + "\n" for i in range(4))
    (tmp_path / "super_glue__copa__validation.jsonl").write_text(lines)
    words = SMALL[name].replace("MODEL", str(tiny_opt)).replace("TEXT", str(text))
    words = words.replace("DATA", str(tmp_path)).replace("DIRECTORY", str(tmp_path))
    found = tmp_path / "found.json"
    assert main([name, *words.split(), "--json", str(found)]) == 0
    rows = rows_of(found)
    assert [row for row in rows if "absent" not in row]
    assert not [row for row in rows if str(row.get("absent", "")).startswith("failed")]
    out, _ = capfd.readouterr()
    first = next(row for row in rows if "absent" not in row)
    columns = [key for key in first if key != "table" and key[:1] != "_"]
    assert all(key in out for key in columns)


def test_help_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name, line in names().items():
        assert f"  {name:14} {line}" in out
        assert line.endswith("." if not line.endswith(":") else "")
    assert names().keys() == SMALL.keys()


def test_pages_name_measurements_that_exist() -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        words = page.read_text(encoding="utf-8").split("tools/bench ")[1:]
        for name in (word.split()[0].strip("`),.") for word in words):
            assert name in names() or name == "NAME" or not name.isalpha(), (page, name)


def test_program_starts() -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench"), "sampler", "--vocab", "50"]
    done = subprocess.run([*command, "--rounds", "1"], capture_output=True, text=True, check=True)
    assert "| greedy" in done.stdout


def test_results_of_a_command_that_runs_again_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    for command, value in (("a", 1), ("b", 2), ("a", 3)):
        results = Results(path, ABOUT | {"command": command})
        results.add({"value": value})
    assert [row["value"] for row in results.rows()] == [2, 3]
    Results(path, ABOUT | {"name": "other", "command": "c"}).add({"value": 4})
    assert [row["value"] for row in results.rows()] == [2, 3]


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """Writes beyond this size of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@LINUX
def test_full_disk_keeps_results(tmp_path: Path) -> None:
    """A write that fails halfway, of a new row and of a file without an old one."""
    path = tmp_path / "found.json"
    results = Results(path, ABOUT)
    results.add({"value": 1})
    size = path.stat().st_size
    with (
        file_size_limit(size + 20),
        pytest.raises(ResultsError, match=r"^found.json: File too lar"),
    ):
        results.add({"value": 2})
    assert path.stat().st_size == size
    Results(path, ABOUT | {"command": "other"}).add({"value": 3})
    with file_size_limit(20), pytest.raises(ResultsError, match=r"^found.json: File too large$"):
        Results(path, ABOUT)
    assert [row["value"] for row in rows_of(path)] == [1, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_ends_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one sentence."""

    def refuse(results: Results, row: Row) -> None:
        raise ResultsError("found.json: No space left on device")

    monkeypatch.setattr(Results, "add", refuse)
    found = str(tmp_path / "found.json")
    assert main(["sampler", "--vocab", "50", "--rounds", "1", "--json", found]) == 1
    assert capsys.readouterr().err == "error: found.json: No space left on device\n"


def test_tables() -> None:
    rows: list[Row] = [
        {"model": "a", "engine": "ours", "rate": [200.0, 190.0, 210.0], "n": 3, "_more": [1.0]},
        {"model": "a", "engine": "theirs", "rate": [100.0, 98.0, 160.0], "ms": 0.01234},
        {"model": "b", "engine": "theirs", "rate": [50.0]},
        {"model": "a", "engine": "other", "absent": "not installed"},
        {"model": "b", "engine": "other", "absent": "not installed"},
        {"table": "second", "x": "y"},
    ]
    text = markdown(rows, "ours")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "| model | engine | rate | n | ms |"
    assert "| a | ours | 200 (190 to 210) | 3 | |" in lines
    assert "| a | theirs | 100 (98.0 to 160) **2.00x** | | 0.0123 |" in lines
    assert "| b | theirs | 50.0 | | |" in lines  # nothing of ours to compare with
    assert "- a, other; b, other: not installed" in lines
    assert text.endswith("### second\n\n| x |\n| --- |\n| y |\n")


def test_results_go_into_a_record(tmp_path: Path) -> None:
    """Results are written beside the page, with their origin; text around the table stays."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    words = ["sampler", "--vocab", "50", "--rounds", "1"]
    assert main([*words, "--into", f"{page}#speed"]) == 0
    before, text, after = page.read_text().split(" -->\n")
    line, *_ = read(tmp_path / "page.jsonl")
    assert (line["name"], line["row"]["options"]) == ("speed", "greedy")
    assert before.startswith("before")
    command = f"tools/bench {' '.join(words)} --into page.md#speed"
    assert f"```sh\n{command}\n```\n{line['machine']}, {line['date']}" in text
    assert "| greedy |" in text
    assert after == "after\n"
    page.write_text("<!-- none -->\n<!-- /none -->\n")
    assert main([*words, "--into", str(page)]) == 1


def test_chart(tmp_path: Path) -> None:
    """A light and a dark picture, with every line named at its end, inside the picture."""
    rows: list[Row] = [
        {"task": task, "policy": policy, "budget": budget, "scores": [1.0, 0.0, 1.0]}
        for task in ("copa", "piqa")
        for policy, budget in (("full", 100), ("h2o", 20), ("h2o", 40))
    ]
    chart = Chart("policy", "budget", {"scores": "score"}, None, "task", True, "full")
    written = draw(chart, rows, tmp_path / "chart.svg")
    assert [path.name for path in written] == ["chart-light.svg", "chart-dark.svg"]
    for path in written:
        svg = ElementTree.fromstring(path.read_text())
        texts = [(element.text, element) for element in svg.iter(f"{SVG}text")]
        for name, value in (("full", ": 0.667"), ("h2o", ": 0.667")):
            labels = [element for text, element in texts if text == name]
            assert [label[0].text for label in labels] == [value, value]  # in both panels
        assert [text for text, _ in texts if "score" in str(text)] == ["copa: score", "piqa: score"]
        _, _, width, height = map(float, svg.get("viewBox", "").split())
        for _, element in texts:
            assert 0 <= float(element.get("x", "")) <= width
            assert 0 <= float(element.get("y", "")) <= height
        # The mean of 1, 0 and 1 is 2/3, and its standard error 1/3: in a panel that ends at 1.
        bars = [bar.get("d", "") for bar in svg.iter(f"{SVG}path") if "v" in bar.get("d", "")]
        lengths = [float(bar.partition("v")[2]) for bar in bars]
        assert len(lengths) == 2 * 2  # in two panels; the level has none
        assert lengths == pytest.approx([2 / 3 * HEIGHT] * len(lengths), rel=0.01)


def test_labels_of_close_lines_do_not_overlap(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"engine": name, "n": n, "rate": rate + n / 1e6}
        for rate, name in enumerate(("a", "b", "c"), start=500)
        for n in (0, 1000)
    ]
    light, _ = draw(Chart("engine", "n", {"rate": "Rate"}), rows, tmp_path / "chart.svg")
    labels = {
        element.text: float(element.get("y", ""))
        for element in ElementTree.fromstring(light.read_text()).iter(f"{SVG}text")
        if element.text in ("a", "b", "c")
    }
    assert labels["c"] + 28 <= labels["b"]  # two lines of 14 pixels each
    assert labels["b"] + 28 <= labels["a"]


def test_chart_of_no_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row has MiB to draw"):
        draw(Chart("engine", "n", {"MiB": "Memory"}), [{"engine": "a", "n": 1}], tmp_path / "a.svg")
