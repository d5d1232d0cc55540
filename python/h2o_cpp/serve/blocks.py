"""A reply as numbered blocks of text, reasoning and tool calls, as Anthropic and /v1/responses
want."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from h2o_cpp.generation.trace import TokenLogprob
from h2o_cpp.reply import Call, CallDelta, Content, NoCall, Part, Reasoning
from h2o_cpp.serve.outputs import Output

Step = Literal["begin", "more", "end"]
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
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of text; see TextLogprobs


class Blocks:
    """The blocks of one output. Attributes: `all`, the blocks so far."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def add_all(self, output: Output) -> list[Block]:
        """The blocks of a finished output."""
        for _ in self.add(output, output.ended.text, deltas=False):
            pass
        return self.all

    def add(
        self, output: Output, piece: str, *, deltas: bool = True, more: bool = False
    ) -> Iterator[tuple[Step, Block, str]]:
        """The steps that a piece of text causes, each with its block and the text it adds.

        deltas, more: as for Output.parts.
        """
        for part in output.parts(piece, deltas=deltas, more=more):
            yield from self._add(output, part)
        if output.generation is not None and not more:
            if self._open and output.finish_reason == "length":
                self.all[-1].complete = False
            yield from self._end()

    def _add(self, output: Output, part: Part) -> Iterator[tuple[Step, Block, str]]:
        if isinstance(part, NoCall):
            self.all[-1].complete = False
            yield from self._end()
        elif isinstance(part, Content | Reasoning):
            kind: Kind = "reasoning" if isinstance(part, Reasoning) else "text"
            if not self._open or self.all[-1].kind != kind:
                yield from self._begin(Block(len(self.all), kind))
            yield from self._more(part.text)
        else:
            streamed = self._open and self.all[-1].kind == "call"
            if part.name is not None and not streamed:
                block = Block(len(self.all), "call", "", part.name, output.call_id(part.index))
                yield from self._begin(block)
            if isinstance(part, CallDelta) or not streamed:
                yield from self._more(part.arguments)
            if isinstance(part, Call):
                yield from self._end()

    def _begin(self, block: Block) -> Iterator[tuple[Step, Block, str]]:
        yield from self._end()
        self.all.append(block)
        self._open = True
        yield "begin", block, ""

    def _more(self, text: str) -> Iterator[tuple[Step, Block, str]]:
        self.all[-1].text += text
        yield "more", self.all[-1], text

    def _end(self) -> Iterator[tuple[Step, Block, str]]:
        if self._open:
            self._open = False
            yield "end", self.all[-1], ""
