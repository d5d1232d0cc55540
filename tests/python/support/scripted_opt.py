"""OPT models that generate a given text, as GGUF files that are easy to corrupt."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

F32, F16 = 0, 1  # tensor types
U32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # value types
END = 256  # end-of-text; smaller tokens are bytes
N_VOCAB = 258
ALIGNMENT = 32

_shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_hidden = [byte for byte in range(256) if byte not in _shown]
# GPT-2's printable character for each byte
VISIBLE = [chr(b if b in _shown else 256 + _hidden.index(b)) for b in range(256)]


def text(value: str) -> bytes:
    """A GGUF string: its length and its bytes."""
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def u32(value: int) -> bytes:
    """A metadata value with its type; so are the results of the functions below."""
    return struct.pack("<II", U32, value)


def f32(value: float) -> bytes:
    return struct.pack("<If", FLOAT32, value)


def boolean(value: bool) -> bytes:
    return struct.pack("<IB", BOOL, value)


def string(value: str) -> bytes:
    return struct.pack("<I", STRING) + text(value)


def strings(values: Sequence[str]) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(text, values))


def integers(values: Sequence[int]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}i", ARRAY, INT32, len(values), *values)


@dataclass
class Tensor:
    """A tensor; by default its offset is the end of the previous one."""

    dims: tuple[int, ...]  # fastest first
    data: bytes
    type: int = F32
    offset: int | None = None


@dataclass
class Gguf:
    """A GGUF file: encoded values by key, and tensors by name."""

    keys: dict[str, bytes]
    tensors: dict[str, Tensor]
    version: int = 3

    def fields(self) -> list[bytes]:
        """The file, split between fields."""
        counts = (len(self.tensors), len(self.keys))
        fields = [b"GGUF", struct.pack("<I", self.version), *(struct.pack("<Q", n) for n in counts)]
        for key, value in self.keys.items():
            fields += [text(key), value[:4], value[4:]]
        end = 0
        for name, tensor in self.tensors.items():
            offset = end if tensor.offset is None else tensor.offset
            fields += [text(name), struct.pack("<I", len(tensor.dims))]
            fields += [struct.pack("<Q", n) for n in tensor.dims]
            fields += [struct.pack("<I", tensor.type), struct.pack("<Q", offset)]
            end += len(tensor.data) + -len(tensor.data) % ALIGNMENT
        fields.append(bytes(-sum(map(len, fields)) % ALIGNMENT))
        for tensor in self.tensors.values():
            fields += [tensor.data, bytes(-len(tensor.data) % ALIGNMENT)]
        return fields[:-1]

    def boundaries(self) -> list[int]:
        """The offsets of field ends, except the end of the file."""
        size = len(self.encode())
        return sorted({end for end in accumulate(map(len, self.fields())) if end < size})

    def encode(self) -> bytes:
        return b"".join(self.fields())

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encode())
        return path


def scripted_opt(script: Sequence[int], n_ctx: int = 64) -> Gguf:
    """A model whose next token depends only on the position.

    After a prompt of n tokens it generates script[n - 1], script[n], ... and </s> where the script
    ends. Tokens 0 to 255 are bytes, 256 is </s>, and 257 is "ab".

    Position embeddings are unit vectors, attention and feed-forward add nothing, and the output
    matrix has a large weight for the scripted token of each position.
    """
    if len(script) > n_ctx:
        raise ValueError(f"the script has {len(script)} tokens, expected at most n_ctx={n_ctx}")
    n_embd, n_ff = n_ctx, 8
    output = np.zeros((N_VOCAB, n_embd), np.float32)
    output[[*script, *[END] * (n_ctx - len(script))], np.arange(n_ctx)] = 8

    def zeros(*shape: int) -> NDArray[np.float32]:
        return np.zeros(shape, np.float32)

    arrays: dict[str, NDArray[np.float32] | NDArray[np.float16]] = {
        "token_embd.weight": np.zeros((N_VOCAB, n_embd), np.float16),
        "position_embd.weight": np.eye(n_ctx, dtype=np.float32),
        "output_norm.weight": np.ones(n_embd, np.float32),
        # shifts the normalized unit vector so that its zeros stay 0
        "output_norm.bias": np.full(n_embd, (n_embd - 1) ** -0.5, np.float32),
        "output.weight": output,
    }
    for name, rows, cols in (
        ("attn_q", n_embd, n_embd),
        ("attn_k", n_embd, n_embd),
        ("attn_v", n_embd, n_embd),
        ("attn_output", n_embd, n_embd),
        ("ffn_up", n_ff, n_embd),
        ("ffn_down", n_embd, n_ff),
    ):
        arrays |= {f"blk.0.{name}.weight": zeros(rows, cols), f"blk.0.{name}.bias": zeros(rows)}
    for name in ("attn_norm", "ffn_norm"):
        arrays |= {f"blk.0.{name}.{part}": zeros(n_embd) for part in ("weight", "bias")}
    keys = {
        "general.architecture": string("opt"),
        "general.name": string("scripted"),
        "general.type": string("model"),
        "opt.context_length": u32(n_ctx),
        "opt.embedding_length": u32(n_embd),
        "opt.block_count": u32(1),
        "opt.feed_forward_length": u32(n_ff),
        "opt.attention.head_count": u32(2),
        "opt.attention.layer_norm_epsilon": f32(1e-5),
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string("gpt-2"),
        "tokenizer.ggml.tokens": strings([*VISIBLE, "</s>", "ab"]),
        "tokenizer.ggml.token_type": integers([1] * 256 + [3, 1]),
        "tokenizer.ggml.merges": strings(["a b"]),
        "tokenizer.ggml.bos_token_id": u32(END),
        "tokenizer.ggml.eos_token_id": u32(END),
        "tokenizer.ggml.add_bos_token": boolean(False),
    }
    return Gguf(keys, {name: _tensor(array) for name, array in arrays.items()})


def _tensor(array: NDArray[np.float32] | NDArray[np.float16]) -> Tensor:
    return Tensor(
        dims=array.shape[::-1], data=array.tobytes(), type=F16 if array.itemsize == 2 else F32
    )
