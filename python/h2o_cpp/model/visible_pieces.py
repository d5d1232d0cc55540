"""VisiblePieces: text of tokens that can be shown."""

from __future__ import annotations

from h2o_cpp import _core
from h2o_cpp.files.visible_text import visible
from h2o_cpp.model.tokenizer import Tokenizer


class VisiblePieces:
    """Printable text of each token of a text, in order.

    A character of several tokens appears at the last of them; the others show their bytes, as in
    "<0xE6>". Tokens without text appear as in the vocabulary. Control characters are escaped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = _core.Detokenizer()
        self._begins = True

    def push(self, token: int) -> str:
        """The text of the next token."""
        tokenizer = self._tokenizer
        data = tokenizer.token_bytes(token, begins=self._begins)
        self._begins = self._begins and not tokenizer.has_text([token])
        piece = self._text.push(data) or "".join(f"<0x{byte:02X}>" for byte in data)
        return visible(piece or tokenizer.token_text(token), lines=True)
