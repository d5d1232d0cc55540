"""Chat: a conversation of several turns that keeps its cache between turns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from h2o_cpp.arguments import check_int, check_str, short
from h2o_cpp.budget.policy import is_at_most_half
from h2o_cpp.generation.prompt_memory import PromptParts
from h2o_cpp.generation.request import ContextFullError, Request, StreamOptions, show_options
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.generation.stream import Stream
from h2o_cpp.model.truncation import Truncation, check_truncation

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from h2o_cpp.generator import Generator
    from h2o_cpp.model.template_messages import Message


@dataclass(frozen=True)
class _RestoredReply:
    """A reply restored from a snapshot; parts: of the conversation up to its end."""

    text: str
    snapshot: Snapshot
    parts: PromptParts


class Chat:
    """A conversation with a Generator's model, for one thread.

    Each turn reads only the new message; evicted tokens stay evicted. If the Generator has streamed
    something else in between, the next turn reads the whole conversation again, with the same
    result. The system prompt is read once and cached for other conversations, as by
    Generator.read().
    """

    def __init__(
        self,
        generator: Generator,
        *,
        system: str | None = None,
        template: str | None = None,
        protect: Literal["system", "prompt", "auto"] | int | None = None,
        truncation: Truncation = "error",
    ) -> None:
        """Begin a conversation.

        system: the system prompt; default: none.
        protect: tokens that are never evicted, inside the budget: "system", those before the first
            message; "auto", these if they are at most half of the budget; "prompt", those up to the
            first reply; or a number, the first ones.
        template: a Jinja2 chat template, its file, or the name of a built-in one; default: the
            model file's.
        truncation: as for Generator.chat(); `messages` keeps the whole conversation.

        Raises ValueError for a missing or an invalid template, TypeError for other types.
        """
        if not hasattr(generator, "chat_template"):
            raise TypeError(
                f"generator={short(generator)}, expected a Generator: Chat(Generator(...))"
            )
        if system is not None:
            check_str("system", system)
        self._generator = generator
        self._template = generator.chat_template(template)
        if isinstance(protect, str) and protect not in ("system", "prompt", "auto"):
            raise ValueError(
                f"protect={protect!r}, expected 'system', 'prompt', 'auto' or a number"
            )
        self._protect = (
            protect if isinstance(protect, str | None) else check_int("protect", protect, 0)
        )
        self._is_auto = protect == "auto"
        self._truncation = check_truncation(truncation)
        self._messages: list[Message] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        self._reply: Stream | _RestoredReply | None = None  # to the last message

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, with the part of an unfinished reply that was read."""
        if self._reply is None:
            return [*self._messages]
        return [*self._messages, {"role": "assistant", "content": self._reply.text}]

    @show_options
    def say(self, text: str, **options: Unpack[StreamOptions]) -> Stream:
        """Send a message and stream the reply; options as for Generator.stream().

        Ends the previous reply if it is still being streamed.

        Raises ValueError for a conversation longer than n_ctx, unless it is truncated or the
        Generator is `endless`, a message that the template rejects, and options out of range; the
        conversation is then unchanged.
        """
        if "protect" in options:
            raise TypeError("protect is an option of Chat, not of a message")
        message: Message = {"role": "user", "content": check_str("text", text)}
        last = self._reply
        protect = self._protect
        if last is None:
            reply, protect = self._begin(message, options)
        else:
            if isinstance(protect, int):
                options["protect"] = protect
            try:
                reply = self._after(last, message, options)
            except ContextFullError:
                if self._truncation == "error":
                    raise
                reply, protect = self._begin(message, options)
        self._messages, self._reply, self._protect = [*self.messages, message], reply, protect
        return reply

    def _after(
        self, last: Stream | _RestoredReply, message: Message, options: StreamOptions
    ) -> Stream:
        more = self._template.prompt_after_reply(self._messages, [message])
        if isinstance(last, _RestoredReply):
            # The message's first chunk has no token of the reply, whose last one may be unread.
            unread = (last.snapshot.n_read, len(last.snapshot.tokens))
            request = self._generator._request(more.tokens, last.snapshot, options)
            request = replace(request, replies=[unread] if unread[0] < unread[1] else [])
        else:
            last.close()
            request = self._after_stream(last, more.tokens, options)
        request = replace(request, parts=_parts_with(last).then(len(self.tokens), more))
        follows = last if isinstance(last, Stream) and request.after is None else None
        return Stream(self._generator._runtime, request, follows)

    def _after_stream(self, last: Stream, more: list[int], options: StreamOptions) -> Request:
        request, generator, history = last.request, self._generator, last.history
        if request.after is not None and not last.began:  # the last reply was never read
            return generator._request([*request.prompt, *more], request.after, options)
        replies = [*request.replies, _reply_of(last)]
        return replace(generator._request([*history, *more], None, options), replies=replies)

    def _begin(self, message: Message, options: StreamOptions) -> tuple[Stream, int | None]:
        """The first reply, and the number of protected tokens."""
        messages = [*self.messages, message]
        turn = self._generator._fitting(self._template, messages, self._truncation)
        tokens = turn.prompt.tokens
        is_divided = bool(self._messages) or self._protect in ("system", "auto")
        n = self._template.n_before(tokens, messages) if is_divided else 0
        protect = self._n_protected(tokens, n)
        if protect is not None:
            options["protect"] = protect
        if n == 0 or not self._messages or (protect or 0) > n:  # no snapshot protects what follows
            system, n = None, 0
        else:
            system = self._generator.read(tokens[:n], protect=protect)
        request = self._generator._request(tokens[n:], system, options)
        return Stream(self._generator._runtime, request.of_turn(turn)), protect

    def _n_protected(self, tokens: Sequence[int], n_system: int) -> int | None:
        """The number of protected tokens; tokens: up to the first reply, n_system: before the first
        message.
        """
        if self._protect == "prompt":
            return len(tokens)
        if self._protect == "auto" and not is_at_most_half(n_system, self._generator.policy):
            return None
        return n_system if isinstance(self._protect, str) else self._protect

    @property
    def tokens(self) -> list[int]:
        """All tokens of the conversation."""
        if self._reply is None:
            return []
        last = self._reply
        return [*last.snapshot.tokens] if isinstance(last, _RestoredReply) else last.history

    def moved(self, generator: Generator) -> Chat:
        """Continues this conversation with another Generator of this model, for another budget.

        The next turn reads the whole conversation again.
        """
        other = copy(self)
        other._generator, other._messages, other._reply = generator, self.messages, None
        if self._is_auto:
            other._protect = "auto"
        return other

    def fork(self) -> Chat:
        """An independent copy of the conversation.

        Raises RuntimeError before the first reply, and if the Generator has streamed something else
        since the last one.
        """
        other = copy(self)  # say() replaces the list of messages
        reply = self._last_reply()
        other._reply = _RestoredReply(reply.text, self._snapshot(), _parts_with(reply))
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation and its cache to a file. Raises as fork() does."""
        self._snapshot().save(path)

    @staticmethod
    def load(
        generator: Generator,
        path: str | os.PathLike[str],
        *,
        template: str | None = None,
        protect: Literal["system", "prompt", "auto"] | int | None = None,
    ) -> Chat:
        """Load a saved conversation; protect: as when it began.

        Raises FileNotFoundError, and ValueError for an invalid file or another model, policy or
        cache type.
        """
        snapshot = generator.load(path)
        chat = Chat(generator, template=template, protect=protect)
        try:
            *earlier, reply = snapshot.note
            chat._messages = [{"role": m["role"], "content": m["content"]} for m in earlier]
            text = str(reply["content"])
            places = [[(int(i), int(j)) for i, j in m.get("tokens", ())] for m in snapshot.note]
            parts = PromptParts(messages=[*map(tuple, places)])
            chat._reply = _RestoredReply(text, snapshot, parts)
        except (TypeError, KeyError, ValueError, OverflowError):
            raise ValueError(f"{os.fspath(path)}: the snapshot has no conversation") from None
        if isinstance(protect, str):
            roles = [message["role"] for message in chat._messages]
            n_system = next((i for i, role in enumerate(roles) if role != "system"), 0)
            beginning = chat._messages[: n_system + 1]
            tokens = chat._template.tokens(beginning)
            n_before = chat._template.n_before(tokens, beginning)
            chat._protect = chat._n_protected(tokens, n_before)
        return chat

    def _last_reply(self) -> Stream | _RestoredReply:
        if self._reply is None:
            begun = any(message["role"] != "system" for message in self._messages)
            what = "has moved to other options" if begun else "has not begun"
            raise RuntimeError(f"the conversation {what}, send a message first")
        return self._reply

    def _snapshot(self) -> Snapshot:
        reply = self._last_reply()
        if isinstance(reply, _RestoredReply):
            return reply.snapshot
        both = zip(self.messages, _parts_with(reply).messages, strict=True)
        return reply.save(note=[{**message, "tokens": places} for message, places in both])


def _reply_of(stream: Stream) -> tuple[int, int]:
    """Where the tokens of a reply begin and end."""
    end = len(stream.history)
    return end - len(stream.tokens), end


def _parts_with(reply: Stream | _RestoredReply) -> PromptParts:
    """The parts of the conversation up to the end of a reply."""
    if isinstance(reply, _RestoredReply):
        return reply.parts
    parts = reply.request.parts
    return replace(parts, messages=[*parts.messages, (_reply_of(reply),)])
