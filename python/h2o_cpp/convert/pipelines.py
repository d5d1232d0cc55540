"""llama.cpp's names for the normalizers and pre-tokenizers of tokenizer.json.

llama.cpp identifies tokenizers by name. Each name here stands for exactly the given steps;
anything else is an error, because a similar pre-tokenizer would encode some texts differently.
"""

import json
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
_SEED = _words(r"\p{N}{1}", r"[^\s\p{L}\p{N}\r\n]+")
_DEEPSEEK_3 = [
    _split(r"\p{N}{1,3}"),
    _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    _split(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
]
_DEEPSEEK_CODER = [
    _split(r"[\r\n]"),
    _split(r"\s?\p{L}+"),
    _split(r"\s?\p{P}+"),
    _split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
    _DIGITS,
]

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
    ([], [_words(r"\p{N}"), _BYTES], False, "stablelm2"),
    ([], [_BAILING, _BYTES], False, "bailingmoe"),  # Ling
    ([_NFC], [_BAILING, _BYTES], False, "qwen2"),  # which splits like bailingmoe
    ([], [_SEED, _BYTES], False, "seed-coder"),  # Seed-OSS
    ([], [*_DEEPSEEK_3, _BYTES], False, "deepseek-v3"),  # DeepSeek V3, Hunyuan
    ([], [*_DEEPSEEK_CODER, _BYTES], False, "deepseek-coder"),
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


def is_byte_fallback(tokenizer: Mapping[str, Any]) -> bool:
    """Whether characters without a token are encoded as bytes, as in SentencePiece's BPE."""
    return tokenizer["model"].get("byte_fallback") is True


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
            # What no match covers is removed: nothing, with the other patterns here.
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
