"""Vocabularies as GGUF metadata, small and published ones; texts for them."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf import GGUFValueType, GGUFWriter
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from h2o_cpp import _core
from h2o_cpp.model.tokenizer import Tokenizer
from support.scripted_opt import VISIBLE

# Code, emoji, scripts without spaces, control characters, long whitespace.
TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading, trailing and   inner spaces  ",
    "tabs\tand\nnew\r\nlines\n\n\n \n\t\n",
    "def f(x):\n    if x:\n\treturn {'a': [1, 2.5e-3]}  # ok\n\n\n        pass",
    "I'll, you've, he's, don't, WE'RE, SHE'LL, 'tis, y'all'd've, O'Neil 's 'S",
    "0 12 345 6789 12345678901 3.14159 ½ Ⅷ ² ٣٤٥",
    "Führer, naïve café, e\u0301 beside \u00e9, \u1100\u1161 가, ﬁ ligature, A\u030a \u212b",
    "нещо на Български; Ελληνικά; עברית; العربية",
    "我想在apple工作1314151天\uff5e 日本語のテキスト 한국어",
    "កាន់តែពិសេស हिन्दी ไทย",
    "🦙 😶‍🌫️ 👩‍👩‍👧‍👦 🇩🇪 \U0010ffff",
    "\x00\x01\x02\x1b[0m\x7f \x85 \u00a0 \u200b \u2028 \u3000 \ufeff \ufffd \ufffe",
    " " * 100 + "a" + " " * 33 + "\n" * 40 + "\t" * 17 + " b",
    "!!!!???---===___***/// $$$ %%% @# ^& (){}[]<>|\\~`",
    "<s> </s> <unk> < /s> <|endoftext|><|im_start|>user\n<|im_end|> <0x0A> [INST]",
    "Ġ Ċ ▁ ▁▁a a▁b ##ing",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://example.org/a_b-c?d=e&f=%20#g",
]

any_text = st.one_of(
    st.text(),
    st.text("aeinorst '\n\t.0é我🦙\u0301\u3000▁"),
    st.lists(st.sampled_from(TEXTS)).map("".join),
    st.lists(st.sampled_from(["<s>", "</s>", "<|im_end|>", "<", "s>", "  ", "\n", "x"])).map(
        "".join
    ),
)


def byte_pairs(*extra: tuple[str, int], pre: str = "gpt-2", **keys: Any) -> dict[str, Any]:
    """Bytes, then 256: </s>, 257: "ab", and `extra` with their types."""
    tokens = [*VISIBLE, "</s>", "ab", *(text for text, _ in extra)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 1, *(kind for _, kind in extra)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 256,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentence_pieces(*extra: tuple[str, int], **keys: Any) -> dict[str, Any]:
    """Unknown, <s>, </s>, every byte; from 259 on ▁, a, b, ab, ▁ab, ▁a and `extra`."""
    pieces = ["\u2581", "a", "b", "ab", "\u2581ab", "\u2581a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [kind for _, kind in extra]
    tokens += [text for text, _ in extra]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def opt_vocabulary(shared: Path) -> dict[str, Any]:
    """The vocabulary of the published OPT models."""
    folder = shared / "tokenizers" / "opt"
    ids: dict[str, int] = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    merges = (folder / "merges.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")[1:]
    tokens = sorted(ids, key=ids.__getitem__)
    special = ("<s>", "<pad>", "</s>", "<unk>")
    return byte_pairs() | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
    }


def from_tokenizer_json(path: Path, pre: str) -> dict[str, Any]:
    """The vocabulary of a byte-level BPE in a Hugging Face tokenizer.json."""
    document = json.loads(path.read_text(encoding="utf-8"))
    ids: dict[str, int] = document["model"]["vocab"]
    kinds = {}
    for added in document["added_tokens"]:
        ids[added["content"]] = added["id"]
        kinds[added["id"]] = 3 if added["special"] else 4
    tokens = [f"[PAD{i}]" for i in range(max(ids.values()) + 1)]
    for token, i in ids.items():
        tokens[i] = token
        kinds.setdefault(i, 1)
    merges = document["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(i, 5) for i in range(len(tokens))],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
    }


def from_sentencepiece(path: Path) -> dict[str, Any]:
    """The vocabulary of a SentencePiece BPE model."""
    model = SentencePieceProcessor(model_file=str(path))
    ids = range(model.vocab_size())
    types = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.remove_extra_whitespaces": model.encode("a  a") == model.encode("a a"),
    }


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file of metadata only. Lone surrogates represent bytes that are not UTF-8."""
    writer = GGUFWriter(path, metadata.get("general.architecture", "test"))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_int64(key, value)
        elif isinstance(value, str):
            writer.add_key_value(key, value, GGUFValueType.STRING)  # also if empty
        else:
            writer.add_array(key, [_raw(element) for element in value])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _raw(value: Any) -> Any:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


def tokenizer_of(metadata: dict[str, Any], n_vocab: int | None = None) -> Tokenizer:
    """The tokenizer of a file with this metadata."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # Windows maps the file
        file = _core.GgufFile(write_vocabulary(Path(directory) / "vocabulary.gguf", metadata))
    return Tokenizer(file, len(metadata["tokenizer.ggml.tokens"]) if n_vocab is None else n_vocab)


def tokenizer_of_file(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer in a GGUF file, and its metadata."""
    file = _core.GgufFile(path)
    metadata = file.metadata()
    return Tokenizer(file, len(metadata["tokenizer.ggml.tokens"])), metadata


def vectors_of_llama_cpp(shared: Path, name: str) -> tuple[Tokenizer, list[tuple[str, list[int]]]]:
    """A tokenizer from llama.cpp's tests, and texts with expected tokens."""
    path = shared / "tokenizers" / "ggml-vocab" / f"ggml-vocab-{name}.gguf"
    tokenizer, _ = tokenizer_of_file(path)
    with open(f"{path}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text(encoding="utf-8").split("\n")
    assert len(texts) == len(lines) > 40
    ids = [[int(token) for token in line.split()] for line in lines]
    return tokenizer, list(zip(texts, ids, strict=True))
