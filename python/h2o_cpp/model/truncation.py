"""Conversations that are too long: errors, or without their oldest turns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from h2o_cpp import _core

if TYPE_CHECKING:
    from h2o_cpp.model.chat_template import ChatTemplate
    from h2o_cpp.model.chat_turn import ChatTurn
    from h2o_cpp.model.template_messages import Message

Truncation = Literal["error", "auto"]


def check_truncation(truncation: object) -> Truncation:
    """Raises ValueError for another value."""
    if truncation not in ("error", "auto"):
        raise ValueError(f"truncation={truncation!r}, expected 'error' or 'auto'")
    return truncation


def fitting_turn(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    most: int | None,
    truncation: Truncation,
    **given: Any,
) -> ChatTurn:
    """The turn of a conversation, or with "auto" of the part of it that fits.

    The oldest turns are dropped, and then of the last turn the oldest calls with their results, but
    never a message for the system, the user's last message, or what follows its last call. If that
    is possible, a quarter of `most` is left for the output.

    most: the limit in tokens; None: there is none. given: other arguments of ChatTemplate.turn().

    Raises ContextFullError, and ValueError as ChatTemplate.prompt() does.
    """
    try:
        return template.turn(messages, most=most, **given)
    except _core.ContextFullError:
        if most is None or truncation == "error":
            raise
    kept = shortened(messages)

    def fits(i: int) -> bool:
        try:
            some = [messages[number] for number in kept[i]]
            template.prompt(some, most=max(most * 3 // 4, 1), **given)
        except _core.ContextFullError:
            return False
        return True

    found = kept[bisect_left(range(len(kept) - 1), True, key=fits)]
    turn = template.turn([messages[number] for number in found], most=most, **given)
    n_all = len(template.prompt(messages, **given).tokens)
    places = dict(zip(found, turn.prompt.messages, strict=True))
    prompt = turn.prompt._replace(messages=[places.get(i, ()) for i in range(len(messages))])
    return replace(turn, prompt=prompt, n_dropped=n_all - len(prompt.tokens))


def shortened(messages: Sequence[Message]) -> list[list[int]]:
    """Which messages there are without more and more of the oldest."""
    roles = [message["role"] for message in messages]
    users = [i for i, role in enumerate(roles) if role == "user"]
    last = users[-1] if users else roles.count("system")
    begins = [i for i in range(last + 2, len(roles)) if roles[i] == "assistant"]  # of calls

    def kept(begin: int) -> list[int]:
        """Messages from `begin` on, and the earlier ones that are never dropped."""
        return [i for i, role in enumerate(roles) if i >= begin or i == last or role == "system"]

    return [kept(begin) for begin in [*users, *begins]] or [[*range(len(roles))]]
