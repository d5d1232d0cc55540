"""Qwen3.5's checkpoints: the file has the tensors that llama.cpp reads, with their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_cpp.convert import convert
from support.llama_cpp_tensors import assert_tensors
from support.needs import packages
from support.opt_checkpoint import (
    read_metadata,
    read_tensors,
    write_json,
    write_safetensors,
    write_tokenizer_json,
)
from support.random_models import HYBRIDS, N_VOCAB, make_model, randomize, save_checkpoint
from support.refused_conversion import assert_refused

Array = NDArray[np.float32]
reference = packages("torch", "transformers", "safetensors")


def make_checkpoint(path: Path, name: str) -> dict[str, Array]:
    """A random checkpoint; returns its weights."""
    save_checkpoint(make_model(HYBRIDS[name], seed=5), path)
    return weights(path)


def weights(path: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file

    return dict(load_file(path / "model.safetensors"))


def llama_cpp_shapes(metadata: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, rows first, as in `load_arch_tensors` of llama.cpp's files of models."""
    architecture = metadata["general.architecture"]
    m = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    n_embd, n_layer, n_vocab = m["embedding_length"], m["block_count"], m["vocab_size"]
    head, n_head, n_head_kv = (
        m[f"attention.{key}"] for key in ("key_length", "head_count", "head_count_kv")
    )
    assert m["attention.value_length"] == head
    state, n_k_heads, n_v_heads = (
        m[f"ssm.{key}"] for key in ("state_size", "group_count", "time_step_rank")
    )
    value_dim, conv_dim = state * n_v_heads, state * (2 * n_k_heads + n_v_heads)
    assert m["ssm.inner_size"] == value_dim
    interval = m.get("full_attention_interval", 4)
    recurrent = m.get("attention.recurrent_layers") or [
        (i + 1) % interval != 0 for i in range(n_layer)
    ]
    attention = {
        "attn_q.weight": (2 * head * n_head, n_embd),
        "attn_k.weight": (head * n_head_kv, n_embd),
        "attn_v.weight": (head * n_head_kv, n_embd),
        "attn_output.weight": (n_embd, head * n_head),
        "attn_q_norm.weight": (head,),
        "attn_k_norm.weight": (head,),
    }
    delta_net = {
        "attn_qkv.weight": (conv_dim, n_embd),
        "attn_gate.weight": (value_dim, n_embd),
        "ssm_conv1d.weight": (conv_dim, m["ssm.conv_kernel"]),
        "ssm_dt.bias": (n_v_heads,),
        "ssm_a": (n_v_heads,),
        "ssm_norm.weight": (state,),
        "ssm_out.weight": (n_embd, value_dim),
    }
    if architecture == "qwen3next":
        delta_net["ssm_ba.weight"] = (2 * n_v_heads, n_embd)
    else:
        delta_net |= {f"ssm_{gate}.weight": (n_v_heads, n_embd) for gate in ("beta", "alpha")}
    if architecture == "qwen35":
        n_ff = m["feed_forward_length"]
        mlp: dict[str, tuple[int, ...]] = {
            "ffn_gate.weight": (n_ff, n_embd),
            "ffn_up.weight": (n_ff, n_embd),
            "ffn_down.weight": (n_embd, n_ff),
        }
    else:
        n, n_ff = m["expert_count"], m["expert_feed_forward_length"]
        shared = m["expert_shared_feed_forward_length"]
        mlp = {
            "ffn_gate_inp.weight": (n, n_embd),
            "ffn_gate_exps.weight": (n, n_ff, n_embd),
            "ffn_up_exps.weight": (n, n_ff, n_embd),
            "ffn_down_exps.weight": (n, n_embd, n_ff),
            "ffn_gate_inp_shexp.weight": (1, n_embd),  # for llama.cpp the same as (n_embd,)
            "ffn_gate_shexp.weight": (shared, n_embd),
            "ffn_up_shexp.weight": (shared, n_embd),
            "ffn_down_shexp.weight": (n_embd, shared),
        }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n_embd),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_vocab, n_embd),
    }
    for i in range(n_layer):
        norms = {"attn_norm.weight": (n_embd,), "post_attention_norm.weight": (n_embd,)}
        layer = norms | (delta_net if recurrent[i] else attention) | mlp
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


