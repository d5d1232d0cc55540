"""Write a small corpus of seeds for the fuzz targets: make_corpus.py DIRECTORY.

Files are built here byte by byte, so that a seed holds every kind of value in a few hundred bytes.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
NUMBERS = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?",
    U64: "Q", I64: "q", F64: "d",
}  # fmt: skip

# Types of few bits: their number -> elements and bytes of a block.
FEW_BITS = {
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110),
    22: (256, 82), 23: (256, 136), 29: (256, 56), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36),
}  # fmt: skip


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def number(kind: int, value: float) -> bytes:
    return struct.pack("<" + NUMBERS[kind], value)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def array(kind: int, values: Iterable[bytes]) -> bytes:
    values = list(values)
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


def tensor(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", dim) for dim in dims)
    return string(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def gguf(
    keys: list[bytes], tensors: Sequence[bytes] = (), data: bytes = b"", version: int = 3
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    file = head + b"".join(keys) + b"".join(tensors)
    return file + b"\0" * (-len(file) % 32) + data


def one_row(kind: int, elements: int, size: int) -> bytes:
    """Two blocks of a type."""
    return gguf([], [tensor(b"w", [2 * elements], kind, 0)], bytes(2 * size))


def gguf_seeds() -> dict[str, bytes]:
    kinds = [key(b"n%d" % kind, kind, number(kind, 1)) for kind in NUMBERS]
    arrays = [
        key(b"a%d" % k, ARRAY, array(k, [number(k, i % 2) for i in range(3)])) for k in NUMBERS
    ]
    texts = [
        key(b"general.architecture", STRING, string(b"llama")),
        key(b"tokens", ARRAY, array(STRING, map(string, [b"a", b"", b"\xff"]))),
    ]
    nested = array(ARRAY, [array(ARRAY, [array(U8, [b"\1"])])])
    aligned = key(b"general.alignment", U32, number(U32, 64))
    two = [tensor(b"f32", [4, 2], 0, 0), tensor(b"q8_0", [32], 8, 32)]
    mixture = [
        key(b"general.architecture", STRING, string(b"gpt-oss")),
        key(b"gpt-oss.expert_count", U32, number(U32, 2)),
        key(b"gpt-oss.expert_used_count", U32, number(U32, 1)),
        key(b"gpt-oss.attention.sliding_window", U32, number(U32, 128)),
    ]
    experts = [
        tensor(b"blk.0.ffn_up_exps.weight", [32, 2, 2], 39, 0),
        tensor(b"blk.0.attn_sinks.weight", [4], 0, 96),
    ]
    windows = [
        key(b"general.architecture", STRING, string(b"gemma3")),
        key(
            b"gemma3.attention.sliding_window_pattern",
            ARRAY,
            array(BOOL, [number(BOOL, i < 5) for i in range(6)]),
        ),
        key(b"gemma3.final_logit_softcapping", F32, number(F32, 30)),
        key(b"gemma3.rope.scaling.type", STRING, string(b"yarn")),
    ]
    return {
        "empty": gguf([]),
        "numbers": gguf(kinds),
        "arrays": gguf(arrays, version=2),
        "texts": gguf(texts),
        "nested": gguf([key(b"nested", ARRAY, nested)]),
        "aligned": gguf([aligned], [tensor(b"w", [2, 2, 2, 2], 1, 0)], bytes(96)),
        "tensors": gguf(texts, two, bytes(66)),
        "mixture": gguf(mixture, experts, bytes(112)),
        "windows": gguf(windows),
        **{f"type{kind}": one_row(kind, *sizes) for kind, sizes in FEW_BITS.items()},
    }


def tokenizer_seeds() -> dict[str, bytes]:
    texts = {
        "words": b"The old man's 12345 dogs,  and\n\n the sea ",
        "special": b"a</s>b<s> <unk>",
        "unicode": "naïve 北京 \u1112\u1161\u11ab \U0001f468\u200d\U0001f469 \u00a0".encode(),
        "broken": b"a\xff\xe2\x82 \xed\xa0\x80",
    }
    # The first byte: flags.
    return {
        f"{name}{flags}": bytes([flags]) + t for name, t in texts.items() for flags in (2, 13, 46)
    }


def snapshot_seeds() -> dict[str, bytes]:
    change = struct.pack("<HB", 60, 4 << 2) + b"\xff\xff\xff\x7f"
    return {f"{n}": bytes([n]) + change for n in (*range(12), *range(32, 44))} | {
        "good": b"\0",
        "raw": b"\x80h2o snap",
        "overwritten_row": b"\x0a\x24\xff\x10\x00\xff\xa3\xff\x7f",  # in a row that is not read
    }


def capi_seeds() -> dict[str, bytes]:
    stream = bytes([1, 4, 0, 5]) + b"hello"
    look = bytes([6, 0, 0, 9])
    step, save, reset, cancel = bytes([4]), bytes([5, 0]), bytes([8]), bytes([7])
    calls = stream + look + step + save + stream + cancel + stream + reset + stream
    budget = bytes([4, 8])  # hh: 8 tokens
    tokenize = bytes([2, 1, 5]) + b"hello" + bytes([20, 30])
    archive = bytes([133, 4, 1, 1, 0, 9, 1])  # f32, one page
    plain = bytes([0, 1, 0, 1, 0, 1, 64])  # sampling without filters
    penalties = bytes([6, 3, 200]) + number(F64, -3e38) + bytes([0, 5, 1])  # and a forbidden token
    steps = bytes([224, 3, 150, 0, 150, 110, 1, 1, 2, 5, 1, 3, 4, 5, 6])
    return {"full": bytes([0]) + calls, "budget": budget + calls, "rotary": bytes([5, 8]) + calls,
            "tokenize": tokenize + calls, "archive": archive + calls + calls,
            "penalties": bytes([1]) + plain + penalties + calls,
            "steps": bytes([1]) + plain + steps + calls}  # fmt: skip


def stop_string_seeds() -> dict[str, bytes]:
    stops = bytes([2, 3]) + b"a b" + bytes([7]) + "né🦙".encode()
    words = "a né a né🦙 a b".encode()
    text = b"".join(bytes([68]) + words[n : n + 4] for n in range(0, len(words), 4))
    return {"any": stops + text, "letters": bytes([13, 2]) + b"ab" + bytes([3]) + b"aba" + text}


def vocabulary_seeds() -> dict[str, bytes]:
    letters = bytes([7]) + bytes(range(0, 4)) * 8
    return {"bpe": b"\1\0" + letters, "spm": b"\0\3" + letters, "odd": b"\x7f\xff" + letters * 2}


def main() -> None:
    (directory,) = sys.argv[1:]
    corpora = {
        "gguf": gguf_seeds(),
        "tokenizer": tokenizer_seeds(),
        "vocabulary": vocabulary_seeds(),
        "stop_strings": stop_string_seeds(),
        "snapshot": snapshot_seeds(),
        "capi": capi_seeds(),
    }
    for name, seeds in corpora.items():
        folder = Path(directory) / name
        folder.mkdir(parents=True, exist_ok=True)
        for seed, content in seeds.items():
            (folder / seed).write_bytes(content)


if __name__ == "__main__":
    main()
