"""Files with keys as llama.cpp's converter writes them, beside the same models with others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from numpy.typing import NDArray

from h2o_cpp import Generator
from support.changed_gguf import changed

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
LLAMA = GOLDEN / "llama_gqa2_tied.gguf"
TOKENS = [5, 60, 7, 7, 31, 2, 19, 44, 8, 13]
KINDS = {float: GGUFValueType.FLOAT32, bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32}
Tensors = dict[str, NDArray[np.float32]]


def logits(
    folder: Path,
    source: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    architecture: str | None = None,
    without: Collection[str] = (),
) -> NDArray[np.float32]:
    """Logits of a changed copy of a file."""
    typed = {
        key: (value, KINDS.get(type(value), GGUFValueType.ARRAY)) for key, value in keys.items()
    }
    typed |= {k: (v, GGUFValueType.STRING) for k, v in keys.items() if isinstance(v, str)}
    path = changed(source, folder / "copy.gguf", typed, tensors or {}, architecture, without)
    with Generator(path, threads=1) as generator:
        return generator.logits(TOKENS)


def tensors_of(path: Path) -> Tensors:
    """All tensors of a file in F32, rows first."""
    return {tensor.name: np.array(tensor.data) for tensor in GGUFReader(path).tensors}


def same_up_to_rounding(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """A few thousand roundings of 2^-24, which add up as the worst case of a random walk."""
    return bool(np.abs(a - b).max() < 1e-5 * np.abs(b).max())


def test_gemma_2_without_its_constants(tmp_path: Path) -> None:
    """The first files of Gemma 2 rely on the reader's constants."""
    size = "gemma2.attention.sliding_window"
    caps = ("gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping")
    source = GOLDEN / "gemma2.gguf"
    found = logits(tmp_path, source, {}, without=(size, *caps))
    said = {size: 4096, caps[0]: 50.0, caps[1]: 30.0}
    np.testing.assert_array_equal(found, logits(tmp_path, source, said))
    none = dict.fromkeys(caps, 0.0)
    assert not np.array_equal(found, logits(tmp_path, source, said | none))


