"""Models of real shapes with random weights: as large and as fast as real ones, without sense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

_N_BYTES = 256  # byte tokens, after <unk>, <s> and </s>


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a model of architecture `llama`."""

    n_embd: int
    n_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_vocab: int
    tied: bool


SHAPES = {
    "SmolLM2-135M": LlamaShape(576, 1536, 30, 9, 3, 49152, tied=True),
    "TinyLlama-1.1B": LlamaShape(2048, 5632, 22, 32, 4, 32000, tied=False),
}


def write_llama(path: Path, shape: LlamaShape, *, n_ctx: int = 2048, seed: int = 0) -> None:
    """Write a model in F32, one tensor at a time."""
    random = np.random.default_rng(seed)
    with closing(GGUFWriter(path, "llama")) as writer:
        writer.add_context_length(n_ctx)
        writer.add_embedding_length(shape.n_embd)
        writer.add_block_count(shape.n_layers)
        writer.add_feed_forward_length(shape.n_ff)
        writer.add_head_count(shape.n_heads)
        writer.add_head_count_kv(shape.n_kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(shape.n_embd // shape.n_heads)
        writer.add_vocab_size(shape.n_vocab)
        _add_vocabulary(writer, shape.n_vocab)
        tensors = list(_tensors(shape))
        for name, size in tensors:
            nbytes = 4 * int(np.prod(size))
            writer.add_tensor_info(name, size, np.dtype(np.float32), nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, size in tensors:
            if name.endswith("norm.weight"):
                values = np.ones(size, np.float32)
            else:  # outputs about as large as inputs
                values = random.standard_normal(size, np.float32) / np.float32(size[-1] ** 0.5)
            writer.write_tensor_data(values)


def _tensors(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    n_embd, n_ff = shape.n_embd, shape.n_ff
    kv_width = n_embd // shape.n_heads * shape.n_kv_heads
    yield "token_embd.weight", (shape.n_vocab, n_embd)
    for i in range(shape.n_layers):
        for name, size in (
            ("attn_norm", (n_embd,)),
            ("attn_q", (n_embd, n_embd)),
            ("attn_k", (kv_width, n_embd)),
            ("attn_v", (kv_width, n_embd)),
            ("attn_output", (n_embd, n_embd)),
            ("ffn_norm", (n_embd,)),
            ("ffn_gate", (n_ff, n_embd)),
            ("ffn_up", (n_ff, n_embd)),
            ("ffn_down", (n_embd, n_ff)),
        ):
            yield f"blk.{i}.{name}.weight", size
    yield "output_norm.weight", (n_embd,)
    if not shape.tied:
        yield "output.weight", (shape.n_vocab, n_embd)


def _add_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    """<unk>, <s>, </s>, the bytes, and words without meaning."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(_N_BYTES))]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * _N_BYTES]
    n_words = n_vocab - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"w{i}" for i in range(n_words))])
    writer.add_token_scores([0.0] * len(tokens) + [-float(i) for i in range(n_words)])
    writer.add_token_types([*types, *[TokenType.NORMAL] * n_words])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
