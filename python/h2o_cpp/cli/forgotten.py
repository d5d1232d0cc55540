"""Messages of a conversation that the model no longer has, in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from h2o_cpp.generation.prompt_memory import PromptMemory
from h2o_cpp.model.template_messages import Message

_SHOWN = 40  # characters of a message


def lost_messages(messages: Sequence[Message], memory: PromptMemory) -> set[int]:
    """The numbers of messages that are all forgotten: the system's, and those of earlier turns."""
    lost = {i for i, share in enumerate(memory.messages) if share == 0}
    if memory.dropped_tokens:  # otherwise a template left them out
        lost |= {i for i, share in enumerate(memory.messages) if share is None}
    turns: list[list[int]] = [[]]
    for i, message in enumerate(messages[: max(len(memory.messages) - 1, 0)]):
        if message["role"] in ("system", "user"):
            turns.append([])
        turns[-1].append(i)
    return {i for turn in turns if lost.issuperset(turn) for i in turn}


def described(messages: Sequence[Message], lost: Collection[int], memory: PromptMemory) -> str:
    """A sentence about lost messages."""
    what = "has forgotten"
    if memory.dropped_tokens:
        what = "no longer reads"
    elif memory.archived_tokens:
        what = "has only in its archive"
    parts = []
    if any(messages[i]["role"] == "system" for i in lost):
        parts.append("the system prompt (--protect system keeps it)")
    users = [i for i in sorted(lost) if messages[i]["role"] == "user"]
    if users:
        text = " ".join(str(messages[users[-1]]["content"]).split())
        last = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
        parts.append(last if len(users) == 1 else f"{len(users)} earlier turns, up to {last}")
    return f"the model {what} {' and '.join(parts)}"
