"""Hugging Face checkpoints to GGUF.

`conversion` drives: it reads a checkpoint (`checkpoint`, `vocabulary`, `bpe`), maps its tensors
by the table of its family (`family`, `opt`) and writes them (`tensors`). `command` is the command
line.
"""

from h2o_cpp.convert.command import add_arguments, main, run
from h2o_cpp.convert.conversion import convert

__all__ = ["add_arguments", "convert", "main", "run"]
