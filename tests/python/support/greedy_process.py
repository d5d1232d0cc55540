"""Texts in a process of their own."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

from h2o_cpp import Generator
from support.background import greedy


def text_of(path: Path, device: str) -> str:
    """What a fresh Generator says."""
    with Generator(path, threads=1, device=device) as generator:
        return greedy(generator)


def texts_of_processes(n: int, path: Path, device: str) -> list[str]:
    """What n processes say at once."""
    with get_context("spawn").Pool(n) as pool:
        return pool.starmap(text_of, [(path, device)] * n)
