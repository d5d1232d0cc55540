"""llama.cpp's names for the normalizers and pre-tokenizers of tokenizer.json.

llama.cpp identifies tokenizers by name. Each name here stands for exactly the given steps;
anything else is an error, because a similar pre-tokenizer would encode some texts differently.
"""

import json
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_Step = dict[str, Any]

_NFC: _Step = {"type": "NFC"}
_BYTE_LEVEL: _Step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_BYTES: _Step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_DIGITS: _Step = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> _Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _words(numbers: str, signs: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> _Step:
    return _split(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?{signs}"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# With marks as letters, except in the class before a word.
_QWEN35 = _split(
    _words(r"\p{N}")["pattern"]["Regex"]
    .replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
    .replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
)
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = _split(
    f"{_WORD % ('*', '+')}{_CONTRACTION}|{_WORD % ('+', '*')}{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _split(_GPT_4O["pattern"]["Regex"].replace(_CONTRACTION, "").replace("{1,3}", ""))
_BLOOM = _split(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+")
_BAILING = _split(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_THOUSANDS = _split(r"\d{1,3}(?=(?:\d{3})*\b)")
_SEED = _words(r"\p{N}{1}", r"[^\s\p{L}\p{N}\r\n]+")
_DEEPSEEK_3 = [
    _split(r"\p{N}{1,3}"),
    _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    _split(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
]
_NEWLINE = _split(r"[\r\n]")
_BEYOND_LATIN = _split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
_DEEPSEEK_CODER = [_NEWLINE, _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _BEYOND_LATIN, _DIGITS]
# Most letters with case.
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
_DEEPSEEK_LLM = [
    _NEWLINE,
    _split(rf"\s?[{_CASED}]+"),
    _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    _split(r"\s+$"),
    _BEYOND_LATIN,
    _DIGITS,
]
_EXAONE_MOE = _split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)

# normalizer, pre_tokenizer, model.ignore_merges -> tokenizer.ggml.pre. llama.cpp omits NFC; `olmo`
# splits like `gpt-2`, so it names GPT-NeoX's, with NFC.
_BYTE_LEVEL_PRE: tuple[tuple[list[_Step], list[_Step], bool, str], ...] = (
    ([], [_BYTE_LEVEL], False, "gpt-2"),
    ([_NFC], [_BYTE_LEVEL], False, "olmo"),  # GPT-NeoX-20B, Pythia
    ([], [_DIGITS, _BYTE_LEVEL], False, "smollm"),  # SmolLM, SmolLM2, StarCoder2, Granite
    ([_NFC], [_DIGITS, _BYTE_LEVEL], False, "command-r"),
    ([], [_BLOOM, _BYTES], False, "bloom"),
    ([], [_words(r"\p{N}{1,3}"), _BYTES], True, "llama-bpe"),  # Llama 3
    ([], [_words(r"\p{N}{1,3}"), _BYTES], False, "dbrx"),  # Phi-4, GLM-4
    ([], [_GPT_4O, _BYTES], False, "gpt-4o"),  # gpt-oss, Phi-4-mini
    ([], [_TEKKEN, _BYTES], True, "tekken"),  # Mistral Nemo and Small
    ([_NFC], [_words(r"\p{N}"), _BYTES], False, "qwen2"),  # Qwen2, Qwen2.5, Qwen3
    ([_NFC], [_QWEN35, _BYTES], False, "qwen35"),  # Qwen3.5
    ([], [_words(r"\p{N}"), _BYTES], False, "stablelm2"),
    ([], [_BAILING, _BYTES], False, "bailingmoe"),  # Ling
    ([_NFC], [_BAILING, _BYTES], False, "qwen2"),  # which splits like bailingmoe
    ([], [_SEED, _BYTES], False, "seed-coder"),  # Seed-OSS
    ([], [*_DEEPSEEK_3, _BYTES], False, "deepseek-v3"),  # DeepSeek V3, Hunyuan
    ([], [*_DEEPSEEK_CODER, _BYTES], False, "deepseek-coder"),
    ([], [*_DEEPSEEK_LLM, _BYTES], False, "deepseek-llm"),
    ([], [_EXAONE_MOE, _BYTES], False, "exaone-moe"),  # K-EXAONE
    ([], [_THOUSANDS, _GPT_4O, _BYTES], False, "tiny_aya"),
    ([], [_split(r"\p{N}+"), _split(r"(?=(\d{3})+(?!\d))"), _BYTES], False, "superbpe"),
)


def _metaspace(scheme: str) -> _Step:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


_PREPEND: _Step = {"type": "Prepend", "prepend": "▁"}
_REPLACE: _Step = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
# Gemma's, which divides nothing: spaces are replaced before.
_SPACES: _Step = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}

# normalizer, pre_tokenizer of SentencePiece's BPE -> whether a space is put before a text.
# Metaspace adds none to a text that begins with a space; SentencePiece, whose models it represents
# in tokenizer.json, does, and so does GGUF.
_SENTENCEPIECE_PREFIX: tuple[tuple[list[_Step], list[_Step], bool], ...] = (
    ([_PREPEND, _REPLACE], [], True),
    ([_REPLACE], [], False),
    ([_REPLACE], [_SPACES], False),
    ([], [_metaspace("first")], True),
    ([], [_metaspace("always")], True),
    ([], [_metaspace("never")], False),
)


def byte_level_pre(path: Path, tokenizer: Mapping[str, Any]) -> str:
    """tokenizer.ggml.pre of byte-level BPE. Raises ValueError for unknown steps."""
    found = _steps(tokenizer)
    ignore_merges = bool(tokenizer["model"].get("ignore_merges"))
    for normalizer, pre_tokenizer, ignores, name in _BYTE_LEVEL_PRE:
        if (normalizer, pre_tokenizer, ignores) == (*found, ignore_merges):
            return name
    raise _unknown(path, tokenizer, f"with ignore_merges {json.dumps(ignore_merges)}")


def sentencepiece_prefix(path: Path, tokenizer: Mapping[str, Any]) -> bool:
    """Whether SentencePiece's BPE puts a space before a text; ValueError for unknown steps."""
    found = _steps(tokenizer)
    ignore_merges = bool(tokenizer["model"].get("ignore_merges"))
    for normalizer, pre_tokenizer, prefix in _SENTENCEPIECE_PREFIX:
        if (normalizer, pre_tokenizer) == found and not ignore_merges:
            return prefix
    raise _unknown(path, tokenizer, "with byte_fallback true")


def word_piece_flags(path: Path, tokenizer: Mapping[str, Any]) -> dict[str, bool]:
    """The flags of BERT's normalizer in tokenizer.json. Raises ValueError for other steps."""
    model = tokenizer["model"]
    match _steps(tokenizer):
        case [{"type": "BertNormalizer", **normalizer}], [{"type": "BertPreTokenizer"}] if (
            model.get("continuing_subword_prefix") == "##"
            and model.get("max_input_chars_per_word", 100) == 100
        ):
            return normalizer_flags(path, normalizer)
    raise _unknown(path, tokenizer, "of WordPiece")


def normalizer_flags(path: Path, normalizer: Mapping[str, Any]) -> dict[str, bool]:
    """tokenizer.ggml.normalizer.*, as in llama.cpp. Raises ValueError for what these lack."""
    for key in ("clean_text", "handle_chinese_chars"):
        if normalizer.get(key, True) is not True:
            raise ValueError(f"{path}: {key} is {normalizer[key]!r}; a GGUF file has no key for it")
    lower = normalizer.get("lowercase", True)
    accents = normalizer.get("strip_accents")
    strips = lower if accents is None else accents
    if not isinstance(lower, bool) or not isinstance(strips, bool):
        raise ValueError(f"{path}: lowercase is {lower!r} and strip_accents {accents!r}")
    return {"normalizer.lowercase": lower, "normalizer.strip_accents": strips}


_SPACES_TO_ONE: _Step = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
_SPACES_TO_MARK: _Step = _SPACES_TO_ONE | {"content": "▁"}
_STRIP_RIGHT: _Step = {"type": "Strip", "strip_left": False, "strip_right": True}

# After a charsmap; each leaves one space between words, and none at the end of a text.
_STRIPPED: tuple[list[_Step], ...] = (
    [_STRIP_RIGHT, _SPACES_TO_ONE],
    [_SPACES_TO_ONE, _STRIP_RIGHT],
    [_STRIP_RIGHT, _SPACES_TO_MARK],  # transformers' converter of SentencePiece's models
)
_SPLIT_LATER: tuple[list[_Step], ...] = (  # WhitespaceSplit leaves none either
    *([], [_SPACES_TO_ONE], [_STRIP_RIGHT]),
    *_STRIPPED,
)


def unigram_steps(path: Path, tokenizer: Mapping[str, Any]) -> tuple[bytes, dict[str, bool]]:
    """The charsmap of a unigram model and its flags. Raises ValueError for unknown steps."""
    normalizer, pre_tokenizer = _steps(tokenizer)
    charsmap = b""
    if normalizer and normalizer[0].get("type") == "Precompiled":
        charsmap = b64decode(normalizer[0].get("precompiled_charsmap") or "")
        normalizer = normalizer[1:]
    known = normalizer in _STRIPPED
    if pre_tokenizer and pre_tokenizer[0] == {"type": "WhitespaceSplit"}:
        pre_tokenizer = pre_tokenizer[1:]
        known = normalizer in _SPLIT_LATER
    match pre_tokenizer:
        case [{"type": "Metaspace", "replacement": "▁", **rest}] if known:
            scheme = rest.get("prepend_scheme", "always")
            prefix = rest.get("add_prefix_space", True) and scheme != "never"
            return charsmap, {"add_space_prefix": prefix, "remove_extra_whitespaces": True}
    raise _unknown(path, tokenizer, "of a unigram model")


def is_prefix_first(tokenizer: Mapping[str, Any]) -> bool:
    """Whether that space is put only before the first text, not after a special token too."""
    return _steps(tokenizer) == ([], [_metaspace("first")])


def _steps(tokenizer: Mapping[str, Any]) -> tuple[list[_Step], list[_Step]]:
    return _flatten(tokenizer.get("normalizer")), _flatten(tokenizer.get("pre_tokenizer"))


def _flatten(value: Any) -> list[_Step]:
    """The steps of a normalizer or pre_tokenizer, without keys that do not affect tokens."""
    match value:
        case None:
            return []
        case {"type": "Sequence", "normalizers": list(steps)} | {
            "type": "Sequence",
            "pretokenizers": list(steps),
        }:
            return [step for part in steps for step in _flatten(part)]
        case {"type": "ByteLevel"}:
            return [_BYTE_LEVEL | {key: v for key, v in value.items() if key != "trim_offsets"}]
        case {"type": "Split", "pattern": {"Regex": str(regex)}} if "\r" in regex or "\n" in regex:
            regex = regex.replace("\r", r"\r").replace("\n", r"\n")
            return _flatten(value | {"pattern": {"Regex": regex}})
        case {"type": "Split", "pattern": pattern, "behavior": "Removed", "invert": True} if (
            pattern != _BLOOM["pattern"]
        ):
            # Text that no match covers is removed: nothing, with the other patterns here.
            return [value | {"behavior": "Isolated", "invert": False}]
        case dict():
            return [value]
    return [{"type": repr(value)}]


def _unknown(path: Path, tokenizer: Mapping[str, Any], which: str) -> ValueError:
    parts = [
        f"{key} {json.dumps(tokenizer.get(key), ensure_ascii=False)}"
        for key in ("normalizer", "pre_tokenizer")
    ]
    return ValueError(f"{path}: llama.cpp has no name for {' and '.join(parts)} {which}")
