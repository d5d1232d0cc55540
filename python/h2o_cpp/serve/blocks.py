"""Blocks: a reply as numbered reasoning, texts and calls, as some dialects send it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from h2o_cpp.reply import Call, Part, Reasoning
from h2o_cpp.serve.outputs import Output

Step = Literal["begin", "more", "end"]


@dataclass
class Block:
    """One of them; text: what it says so far, of a call its arguments."""

    index: int
    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    name: str = ""  # of a call
    id: str = ""


class Blocks:
    """Attributes: `all`, of one output, so far."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False
        self._n_calls = 0

    def add(self, output: Output, piece: str) -> Iterator[tuple[Step, Block, str]]:
        """What a piece begins, adds and ends, each with the text that it adds."""
        for part in output.parts(piece):
            yield from self._add(output, part)
        if output.generation is not None:
            yield from self._end()

    def _add(self, output: Output, part: Part) -> Iterator[tuple[Step, Block, str]]:
        if isinstance(part, Call):
            yield from self._end()
            block = Block(len(self.all), "call", "", part.name, output.call_id(self._n_calls))
            self._n_calls += 1
            yield from self._begin(block)
            yield from self._more(part.arguments)
            yield from self._end()
            return
        kind: Literal["text", "reasoning"] = "reasoning" if isinstance(part, Reasoning) else "text"
        if not self._open or self.all[-1].kind != kind:
            yield from self._end()
            yield from self._begin(Block(len(self.all), kind))
        yield from self._more(part.text)

    def _begin(self, block: Block) -> Iterator[tuple[Step, Block, str]]:
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
