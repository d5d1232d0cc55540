"""GGUF files to smaller ones.

`quantization` drives: it reads a model (`model_file`), chooses a type for each of its tensors
(`mix`) and has the core quantise their rows. `importance` measures which weights count.
"""

from h2o_cpp.quantize.importance import make_imatrix
from h2o_cpp.quantize.mix import MIXES
from h2o_cpp.quantize.quantization import quantize

__all__ = ["MIXES", "make_imatrix", "quantize"]