def test_glm_4_with_m_rope_rotates_halves(tmp_path: Path) -> None:
    """The converter permutes Q and K of GLM-4V from pairs to halves."""
    source, head = GOLDEN / "gemma2.gguf", 10  # its tensors have the names of GLM-4's
    without = [key for key in GGUFReader(source).fields if "softcapping" in key]
    without += ["gemma2.attention.sliding_window", "gemma2.attention.scale"]
    order = np.arange(head).reshape(head // 2, 2).T.ravel()
    permuted = {
        name: np.ascontiguousarray(
            values.reshape(-1, head, values.shape[1])[:, order].reshape(values.shape)
        )
        for name, values in tensors_of(source).items()
        if name.endswith(("attn_q.weight", "attn_k.weight"))
    }
    pairs = logits(tmp_path, source, {}, None, "glm4", without)
    sections = {"glm4.rope.dimension_sections": [2, 2, 1, 0]}
    halves = logits(tmp_path, source, sections, permuted, "glm4", without)
    assert same_up_to_rounding(halves, pairs)
    assert not same_up_to_rounding(logits(tmp_path, source, {}, permuted, "glm4", without), pairs)
    none = {"glm4.rope.dimension_sections": [5, 0, 0, 0]}
    np.testing.assert_array_equal(logits(tmp_path, source, none, None, "glm4", without), pairs)


def test_yarn_attn_factor_replaces_yarns_own(tmp_path: Path) -> None:
    """The factor is transformers' attention_factor: OLMo 3 has its own value."""
    scaling = "llama.rope.scaling."
    yarn: dict[str, Any] = {
        f"{scaling}type": "yarn",
        f"{scaling}factor": 8.0,
        f"{scaling}original_context_length": 5,
    }
    plain = logits(tmp_path, LLAMA, yarn)
    own = yarn | {f"{scaling}yarn_attn_factor": 0.1 * float(np.log(8)) + 1}
    assert same_up_to_rounding(logits(tmp_path, LLAMA, own), plain)
    other = logits(tmp_path, LLAMA, yarn | {f"{scaling}yarn_attn_factor": 1.5})
    assert not same_up_to_rounding(other, plain)
    both = yarn | {f"{scaling}yarn_attn_factor": 1.0, f"{scaling}attn_factor": 1.5}
    np.testing.assert_array_equal(logits(tmp_path, LLAMA, both), other)


def test_shared_expert_of_granite_is_scaled_as_the_residual(tmp_path: Path) -> None:
    """By a power of two, which is exact: as if all outputs of blocks had smaller weights."""
    source, scale = GOLDEN / "qwen3moe.gguf", 0.25
    own = tensors_of(source)
    random = np.random.default_rng(1)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return random.normal(0, 0.2, (rows, columns)).astype(np.float32)

    n_embd, n_ff = own["token_embd.weight"].shape[1], 16
    shared: Tensors = {}
    for layer in range(2):
        shared[f"blk.{layer}.ffn_gate_shexp.weight"] = matrix(n_ff, n_embd)
        shared[f"blk.{layer}.ffn_up_shexp.weight"] = matrix(n_ff, n_embd)
        shared[f"blk.{layer}.ffn_down_shexp.weight"] = matrix(n_embd, n_ff)
    keys = {"granitemoe.logit_scale": 1.0, "granitemoe.expert_shared_feed_forward_length": n_ff}
    without = [name for name in own if "_norm.weight" in name and "attn_" in name and "_k" in name]
    without += [name for name in own if "attn_q_norm" in name]
    smaller = {
        name: np.float32(scale) * values
        for name, values in (own | shared).items()
        if any(part in name for part in ("attn_output", "ffn_down"))
    }
    residual = {"granitemoe.residual_scale": scale}
    found = logits(tmp_path, source, keys | residual, shared, "granitemoe", without)
    expected = logits(tmp_path, source, keys, shared | smaller, "granitemoe", without)
    np.testing.assert_array_equal(found, expected)


def test_granite_4_with_the_size_of_its_only_mlp(tmp_path: Path) -> None:
    keys = {"granite.logit_scale": 1.0}
    expected = logits(tmp_path, LLAMA, keys, None, "granite")
    more = keys | {"granite.expert_shared_feed_forward_length": 8192}
    np.testing.assert_array_equal(logits(tmp_path, LLAMA, more, None, "granite"), expected)


def test_branches_of_stablelm_are_parallel_without_the_second_norm(tmp_path: Path) -> None:
    """Whatever the key says: the converter writes true if config.json has no such key."""
    norms = [name for name in tensors_of(LLAMA) if name.endswith("_norm.weight")]
    zeros = {name.replace("weight", "bias"): np.zeros(48, np.float32) for name in norms}
    eps = {"stablelm.attention.layer_norm_epsilon": 1e-5}
    said = [eps | {"stablelm.use_parallel_residual": value} for value in (False, True)]
    one, other = (logits(tmp_path, LLAMA, keys, zeros, "stablelm") for keys in said)
    np.testing.assert_array_equal(one, other)
    without = [name for name in norms if "ffn_norm" in name]
    biases = {name: values for name, values in zeros.items() if "ffn_norm" not in name}
    one, parallel = (logits(tmp_path, LLAMA, keys, biases, "stablelm", without) for keys in said)
    np.testing.assert_array_equal(one, parallel)
    assert not same_up_to_rounding(parallel, other)


def test_epsilon_of_the_other_kind_of_norm_is_ignored(tmp_path: Path) -> None:
    """Files of Nemotron have both."""
    both = logits(tmp_path, LLAMA, {"llama.attention.layer_norm_epsilon": 0.5})
    np.testing.assert_array_equal(both, logits(tmp_path, LLAMA, {}))
