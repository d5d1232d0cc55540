"""Reference tokenizers from the libraries tokenizers and sentencepiece.

`original` creates one with the vocabulary of a GGUF file's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HuggingFace

from h2o_cpp.model.tokenizer import Tokenizer
from support.scripted_opt import VISIBLE
from support.tokenizer_files import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED, encode_model

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN_35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    f"{_WORD % ('*', '+')}{_CONTRACTION}|{_WORD % ('+', '*')}{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _GPT_4O.replace(_CONTRACTION, "").replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")
_DIGITS = (r"\p{N}", _GPT_2)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_SEED = _QWEN_2.replace(r"+[\r\n]*", "+").replace(r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{N}\r\n]")
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Most letters with case, as the file lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)

# tokenizer.ggml.pre -> regular expressions, applied one after another.
CUTS = {
    "default": _DEFAULT,
    **dict.fromkeys(["gpt-2", "phi-2", "exaone4", "trillion", "gigachat", "mellum"], (_GPT_2,)),
    **dict.fromkeys(["a.x-4.0", "granite-docling", "mpt", "olmo"], (_GPT_2,)),
    **dict.fromkeys(["llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3"], (_LLAMA_3,)),
    **dict.fromkeys(["midm-2.0", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], (_LLAMA_3,)),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA_3.replace("{1,3}", "+")),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "hunyuan", "stablelm2"], (_QWEN_2,)),
    "qwen35": (_QWEN_35,),
    **dict.fromkeys(["bailingmoe", "bailingmoe2"], (_BAILING,)),
    **dict.fromkeys(["megrez", "kormo", "solar-open", "grok-2"], (_QWEN_2,)),
    "seed-coder": (_SEED,),
    **dict.fromkeys(["smollm", "starcoder", "refact", "exaone", "minerva-7b"], _DIGITS),
    **dict.fromkeys(["codeshell", "command-r"], _DIGITS),
    **dict.fromkeys(["gpt-4o", "minimax-m2"], (_GPT_4O,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(["bloom", "poro-chat", "gpt3-finnish"], (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]"),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense"], _DEEPSEEK_3),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "exaone-moe": (_EXAONE_MOE,),
}
_NFC = {"mpt", "olmo", "qwen2", "qwen35", "command-r", "deepseek-r1-qwen", "hunyuan"}
_LLAMA_BPE = {"llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "midm-2.0", "tekken"}
_IGNORES_MERGES = _LLAMA_BPE | {"minicpm5"}
_OF_ARCHITECTURE = {"gpt2": "gpt-2", "gptneox": "olmo"}  # files without tokenizer.ggml.pre
_ENDS = {"<|end|>", "<|im_end|>", "<|endoftext|>"}  # control tokens, regardless of the file
_SILENT = {UNKNOWN, CONTROL, UNUSED}


class Library(Protocol):
    """A tokenizer without special-token handling."""

    def encode(self, text: str, *, begins: bool) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Original:
    """A library's tokenizer with the special tokens of GGUF metadata."""

    library: Library
    bytes: list[bytes]  # by token id
    special: dict[str, int]
    before: list[int]
    after: list[int]

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        begins: bool = True,
    ) -> list[int]:
        longest_first = sorted(self.special, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        parts = re.split(f"({pattern})", text) if parse_special else [text]
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self.special[part])
                begins = True
            elif part:
                ids += self.library.encode(part, begins=begins)
                begins = False
        return [*self.before, *ids, *self.after] if add_special else ids


