"""What engines are called in results and reports."""

from __future__ import annotations

OURS = "h2o.cpp"
LLAMA_CPP = "llama.cpp"
TORCH = "transformers"  # and Accelerate
