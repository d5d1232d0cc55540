"""From a token's bytes to pieces of text that can be shown: whole characters, no stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextPieces:
    """Turns bytes, as they come, into text: characters whole, and cut before a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def push(self, data: bytes) -> str:
        """The text that `data` completes; sets `stopped` when a stop string appeared."""
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """What was held back. Bytes of an incomplete character become U+FFFD."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            n, keep = min(found), ""
        else:
            n = len(self._held) - max(map(self._overlap, self._stop), default=0)
            keep = self._held[n:]
        text, self._held = self._held[:n], keep
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
