"""PromptMemory: how much of a prompt, and of each message of a conversation, the cache keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from h2o_cpp import _core

if TYPE_CHECKING:
    from h2o_cpp.model.chat_turn import ChatPrompt, ChatTurn
    from h2o_cpp.model.message_places import Places


@dataclass(frozen=True)
class PromptMemory:
    """Tokens of a prompt, with those before it in its sequence, that the cache does not hold."""

    dropped_tokens: int = 0  # left out before the model read it, by truncation="auto"
    evicted_tokens: int = 0  # at the end of the output, kept by no KV head of any layer
    archived_tokens: int = 0  # of the evicted, those in an archive, which may recall them
    # For each message that the chat template gets, the share of its tokens not evicted; None: it is
    # not in the prompt, or not found there. Empty before the end of the output.
    messages: Sequence[float | None] = ()


@dataclass(frozen=True)
class PromptParts:
    """The part of a conversation that a prompt has.

    n_dropped: tokens that were left out; messages: the tokens of each message, with those before
    the prompt.
    """

    n_dropped: int = 0
    messages: Sequence[Places] = ()

    @staticmethod
    def of(turn: ChatTurn) -> PromptParts:
        """The parts of the prompt of a turn."""
        return PromptParts(turn.n_dropped, turn.prompt.messages)

    def then(self, n: int, after: ChatPrompt) -> PromptParts:
        """The parts of a prompt that consists of this one, n tokens long, and further messages, as
        ChatTemplate.prompt_after_reply() returns them.
        """
        moved = (tuple((n + i, n + j) for i, j in places) for places in after.messages)
        both = zip_longest(self.messages, moved, fillvalue=())
        return PromptParts(self.n_dropped, [(*before, *more) for before, more in both])

    def memory(self, state: _core.Generation) -> PromptMemory:
        """The memory of such a prompt; evictions only at the end."""
        shares: list[float | None] = []
        if self.messages and state.finish_reason not in (None, "cancelled"):
            kept = state.kept
            shares = [_share(places, kept) for places in self.messages]
        return PromptMemory(self.n_dropped, *state.forgotten, tuple(shares))


NOTHING_LOST = PromptMemory()
NOTHING_DROPPED = PromptParts()


def _share(places: Places, kept: bytes | None) -> float | None:
    n = sum(end - begin for begin, end in places)
    if n == 0 or kept is None:
        return None if n == 0 else 1.0
    return sum(kept.count(1, begin, end) for begin, end in places) / n
