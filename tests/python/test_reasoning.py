"""Problems with long traces: what a solution is, and how outputs are measured."""

from __future__ import annotations

import csv
import json
import re
from io import StringIO
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from h2o_cpp.cli import main
from h2o_cpp.eval.reasoning.measurement import is_loop, make_problems, measure
from h2o_cpp.eval.reasoning.problems import FAMILIES, Problem, make_problem


def nodes_of_walk(prompt: str) -> list[str]:
    """Every node of the walk, read from the prompt alone."""
    graph, word, start = prompt.removesuffix("=").split("|")
    exits = dict(re.findall("(.):(...)", graph))
    nodes = [start[-1]]
    for number in word[1::2] * int(start[:-1]):
        nodes.append(exits[nodes[-1]][int(number)])
    return nodes


def nodes_of_rotor(prompt: str) -> list[str]:
    graph, start = prompt.removesuffix("=").split("|")
    exits = dict(re.findall("(.):(...)", graph))
    rounds, last, node = list(start)
    nodes = [node]
    for _ in range(int(rounds) * (ord(last) - ord("A") + 1)):
        visits = nodes[:-1].count(nodes[-1])
        nodes.append(exits[nodes[-1]][visits % 3])
    return nodes


def results_of_machine(prompt: str) -> list[str]:
    program, registers, rounds = prompt.removesuffix("=").split("|")
    values = {name: int(value) for name, value in re.findall("(.)(.)", registers)}
    results = []
    for sign, a, b in re.findall(r"[A-Z]([+-])(.)(.)", program) * int(rounds):
        values[a] = (values[a] + int(f"{sign}1") * values[b]) % 10
        results.append(f"{a}{values[a]}")
    return results


def items_of_sort(prompt: str) -> list[str]:
    return sorted(prompt.removesuffix("="))


SOLVERS = {
    "walk": nodes_of_walk,
    "rotor": nodes_of_rotor,
    "machine": results_of_machine,
    "sort": items_of_sort,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [48, 200, 900])
def test_trace_has_the_results(family: str, length: int) -> None:
    random = Random(length)
    for _ in range(20):
        problem = make_problem(family, random, length)
        assert re.findall(problem.results, problem.trace) == SOLVERS[family](problem.prompt)
        assert problem.solved(problem.trace)
        assert 0.5 * length < len(problem.prompt + problem.trace) < 1.3 * length


@pytest.mark.parametrize("family", FAMILIES)
def test_an_eighth_holds_the_prompt(family: str) -> None:
    problems = make_problems(family, n=100, length=900, seed=1)
    mean = sum(len(p.prompt + p.trace) for p in problems) / len(problems)
    assert max(len(p.prompt) + 1 for p in problems) < mean / 8


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_or_missing_steps_do_not_solve(family: str) -> None:
    problem = make_problem(family, Random(0), 200)
    positions = [match.start() for match in re.finditer(problem.results, problem.trace)]
    assert len(positions) > 3
    for begin, end in pairwise(positions):
        assert not problem.solved(problem.trace[:begin] + problem.trace[end:])
        wrong = "?" + problem.trace[begin + 1 :]
        assert not problem.solved(problem.trace[:begin] + wrong)
    assert not problem.solved("")


def test_problems_depend_on_the_seed_and_the_family() -> None:
    first = make_problems("walk", n=3, length=100, seed=1)
    assert make_problems("walk", n=3, length=100, seed=1) == first
    assert make_problems("walk", n=2, length=100, seed=1) == first[:2]
    assert make_problems("walk", n=3, length=100, seed=2) != first
    assert len({problem.prompt for problem in first}) == 3


def test_unknown_family() -> None:
    with pytest.raises(ValueError, match=r"family='x', expected one of walk, rotor"):
        make_problem("x", Random(0), 100)


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("xabcabcabc", True),
        ("xabcabcab", False),
        ("aaa", True),
        ("abcabcabcd", False),
        ("", False),
    ],
)
def test_loop(text: str, loops: bool) -> None:
    assert is_loop(text) == loops


