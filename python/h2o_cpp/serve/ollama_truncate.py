"""Prompts of Ollama's API; those that are too long are cut, with a quarter left for the output."""

from __future__ import annotations

from bisect import bisect_left

from h2o_cpp.serve.conversation import prompt_of, submit_chat, submit_prompt, turns
from h2o_cpp.serve.errors import TooLongError
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.requests import ChatRequest, CompletionRequest
from h2o_cpp.serve.service import Service


def submit_cut_chat(service: Service, chat: ChatRequest, *, truncate: bool) -> list[Output]:
    """Submit a conversation; truncate: if it is too long, without its oldest turns.

    If its last turn alone is too long, the longest message of it loses its beginning. Raises
    ApiError.
    """
    try:
        return submit_chat(service, chat, truncate=truncate)
    except TooLongError:
        if not truncate:
            raise
    return submit_chat(service, _last_turn(service, chat))


def submit_cut_prompt(
    service: Service, prompt: str | list[int], request: CompletionRequest, n_keep: int | None
) -> list[Output]:
    """Submit a prompt; if it is too long, its first n_keep tokens (-1: most) and its last ones.

    n_keep: None: refuse it. Raises ApiError.
    """
    try:
        return service.submit([prompt], request)
    except TooLongError:
        if n_keep is None:
            raise
    with service.refusals():
        tokens = service.generator.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return service.submit([_cut(service, tokens, n_keep)], request)


def submit_after_reply(
    service: Service, before: list[int], chat: ChatRequest, n_keep: int | None
) -> list[Output]:
    """Submit messages that follow a reply; before: the tokens up to its end.

    n_keep: as for submit_cut_prompt. Raises ApiError.
    """
    given = chat.conversation()
    first = {"role": "user", "content": "Hello"}  # before the reply, which is only a place
    with service.refusals():
        prompt = service.chat_template().prompt_after_reply(
            [first], given["messages"], variables=given["variables"]
        )
    tokens = [*before, *prompt.tokens]
    if n_keep is not None and len(tokens) > service.max_prompt:
        tokens = _cut(service, tokens, n_keep)
    return submit_prompt(service, chat, prompt._replace(tokens=tokens))


def _cut(service: Service, tokens: list[int], n_keep: int) -> list[int]:
    """The first n_keep tokens, besides the one that begins a text, and as many last ones as fit."""
    most = _most_tokens(service)
    n_first = most - 1
    if n_keep >= 0:
        begins = tokens[0] == service.generator.tokenizer.bos
        n_first = min(n_keep + begins, most - 1)
    return tokens[:n_first] + tokens[n_first - most :]


def _last_turn(service: Service, chat: ChatRequest) -> ChatRequest:
    """The system's messages and the last turn, with as much of its longest message as fits."""
    first, begins = turns([message.role for message in chat.messages])
    turn = chat.messages[begins[-1] :]
    long = max(turn, key=lambda message: len(message.plain()["content"]))
    text = long.plain()["content"]

    def without(n: int) -> ChatRequest:
        cut = long.model_copy(update={"content": text[n:]})
        kept = [cut if message is long else message for message in turn]
        return chat.model_copy(update={"messages": [*chat.messages[:first], *kept]})

    def fits(n: int) -> bool:
        try:
            return len(prompt_of(service, without(n)).tokens) <= _most_tokens(service)
        except TooLongError:
            return False

    return without(bisect_left(range(len(text)), True, key=fits))


def _most_tokens(service: Service) -> int:
    return max(service.max_prompt * 3 // 4, 1)
