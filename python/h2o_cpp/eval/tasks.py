"""The paper's tasks as lm_eval defines them, with local files instead of the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.tasks import TaskManager

_Document = dict[str, Any]

_SPLIT = "test"  # only in this split does lm_eval exclude the document from its few-shot examples


def _math_qa(documents: Iterable[_Document]) -> Iterator[_Document]:
    """Questions and options from prompts that contain both.

    A prompt is "Question: ...", a line "A. ..." per option, and "Answer: ". Documents with an empty
    option, which occur for some numbers with thousands separators, are skipped.
    """
    for document in documents:
        text = document["query"].removeprefix("Question: ").removesuffix("\nAnswer: ")
        problem, *options = re.split(r"\n[A-E]\. ", text)
        if all(options):
            yield {"Problem": problem, "options": options, "label": document["gold"]}


@dataclass(frozen=True)
class LocalTask:
    """The definition and the documents of a task."""

    folder: str  # lm_eval's definition
    file: str  # JSON lines
    fields: str  # required in every line; others are ignored
    convert: Callable[[Iterable[_Document]], Iterable[_Document]] = iter
    changes: Mapping[str, Any] = field(default_factory=dict)  # changes to the definition


# By lm_eval's name. Fields are those of the Hub's datasets, except for MathQA.
LOCAL_TASKS = {
    "copa": LocalTask(
        "super_glue/copa",
        "super_glue__copa__validation.jsonl",
        "premise choice1 choice2 question label",
    ),
    "openbookqa": LocalTask(
        "openbookqa", "openbookqa__main__validation.jsonl", "question_stem choices answerKey"
    ),
    "piqa": LocalTask("piqa", "piqa__plain_text__validation.jsonl", "goal sol1 sol2 label"),
    "rte": LocalTask("glue/rte", "glue__rte__validation.jsonl", "sentence1 sentence2 label"),
    "winogrande": LocalTask(
        "winogrande",
        "winogrande__winogrande_xl__validation.jsonl",
        "sentence option1 option2 answer",
    ),
    "mathqa": LocalTask(
        "mathqa",
        "math_qa.jsonl",
        "query gold",
        _math_qa,
        {"doc_to_choice": "options", "doc_to_target": "label"},
    ),
}


def load_task(name: str, directory: Path | None) -> dict[str, Any]:
    """A task_dict for lm_eval.evaluate, with one task or a group.

    name: any of lm_eval's tasks, from the Hub; with a directory, one of LOCAL_TASKS, from its file.
        Few-shot examples come from the same file, without the current document.

    Raises FileNotFoundError, and ValueError for an unknown name or a file that is not the task's.
    """
    loaded: dict[str, Any]
    if directory is None:
        manager = _all_tasks()
        if name not in manager.all_tasks:
            raise ValueError(f"task={name!r}, expected one of lm_eval's tasks (`lm_eval ls tasks`)")
        loaded = manager.load(name)
        return loaded
    if name not in LOCAL_TASKS:
        raise ValueError(f"task={name!r}, expected one of {', '.join(LOCAL_TASKS)}")
    task = LOCAL_TASKS[name]
    documents = list(task.convert(_documents(directory / task.file, task.fields.split())))
    dataset = datasets.DatasetDict({_SPLIT: datasets.Dataset.from_list(documents)})
    changes: dict[str, Any] = {
        **task.changes,
        "task": name,
        "custom_dataset": lambda **_: dataset,
        "training_split": None,
        "validation_split": None,
        "test_split": _SPLIT,
        "fewshot_split": _SPLIT,
    }
    folder = Path(lm_eval.tasks.__file__).parent / task.folder
    manager = TaskManager(include_path=folder, include_defaults=False)
    loaded = manager.load({"group": f"local {name}", "task": [changes]})
    return loaded


@cache
def _all_tasks() -> Any:
    return TaskManager()  # reads thousands of files


def _documents(file: Path, fields: Sequence[str]) -> list[_Document]:
    documents = []
    with file.open(encoding="utf-8") as lines:
        for n, line in enumerate(lines, 1):
            try:
                document = json.loads(line)
                documents.append({name: document[name] for name in fields})
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}: line {n} is not a JSON object: {error}") from None
            except KeyError as error:
                raise ValueError(f"{file}: line {n} has no field {error}") from None
    if not documents:
        raise ValueError(f"{file}: the file is empty")
    return documents
