"""Log-probabilities of the text in a reply, without those of reasoning, tool calls and markers."""

from __future__ import annotations

from collections.abc import Iterator

from h2o_cpp.generation.trace import TokenLogprob
from h2o_cpp.serve.blocks import Block, Blocks, Step
from h2o_cpp.serve.outputs import Output


class TextLogprobs:
    """Adds an output to blocks token by token, to know which tokens each block of text has."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._text = ""  # of tokens not yet added
        self._n_added = 0  # characters
        self._pending: list[tuple[TokenLogprob, int]] = []  # tokens since the last text; lengths

    def add(
        self, output: Output, piece: str, *, deltas: bool = True
    ) -> Iterator[tuple[Step, Block, str, list[TokenLogprob]]]:
        """As Blocks.add(), with the log-probabilities of the text, if they were recorded."""
        self._text += piece
        for found, end in output.new_tokens() if output.offset is not None else ():
            text = self._take(end - self._n_added)
            self._pending.append((found, len(text)))
            for step in self._blocks.add(output, text, deltas=deltas, more=True):
                yield *step, self._logprobs(*step)
        for step in self._blocks.add(output, self._take(len(self._text)), deltas=deltas):
            yield *step, self._logprobs(*step)

    def _take(self, n: int) -> str:
        n = max(n, 0)
        taken, self._text = self._text[:n], self._text[n:]
        self._n_added += len(taken)
        return taken

    def _logprobs(self, step: Step, block: Block, text: str) -> list[TokenLogprob]:
        """The log-probabilities of the text that a step adds, which go to the block."""
        if step != "more":
            return []
        begin = 0 if block.kind == "text" else len(self._pending)
        if block.kind == "text" and block.text == text:  # its first; a marker may precede it
            begin = self._begin_of(len(text))
        found = [one for one, _ in self._pending[begin:]]
        self._pending = []
        block.logprobs += found
        return found

    def _begin_of(self, n: int) -> int:
        """The first of the last pending tokens that have n characters; an incomplete character has
        none."""
        begin = len(self._pending)
        while begin > 0 and (n > 0 or self._pending[begin - 1][1] == 0):
            begin -= 1
            n -= self._pending[begin][1]
        return begin
