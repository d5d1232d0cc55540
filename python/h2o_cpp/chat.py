"""Chat: a conversation of several turns that keeps its cache from one to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2o_cpp.chat_template import Message
from h2o_cpp.stream import Stream, StreamOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from h2o_cpp.generator import Generator


class Chat:
    """A conversation with a Generator's model, for one thread.

    Each turn reads only what is new: what the model said stays in the cache token by token, and
    what was evicted stays evicted. If the Generator has streamed something else in between, the
    next turn reads the whole conversation again, as one prompt.
    """

    def __init__(
        self, generator: Generator, *, system: str | None = None, template: str | None = None
    ) -> None:
        """Begin a conversation.

        system: what the model is told first.
        template: a Jinja2 chat template; default: the file's own.

        Raises ValueError if there is no template, or it makes no sense.
        """
        self._generator = generator
        self._template = generator.chat_template(template)
        self._said: list[Message] = []
        if system is not None:
            self._said.append({"role": "system", "content": system})
        self._reply: Stream | None = None  # to the last message

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, the last reply as far as it has been heard."""
        if self._reply is None:
            return [*self._said]
        return [*self._said, {"role": "assistant", "content": self._reply.text}]

    def say(self, text: str, **options: Unpack[StreamOptions]) -> Stream:
        """Send a message and stream the reply; options as for Generator.stream.

        A reply that is still being streamed ends here.

        Raises ValueError for a conversation longer than n_ctx, a message that the template
        refuses, and options out of range; the conversation is then as before.
        """
        message = {"role": "user", "content": text}
        last = self._reply
        if last is None:
            tokens = self._template.tokens([*self._said, message])
            reply = self._generator.stream(tokens, **options)
        else:
            last.close()
            tokens = [*last.history, *self._template.tokens_after_reply(self._said, [message])]
            reply = self._generator.stream(tokens, **options)
            reply.resume(last)
        self._said, self._reply = [*self.messages, message], reply
        return reply
