"""A conversation that can change its cache: a chat, or a text that is continued."""

from __future__ import annotations

from h2o_cpp import Generator, Snapshot, Stream
from h2o_cpp.model.template_messages import Message


class Conversation:
    """The tokens of a conversation, for one thread.

    A model with a chat template answers messages. Other models, such as the bundled one, continue a
    text: each message begins a new paragraph; an empty message lets the model continue.

    Unlike h2o_cpp.Chat, it outlives its Generator.
    """

    def __init__(self, generator: Generator, before: Conversation | None = None) -> None:
        """Begin a conversation, or continue `before` with a Generator of the same file.

        Raises ValueError for an invalid chat template.
        """
        self._generator = generator
        self._template = generator.chat_template() if has_template(generator) else None
        self._messages: list[Message] = [] if before is None else [*before._messages]
        self._snapshot: Snapshot | None = None  # the cache after the last reply
        self.tokens: list[int] = [] if before is None else [*before.tokens]  # all so far

    def say(self, text: str, *, max_tokens: int) -> Stream:
        """Stream the reply to a message; heard() stores it.

        Raises ValueError if the context is too short, and RuntimeError; the conversation is then
        unchanged.
        """
        new = self._new_tokens(text)
        prompt = new if self._snapshot is not None else [*self.tokens, *new]
        return self._generator.stream(prompt, after=self._snapshot, max_tokens=max_tokens)

    def heard(self, text: str, stream: Stream) -> None:
        """Store a message and its reply, which may be incomplete."""
        if not stream.began:
            return
        self._snapshot = stream.save()
        self.tokens = [*self._snapshot.tokens]
        if self._template is not None:
            self._messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": stream.text},
            ]

    def paragraph(self, text: str) -> str:
        """A message as it appears in the text."""
        begins = not text or not self.tokens or self._template is not None
        return text if begins else f"\n\n{text}"

    def _new_tokens(self, text: str) -> list[int]:
        if self._template is not None:
            message: Message = {"role": "user", "content": text}
            if not self._messages:
                return self._template.tokens([message])
            return self._template.prompt_after_reply(self._messages[:-1], [message]).tokens
        begins = not self.tokens
        return self._generator.tokenizer.encode(
            self.paragraph(text), add_special=begins, begins=begins
        )


def has_template(generator: Generator) -> bool:
    """Whether the model's file has a chat template."""
    return generator.tokenizer.chat_template is not None
