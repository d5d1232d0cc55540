"""Errors about arguments name the options of the command, and exit with status 2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from h2o_cpp import BUNDLED_MODEL
from h2o_cpp.cli import main
from h2o_cpp.cli.option_names import with_option_names
from h2o_cpp.cli.parser import Parser
from support.needs import packages

GRAMMAR = packages("llguidance")
SERVE = packages("fastapi", "uvicorn")

MODEL = str(BUNDLED_MODEL)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("The old man went down to the sea. " * 40, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run x --hh 0", "--hh 0 keeps no token of --n-ctx 2048, expected at least 1"),
        ("run x --hh 1", "--hh 1 is one token, expected 1.0 for all of --n-ctx, or at least 2"),
        ("run x --hh 1.5", "--hh 1.5, expected a fraction from 0 to 1 or a number of tokens"),
        ("run x --recent 0.1", "--recent 0.1 is a part of --hh, which is not given"),
        ("run x --policy window", "--policy 'window' needs --hh, the budget, such as --hh 0.2"),
        ("run x --hh auto --policy h2o", "--hh 'auto' includes a policy, expected --hh as a "),
        ("run x -c 4096", "--n-ctx 4096, expected at most the trained length, 2048"),
        ("run x --ctx-size=4096", "--ctx-size 4096, expected at most the trained length"),
        ("run x -b 0", "--n-batch 0, expected an integer, 1 to 65536"),
        ("run x -n 0", "--max-tokens 0, expected 1 or more"),
        ("run x --n-predict 0", "--n-predict 0, expected 1 or more"),
        ("run x --threads 0", "--threads 0, expected an integer, 1 to 1024"),
        ("run x --temperature -1", "--temperature is -1, expected 0 (greedy) or more"),
        ("run x --mirostat-ent -1", "--mirostat-ent is -1, expected"),
        ("run x -ctk x", "--cache-type-k is 'x', expected one of f32"),
        ("run x -ctk q8_0 -ctv x", "--kv-dtype is 'x', expected one of f32"),
        ("run x --archive q8_0", "--archive 'q8_0' needs a budget such as --hh 0.2, which evicts"),
        ("run x --archive-heads 1", "--archive-heads 1.0 needs --archive, its type"),
        ("run x --cache-memory 1% --hh 2", "--cache-memory cannot be combined with --hh, recent"),
        pytest.param("run x -j nonsense", "--json-schema is not JSON: ", marks=GRAMMAR),
        pytest.param("run x --grammar x", "--grammar: ", marks=GRAMMAR),
        ("run x --exact --device cuda", "--exact requires the CPU, but device is 'cuda'"),
        ("run x -m=", "--model is empty, expected a GGUF file"),
        ("chat --template chatml -m MODEL --top-p 2", "--top-p is 2, expected above 0"),
        pytest.param(
            "serve --max-queue 0", "--max-queue 0, expected an integer, 1 or more", marks=SERVE
        ),
        pytest.param(
            "serve --tls-key k",
            "--tls-key is given without --tls-cert, expected both or only --tls",
            marks=SERVE,
        ),
        pytest.param(
            "serve --cors-origin x", "--cors-origin has 'x', expected an origin", marks=SERVE
        ),
        pytest.param("serve --prefix-cache x", "--prefix-cache 'x', expected bytes", marks=SERVE),
        ("quantize MODEL o.gguf Q9", "TYPE 'Q9', expected one of Q8_0, Q6_K"),
        ("imatrix MODEL text --chunks 0", "--chunks 0, expected an integer, 1 or more"),
        ("advise MODEL text -c 5", "--n-ctx 5, expected an integer, 100 or more"),
        ("advise MODEL text -c 100 --kv-dtypes x", "--kv-dtypes is 'x', expected one of"),
        ("perplexity MODEL text --budget 0", "--budget 0.0, expected a fraction above 0"),
        (
            "perplexity MODEL text -c 9 --hh 0.5 --stride 9",
            "--stride 9, expected an integer, 1 to 8",
        ),
        ("retrieve MODEL --tasks x", "--tasks 'x', expected one of copy, needle"),
        ("retrieve MODEL --tasks copy --data text", "--data 'text' has samples of kv, expected kv"),
        ("bench -p 0", "--prompt-tokens 0, expected an integer, 1 or more"),
        ("bench --n-depth -1", "--n-depth -1, expected an integer, 0 or more"),
        ("bench -b 99999999999", "--n-batch 99999999999, expected an integer, 1 to 2147483647"),
    ],
)
def test_wrong_value(
    text: Path, command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([MODEL if word == "MODEL" else word for word in command.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_failure_that_mentions_an_option(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has status 1: a longer text would do."""
    assert main(["perplexity", MODEL, "text", "-c", "2000"]) == 1
    message = r"error: the text has \d+ tokens, expected at least 1999 for --n-ctx 2000\n"
    assert re.fullmatch(message, capsys.readouterr().err)


def test_messages_about_memory_name_options() -> None:
    parser = Parser()
    for name in ("--hh", "--n-ctx"):
        parser.add_argument(name)
    message = "the cache of 2 x n_ctx 9 tokens cannot be allocated; a smaller n_ctx or a budget hh"
    expected = message.replace("n_ctx", "--n-ctx").replace("hh", "--hh")
    assert with_option_names(message, parser, [])[0] == expected


@pytest.mark.parametrize(
    "message",
    [
        "/data/n_ctx=5/hh/x.gguf: not a GGUF file",
        "./hh: not a GGUF file",
        "model.gguf: h2o.hh is 7, expected a fraction above 0 and up to 1",
        "the text has no tokens",
        'there is no sampler "x", expected penalties, dry, top_n_sigma, temperature or top_k',
        "policy-names.txt: a file",
    ],
)
def test_other_messages_stay_as_they_are(message: str) -> None:
    parser = Parser()
    for name in ("--hh", "--n-ctx", "--policy", "--temperature", "--top-n-sigma", "--top-k"):
        parser.add_argument(name)
    assert with_option_names(message, parser, []) == (message, False)
