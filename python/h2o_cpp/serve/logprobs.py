"""Log-probabilities in the forms of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from h2o_cpp import _core
from h2o_cpp.generation.record import TokenLogprob
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.serve.openai_responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)


class TextOffset:
    """How long a text is, in characters, while tokens are added.

    Attributes: `value`, the number of complete characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, after: Sequence[int], spelled: Collection[int] = ()
    ) -> None:
        """after: tokens before the text; spelled: special tokens whose text is part of it."""
        self.value = 0
        self._tokenizer = tokenizer
        self._spelled = spelled
        self._text = _core.Detokenizer()
        self._begins = not tokenizer.has_text(after)  # no text so far

    def add(self, token: int) -> None:
        if token in self._spelled:
            data = self._tokenizer.token_text(token).encode()
        else:
            data = self._tokenizer.token_bytes(token, begins=self._begins)
        self._begins = self._begins and not self._tokenizer.has_text([token])
        self.value += len(self._text.push(data))


class CompletionTokens:
    """Log-probabilities and text offsets of one sequence's tokens, part by part."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, echo: bool) -> None:
        """echo: the prompt is reported too; its first token has no log-probability."""
        self._tokenizer = tokenizer
        self._offset = TextOffset(tokenizer, after=() if echo else prompt)
        self._part = _nothing()
        if echo:
            self._add(prompt[0], None, None)

    def part(self, found: Iterable[TokenLogprob]) -> CompletionLogprobs:
        """Add tokens, and return those added since the last part."""
        for token, logprob, top in found:
            texts: dict[str, float] = {}
            for other, value in (*top, (token, logprob)):
                texts.setdefault(_spelling(self._tokenizer, other), value)
            self._add(token, logprob, texts if top else {})
        part, self._part = self._part, _nothing()
        return part

    def _add(self, token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        self._part.tokens.append(_spelling(self._tokenizer, token))
        self._part.token_logprobs.append(logprob)
        self._part.top_logprobs.append(top)
        self._part.text_offset.append(self._offset.value)
        self._offset.add(token)


def _nothing() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def chat_logprobs(
    tokenizer: Tokenizer, found: Iterable[TokenLogprob], *, ids: bool = True
) -> ChatLogprobs:
    """Log-probabilities in the form of chat completions."""

    def one(token: int, logprob: float) -> TopLogprob:
        data = tokenizer.token_bytes(token)
        name = _spelling(tokenizer, token)
        return TopLogprob(id=token if ids else None, token=name, logprob=logprob, bytes=list(data))

    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                **one(token, logprob).model_dump(), top_logprobs=[one(*other) for other in top]
            )
            for token, logprob, top in found
        ]
    )


def _spelling(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, its bytes if they are not UTF-8, or a special token's name."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode("utf-8") or tokenizer.token_text(token)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
