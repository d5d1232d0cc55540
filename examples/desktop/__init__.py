"""A chat window with PySide6 that shows what the cache keeps: python -m desktop."""
