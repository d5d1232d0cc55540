"""LFM2's checkpoints: the file has the tensors that llama.cpp reads, with their values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from numpy.typing import NDArray

from h2o_cpp import Generator, _core, capacity
from h2o_cpp.budget.cache_memory import ModelShape
from h2o_cpp.cli import main
from h2o_cpp.convert import convert
from h2o_cpp.convert.checkpoint import read_json
from h2o_cpp.convert.conversion import FAMILIES
from support.changed_gguf import changed
from support.llama_cpp_tensors import assert_tensors
from support.needs import packages
from support.opt_checkpoint import read_metadata, read_tensors, write_json
from support.random_models import CONVOLUTIONS, N_VOCAB, make_model, save_checkpoint

Array = NDArray[np.float32]
reference = packages("torch", "transformers", "safetensors")


def make_checkpoint(path: Path, name: str) -> dict[str, Array]:
    """A random checkpoint; returns its weights."""
    from safetensors.numpy import load_file

    save_checkpoint(make_model(CONVOLUTIONS[name], seed=5), path)
    return dict(load_file(path / "model.safetensors"))


def llama_cpp_shapes(metadata: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, rows first, as llama.cpp loads lfm2 and lfm2moe."""
    architecture = metadata["general.architecture"]
    m = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    n_embd, n_vocab, n_head = m["embedding_length"], m["vocab_size"], m["attention.head_count"]
    head, n_dense = n_embd // n_head, m.get("leading_dense_block_count", m["block_count"])
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n_embd),
        "token_embd_norm.weight": (n_embd,),
        "output.weight": (n_vocab, n_embd),
    }
    for i, n_head_kv in enumerate(m["attention.head_count_kv"]):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (n_embd,),
            "ffn_norm.weight": (n_embd,),
        }
        if n_head_kv > 0:
            layer |= {
                "attn_q.weight": (n_embd, n_embd),
                "attn_k.weight": (head * n_head_kv, n_embd),
                "attn_v.weight": (head * n_head_kv, n_embd),
                "attn_output.weight": (n_embd, n_embd),
                "attn_q_norm.weight": (head,),
                "attn_k_norm.weight": (head,),
            }
        else:
            layer |= {
                "shortconv.conv.weight": (n_embd, m["shortconv.l_cache"]),
                "shortconv.in_proj.weight": (3 * n_embd, n_embd),
                "shortconv.out_proj.weight": (n_embd, n_embd),
            }
        if i < n_dense:
            n_ff = m["feed_forward_length"]
            layer |= {
                "ffn_gate.weight": (n_ff, n_embd),
                "ffn_up.weight": (n_ff, n_embd),
                "ffn_down.weight": (n_embd, n_ff),
            }
        else:
            n, n_ff = m["expert_count"], m["expert_feed_forward_length"]
            layer |= {
                "ffn_gate_inp.weight": (n, n_embd),
                "ffn_gate_exps.weight": (n, n_ff, n_embd),
                "ffn_up_exps.weight": (n, n_ff, n_embd),
                "ffn_down_exps.weight": (n, n_embd, n_ff),
                "exp_probs_b.bias": (n,),
            }
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


@reference
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_names_shapes_and_types(tmp_path: Path, name: str, outtype: str) -> None:
    make_checkpoint(tmp_path, name)
    assert convert(tmp_path, tmp_path / "out.gguf", outtype) == []
    shapes = llama_cpp_shapes(read_metadata(tmp_path / "out.gguf"))
    if CONVOLUTIONS[name].options.get("tie_word_embeddings", True):
        del shapes["output.weight"]
    assert_tensors(tmp_path / "out.gguf", shapes, outtype)


COMMON = {
    "context_length": 40,
    "vocab_size": N_VOCAB,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "rope.freq_base": 1e6,
}
METADATA = {
    "lfm2": COMMON
    | {
        "embedding_length": 48,
        "block_count": 4,
        "feed_forward_length": 40,
        "attention.head_count_kv": [0, 0, 2, 0],
        "rope.dimension_count": 12,
        "shortconv.l_cache": 3,
    },
    "lfm2_adjusted": COMMON
    | {
        "embedding_length": 64,
        "block_count": 3,
        "feed_forward_length": 80,
        "attention.head_count_kv": [1, 0, 1],
        "rope.dimension_count": 16,
        "shortconv.l_cache": 4,
    },
    "lfm2moe": COMMON
    | {
        "embedding_length": 64,
        "block_count": 4,
        "feed_forward_length": 40,
        "attention.head_count_kv": [0, 2, 0, 2],
        "rope.dimension_count": 16,
        "shortconv.l_cache": 3,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 24,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
    },
}