@reference
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_names_shapes_and_types(tmp_path: Path, name: str, outtype: str) -> None:
    make_checkpoint(tmp_path, name)
    assert convert(tmp_path, tmp_path / "out.gguf", outtype) == []
    shapes = llama_cpp_shapes(read_metadata(tmp_path / "out.gguf"))
    if HYBRIDS[name].options.get("tie_word_embeddings"):
        del shapes["output.weight"]
    assert_tensors(tmp_path / "out.gguf", shapes, outtype)


COMMON = {
    "context_length": 40,
    "embedding_length": 64,
    "block_count": 4,
    "vocab_size": N_VOCAB,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    "rope.freq_base": 10000.0,
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
}
METADATA = {
    "qwen35": COMMON
    | {
        "feed_forward_length": 40,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 12,
        "rope.dimension_sections": [2, 2, 2, 0],
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 64,
    },
    "qwen35moe": COMMON
    | {
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.dimension_count": 4,
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 96,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 24,
        "expert_shared_feed_forward_length": 36,
    },
}


@reference
@pytest.mark.parametrize("name", METADATA)
def test_metadata(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path, name)
    convert(tmp_path, tmp_path / "out.gguf")
    metadata = read_metadata(tmp_path / "out.gguf")
    assert metadata["general.architecture"] == name
    prefix = f"{name}."
    found = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    assert found == METADATA[name]


