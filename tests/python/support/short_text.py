"""A short text for tests of the cache."""

from __future__ import annotations

TEXT = (
    "The old man went down to the sea with his son. He had not been there for many years, and he "
    "thought of his father, who had been a sailor."
)
