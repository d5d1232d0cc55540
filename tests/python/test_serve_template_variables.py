"""Variables of the chat template over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.scripted_chat import user
from support.serving import serving
from support.tool_talk import THINKS, talking


def test_variables_of_the_template(tmp_path: Path) -> None:
    template = (
        "{{ documents | tojson }}{{ effort }}{{ reasoning_effort }}{{ enable_thinking }};"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    body = {
        "messages": user("Hi"),
        "documents": [{"title": "A"}],
        "chat_template_kwargs": {"effort": 3},
        "temperature": 0,
    }
    with (
        Generator(talking(tmp_path, {}, template)) as generator,
        serving(generator) as server,
    ):
        for effort, value in (("low", "low"), ("none", "False")):
            answer = server.ask("/apply-template", {**body, "reasoning_effort": effort})
            assert answer.json()["prompt"] == f'[{{"title": "A"}}]3{value};a'
        answer = server.ask("/apply-template", {**body, "add_generation_prompt": False})
        assert answer.json()["prompt"] == '[{"title": "A"}]3;'


@pytest.mark.parametrize(
    "variables",
    [{"self": 1}, {"messages": []}, {"bos_token": "<|im_end|>"}, {"": {}}, {"a b": [{"c": None}]}],
)
def test_unusual_template_variables(tmp_path: Path, variables: Any) -> None:
    """They are neither an error nor override the conversation."""
    body = {"messages": user("Hi"), "chat_template_kwargs": variables}
    with Generator(talking(tmp_path, {}, THINKS)) as generator, serving(generator) as server:
        answer = server.ask("/apply-template", body)
    assert (answer.status, answer.json()) == (200, {"prompt": "uHi;"})
