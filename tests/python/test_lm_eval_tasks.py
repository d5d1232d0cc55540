"""lm-evaluation-harness tasks on local files, and their scores."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp.cli import main

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra: eval)")

from lm_eval.tasks import TaskManager

from h2o_cpp.eval import tasks
from h2o_cpp.eval.model import H2oModel
from h2o_cpp.eval.scores import evaluate
from h2o_cpp.eval.tasks import LOCAL_TASKS, load_task

# Two documents per task, with the fields of its dataset, and lm_eval's prompts for them.
DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "copa": [
        {"premise": "It rained.", "choice1": "He sang.", "choice2": "We got wet.",
         "question": "effect", "label": 1},
        {"premise": "She fell.", "choice1": "It was icy.", "choice2": "He sang.",
         "question": "cause", "label": 0},
    ],
    "openbookqa": [
        {"question_stem": "The sea is", "choices": {"text": ["salt", "sweet"], "label": ["A", "B"]},
         "answerKey": "A"},
        {"question_stem": "Snow is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]},
         "answerKey": "B"},
    ],
    "piqa": [
        {"goal": "To boil", "sol1": "heat it", "sol2": "cool it", "label": 0},
        {"goal": "To cut", "sol1": "use a spoon", "sol2": "use a knife", "label": 1},
    ],
    "rte": [
        {"sentence1": "Tom ate.", "sentence2": "Tom slept.", "label": 1},
        {"sentence1": "Ann ran home.", "sentence2": "Ann ran.", "label": 0},
    ],
    "winogrande": [
        {"sentence": "Tom hid as _ was shy.", "option1": "Tom", "option2": "Ann", "answer": "1"},
        {"sentence": "Ann ran as _ was late.", "option1": "Tom", "option2": "Ann", "answer": "2"},
    ],
    "mathqa": [
        {"query": "Question: 1 + 1 ?\nA. 3\nB. 2\nAnswer: ", "gold": 1},
        {"query": "Question: 2 * 3 ?\nA. 6\nB. 5\nAnswer: ", "gold": 0},
        {"query": "Question: 10 * 100 ?\nA. 1\nB. \nAnswer: ", "gold": 0},  # skipped
    ],
}  # fmt: skip
PROMPTS: dict[str, list[tuple[Any, Any]]] = {
    "copa": [
        ("It rained therefore", ["  he sang.", "  we got wet."]),
        ("She fell because", ["  it was icy.", "  he sang."]),
    ],
    "openbookqa": [("The sea is", [" salt", " sweet"]), ("Snow is", [" hot", " cold"])],
    "piqa": [
        ("Question: To boil\nAnswer:", [" heat it", " cool it"]),
        ("Question: To cut\nAnswer:", [" use a spoon", " use a knife"]),
    ],
    "rte": [
        ("Tom ate.\nQuestion: Tom slept. True or False?\nAnswer:", [" True", " False"]),
        ("Ann ran home.\nQuestion: Ann ran. True or False?\nAnswer:", [" True", " False"]),
    ],
    "winogrande": [  # two contexts and one continuation
        (["Tom hid as Tom", "Tom hid as Ann"], " was shy."),
        (["Ann ran as Tom", "Ann ran as Ann"], " was late."),
    ],
    "mathqa": [
        ("Question: 1 + 1 ?\nAnswer:", [" 3", " 2"]),
        ("Question: 2 * 3 ?\nAnswer:", [" 6", " 5"]),
    ],
}
GOLD = {"copa": [1, 0], "openbookqa": [0, 1], "piqa": [0, 1], "rte": [1, 0],
        "winogrande": [0, 1], "mathqa": [1, 0]}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the task files."""
    assert DOCUMENTS.keys() == LOCAL_TASKS.keys()
    path = tmp_path_factory.mktemp("tasks")
    for name, task in LOCAL_TASKS.items():
        lines = [json.dumps(document) for document in DOCUMENTS[name]]
        (path / task.file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def pairs(prompt: tuple[Any, Any]) -> list[tuple[str, str]]:
    """(context, continuation) for each choice, which replaces either of them."""
    context, choices = prompt
    if isinstance(context, str):
        return [(context, choice) for choice in choices]
    return [(each, choices) for each in context]


def task_requests(task: Any) -> list[tuple[str, str]]:
    task.build_all_requests(rank=0, world_size=1)
    return [tuple(request.args) for request in task.instances]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_prompts_and_gold_answers(directory: Path, name: str) -> None:
    """With one few-shot example, it is the other document with its answer."""
    [task] = load_task(name, directory)["tasks"].values()
    expected = [pair for prompt in PROMPTS[name] for pair in pairs(prompt)]
    assert task_requests(task) == expected
    for i, gold in enumerate(GOLD[name]):
        answers = [(-1.0, False)] * 2
        answers[gold] = (-0.5, False)
        assert task.process_results(task.dataset["test"][i], answers)["acc"] == 1.0

    task.set_config("num_fewshot", 1)
    examples = ["".join(pairs(p)[g]) for p, g in zip(PROMPTS[name], GOLD[name], strict=True)]
    assert task_requests(task) == [
        (f"{example}\n\n{context}", choice)
        for example, prompt in zip(reversed(examples), PROMPTS[name], strict=True)
        for context, choice in pairs(prompt)
    ]


def test_scores_equal_separate_evaluation(tiny_opt: Path, directory: Path) -> None:
    model = H2oModel(tiny_opt, hh=0.5, threads=1)
    right, kept = [], []
    for prompt, gold in zip(PROMPTS["piqa"], GOLD["piqa"], strict=True):
        tokens = [model._encode_pair(*pair) for pair in pairs(prompt)]
        totals = [model.budgeted.loglikelihood(*each)[0] for each in tokens]
        right.append(totals[gold] == max(totals))
        kept += [(len(context) + len(continuation)) // 2 for context, continuation in tokens]
    usage = model.budgeted.usage
    acc, acc_norm = evaluate(model, ["piqa"], data=directory)
    assert [(s.task, s.metric, s.n) for s in (acc, acc_norm)] == [
        ("piqa", "acc", 2),
        ("piqa", "acc_norm", 2),
    ]
    assert acc.value == np.mean(right)
    assert acc.stderr == pytest.approx(np.std(right, ddof=1) / sqrt(2))
    assert acc.kept == np.mean(kept)
    assert acc.cache_bytes == usage.cache_bytes
    assert acc.truncated == 0


def test_usage_is_counted_per_task(tiny_opt: Path, directory: Path) -> None:
    model = H2oModel(tiny_opt, threads=1)
    alone = [list(evaluate(model, [name], data=directory, limit=1)) for name in ("rte", "copa")]
    [[rte], [copa]] = alone
    assert list(evaluate(model, ["rte", "copa"], data=directory, limit=1)) == [rte, copa]
    assert rte.n == copa.n == 1
    assert rte.kept > copa.kept  # its prompts are longer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"goal": "x"}\n', "line 1 has no field 'sol1'"),
        ("[1, 2]\n", "line 1 is not a JSON object"),
        ('{"goal": "x", "sol1": "y", "sol2": "z", "label": 0}\n{"goal', "line 2 is not a JSON"),
    ],
)
def test_invalid_task_files_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / LOCAL_TASKS["piqa"].file).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_task("piqa", tmp_path)
    with pytest.raises(FileNotFoundError, match="copa"):
        load_task("copa", tmp_path)
    with pytest.raises(ValueError, match="task='boolq', expected one of copa, "):
        load_task("boolq", tmp_path)


