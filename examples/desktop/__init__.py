"""A chat window, in PySide6, that shows what the cache keeps: python -m desktop."""
