"""Advice that chooses among archives of several shares of the KV heads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from h2o_cpp import Policy, _core, advise
from h2o_cpp.cli import main, make_parser
from h2o_cpp.files.stored_metadata import store_metadata
from h2o_cpp.measure.heads import RETRIEVAL_HEADS
from h2o_cpp.model.session import open_session, read_tokens
from support.short_text import TEXT

N_CTX = 100  # a percent is a token, but 29%, 57% and 58% are one less, as floats
N_HEADS = 36
LONG = f"{TEXT} " * 4
OPTIONS: dict[str, Any] = {
    "n_ctx": N_CTX, "text_tokens": N_CTX, "policies": ["sinks"], "kv_dtypes": ["q8_0"],
    "threads": 1, "archive": "q8_0",
}  # fmt: skip

Share = float | None  # None: all; 0: no archive


@pytest.fixture(scope="module")
def ranked(tiny_opt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranked") / "model.gguf"
    store_metadata(tiny_opt, path, {RETRIEVAL_HEADS: [*range(N_HEADS)]})
    return path


class Measured(NamedTuple):
    needed: dict[Share, int]  # tokens that each share needs
    done: list[tuple[Share, int]]  # measured shares and tokens


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Perplexity is a step; bytes are real."""
    found = Measured({0: 90}, [])
    opened: list[tuple[Share, int]] = []

    def recording_open_session(model: _core.Model, policy: Policy, **options: Any) -> _core.Session:
        share = 0 if options.get("archive") is None else options["archive_heads"]
        opened.append((share, policy.budget or N_CTX))
        return open_session(model, policy, **options)

    def step_perplexity(session: _core.Session, *_: Any, **__: Any) -> tuple[float, int]:
        read_tokens(session, np.full(N_CTX - 1, 5, np.int32))  # fills the archive
        share, kept = opened[-1]
        found.done.append((share, kept))
        return (10.0 if kept >= found.needed[share] else 10.2), 7

    monkeypatch.setattr("h2o_cpp.measure.budget_search.open_session", recording_open_session)
    monkeypatch.setattr("h2o_cpp.measure.quality.perplexity", step_perplexity)
    monkeypatch.setattr("h2o_cpp.measure.advice._NEEDLES", 1)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.05,0.1,0.05,1", [0.05, 0.1, 1]),
        ("0.2", [0.2]),
        ("auto", "auto"),
    ],
)
def test_option_takes_several_shares(text: str, expected: object) -> None:
    arguments = ["advise", "model.gguf", "text", "--archive-heads", text]
    assert make_parser().parse_args(arguments).archive_heads == expected


@pytest.mark.parametrize(
    ("needed", "chosen", "tried"),
    [
        # A smaller share is enough: 30 + 0.1 * 70 of 100 tokens in q8_0, then 25 + 0.2 * 75.
        ({0.1: 30, 0.2: 25, 1: 20}, 0.1, {0.1, 0.2, 1}),
        # It is not: 80 + 0.1 * 20, then 30 + 0.2 * 70.
        ({0.1: 80, 0.2: 30, 1: 25}, 0.2, {0.1, 0.2, 1}),
        # Only an archive of all heads is, in q4_0: 100, then 1 + 0.53 * 99.
        ({0.1: 100, 0.2: 100, 1: 1}, 1, {0.1, 0.2, 1}),
        # With as many tokens, a larger share cannot be smaller.
        ({0.1: 1, 0.2: 1, 1: 1}, 0.1, {0.1}),
    ],
)
def test_share_with_fewest_bytes_is_chosen(
    ranked: Path, measured: Measured, needed: dict[Share, int], chosen: float, tried: set[float]
) -> None:
    measured.needed.update(needed)
    types = {"archive": "q4_0"} if chosen == 1 else {}
    found = advise(ranked, LONG, **OPTIONS | types, archive_heads=[1, 0.2, 0.1]).archived
    assert found is not None
    assert (found.archive_heads, found.kept) == (chosen, needed[chosen])
    heads, row = round(chosen * N_HEADS), 18 if chosen == 1 else 34  # bytes of 32 numbers
    least = heads * (N_CTX - found.kept) * 2 * row
    assert least < found.archive_bytes <= least + heads * (N_CTX // 16 + 1) * 2 * 32 * 2  # bounds
    with_archive = [one for one in measured.done if one[0]]
    assert {share for share, _ in with_archive} == tried
    enough = N_CTX
    for share in sorted(tried):  # a larger share is only tried with fewer tokens
        assert all(kept < enough for one, kept in with_archive if one == share)
        enough = min(enough, needed[share])


def test_command_tries_shares_of_ranked_heads(
    ranked: Path,
    tiny_opt: Path,
    tmp_path: Path,
    measured: Measured,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By default, or with auto; without a ranking, all heads."""
    text, output = tmp_path / "text", tmp_path / "model.gguf"
    text.write_text(LONG)
    options = ["-c", str(N_CTX), "--text-tokens", str(N_CTX), "--policy", "sinks", "-t", "1"]
    options += ["--kv-dtypes", "q8_0", "--archive", "q8_0"]
    measured.needed.update({0.1: 80, 0.2: 30, 1: 20, None: 20})
    assert main(["advise", str(ranked), str(text), *options, "-o", str(output)]) == 0
    out = capsys.readouterr().out
    for percent, kept in ((10, 80), (20, 30), (100, 20)):
        row = f"| sinks | q8_0, archive q8_0 of {percent}% of the heads | {kept / 100:g} | {kept} "
        assert re.search(rf"{re.escape(row)}.* MiB, archive 0\.\d\d MiB \|\n", out)
    assert "with an archive: --hh 0.3 --policy sinks --kv-dtype q8_0 --archive q8_0" in out
    assert " --archive-heads 0.2\n" in out
    metadata = _core.GgufFile(output).metadata()
    assert (metadata["h2o.hh"], metadata["h2o.archive_heads"]) == (0.3, 0.2)
    assert main(["info", str(output)]) == 0
    assert ", archive in q8_0 of 20% of the heads, " in capsys.readouterr().out

    for more in [], ["--archive-heads", "auto"]:
        assert main(["advise", str(tiny_opt), str(text), *options, *more, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["archived"]["hh"] == 0.2
        assert document["archived"]["archive_heads"] is None
    assert main(["advise", str(tiny_opt), str(text), *options]) == 0
    assert "of the heads" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"archive_heads": [0.1, 1.5]},
            r"archive_heads=1\.5, expected a share above 0 and up to 1",
        ),
        ({"archive_heads": [0, 1]}, "archive_heads=0, expected a share above 0 and up to 1"),
        ({"archive_heads": []}, "archive_heads is empty, expected one or more"),
        ({"archive_heads": "most"}, "archive_heads='most', expected a number"),
        ({"archive_heads": ["auto"]}, "archive_heads='auto', expected a number"),
        ({"archive_heads": [1, 0.5]}, "h2o-cpp heads MODEL --write"),
        ({"archive_heads": "auto", "archive": None}, "archive_heads='auto' needs archive"),
        ({"archive_heads": [0.5], "archive": None}, r"archive_heads=0\.5 needs archive"),
    ],
)
def test_invalid_shares_are_rejected(tiny_opt: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advise(tiny_opt, LONG, **OPTIONS | options)


def test_option_rejects_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["advise", "model.gguf", "text", "--archive-heads", "few"])
    assert "--archive-heads: expected fractions such as 0.1,0.2" in capsys.readouterr().err
