"""Input of people who know other programs: it works, or the answer names what is meant."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.budget.stored_budget import store_budget
from h2o_cpp.cli import llama_cpp_flags, main, progress
from h2o_cpp.files.gguf_names import choose_model
from h2o_cpp.files.hub import HubSource
from support.needs import packages

PROMPT = "The old man"
RUN = ["run", PROMPT, "-n", "2", "-t", "1", "--temperature", "0"]


def usage_error(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on stderr of a command with a usage error."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("page", ["https://huggingface.co/", "http://www.hf.co/", "hf.co/"])
@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("O/R", "hf://O/R"),
        ("O/R/", "hf://O/R"),
        ("O/R/tree/main", "hf://O/R"),
        ("O/R/tree/dev", "hf://O/R@dev"),
        ("O/R/blob/main/a/b.gguf", "hf://O/R/a/b.gguf"),
        ("O/R/resolve/v1/b.gguf?download=true", "hf://O/R/b.gguf@v1"),
        ("O/R:Q8_0", "hf://O/R:Q8_0"),
    ],
)
def test_pages_of_the_hub(page: str, path: str, source: str) -> None:
    assert HubSource.parse(page + path) == HubSource.parse(source)


def test_other_pages_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for page in ("https://huggingface.co/", "https://huggingface.co/datasets/O/R"):
        assert main(["pull", page]) == 1
        assert capsys.readouterr().err.startswith(f"error: {page}: expected hf://org/name")


@pytest.mark.parametrize("name", ["llama3.2", "qwen3:8b", "https://ollama.com/library/qwen3"])
def test_models_of_ollama_are_not_on_the_hub(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", name]) == 1
    assert "; Ollama's library is not the Hub" in capsys.readouterr().err


def test_repositories_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.safetensors").write_bytes(b"")
    for arguments, message in (
        (["run", "-m", "O/R", "x"], "O/R: no such file; a repository of the Hub is hf://O/R"),
        (["convert", "O/R"], "O/R: no such directory; one of the Hub is downloaded before"),
        (["convert", "hf://O/R"], "hf:/O/R: no such directory; one of the Hub is downloaded"),
        (["convert", "a.safetensors"], "a.safetensors: a file, expected the directory that it is"),
        (["convert", "nowhere"], "nowhere: no such directory\n"),
        (["run", "-m", "a/b.gguf", "x"], "a/b.gguf: No such file or directory"),
    ):
        assert main(arguments) == 1
        assert f"error: {message}" in capsys.readouterr().err


def test_types_in_other_spellings(
    tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for type_name in ("q4_k", "Q4_K_M"):
        assert main(["quantize", str(tiny_opt), str(tmp_path / type_name), type_name]) == 0
    assert (tmp_path / "q4_k").read_bytes() == (tmp_path / "Q4_K_M").read_bytes()
    sizes = []
    for types in ("Q8_0,F16", "q8_0,f16"):
        assert main([*RUN, "--kv-dtype", types, "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["cache_bytes"])
    assert sizes[0] == sizes[1]


def test_percent_of_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for hh in ("0.2", "20%"):
        assert main([*RUN, "--hh", hh, "--json"]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["cache_bytes"])
    assert outputs[0] == outputs[1]


def test_few_tokens_get_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    note = "note: --hh 20 keeps 20 tokens; 20% is --hh 0.2"
    for more, noted in ((["--hh", "20"], True), (["--hh", "20", "--recent", "10"], False)):
        assert main([*RUN, *more]) == 0
        assert (capsys.readouterr().err.splitlines()[0] == note) == noted


@pytest.mark.parametrize("flag", [*llama_cpp_flags.REASONS, "-fa on", "--flash-attn auto"])
def test_flags_without_effect_are_noted(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = flag.split()[0]
    assert main(["run", *flag.split(), *RUN[1:]]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"note: {name} has no effect: {llama_cpp_flags.REASONS[name]}\n")
    assert out.startswith(PROMPT)


def test_converting_a_gguf_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(BUNDLED_MODEL)]) == 1
    assert "GGUF already, expected a checkpoint's directory" in capsys.readouterr().err


def test_folder_with_many_models() -> None:
    with pytest.raises(ValueError, match=r"9 models, expected one of: 0, 1, 2, 3, 4 and 4 more$"):
        choose_model([*map(str, range(9))], "folder")
    with pytest.raises(ValueError, match=r"5 models, expected one of: 0, 1, 2, 3, 4$"):
        choose_model([*map(str, range(5))], "folder")


def test_importance_matrix_is_no_model(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "imatrix")
    writer.add_type("imatrix")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"a\.gguf: an importance matrix, not a model; it is for"):
        Generator(tmp_path / "a.gguf")


def test_plain_lines_for_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("The old man\n")
    given = ["-i", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.jsonl"), "-t", "1"]
    assert main(["generate", *given]) == 1
    assert 'expected an object such as {"prompt": "The old man"}' in capsys.readouterr().err
    assert main(["generate", *given, "--field", "question"]) == 1
    assert 'expected an object such as {"question": "The old man"}' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("list", "h2o-cpp models"),
        ("ls", "h2o-cpp models"),
        ("rm", "rm FILE"),
        ("version", "h2o-cpp --version"),
        ("help", "h2o-cpp --help"),
        ("ps", "GET /api/ps of h2o-cpp serve"),
        ("stop", "Ctrl-C in h2o-cpp serve"),
        ("create", "h2o-cpp convert CHECKPOINT -o MODEL.gguf"),
    ],
)
def test_commands_of_other_programs(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = usage_error(word, "model", capsys=capsys)
    assert f"there is no {word}; did you mean: {meant}" in error


def test_no_command_is_a_request_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "generate text:\n  run " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["run", PROMPT, "--system", "a"], "h2o-cpp chat has --system TEXT"),
        (["chat", "-p", "hi"], "-p; messages are lines of stdin: echo MESSAGE | h2o-cpp chat"),
        (["chat", "m.gguf", "hi"], "hi; messages are lines of stdin: echo MESSAGE | h2o-cpp chat"),
    ],
)
def test_options_of_another_command(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in usage_error(*words, capsys=capsys)


def test_context_in_thousands(capsys: pytest.CaptureFixture[str]) -> None:
    full = []
    for length in ("1k", "1K", "1024"):
        assert main([*RUN, "-c", length, "--json"]) == 0
        full.append(json.loads(capsys.readouterr().out)["full_cache_bytes"])
    assert full[0] == full[1] == full[2]
    assert "expected an integer, got 'k'" in usage_error(*RUN, "-c", "k", capsys=capsys)


def test_context_beyond_the_trained_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "-c", "8k"]) == 2
    error = capsys.readouterr().err
    assert "--n-ctx 8192, expected at most the trained length, 2048" in error
    assert "--hh X and --endless" in error


def test_output_without_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    whole = capsys.readouterr().out
    assert main([*RUN, "--no-display-prompt"]) == 0
    assert whole == PROMPT + capsys.readouterr().out


def test_budget_of_another_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.gguf"
    store_budget(BUNDLED_MODEL, model, hh=0.5, policy="h2o", n_ctx=512, loss=0.01)
    for length, noted in (("1024", True), ("512", False)):
        assert main([*RUN, "-m", str(model), "--hh", "auto", "-c", length]) == 0
        error = capsys.readouterr().err
        assert ("note: --hh auto was measured in a context of 512 tokens" in error) == noted


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Reading:
    """A Stream that has read more tokens each time it is asked."""

    prompt_tokens = 1000
    _n_read = 0

    @property
    def prompt_tokens_read(self) -> int:
        self._n_read += 10
        return self._n_read


def test_progress_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows the share that was read and the time that is left."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_AFTER", 0.001)
    monkeypatch.setattr(progress, "_EVERY", 0.001)
    stream: Any = _Reading()
    with progress.reading(stream) as ended:
        while not re.search(r"reading: +\d+%.*/1000 \[00:\d\d<\d\d:\d\d", terminal.getvalue()):
            time.sleep(0.001)
        ended()
        shown = terminal.getvalue()
        assert shown.endswith("\r")  # the bar is gone
    assert terminal.getvalue() == shown


def test_no_progress_of_a_short_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an import of tqdm."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_AFTER", 1e6)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    stream: Any = _Reading()
    with progress.reading(stream) as ended:
        ended()
    assert terminal.getvalue() == ""


def test_no_progress_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    stream: Any = _Reading()
    with progress.reading(stream) as ended:
        ended()
    assert file.getvalue() == ""


@packages("fastapi", "uvicorn")
def test_model_of_another_name(tiny_opt: Path) -> None:
    from h2o_cpp.serve.catalog import Catalog
    from h2o_cpp.serve.service import Service
    from support.serving import serving_catalog

    body = {"model": "gpt-4", "prompt": "The", "max_tokens": 1}
    with Generator(tiny_opt, threads=1) as generator:
        service = Service(generator, name="tiny")
        for any_name, status in ((True, 200), (False, 404)):
            with serving_catalog(Catalog.of(service, any_name=any_name)) as server:
                assert server.ask("/v1/completions", body).status == status
