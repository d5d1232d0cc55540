"""Text to tokens and back, by the vocabulary in a GGUF file's metadata (keys tokenizer.*)."""

from h2o_cpp.tokenizer.text_tokenizer import TextTokenizer

__all__ = ["TextTokenizer"]
