"""Quantizing GGUF files.

`quantization` reads a model, chooses a type for each tensor (`mix`) and quantizes with the core.
`importance` measures importance matrices, which `imatrix` reads.
"""

from h2o_cpp.quantize.importance import make_imatrix
from h2o_cpp.quantize.mix import MIXES
from h2o_cpp.quantize.quantization import quantize

__all__ = ["MIXES", "make_imatrix", "quantize"]