def test_measure(tiny_opt: Path) -> None:
    """A model that was trained on other texts solves nothing."""
    problems = make_problems("sort", n=2, length=60, seed=0)
    rows = list(
        measure(tiny_opt, "sort", problems, policies=["h2o", "random"], budgets=[0.5], threads=1)
    )
    mean = sum(len(p.prompt + p.trace) for p in problems) // 2
    assert [(row.policy, row.protect, row.budget, row.kept) for row in rows[1:]] == [
        (policy, protect, 0.5, mean // 2)
        for policy in ("h2o", "random")
        for protect in ("none", "prompt")
    ]
    full = rows[0]
    assert (full.policy, full.protect, full.budget) == ("full", "none", 1)
    assert (full.of_full, full.of_full_error, full.tokens) == (0, 0, 1)
    assert {(row.accuracy, row.error, row.problems) for row in rows} == {(0, 0, 2)}
    assert all(row.tokens_per_second > 0 for row in rows)


@pytest.fixture(scope="session")
def reasoner() -> Path:
    """The model that was trained on these problems."""
    return Path(__file__).parents[2] / "models" / "reasoning.gguf"


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_model_solves_problems(family: str, reasoner: Path) -> None:
    """It solves new problems with the full cache, and more of them in a window with the prompt
    than in one without."""
    problems = make_problems(family, n=6, length=200, seed=7)
    rows = list(measure(reasoner, family, problems, policies=["window"], budgets=[0.6], threads=1))
    full, window, protected = (row.accuracy for row in rows)
    assert full >= 5 / 6
    assert window < min(full, protected)


def test_archive_keeps_what_is_evicted(reasoner: Path) -> None:
    """With pages for all archived tokens, a small cache solves what the full one does."""
    problems = make_problems("machine", n=4, length=200, seed=7)

    def accuracies(**archive: Any) -> list[float]:
        rows = measure(
            *(reasoner, "machine", problems),
            policies=["window"],
            budgets=[0.2],
            protects=["none"],
            threads=1,
            **archive,
        )
        return [row.accuracy for row in rows]

    full, lost = accuracies()
    assert (full, lost) == (1, 0)
    assert accuracies(archive="q8_0", archive_pages=30) == [full, full]


def test_protected_prompt_that_fills_a_budget(reasoner: Path) -> None:
    """The other rows are measured; the prompt has 12 tokens, one of them before the text."""
    problems = [Problem("a" * 10 + "=", "z" * 10, "z")]
    rows = measure(
        reasoner, "x", problems, policies=["window"], budgets=[12 / 21, 13 / 21], threads=1
    )
    assert [(row.kept, row.protect, row.longest_prompt, row.problems) for row in rows] == [
        (21, "none", 12, 1),
        (12, "none", 12, 1),
        (12, "prompt", 12, 0),
        (13, "none", 12, 1),
        (13, "prompt", 12, 1),
    ]


def test_command_shows_prompts_that_do_not_fit(
    reasoner: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--tasks sort --length 48 --samples 2 --hh 0.1 --policy window --protect prompt -t 1"
    command = ["reasoning", str(reasoner), *words.split()]
    assert main(command) == 0
    *_, row = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| sort"))
    assert re.search(r"\| a prompt of \d+ tokens does not fit \| - \|", row)
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"][1]["accuracy"] is None


def test_command(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON and CSV have the same rows, which the table shows."""
    words = "--tasks sort --length 48 --samples 2 --hh 0.5 --policy mean --protect none -t 1"
    command = ["reasoning", str(tiny_opt), *words.split()]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["length"], found["samples"], found["seed"]) == (48, 2, 0)
    assert [row["policy"] for row in found["measured"]] == ["full", "mean"]
    assert main([*command, "--csv", "-"]) == 0
    rows = csv.DictReader(StringIO(capsys.readouterr().out))
    assert [row["kept"] for row in rows] == [str(row["kept"]) for row in found["measured"]]
    assert main(command) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("| task | policy | protect | budget | kept | solved |")
    assert [line.split(" | ")[1] for line in table[2:4]] == ["full", "mean"]


def test_command_refuses_unknown_names(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasoning", str(tiny_opt), "--tasks", "x"]) == 2
    assert "--tasks 'x', expected one of walk" in capsys.readouterr().err
    assert main(["reasoning", str(tiny_opt), "--protect", "x"]) == 2
    assert "--protect 'x', expected one of none, prompt" in capsys.readouterr().err