def original(metadata: dict[str, Any]) -> Original:
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens = keys["tokens"]
    types = list(keys.get("token_type", [1] * len(tokens)))
    types = [CONTROL if t in _ENDS else kind for t, kind in zip(tokens, types, strict=True)]
    if keys["model"] == "gpt2":
        pre = keys.get("pre") or _OF_ARCHITECTURE[metadata["general.architecture"]]
        library: Library = _BytePairs(tokens, types, keys["merges"], pre)
        spelled = [_byte_level(t, kind) for t, kind in zip(tokens, types, strict=True)]
        add_bos, bos, eos = pre in _LLAMA_BPE, -1, -1
    else:
        tokens = [token.replace(" ", "\u2581") for token in tokens]
        types = _with_one_unknown(types, keys.get("unknown_token_id", 0))
        library = _SentencePieces(tokens, types, keys)
        spelled = [_piece(t, kind) for t, kind in zip(tokens, types, strict=True)]
        add_bos, bos, eos = True, 1, 2
    bos, eos = keys.get("bos_token_id", bos), keys.get("eos_token_id", eos)
    pairs = list(zip(keys["tokens"], keys.get("token_type", types), strict=True))
    special = {
        t: i for i, (t, kind) in enumerate(pairs) if t in _ENDS or kind in (UNKNOWN, CONTROL)
    }
    return Original(
        library,
        [b"" if kind in _SILENT else b for b, kind in zip(spelled, types, strict=True)],
        {text: i for text, i in special.items() if text},
        [bos] if keys.get("add_bos_token", add_bos) else [],
        [eos] if keys.get("add_eos_token", False) else [],
    )


def check(ours: Tokenizer, theirs: Original, text: str) -> None:
    """Compare the tokens of `text` for every combination of options."""
    for add_special in (True, False):
        for parse_special in (True, False):
            for begins in (True, False):
                options = {"parse_special": parse_special, "begins": begins}
                expected = theirs.encode(text, add_special=add_special, **options)
                got = ours.encode(text, add_special=add_special, **options)
                assert got == expected, (text, add_special, options)


def check_bytes(ours: Tokenizer, theirs: Original) -> None:
    for token, data in enumerate(theirs.bytes):
        assert ours.token_bytes(token) == data


class _BytePairs:
    def __init__(
        self, tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], pre: str
    ) -> None:
        vocab = {t: i for i, t in enumerate(tokens) if types[i] not in _SILENT}
        pairs = [(m[: m.index(" ", 1)], m[m.index(" ", 1) + 1 :]) for m in merges]
        self._bpe = HuggingFace(
            models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _IGNORES_MERGES)
        )
        if pre in _NFC:
            self._bpe.normalizer = normalizers.NFC()
        cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in CUTS[pre]]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
        self._bpe.decoder = decoders.ByteLevel()
        whole = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
        self._bpe.add_tokens([AddedToken(token) for token in whole])

    def encode(self, text: str, *, begins: bool) -> list[int]:
        del begins
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._bpe.decode(ids))


class _SentencePieces:
    def __init__(self, tokens: Sequence[str], types: Sequence[int], keys: dict[str, Any]) -> None:
        def processor(space: bool, one_space: bool) -> SentencePieceProcessor:
            data = encode_model(
                list(zip(tokens, keys["scores"], types, strict=True)),
                {3: 2, 4: len(tokens), 35: int(BYTE in types)},  # BPE, size, byte fallback
                {1: b"identity", 3: int(space), 4: int(one_space)},
            )
            return SentencePieceProcessor(model_proto=data)

        space = keys.get("add_space_prefix", True)
        self._beginning = processor(space, keys.get("remove_extra_whitespaces", False))
        self._continuation = processor(False, False)

    def encode(self, text: str, *, begins: bool) -> list[int]:
        return list((self._beginning if begins else self._continuation).encode(text))

    def decode(self, ids: list[int]) -> str:
        return str(self._beginning.decode(ids))


def _with_one_unknown(types: list[int], unknown: int) -> list[int]:
    """SentencePiece needs exactly one unknown token."""
    if types[unknown] != UNKNOWN and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    fixed = [CONTROL if kind == UNKNOWN else kind for kind in types]
    fixed[unknown] = UNKNOWN
    return fixed


_VISIBLE_BYTES = {c: byte for byte, c in enumerate(VISIBLE)}


def _byte_level(token: str, kind: int) -> bytes:
    if kind != USER_DEFINED and all(c in _VISIBLE_BYTES for c in token):
        return bytes(_VISIBLE_BYTES[c] for c in token)
    return token.encode("utf-8", "surrogateescape")


def _piece(piece: str, kind: int) -> bytes:
    if kind == BYTE:
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()