@reference
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name != "qwen3next"])
def test_values_of_delta_net(tmp_path: Path, name: str) -> None:
    """Head i of V in the file has head i % n_k of K, one of those that follow it in HF."""
    source = make_checkpoint(tmp_path, name)
    convert(tmp_path, tmp_path / "out.gguf", "f32")
    tensors = {name: values for name, (_, values) in read_tensors(tmp_path / "out.gguf").items()}
    options = HYBRIDS[name].options
    n_k, n_v = options["linear_num_key_heads"], options["linear_num_value_heads"]
    size, blk, hf = options["linear_key_head_dim"], "blk.1.", "model.layers.1.linear_attn."
    own = 2 * n_k * size  # rows of Q and K
    for matrix, original in (
        (tensors[blk + "attn_qkv.weight"], source[hf + "in_proj_qkv.weight"]),
        (tensors[blk + "ssm_conv1d.weight"], source[hf + "conv1d.weight"][:, 0, :]),
    ):
        np.testing.assert_array_equal(matrix[:own], original[:own])
    np.testing.assert_array_equal(tensors[blk + "ssm_norm.weight"], source[hf + "norm.weight"])
    used = set()
    for head in range(n_v):
        k_head, turn = head % n_k, head // n_k
        original_head = k_head * (n_v // n_k) + turn
        used.add(original_head)
        ours, theirs = (slice(i * size, (i + 1) * size) for i in (head, original_head))
        for gguf, rows in (
            ("attn_qkv.weight", source[hf + "in_proj_qkv.weight"][own:][theirs]),
            ("ssm_conv1d.weight", source[hf + "conv1d.weight"][own:, 0][theirs]),
        ):
            np.testing.assert_array_equal(tensors[blk + gguf][own:][ours], rows)
        np.testing.assert_array_equal(
            tensors[blk + "attn_gate.weight"][ours], source[hf + "in_proj_z.weight"][theirs]
        )
        np.testing.assert_array_equal(
            tensors[blk + "ssm_out.weight"][:, ours], source[hf + "out_proj.weight"][:, theirs]
        )
        for gguf, part in (("ssm_beta", "in_proj_b"), ("ssm_alpha", "in_proj_a")):
            row = source[f"{hf}{part}.weight"][original_head]
            np.testing.assert_array_equal(tensors[f"{blk}{gguf}.weight"][head], row)
        assert tensors[blk + "ssm_dt.bias"][head] == source[hf + "dt_bias"][original_head]
        decay = -np.exp(source[hf + "A_log"][original_head].astype(np.float64))
        np.testing.assert_allclose(tensors[blk + "ssm_a"][head], decay, rtol=2**-22)
    assert len(used) == n_v


@reference
def test_values_of_delta_net_of_qwen3next(tmp_path: Path) -> None:
    """The checkpoint has q, k, the heads of v and of z of each head of K in one tensor."""
    source = make_checkpoint(tmp_path, "qwen3next")
    convert(tmp_path, tmp_path / "out.gguf", "f32")
    tensors = {name: values for name, (_, values) in read_tensors(tmp_path / "out.gguf").items()}
    options = HYBRIDS["qwen3next"].options
    n_k, n_v = options["linear_num_key_heads"], options["linear_num_value_heads"]
    size, blk, hf = options["linear_key_head_dim"], "blk.1.", "model.layers.1.linear_attn."
    joined = source[hf + "in_proj_qkvz.weight"]
    by_head = joined.reshape(n_k, -1, joined.shape[1])
    n_rows = n_v // n_k * size  # of v and of z
    parts = np.split(by_head, [size, 2 * size, 2 * size + n_rows], axis=1)
    q, k, v, z = (part.reshape(-1, joined.shape[1]) for part in parts)
    for gguf, expected in (
        ("attn_qkv.weight", np.concatenate([q, k, v])),
        ("attn_gate.weight", z),
        ("ssm_ba.weight", source[hf + "in_proj_ba.weight"]),
        ("ssm_conv1d.weight", source[hf + "conv1d.weight"][:, 0, :]),
        ("ssm_dt.bias", source[hf + "dt_bias"]),
        ("ssm_norm.weight", source[hf + "norm.weight"]),
        ("ssm_out.weight", source[hf + "out_proj.weight"]),
    ):
        np.testing.assert_array_equal(tensors[blk + gguf], expected)
    decay = -np.exp(source[hf + "A_log"].astype(np.float64))
    np.testing.assert_allclose(tensors[blk + "ssm_a"], decay, rtol=2**-22)


@reference
@pytest.mark.parametrize("name", HYBRIDS)
def test_values_of_other_tensors(tmp_path: Path, name: str) -> None:
    source = make_checkpoint(tmp_path, name)
    convert(tmp_path, tmp_path / "out.gguf", "f32")
    tensors = {name: values for name, (_, values) in read_tensors(tmp_path / "out.gguf").items()}
    layer = "2" if name == "qwen35_listed" else "3"
    mixture = "num_experts" in HYBRIDS[name].options
    blk, hf = f"blk.{layer}.", f"model.layers.{layer}."
    projections = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "output": "o_proj"}
    same = {f"attn_{gguf}": f"self_attn.{part}" for gguf, part in projections.items()}
    for part in ("gate", "up", "down"):
        if mixture:
            same[f"ffn_{part}_shexp"] = f"mlp.shared_expert.{part}_proj"
            experts = [source[f"{hf}mlp.experts.{i}.{part}_proj.weight"] for i in range(6)]
            np.testing.assert_array_equal(tensors[f"{blk}ffn_{part}_exps.weight"], experts)
        else:
            same[f"ffn_{part}"] = f"mlp.{part}_proj"
    if mixture:
        same |= {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
    for gguf, part in same.items():
        np.testing.assert_array_equal(tensors[f"{blk}{gguf}.weight"], source[f"{hf}{part}.weight"])
    norms = {
        f"{blk}attn_norm": f"{hf}input_layernorm",
        f"{blk}post_attention_norm": f"{hf}post_attention_layernorm",
        f"{blk}attn_q_norm": f"{hf}self_attn.q_norm",
        f"{blk}attn_k_norm": f"{hf}self_attn.k_norm",
        "output_norm": "model.norm",
    }
    for gguf, norm in norms.items():
        expected = source[f"{norm}.weight"] + np.float32(1)
        np.testing.assert_array_equal(tensors[f"{gguf}.weight"], expected)
    np.testing.assert_array_equal(tensors["token_embd.weight"], source["model.embed_tokens.weight"])
    if "output.weight" in tensors:
        np.testing.assert_array_equal(tensors["output.weight"], source["lm_head.weight"])


def join_experts(source: dict[str, Array], n: int) -> dict[str, Array]:
    """The weights in the form of Qwen's own checkpoints, with one tensor for all experts."""
    joined = {name: values for name, values in source.items() if ".experts." not in name}
    layers = sorted({name.split(".experts.")[0] for name in source if ".experts." in name})
    for layer in layers:

        def of(part: str, layer: str = layer) -> Array:
            return np.stack([source[f"{layer}.experts.{i}.{part}_proj.weight"] for i in range(n)])

        joined[f"{layer}.experts.gate_up_proj"] = np.concatenate([of("gate"), of("up")], axis=1)
        joined[f"{layer}.experts.down_proj"] = of("down")
    return joined


@reference
@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
def test_joined_experts(tmp_path: Path, outtype: str) -> None:
    source = make_checkpoint(tmp_path, "qwen35moe")
    convert(tmp_path, tmp_path / "one_by_one.gguf", outtype)
    joined = join_experts(source, 6)
    assert len(joined) < len(source)
    write_safetensors(tmp_path / "model.safetensors", joined)
    convert(tmp_path, tmp_path / "joined.gguf", outtype)
    assert (tmp_path / "joined.gguf").read_bytes() == (tmp_path / "one_by_one.gguf").read_bytes()


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
}


