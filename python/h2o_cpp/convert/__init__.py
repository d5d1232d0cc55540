"""Hugging Face checkpoints to GGUF.

`conversion` reads a checkpoint (`checkpoint`, `config`), maps its tensors (`family`, `modules`;
`llama`, `mixtures`, `gpt` and others, with `rope` and `window`), reads its tokenizer (`vocabulary`,
with `tokens`, `tokenizer_settings`, and `pipelines` for pre-tokenizers) and writes the file
(`tensors`).
"""

from h2o_cpp.convert.conversion import OUTTYPES, convert

__all__ = ["OUTTYPES", "convert"]
