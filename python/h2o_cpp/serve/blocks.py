"""A reply as numbered blocks of text, reasoning and tool calls, as Anthropic and /v1/responses
want."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from h2o_cpp.generation.record import TokenLogprob
from h2o_cpp.reply import Call, CallDelta, Content, NoCall, Part, Reasoning
from h2o_cpp.serve.outputs import Output

Kind = Literal["text", "reasoning", "call"]


@dataclass
class Block:
    """One block; `text` is its content so far, or the arguments of a tool call."""

    index: int
    kind: Kind
    text: str = ""
    name: str = ""  # of the tool
    id: str = ""
    complete: bool = True  # False: a malformed tool call, or cut by a limit
    # The text's, if they were recorded; without those of reasoning, tool calls and markers.
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Step(NamedTuple):
    """A change of a block; text, logprobs: what `more` adds to it."""

    kind: Literal["begin", "more", "end"]
    block: Block
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class Blocks:
    """The blocks of one output. Attributes: `all`, the blocks so far."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False
        self._text = ""  # of tokens not yet added
        self._n_added = 0  # characters
        self._pending: list[tuple[TokenLogprob, int]] = []  # tokens since the last text; lengths

    def add_all(self, output: Output) -> list[Block]:
        """The blocks of a finished output."""
        for _ in self.add(output, output.ended.text, deltas=False):
            pass
        return self.all

    def add(self, output: Output, piece: str, *, deltas: bool = True) -> Iterator[Step]:
        """The steps that a piece of text causes; deltas: as for Output.parts.

        If log-probabilities were recorded, the text is added token by token, to know which tokens
        each block of text has.
        """
        self._text += piece
        for found, end in output.new_tokens() if output.offset is not None else ():
            text = self._take(end - self._n_added)
            self._pending.append((found, len(text)))
            for part in output.parts(text, deltas=deltas, more=True):
                yield from self._add(output, part)
        for part in output.parts(self._take(len(self._text)), deltas=deltas):
            yield from self._add(output, part)
        if output.generation is not None:
            if self._open and output.finish_reason == "length":
                self.all[-1].complete = False
            yield from self._end()

    def _take(self, n: int) -> str:
        n = max(n, 0)
        taken, self._text = self._text[:n], self._text[n:]
        self._n_added += len(taken)
        return taken

    def _add(self, output: Output, part: Part) -> Iterator[Step]:
        if isinstance(part, NoCall):
            self.all[-1].complete = False
            yield from self._end()
        elif isinstance(part, Content | Reasoning):
            kind: Kind = "reasoning" if isinstance(part, Reasoning) else "text"
            if not self._open or self.all[-1].kind != kind:
                yield from self._begin(Block(len(self.all), kind))
            yield self._more(part.text)
        else:
            streamed = self._open and self.all[-1].kind == "call"
            if part.name is not None and not streamed:
                block = Block(len(self.all), "call", "", part.name, output.call_id(part.index))
                yield from self._begin(block)
            if isinstance(part, CallDelta) or not streamed:
                yield self._more(part.arguments)
            if isinstance(part, Call):
                yield from self._end()

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self._end()
        self.all.append(block)
        self._open = True
        yield Step("begin", block)

    def _more(self, text: str) -> Step:
        block, pending = self.all[-1], self._pending
        self._pending = []
        found: list[TokenLogprob] = []
        if block.kind == "text":
            # A marker may precede its first text.
            begin = 0 if block.text else _begin_of(pending, len(text))
            found = [one for one, _ in pending[begin:]]
        block.text += text
        block.logprobs += found
        return Step("more", block, text, found)

    def _end(self) -> Iterator[Step]:
        if self._open:
            self._open = False
            yield Step("end", self.all[-1])


def _begin_of(tokens: list[tuple[TokenLogprob, int]], n: int) -> int:
    """The first of the last tokens that have n characters; an incomplete character has none."""
    begin = len(tokens)
    while begin > 0 and (n > 0 or tokens[begin - 1][1] == 0):
        begin -= 1
        n -= tokens[begin][1]
    return begin