@reference
@pytest.mark.parametrize("name", METADATA)
def test_metadata(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path, name)
    convert(tmp_path, tmp_path / "out.gguf")
    metadata = read_metadata(tmp_path / "out.gguf")
    prefix = metadata["general.architecture"] + "."
    assert prefix == ("lfm2moe." if name == "lfm2moe" else "lfm2.")
    found = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    assert found == METADATA[name]


@reference
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_values(tmp_path: Path, name: str) -> None:
    source = make_checkpoint(tmp_path, name)
    convert(tmp_path, tmp_path / "out.gguf", "f32")
    names = {
        "attn_norm.weight": "operator_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        "shortconv.conv.weight": "conv.conv.weight",
        "shortconv.in_proj.weight": "conv.in_proj.weight",
        "shortconv.out_proj.weight": "conv.out_proj.weight",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_q_norm.weight": "self_attn.q_layernorm.weight",
        "attn_k_norm.weight": "self_attn.k_layernorm.weight",
        "attn_output.weight": "self_attn.out_proj.weight",
        "ffn_gate.weight": "feed_forward.w1.weight",
        "ffn_up.weight": "feed_forward.w3.weight",
        "ffn_down.weight": "feed_forward.w2.weight",
        "ffn_gate_inp.weight": "feed_forward.gate.weight",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    }
    experts = {
        "ffn_gate_exps.weight": "w1",
        "ffn_up_exps.weight": "w3",
        "ffn_down_exps.weight": "w2",
    }
    others = {
        "token_embd.weight": "model.embed_tokens.weight",
        "token_embd_norm.weight": "model.embedding_norm.weight",
        "output.weight": "lm_head.weight",
    }
    used = set()
    for gguf, (_, values) in read_tensors(tmp_path / "out.gguf").items():
        if gguf in others:
            theirs = [others[gguf]]
        else:
            _, layer, part = gguf.split(".", 2)
            hf = f"model.layers.{layer}."
            if part in experts:
                expert = f"{hf}feed_forward.experts.{{}}.{experts[part]}.weight"
                theirs = [expert.format(i) for i in range(6)]
            else:
                theirs = [hf + names[part]]
        used |= set(theirs)
        expected = np.stack([source[name] for name in theirs]).reshape(values.shape)
        np.testing.assert_array_equal(values, expected)
    assert source.keys() - used <= {"lm_head.weight"}


@reference
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_first_checkpoints(tmp_path: Path, name: str) -> None:
    """LiquidAI's has block_ff_dim, tie_embedding and rope_theta instead of transformers' keys."""
    make_checkpoint(tmp_path, name)
    convert(tmp_path, tmp_path / "out.gguf")
    config = read_json(tmp_path / "config.json")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["tie_embedding"] = config["tie_word_embeddings"]
    config["tie_word_embeddings"] = not config["tie_word_embeddings"]
    if name != "lfm2moe":
        config["block_ff_dim"] = config["intermediate_size"]
        config["intermediate_size"] = 12345
    write_json(tmp_path / "config.json", config)
    convert(tmp_path, tmp_path / "first.gguf")
    assert (tmp_path / "first.gguf").read_bytes() == (tmp_path / "out.gguf").read_bytes()


@reference
def test_head_of_its_own_in_a_first_checkpoint(tmp_path: Path) -> None:
    """transformers 5 reads it so: such a head is not tied, although tie_embedding says so."""
    import torch
    import transformers
    from safetensors.numpy import save_file

    weights = make_checkpoint(tmp_path, "lfm2")
    weights["lm_head.weight"] = -weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", config | {"tie_embedding": True})
    convert(tmp_path, tmp_path / "out.gguf", "f32")
    head = read_tensors(tmp_path / "out.gguf")["output.weight"][1]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    np.testing.assert_array_equal(head, model.lm_head.weight.detach().numpy())
    np.testing.assert_array_equal(head, weights["lm_head.weight"])


