"""Quantizing GGUF files.

`quantization` reads a model, chooses a type for each tensor (`mix`) and quantizes with the core.
`imatrix` measures and reads importance matrices.
"""

from h2o_cpp.quantize.imatrix import make_imatrix
from h2o_cpp.quantize.mix import MIXES
from h2o_cpp.quantize.quantization import quantize

__all__ = ["MIXES", "make_imatrix", "quantize"]
