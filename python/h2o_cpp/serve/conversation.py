"""Chat requests of every API: from a ChatRequest to outputs with parsed replies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from h2o_cpp.budget.policy import has_budget, is_at_most_half
from h2o_cpp.model.chat_turn import ChatTurn
from h2o_cpp.model.truncation import fitting_turn
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.openai_requests import ChatRequest
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.service import Service


def submit_chat(service: Service, body: ChatRequest) -> list[Output]:
    """Submit a conversation. Raises ApiError."""
    return submit_turn(service, body, turn_of(service, body))


def turn_of(service: Service, body: ChatRequest) -> ChatTurn:
    """Render and tokenize a conversation, without its oldest turns if it may be truncated.

    Raises ApiError.
    """
    given = conversation_of(service, body)
    template = service.chat_template(tools=bool(given["tools"]))
    truncation = body.truncation or service.defaults.truncation
    with service.refusals():
        turn = fitting_turn(template, **given, most=service.max_prompt, truncation=truncation)
        protect = service.defaults.protect if body.protect is None else body.protect
        if protect in ("system", "auto"):
            body.protect = None
            policy = service.policy_of(body)
            if protect == "system" or has_budget(policy):
                n_system = template.n_before(turn.prompt.tokens, **given)
                if protect == "system" or is_at_most_half(n_system, policy):
                    body.protect = n_system
    return turn


def count_tokens(service: Service, body: ChatRequest) -> int:
    """The tokens of a conversation of any length. Raises ApiError."""
    given = conversation_of(service, body)
    with service.refusals():
        return len(service.chat_template(tools=bool(given["tools"])).turn(**given).prompt.tokens)


def conversation_of(service: Service, body: ChatRequest) -> dict[str, Any]:
    """The arguments of ChatTemplate.prompt()."""
    given = body.conversation()
    return {**given, "variables": {**service.defaults.variables, **given["variables"]}}


def submit_turn(service: Service, body: ChatRequest, turn: ChatTurn) -> list[Output]:
    """Submit the prompt of a conversation. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs")
    if body.must_call and not turn.tools:
        raise ApiError(400, "tool_choice requires a tool call, but tools is empty", param="tools")
    parallel = body.called_tool is None and body.parallel_tool_calls is not False
    try:
        form = turn.form(
            must_call=body.must_call,
            called_tool=body.called_tool,
            has_form=body.has_form,
            is_free=not body.ignore_eos,
            parallel=parallel,
        )
    except ValueError as error:
        param = "tool_choice" if body.must_call else "tools"
        raise ApiError(400, str(error), param=param) from error
    outputs = service.submit([turn.prompt], body, form)
    for output in outputs:
        n_dropped = output.prompt_parts.n_dropped + turn.n_dropped
        output.prompt_parts = replace(output.prompt_parts, n_dropped=n_dropped)
    for output in outputs if turn.has_parts else ():
        output.parser = turn.parser()
        output.max_calls = 1 if body.parallel_tool_calls is False else None
    body.messages, body.tools = [], None  # may be large
    return outputs
