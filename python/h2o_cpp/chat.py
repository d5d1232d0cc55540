"""Chat: a conversation of several turns that keeps its cache between turns."""

from __future__ import annotations

import os
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from h2o_cpp.generation.request import StreamOptions, show_options
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.generation.stream import Stream
from h2o_cpp.model.arguments import check_str, short
from h2o_cpp.model.template_messages import Message

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from h2o_cpp.generator import Generator


@dataclass(frozen=True)
class _RestoredReply:
    """A reply restored from a snapshot."""

    text: str
    snapshot: Snapshot


class Chat:
    """A conversation with a Generator's model, for one thread.

    Each turn reads only the new message; evicted tokens stay evicted. If the Generator has streamed
    something else in between, the next turn reads the whole conversation again as one prompt. The
    system prompt is read once and cached for other conversations, as by Generator.read().
    """

    def __init__(
        self, generator: Generator, *, system: str | None = None, template: str | None = None
    ) -> None:
        """Begin a conversation.

        system: the system prompt; default: none.
        template: a Jinja2 chat template, its file, or the name of a built-in one; default: the
            model file's.

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

        Raises ValueError for a conversation longer than n_ctx unless the Generator is `endless`, a
        message that the template rejects, and options out of range; the conversation is then
        unchanged.
        """
        message: Message = {"role": "user", "content": check_str("text", text)}
        last = self._reply
        if last is None:
            reply = self._begin(message, options)
        else:
            more = self._template.prompt_after_reply(self._messages, [message]).tokens
            if isinstance(last, _RestoredReply):
                reply = self._generator.stream(more, after=last.snapshot, **options)
            else:
                last.close()
                reply = self._after_stream(last, more, options)
        self._messages, self._reply = [*self.messages, message], reply
        return reply

    def _after_stream(self, last: Stream, more: list[int], options: StreamOptions) -> Stream:
        request = last.request
        if request.after is not None and not last.began:  # the last reply was never read
            prompt = [*request.prompt, *more]
            return self._generator.stream(prompt, after=request.after, **options)
        return self._generator.follow(last, more, options)

    def _begin(self, message: Message, options: StreamOptions) -> Stream:
        tokens = self._template.tokens([*self._messages, message])
        if not self._messages:
            return self._generator.stream(tokens, **options)
        # The system prompt is the part that does not depend on the first message.
        other: Message = {"role": "user", "content": f"-{message['content']}"}
        others = self._template.tokens([*self._messages, other])
        n = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), 0)
        if n == 0:
            return self._generator.stream(tokens, **options)
        system = self._generator.read(tokens[:n])
        return self._generator.stream(tokens[n:], after=system, **options)

    @property
    def tokens(self) -> list[int]:
        """All tokens of the conversation."""
        if self._reply is None:
            return []
        last = self._reply
        return [*last.snapshot.tokens] if isinstance(last, _RestoredReply) else last.history

    def moved(self, generator: Generator) -> Chat:
        """The same conversation with another Generator of this model, for another budget.

        The next turn reads the whole conversation again.
        """
        other = copy(self)
        other._generator, other._messages, other._reply = generator, self.messages, None
        return other

    def fork(self) -> Chat:
        """An independent copy of the conversation.

        Raises RuntimeError before the first reply, and if the Generator has streamed something else
        since the last one.
        """
        other = copy(self)  # say() replaces the list of messages
        other._reply = _RestoredReply(self._last_reply().text, self._snapshot())
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation and its cache to a file. Raises as fork() does."""
        self._snapshot().save(path)

    @staticmethod
    def load(
        generator: Generator, path: str | os.PathLike[str], *, template: str | None = None
    ) -> Chat:
        """Load a saved conversation.

        Raises FileNotFoundError, and ValueError for an invalid file or another model, policy or
        cache type.
        """
        snapshot = generator.load(path)
        chat = Chat(generator, template=template)
        try:
            *earlier, reply = snapshot.note
            chat._messages = [{"role": m["role"], "content": m["content"]} for m in earlier]
            chat._reply = _RestoredReply(str(reply["content"]), snapshot)
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"{os.fspath(path)}: the snapshot has no conversation") from None
        return chat

    def _last_reply(self) -> Stream | _RestoredReply:
        if self._reply is None:
            begun = any(message["role"] != "system" for message in self._messages)
            what = "has moved to other options" if begun else "has not begun"
            raise RuntimeError(f"the conversation {what}, send a message first")
        return self._reply

    def _snapshot(self) -> Snapshot:
        reply = self._last_reply()
        return (
            reply.snapshot if isinstance(reply, _RestoredReply) else reply.save(note=self.messages)
        )
