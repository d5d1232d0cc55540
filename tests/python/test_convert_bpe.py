"""Byte-level BPE: variants of tokenizer.json, added BOS and EOS, special tokens."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from h2o_cpp._core import GgufFile
from support.opt_checkpoint import MERGES, TOKENS, write_json, write_tokenizer_json
from support.original_tokenizers import CUTS
from support.tokenizer_files import CONTROL, NORMAL, UNUSED, USER_DEFINED, read_tokens, template

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
# Seed's and DeepSeek's files have the line breaks themselves.
SEED = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
DEEPSEEK_3 = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
DEEPSEEK_CODER = [
    "[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
]
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
NO_STEPS = {"type": "Sequence", "normalizers": []}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split_step(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior}
    return {**step, "invert": invert}


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return sequence(split_step(pattern, behavior, invert), BYTE_LEVEL | {"use_regex": False})


def splits(patterns: list[str], *more: dict[str, Any]) -> dict[str, Any]:
    return sequence(*map(split_step, patterns), *more, BYTE_LEVEL | {"use_regex": False})


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "ignore_merges", "name"),
    [
        (None, BYTE_LEVEL, None, "gpt-2"),
        (None, BYTE_LEVEL | {"use_regex": True}, False, "gpt-2"),
        ({"type": "NFC"}, BYTE_LEVEL, None, "olmo"),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}]}, BYTE_LEVEL, None, "olmo"),
        (
            None,
            sequence({"type": "Digits", "individual_digits": True}, BYTE_LEVEL),
            False,
            "smollm",
        ),
        (
            {"type": "NFC"},
            sequence({"type": "Digits", "individual_digits": True}, BYTE_LEVEL),
            False,
            "command-r",
        ),
        (None, split(BLOOM), False, "bloom"),
        (None, split(SPLIT), True, "llama-bpe"),
        ({"type": "NFC"}, split(SPLIT.replace("{1,3}", "")), False, "qwen2"),
        ({"type": "NFC"}, split(QWEN35), False, "qwen35"),
        (None, split(QWEN35), False, None),
        (None, sequence({"type": "Digits", "individual_digits": False}, BYTE_LEVEL), False, None),
        (None, split(SPLIT), False, "dbrx"),
        (None, split(SPLIT, behavior="Removed", invert=True), False, "dbrx"),
        (None, split(SPLIT, behavior="Removed"), False, None),
        (None, split(TEKKEN), True, "tekken"),
        (None, split(TEKKEN), False, None),
        (None, split(SPLIT.replace("{1,3}", "{1,2}")), True, None),
        (None, split(SPLIT.replace("{1,3}", "")), False, "stablelm2"),
        (None, split(BAILING), False, "bailingmoe"),
        ({"type": "NFC"}, split(BAILING), False, "qwen2"),
        (None, split(SEED), False, "seed-coder"),
        (NO_STEPS, splits(DEEPSEEK_3), False, "deepseek-v3"),
        (NO_STEPS, splits(DEEPSEEK_3[:2]), False, None),
        (
            NO_STEPS,
            splits(DEEPSEEK_CODER, {"type": "Digits", "individual_digits": True}),
            False,
            "deepseek-coder",
        ),
        (
            NO_STEPS,
            splits(
                [pattern.replace(r"\r\n", "\r\n") for pattern in CUTS["deepseek-llm"][:-1]],
                {"type": "Digits", "individual_digits": True},
            ),
            False,
            "deepseek-llm",
        ),
        (None, split(EXAONE_MOE), False, "exaone-moe"),
        (None, BYTE_LEVEL, True, None),
        (None, BYTE_LEVEL | {"add_prefix_space": True}, False, None),
        (None, BYTE_LEVEL | {"use_regex": False}, False, None),
        ({"type": "NFKC"}, BYTE_LEVEL, False, None),
        ("NFC", BYTE_LEVEL, False, None),
        (None, None, False, None),
    ],
)
def test_pre_tokenizers_are_recognized(
    tmp_path: Path,
    normalizer: object,
    pre_tokenizer: object,
    ignore_merges: bool | None,
    name: str | None,
) -> None:
    changes = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    write_tokenizer_json(tmp_path, {**changes, "model.ignore_merges": ignore_merges})
    if name is None:
        with pytest.raises(ValueError, match=r"tokenizer\.json: llama\.cpp has no name for"):
            read_tokens(tmp_path, 9)
        return
    vocabulary = read_tokens(tmp_path, 9)
    assert vocabulary.model == "gpt2"
    assert vocabulary.pre == name
    assert vocabulary.tokens == TOKENS
    assert vocabulary.merges == MERGES
    assert vocabulary.flags == {"add_bos_token": False}


@pytest.mark.parametrize(
    ("processor", "settings", "flags"),
    [
        (template(["</s>"], []), {}, {"add_bos_token": True}),
        (template([], ["<s>"]), {}, {"add_bos_token": False, "add_eos_token": True}),
        (
            {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template(["</s>"], [])]},
            {},
            {"add_bos_token": True},
        ),
        (
            {"type": "RobertaProcessing", "cls": ["</s>", 4], "sep": ["<s>", 3]},
            {},
            {"add_bos_token": True, "add_eos_token": True},
        ),
        (template(["</s>"], []), {"add_bos_token": False}, {"add_bos_token": False}),
        (template([], []), {"add_bos_token": True}, {"add_bos_token": True}),
        (template(["</s>"], []), {"add_bos_token": None}, {"add_bos_token": True}),
        ({"type": "ByteLevel"}, {}, {"add_bos_token": False}),
    ],
)
def test_bos_and_eos_flags(
    tmp_path: Path, processor: object, settings: dict[str, object], flags: dict[str, bool]
) -> None:
    write_tokenizer_json(tmp_path, {"post_processor": processor})
    special = {"bos_token": "</s>", "eos_token": "<s>"}
    write_json(tmp_path / "tokenizer_config.json", special | settings)
    assert read_tokens(tmp_path, 9).flags == flags


@pytest.mark.parametrize(
    ("processor", "settings", "message"),
    [
        (template(["<s>"], []), {}, "adds <s> to a text, expected only its bos_token"),
        (template(["</s>", "</s>"], []), {}, "adds </s> </s> to a text"),
        (template([], ["</s>"]), {}, "adds </s> to a text, expected only its eos_token"),
        ({"type": "TemplateProcessing", "single": ["A"]}, {}, "malformed post_processor"),
        (None, {"add_eos_token": True}, "add_eos_token is true, but there is no eos_token"),
        (None, {"add_bos_token": "yes"}, "add_bos_token must be true or false"),
        (None, {"chat_template": 1}, "chat_template must be"),
    ],
)
def test_unsupported_added_tokens_are_rejected(
    tmp_path: Path, processor: object, settings: dict[str, object], message: str
) -> None:
    write_tokenizer_json(tmp_path, {"post_processor": processor})
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "</s>"} | settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_tokens(tmp_path, 9)


def test_special_tokens(tmp_path: Path) -> None:
    added = [{"id": 9 + i, "content": f"<|{name}|>"} for i, name in enumerate(("eot_id", "x"))]
    write_tokenizer_json(tmp_path, {"added_tokens": added})
    settings = {"extra_special_tokens": {"image": "ab"}, "additional_special_tokens": ["a"]}
    write_json(tmp_path / "tokenizer_config.json", settings)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ messages }}")
    vocabulary = read_tokens(tmp_path, 11, {"eos_token_id": [2, 9]})
    assert vocabulary.types == [1, 1, 1, 1, CONTROL, 1, 1, CONTROL, 1, CONTROL, CONTROL]
    assert vocabulary.special_ids == {"eos": 2, "eot": 9}
    assert read_tokens(tmp_path, 11, {"eos_token_id": 9}).special_ids == {"eos": 9}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: not UTF-8"):
        read_tokens(tmp_path, 11)


def test_named_templates(tmp_path: Path) -> None:
    """In tokenizer_config.json, or in files of their own, as transformers 5 has them."""
    write_tokenizer_json(tmp_path, {})
    named = [{"name": name, "template": f"{{{{ {name} }}}}"} for name in ("default", "tool_use")]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    expected = {"default": "{{ default }}", "tool_use": "{{ tool_use }}"}
    vocabulary = read_tokens(tmp_path, 9)
    assert vocabulary.chat_templates == expected
    writer = GGUFWriter(tmp_path / "named.gguf", "test")
    vocabulary.write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GgufFile(tmp_path / "named.gguf").metadata()
    assert metadata["tokenizer.chat_template"] == "{{ default }}"
    assert metadata["tokenizer.chat_template.tool_use"] == "{{ tool_use }}"
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": [{"name": "default"}]})
    with pytest.raises(ValueError, match="chat_template must be a string or a list of templates"):
        read_tokens(tmp_path, 9)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{{ rag }}")
    (tmp_path / "chat_template.jinja").write_text("{{ new }}")
    assert read_tokens(tmp_path, 9).chat_templates == {"default": "{{ new }}", "rag": "{{ rag }}"}


def test_end_tokens(tmp_path: Path) -> None:
    """Those of generation_config.json; two without a known text have a key."""
    names = ("<|end|>", "<|a|>", "<|eom_id|>", "</b>", "<|c|>")
    added = [{"id": 9 + i, "content": name} for i, name in enumerate(names)]
    write_tokenizer_json(tmp_path, {"added_tokens": added})
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [2, 9, 11, 10, 5, 99]})
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "</s>"})
    vocabulary = read_tokens(tmp_path, 14, {"eos_token_id": 12})
    assert vocabulary.special_ids == {"eos": 2, "eot": 9, "eom": 10}
    assert vocabulary.types[9:] == [CONTROL, CONTROL, CONTROL, USER_DEFINED, CONTROL]
    assert vocabulary.notes == []
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [12, 13]})
    vocabulary = read_tokens(tmp_path, 14)
    assert vocabulary.special_ids == {"eos": 2, "eot": 9, "eom": 12}
    assert vocabulary.types[12] == CONTROL  # so that a reply does not show it
    [note] = vocabulary.notes
    assert note == "<|c|> will not end an output: a GGUF file names at most three tokens that do"


def test_suppressed_tokens(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    write_json(tmp_path / "generation_config.json", {"suppress_tokens": [5, 99, 3]})
    assert read_tokens(tmp_path, 9, {"eos_token_id": 2}).suppressed == [5, 3]


def test_bad_generation_config(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": "</s>"})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is '</s>', exp"):
        read_tokens(tmp_path, 9)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": []})
    assert read_tokens(tmp_path, 9, {"eos_token_id": 2}).special_ids == {"eos": 2}


def test_tokens_that_include_white_space(tmp_path: Path) -> None:
    added = [{"id": 9, "content": "<a>", "rstrip": True}, {"id": 10, "content": "<b>"}]
    write_tokenizer_json(tmp_path, {"added_tokens": added})
    [note] = read_tokens(tmp_path, 11).notes
    assert note.startswith("transformers drops white space beside <a>; a GGUF file cannot")
    added[1]["lstrip"] = True
    write_tokenizer_json(tmp_path, {"added_tokens": added})
    assert "beside <a> and 1 other;" in read_tokens(tmp_path, 11).notes[0]


def test_added_tokens_beyond_the_vocabulary_are_omitted(tmp_path: Path) -> None:
    """gemma-3-1b has <image_soft_token>, others a padding token added for training."""
    added = [{"id": 9 + i, "content": f"<{i}>", "special": True} for i in range(3)]
    write_tokenizer_json(tmp_path, {"added_tokens": added})
    write_json(tmp_path / "tokenizer_config.json", {"pad_token": "<2>", "eos_token": "<0>"})
    vocabulary = read_tokens(tmp_path, 10, {"pad_token_id": 11})
    assert vocabulary.tokens == [*TOKENS, "<0>"]
    assert vocabulary.special_ids == {"eos": 9}
    [note] = vocabulary.notes
    assert note == "the model has 10 tokens, without <1> and 1 other: it reads them as text"
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<2>"})
    with pytest.raises(ValueError, match="eos_token_id 11 is not in the vocabulary"):
        read_tokens(tmp_path, 10, {"eos_token_id": 11})


def test_gpt_neox(shared: Path, tmp_path: Path) -> None:
    source = shared / "tokenizers" / "gpt-neox" / "20B_tokenizer.json"
    shutil.copy(source, tmp_path / "tokenizer.json")
    vocabulary = read_tokens(tmp_path, 50432)
    file = shared / "tokenizers/ggml-vocab/ggml-vocab-gpt-neox.gguf"
    expected = GgufFile(file).metadata()
    assert vocabulary.pre == "olmo"
    assert vocabulary.merges == expected["tokenizer.ggml.merges"]
    # This tokenizer has four more tokens; older converters marked padding as user-defined.
    assert vocabulary.tokens[:50277] == expected["tokenizer.ggml.tokens"][:50277]
    assert vocabulary.types[:50277] == expected["tokenizer.ggml.token_type"][:50277]
    assert vocabulary.types[50254:50277] == [USER_DEFINED] * 23  # runs of spaces
    assert vocabulary.tokens[50281:] == expected["tokenizer.ggml.tokens"][50281:]
    assert vocabulary.types[50281:] == [UNUSED] * (50432 - 50281)


def test_smollm_2(shared: Path) -> None:
    path = shared / "tokenizers" / "smollm2"
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    vocabulary = read_tokens(path, config["vocab_size"], config)
    assert vocabulary.pre == "smollm"
    assert vocabulary.types == [CONTROL] * 17 + [NORMAL] * (49152 - 17)
    assert vocabulary.special_ids == {"bos": 1, "eos": 2, "padding": 2}
    assert vocabulary.flags == {"add_bos_token": False}
