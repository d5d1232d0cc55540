"""The command h2o-cpp inspect."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from h2o_cpp import Policy, _core
from h2o_cpp.cli import main
from h2o_cpp.measure.inspection import Inspection, inspect
from h2o_cpp.model.tokenizer import Tokenizer
from support.short_text import TEXT


@pytest.fixture(scope="module")
def found(model: _core.Model, tokenizer: Tokenizer, tokens: list[int]) -> Inspection:
    return inspect(model, tokenizer, tokens, Policy.h2o(6, 6))


def shown(pieces: Sequence[str], marks: Sequence[str]) -> str:
    """The plain-text output for tokens of one line, with a mark for each: "[]", "" or "·"."""
    text = ""
    for piece, mark in zip(pieces, marks, strict=True):
        space = " " * piece.startswith(" ")
        match mark:
            case "·":
                text += mark
            case "":
                text += piece
            case _:
                text += f"{space}{mark[0]}{piece.removeprefix(' ')}{mark[1]}"
    for mark in ("[]", "()", "{}"):  # neighbors share brackets
        text = text.replace(mark[::-1], "").replace(f"{mark[1]} {mark[0]}", " ")
    return text


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (4, 3)])
def test_command_without_color(
    found: Inspection, layer: int, head: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--hh", "12", "--layer", str(layer), "--head", str(head)]
    assert main(["inspect", TEXT, "-t", "1", *options]) == 0
    text, _, legend, _, *table = capsys.readouterr().out.splitlines()
    kept = found.kept()[layer, head]
    assert layer == 0 or kept[-7]  # a heavy hitter next to the recent window
    marks = ["[]" if each else "·" for each in kept]
    assert text == shown(found.pieces, [*marks[:-6], *[""] * 6])
    assert legend == "[heavy hitter]  recent  · evicted"
    row = found.summary(layer, head)
    assert row.score_share is not None
    assert table[2:-2] == [
        f"| {layer} | 12 | {len(found.tokens) - 12} | {row.oldest} "
        f"| {row.score_share:.0%} | {row.common_share:.0%} |"
    ]


def test_command_with_color(found: Inspection, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hh", "12", "--layer", "3", "--head", "5", "--color", "always"]
    assert main(["inspect", TEXT, "-t", "1", *options]) == 0
    text, _, legend, *_ = capsys.readouterr().out.splitlines()
    expected = ""
    sgr = ""
    for i, piece in enumerate(found.pieces):
        heavy = "1;33" if found.kept()[3, 5, i] else "2"
        of_token = "32" if i >= len(found.pieces) - 6 else heavy
        if of_token != sgr:
            expected += f"\x1b[0m\x1b[{of_token}m" if sgr else f"\x1b[{of_token}m"
            sgr = of_token
        expected += piece
    assert text == f"{expected}\x1b[0m"
    assert legend == "\x1b[1;33mheavy hitter\x1b[0m  \x1b[32mrecent\x1b[0m  \x1b[2mevicted\x1b[0m"


def test_all_heads_are_averaged(
    model: _core.Model,
    tokenizer: Tokenizer,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    policy = Policy.h2o(9, 6, sinks=2)
    monkeypatch.setattr("h2o_cpp.options.choose_policy", lambda *_: policy)
    assert main(["inspect", TEXT, "-t", "1", "--layer", "3"]) == 0
    text, _, legend, _, *table = capsys.readouterr().out.splitlines()

    found = inspect(model, tokenizer, tokens, policy)
    n_keepers = found.kept()[3].sum(axis=0).tolist()  # of 6 heads
    marks = ["·" if n < 1.5 else "()" if n < 3 else "[]" for n in n_keepers]
    assert {2, 3} <= set(n_keepers[2:-6])  # both sides of 1/2
    assert {1, 2} <= set(n_keepers[2:-6])  # and of 1/4
    assert text == shown(found.pieces, ["{}", "{}", *marks[2:-6], *[""] * 6])
    assert legend == (
        "{sink}  [heavy hitter in half of the heads or more]  (in a quarter or more)  recent  "
        "· evicted, or kept in fewer heads"
    )
    assert len(table) == 2 + 1 + 2


def test_table_has_a_row_per_layer(found: Inspection, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", TEXT, "-t", "1", "--hh", "12", "--head", "1"]) == 0
    _, _, _, _, *table = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in table[2:-2]] == [f"| {layer}" for layer in range(6)]
    shares = [found.summary(layer, 1).score_share or 0 for layer in range(6)]
    assert [row.split(" | ")[4] for row in table[2:-2]] == [f"{share:.0%}" for share in shares]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "colored"), [("", True), ("1", False)])
def test_no_color_disables_color(
    no_color: str, colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["inspect", TEXT, "-t", "1", "--hh", "12"]) == 0
    assert ("\x1b[" in terminal.getvalue()) is colored


def test_command_writes_files(
    tmp_path: Path,
    model: _core.Model,
    tokenizer: Tokenizer,
    tokens: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text.txt").write_text(TEXT + "\n", encoding="utf-8")
    options = ["-f", str(tmp_path / "text.txt"), "-n", "4", "--n-batch", "10", "--hh", "12"]
    options += ["--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "all.json")]
    assert main(["inspect", "-t", "1", *options]) == 0
    assert ", 4 of them generated;" in capsys.readouterr().out
    data = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    expected = inspect(model, tokenizer, tokens, Policy.h2o(6, 6), n_batch=10, max_tokens=4)
    assert data == json.loads(json.dumps(expected.to_dict()))
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == expected.to_html()


def test_message_if_nothing_was_evicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", TEXT, "-t", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"</s>{TEXT}"
    assert out[-1] == "nothing was evicted: the budget (--hh) holds the whole text"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", "6"], "--layer 6, expected an integer, 0 to 5"),
        (["--head", "-1"], "--head -1, expected an integer, 0 to 5"),
        (["--n-batch", "0"], "--n-batch 0, expected an integer, 1 or more"),
        (["-n", "-1"], "--max-tokens -1, expected"),
        (["-c", "5"], "expected 1 to --n-ctx 5"),
        (["--hh", "0"], "--hh 0"),
        (["--threads", "0"], "--threads 0"),
    ],
)
def test_invalid_options_are_rejected(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = 1 if "-c" in options else 2  # the text is too long
    given = options if "--threads" in options else ["-t", "1", *options]
    assert main(["inspect", TEXT, *given]) == status
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
