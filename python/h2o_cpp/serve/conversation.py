"""Chat requests of every API: from a ChatRequest to outputs with parsed replies."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from h2o_cpp.generation.request import ContextFullError
from h2o_cpp.model.chat_template import ChatPrompt, ChatTemplate, tool_schemas
from h2o_cpp.reply import ReplyParser
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.openai_requests import ChatRequest
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.service import Service


def submit_chat(
    service: Service, body: ChatRequest, *, truncate: bool = False, cut: bool = False
) -> list[Output]:
    """Submit a conversation; truncate, cut: as for prompt_of(). Raises ApiError."""
    return submit_prompt(service, body, prompt_of(service, body, truncate=truncate, cut=cut))


def prompt_of(
    service: Service, body: ChatRequest, *, truncate: bool = False, cut: bool = False
) -> ChatPrompt:
    """Render and tokenize a conversation. Raises ApiError.

    truncate: if it is too long, leave out the oldest turns.
    cut: with truncate; if the last turn alone is too long, its longest message loses its beginning.
    """
    template = service.chat_template(tools=bool(body.shown_tools()))
    given = body.conversation()
    with service.refusals():
        try:
            return template.prompt(**given, most=service.max_prompt)
        except ContextFullError:
            if not truncate:
                raise
        return _truncated(template, given, service.max_prompt, cut)


def _truncated(template: ChatTemplate, given: dict[str, Any], most: int, cut: bool) -> ChatPrompt:
    """The prompt of the system's messages and as many of the newest turns as fit.

    A quarter is left for the output, unless the last turn alone takes more and is not cut.
    """
    messages = given["messages"]
    roles = [message["role"] for message in messages]
    first = next((i for i, role in enumerate(roles) if role != "system"), 0)
    begins = [i for i, role in enumerate(roles) if role == "user"] or [first]  # of turns

    def prompt(kept: list[Any], most: int) -> ChatPrompt:
        return template.prompt(**{**given, "messages": [*messages[:first], *kept]}, most=most)

    def fits(kept: list[Any]) -> bool:
        try:
            prompt(kept, max(most * 3 // 4, 1))
        except ContextFullError:
            return False
        return True

    n_old = bisect_left(begins[:-1], True, key=lambda begin: fits(messages[begin:]))
    kept = messages[begins[n_old] :]
    try:
        return prompt(kept, most)
    except ContextFullError:
        if not cut:
            raise
    long = max(kept, key=lambda message: len(message["content"]))
    text = long["content"]

    def without(n: int) -> list[Any]:
        return [{**one, "content": text[n:]} if one is long else one for one in kept]

    n_cut = bisect_left(range(len(text)), True, key=lambda n: fits(without(n)))
    return prompt(without(n_cut), most)


def submit_prompt(service: Service, body: ChatRequest, prompt: ChatPrompt) -> list[Output]:
    """Submit the prompt of a conversation. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs")
    tools = body.shown_tools()
    if body.must_call and not tools:
        raise ApiError(400, "tool_choice requires a tool call, but tools is empty", param="tools")
    template = service.chat_template()
    inside: Any = {"thinking": prompt.thinking, "begun": prompt.begun}
    parallel = body.called_tool is None and body.parallel_tool_calls is not False
    grammar = around_form = None
    try:
        if body.must_call:
            grammar = template.call_grammar(
                tools, name=body.called_tool, parallel=parallel, **inside
            )
        elif body.has_form:
            around_form = template.form_grammar(tools, parallel=parallel, **inside)
    except ValueError as error:
        param = "tool_choice" if body.must_call else "tools"
        raise ApiError(400, str(error), param=param) from error
    form = template.format
    parses = bool(tools) or form.think is not None or form.name == "harmony"
    outputs = service.submit(
        [prompt.tokens],
        body,
        spelled=template.spelled if parses else (),
        grammar=grammar,
        around_form=around_form,
    )
    for output in outputs if parses else ():
        output.parser = ReplyParser(form, tools=tool_schemas(tools), **inside)
        output.max_calls = 1 if body.parallel_tool_calls is False else None
    body.messages, body.tools = [], None  # may be large
    return outputs
