"""Hugging Face checkpoints to GGUF.

`conversion` drives: it reads a checkpoint (`checkpoint`, `vocabulary`, `bpe`), maps its tensors
by the table of its family (`family`, `opt`) and writes them (`tensors`).
"""

from h2o_cpp.convert.conversion import OUTTYPES, convert

__all__ = ["OUTTYPES", "convert"]