@reference
@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_text_model_of_a_checkpoint_with_an_encoder_and_mtp(tmp_path: Path, name: str) -> None:
    import transformers

    recipe = HYBRIDS[name]
    text = recipe.config().to_dict() | {"tie_word_embeddings": False}
    config = getattr(transformers, f"{recipe.model}Config")(text_config=text, vision_config=VISION)
    model = getattr(transformers, f"{recipe.model}ForConditionalGeneration")(config)
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    save_checkpoint(randomize(model, seed=2), whole)
    source = weights(whole)
    assert any(name.startswith("model.visual.") for name in source)

    own = {
        name.replace("language_model.", ""): values
        for name, values in source.items()
        if not name.startswith("model.visual.")
    }
    alone.mkdir()
    write_safetensors(alone / "model.safetensors", own)
    write_json(alone / "config.json", text | {"architectures": [f"{recipe.model}ForCausalLM"]})
    write_tokenizer_json(alone)
    assert convert(alone, tmp_path / "alone.gguf", "f32") == []

    mtp = {"mtp.layers.1.mlp.x": np.zeros(3, "f4")}
    write_safetensors(whole / "model.safetensors", source | mtp)
    notes = convert(whole, tmp_path / "whole.gguf", "f32")
    assert notes == ["only the model of text is converted, not the encoder of images"]
    one, other = (read_tensors(tmp_path / f"{part}.gguf") for part in ("whole", "alone"))
    assert one.keys() == other.keys()
    for tensor, (dtype, values) in one.items():
        assert dtype is other[tensor][0]
        np.testing.assert_array_equal(values, other[tensor][1])
    ours = read_metadata(tmp_path / "whole.gguf")
    assert {k: v for k, v in ours.items() if k.startswith(name)} == {
        k: v for k, v in read_metadata(tmp_path / "alone.gguf").items() if k.startswith(name)
    }


@reference
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.0.linear_attn.A_log", "layers.0.linear_attn.A_log is missing"),
        ("model.layers.3.self_attn.q_norm.weight", "self_attn.q_norm.weight is missing"),
        ("model.layers.2.mlp.experts.5.up_proj.weight", "experts.5.up_proj.weight is missing"),
    ],
)
def test_missing_tensors_are_refused(tmp_path: Path, tensor: str, message: str) -> None:
    source = make_checkpoint(tmp_path, "qwen35moe")
    del source[tensor]
    write_safetensors(tmp_path / "model.safetensors", source)
    assert_refused(tmp_path, message)


@reference
def test_values_of_a_log_beyond_float32_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, "qwen35")
    source["model.layers.0.linear_attn.A_log"] = np.full(4, 100, "f4")
    write_safetensors(tmp_path / "model.safetensors", source)
    assert_refused(tmp_path, "linear_attn.A_log has values that are NaN or infinite")


@reference
def test_tokenizer_of_transformers(tmp_path: Path) -> None:
    """Files that transformers writes with its class for Qwen3.5."""
    import transformers

    make_checkpoint(tmp_path, "qwen35")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer: Any = transformers.Qwen3_5Tokenizer
    tokenizer(vocab=model["vocab"], merges=merges).save_pretrained(tmp_path)
    convert(tmp_path, tmp_path / "out.gguf")
    assert read_metadata(tmp_path / "out.gguf")["tokenizer.ggml.pre"] == "qwen35"