@reference
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_state_of_a_file_and_of_the_model(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, name)
    convert(tmp_path, tmp_path / "out.gguf")
    shape = ModelShape.of_file(tmp_path / "out.gguf")
    model = _core.Model(tmp_path / "out.gguf", device="cpu", threads=1)
    assert shape == ModelShape.of(model)
    m = METADATA[name]
    n_floats = (m["shortconv.l_cache"] - 1) * m["embedding_length"]  # type: ignore[operator]
    kv_heads: Any = m["attention.head_count_kv"]
    assert shape.state_floats == tuple(0 if n else n_floats for n in kv_heads)
    assert main(["info", "--json", str(tmp_path / "out.gguf")]) == 0
    assert json.loads(capsys.readouterr().out)["kv_heads"] == max(kv_heads)
    n = capacity(tmp_path / "out.gguf", 100_000)
    with Generator(tmp_path / "out.gguf", memory=100_000, threads=1) as generator:
        assert generator.max_sequences == n
        assert generator.stats().cache_bytes <= 100_000


@reference
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count_kv", [0, 0, 2], "has 3 counts, expected 4"),
        ("attention.head_count_kv", [0, 2, 4, 0], "differs between the layers that have it"),
        ("attention.head_count_kv", [0, 0, 0, 0], "is 0, expected 1 to"),
        ("attention.head_count_kv", [0, 2, 0, 0], r"tensor blk\.1\.attn_q\.weight is missing"),
        ("shortconv.l_cache", 1, "is 1, expected 2 to 8"),
        ("shortconv.l_cache", 9, "is 9, expected 2 to 8"),
        ("shortconv.l_cache", 4, r"conv\.weight has shape \[48, 3\], expected \[48, 4\]"),
    ],
)
def test_files_that_contradict_themselves(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    make_checkpoint(tmp_path, "lfm2")
    convert(tmp_path, tmp_path / "out.gguf")
    kind = GGUFValueType.ARRAY if isinstance(value, list) else GGUFValueType.UINT32
    path = changed(tmp_path / "out.gguf", tmp_path / "m.gguf", {f"lfm2.{key}": (value, kind)}, {})
    with pytest.raises(ValueError, match=message):
        Generator(path)


CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 50,
}


def metadata(architecture: str = "Lfm2ForCausalLM", **config: object) -> dict[str, Any]:
    family = FAMILIES[architecture]
    return dict(family.metadata({**family.absent, **CONFIG, **config}))


@packages("transformers")
def test_absent_keys_have_the_defaults_of_transformers() -> None:
    import transformers

    for model in ("Lfm2", "Lfm2Moe"):
        theirs = getattr(transformers, f"{model}Config")()
        for key, value in FAMILIES[f"{model}ForCausalLM"].absent.items():
            if key == "rope_theta":
                assert theirs.rope_parameters["rope_theta"] == value
            else:
                assert getattr(theirs, key) == value, key


@packages("transformers")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"block_ff_dim": 1000},
        {"block_ff_dim": 1000, "block_multiple_of": 7, "block_ffn_dim_multiplier": 1.3},
        {"intermediate_size": 1000, "block_auto_adjust_ff_dim": False},
    ],
)
def test_size_of_the_mlp(config: dict[str, Any]) -> None:
    import transformers

    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**(CONFIG | config)))
    size = model.model.layers[0].feed_forward.w1.out_features
    assert metadata("Lfm2ForCausalLM", **config)["feed_forward_length"] == size


def test_layers_with_attention() -> None:
    def kv_heads(**config: Any) -> Any:
        return metadata(**config)["attention.head_count_kv"]

    assert kv_heads() == [2, 2, 2]
    assert kv_heads(full_attn_idxs=[1]) == [0, 2, 0]
    kinds = ["conv", "full_attention", "full_attention"]
    assert kv_heads(full_attn_idxs=[0], layer_types=kinds) == [0, 2, 2]


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("Lfm2", {"conv_bias": True}, "conv_bias is True: the convolutions have biases"),
        ("Lfm2", {"conv_L_cache": 0}, "conv_L_cache must be an integer from 1"),
        ("Lfm2", {"layer_types": ["conv"]}, "layer_types must name one of conv, full_attention"),
        ("Lfm2", {"full_attn_idxs": [3]}, "full_attn_idxs must list layers from 0 to 2, found [3]"),
        ("Lfm2", {"full_attn_idxs": 1}, "full_attn_idxs must list layers from 0 to 2, found 1"),
        ("Lfm2", {"rope_parameters": {"rope_type": "llama3"}}, "rope_type is 'llama3': only"),
        ("Lfm2Moe", {"use_expert_bias": False}, "use_expert_bias is False: the scores of"),
        ("Lfm2Moe", {"norm_topk_prob": False}, "norm_topk_prob is False: the weights of"),
        ("Lfm2Moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor is 2.0: the weights"),
    ],
)
def test_what_a_file_cannot_express_is_refused(
    architecture: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        metadata(f"{architecture}ForCausalLM", **config)