def test_unknown_lm_eval_task_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty task list, because loading lm_eval's tasks takes seconds."""
    monkeypatch.setattr(tasks, "_all_tasks", lambda: TaskManager(include_defaults=False))
    with pytest.raises(ValueError, match="task='guesswork', expected one of lm_eval's"):
        load_task("guesswork", None)


def test_eval_command(
    tiny_opt: Path, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(tiny_opt), "--data", str(directory), "--tasks", "copa,piqa"]
    arguments += ["--hh", "0.4", "--num-fewshot", "1", "--limit", "1", "--threads", "1"]
    assert main([*arguments, "--json", str(tmp_path / "o.json")]) == 0
    _, _, *table = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "o.json").read_text(encoding="utf-8"))
    assert written["settings"]["hh"] == 0.4
    scores = written["scores"]
    assert [(s["task"], s["metric"]) for s in scores] == [
        ("copa", "acc"),
        ("piqa", "acc"),
        ("piqa", "acc_norm"),
    ]
    for score, row in zip(scores, table, strict=True):
        assert row.startswith(f"| {score['task']} | {score['metric']} | {score['value']:.4f} |")
        assert f"| {score['kept']:.1f} |" in row
    for wrong, message in (
        (["--tasks", "copa,boolq"], "--tasks 'boolq', expected one of"),
        (["--limit", "0"], "--limit 0, expected an integer, 1 or more"),
        (["--num-fewshot", "-1"], "--num-fewshot -1, expected an integer, 0 or more"),
        (["--num-fewshot", "2"], "--num-fewshot 2, expected at most 1, the examples of copa"),
    ):
        assert main([*arguments, *wrong]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""  # arguments are validated before scoring
        assert message in printed.err
