"""How text is cut before byte-pair merging, by tokenizer.ggml.pre."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions, each of which cuts the pieces that the one before it left.

    nfc: the model's own tokenizer composes characters first, which llama.cpp leaves out.
    """

    cuts: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token is that token, however it would merge
    add_bos: bool = False  # where the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        """As the tokenizers library has it."""
        cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in self.cuts]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, to_bytes])

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to text before it is cut."""
        return normalizers.NFC() if self.nfc else None


_GPT_2_LIKE = PreTokenizer((_GPT_2,))
_GPT_NEOX = PreTokenizer((_GPT_2,), nfc=True)
_LLAMA_BPE = PreTokenizer((_LLAMA_3,), ignore_merges=True, add_bos=True)
_DIGITS = PreTokenizer((r"\p{N}", _GPT_2))

_BY_NAME = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT_2_LIKE,
    "phi-2": _GPT_2_LIKE,
    "mpt": _GPT_NEOX,
    "olmo": _GPT_NEOX,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": PreTokenizer((_LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"),), nfc=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
}

# Files from before the key: these architectures had one pre-tokenizer.
_BY_ARCHITECTURE = {"gpt2": "gpt-2", "gptneox": "olmo", "mpt": "mpt"}


def pre_tokenizer(name: str | None, architecture: object) -> PreTokenizer:
    """The pre-tokenizer `name`; ValueError for one that would be guessed at."""
    if name is None:
        name = _BY_ARCHITECTURE.get(str(architecture))
        if name is None:
            raise ValueError("tokenizer.ggml.pre is missing")
    if name not in _BY_NAME:
        raise ValueError(f"tokenizer.ggml.pre is {name!r}, supported: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
