"""Hugging Face checkpoints to GGUF.

`conversion` reads a checkpoint (`checkpoint`, `config`), maps its tensors, reads its tokenizer
(`vocabulary`, with `tokens`, `tokenizer_settings`, and `pipelines` for pre-tokenizers) and writes
the file (`tensors`). The mapping is a `family`, made of `modules`, with `rope` and `window`;
`llama`, `mixtures`, `gpt` and others have the families.
"""

from h2o_cpp.convert.conversion import OUTTYPES, convert

__all__ = ["OUTTYPES", "convert"]
