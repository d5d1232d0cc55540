"""Looking at GGUF files that commands have written."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader


def is_whole(path: Path) -> bool:
    """Whether gguf-py finds every tensor's bytes, and there are no others but padding."""
    reader = GGUFReader(path)
    end = max(int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors)
    return end <= path.stat().st_size < end + reader.alignment
