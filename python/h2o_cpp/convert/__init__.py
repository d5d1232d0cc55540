"""Hugging Face checkpoints to GGUF.

`conversion` drives: it reads a checkpoint (`checkpoint`, `config`), maps its tensors as its family
says (`family`, `sizes`; `llama`, `gpt` and so on, with `rope`, `window` and `experts`), reads its
tokenizer (`vocabulary`, from `tokens` that `bpe` or `sentencepiece` found and what
`tokenizer_settings` add; `pipelines` knows how text is cut) and writes it all (`tensors`).
"""

from h2o_cpp.convert.conversion import OUTTYPES, convert

__all__ = ["OUTTYPES", "convert"]
