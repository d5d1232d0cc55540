"""State-space models (Mamba-2) beside attention: Granite 4 h, Bamba, Falcon-H1, Nemotron-H.

Logits are compared in test_logits.py, states in test_hybrid_models.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType

from h2o_cpp import Generator
from h2o_cpp.cli import main
from h2o_cpp.convert import convert
from h2o_cpp.convert.conversion import family_of
from support.changed_gguf import changed
from support.llama_cpp_tensors import assert_tensors
from support.needs import packages
from support.opt_checkpoint import read_metadata
from support.random_models import STATE_SPACES, make_model, random_tokens, save_checkpoint
from support.rounded_weights import check_rounded_weights

reference = packages("torch", "transformers", "safetensors")
Shapes = dict[str, tuple[int, ...]]


def make_file(path: Path, name: str, outtype: str = "f32") -> Path:
    save_checkpoint(make_model(STATE_SPACES[name], seed=5), path)
    assert convert(path, path / "out.gguf", outtype) == []
    return path / "out.gguf"


def llama_cpp_shapes(metadata: dict[str, Any]) -> Shapes:
    """Name -> shape, rows first, as llama.cpp loads these architectures."""
    architecture = metadata["general.architecture"]
    m = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    n_embd, n_layer, n_vocab = m["embedding_length"], m["block_count"], m["vocab_size"]
    n_head = m["attention.head_count"]
    head = m.get("attention.key_length", n_embd // n_head)
    inner, n_ssm_head, groups = (
        m[f"ssm.{key}"] for key in ("inner_size", "time_step_rank", "group_count")
    )
    channels = inner + 2 * groups * m["ssm.state_size"]
    mamba: Shapes = {
        "ssm_in.weight": (inner + channels + n_ssm_head, n_embd),
        "ssm_conv1d.weight": (channels, m["ssm.conv_kernel"]),
        "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (n_ssm_head,),
        "ssm_a": (n_ssm_head, 1),
        "ssm_d": (n_ssm_head, 1),
        "ssm_norm.weight": (groups, inner // groups),
        "ssm_out.weight": (n_embd, inner),
    }
    shapes: Shapes = {
        "token_embd.weight": (n_vocab, n_embd),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_vocab, n_embd),
    }
    for i in range(n_layer):
        layer: Shapes = {"attn_norm.weight": (n_embd,)}
        kv_heads, ff = m["attention.head_count_kv"], m["feed_forward_length"]
        n_kv = kv_heads[i] if isinstance(kv_heads, list) else kv_heads
        n_ff = ff[i] if isinstance(ff, list) else ff
        if n_kv:
            layer |= {
                "attn_q.weight": (n_head * head, n_embd),
                "attn_k.weight": (n_kv * head, n_embd),
                "attn_v.weight": (n_kv * head, n_embd),
                "attn_output.weight": (n_embd, n_head * head),
            }
        single = architecture.startswith("nemotron_h")
        if architecture == "falcon-h1" or (not n_kv and not (single and n_ff)):
            layer |= mamba
        if not single:
            layer["ffn_norm" if architecture == "falcon-h1" else "ffn_norm.weight"] = (n_embd,)
        if n_ff:
            layer |= feed_forward(m, n_ff, gated=not single)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def feed_forward(m: dict[str, Any], n_ff: int, *, gated: bool) -> Shapes:
    n_embd, n = m["embedding_length"], m.get("expert_count")
    parts = ["gate", "up"] if gated else ["up"]
    if n is None:
        mlp: Shapes = {f"ffn_{part}.weight": (n_ff, n_embd) for part in parts}
        return mlp | {"ffn_down.weight": (n_embd, n_ff)}
    shared = m["expert_shared_feed_forward_length"]
    layer: Shapes = {f"ffn_{part}_exps.weight": (n, n_ff, n_embd) for part in parts}
    layer |= {f"ffn_{part}_shexp.weight": (shared, n_embd) for part in parts}
    layer |= {
        "ffn_gate_inp.weight": (n, n_embd),
        "ffn_down_exps.weight": (n, n_embd, n_ff),
        "ffn_down_shexp.weight": (n_embd, shared),
    }
    return layer | ({} if gated else {"exp_probs_b.bias": (n,)})


@reference
@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
@pytest.mark.parametrize("name", STATE_SPACES)
def test_names_shapes_and_types(tmp_path: Path, name: str, outtype: str) -> None:
    path = make_file(tmp_path, name, outtype)
    shapes = llama_cpp_shapes(read_metadata(path))
    options = STATE_SPACES[name].options
    without = [] if options.get("mamba_conv_bias", True) else ["ssm_conv1d.bias"]
    if name == "falcon_h1":
        without.append("ssm_norm.weight")
    shapes = {one: shape for one, shape in shapes.items() if not one.endswith(tuple(without))}
    assert_tensors(path, shapes, outtype)


@reference
@pytest.mark.parametrize(
    ("name", "outtype"),
    [("granite4h_moe", "bf16"), ("falcon_h1", "q8_0"), ("nemotron_h", "q8_0")],
)
def test_rounded_weights_change_logits_within_bound(
    tmp_path: Path, name: str, outtype: str
) -> None:
    check_rounded_weights(tmp_path, STATE_SPACES[name], outtype, seed=7)


@reference
@pytest.mark.parametrize("name", ["granite4h", "bamba", "falcon_h1", "nemotron_h_moe"])
def test_greedy_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    """Which computes them by a recurrence, and prompts in chunks."""
    import torch

    model = make_model(STATE_SPACES[name], seed=6)
    model.generation_config.eos_token_id = None  # ignored
    save_checkpoint(model, tmp_path)
    convert(tmp_path, tmp_path / "out.gguf", "f32")
    prompt = random_tokens(1)[:11].tolist()
    greedy = model.double().generate(torch.tensor(prompt)[None], max_new_tokens=24, do_sample=False)
    with Generator(tmp_path / "out.gguf", kv_dtype="f32", threads=2) as generator:
        stream = generator.stream(prompt, max_tokens=24, temperature=0, ignore_eos=True)
        "".join(stream)
    assert stream.tokens.tolist() == greedy[0, len(prompt) :].tolist()


@reference
def test_a_budget_is_for_attention_beside_states(tmp_path: Path) -> None:
    """Each layer of Falcon-H1 has both; sequences of a batch do not share states."""
    path = make_file(tmp_path, "falcon_h1")
    prompts = [random_tokens(seed)[:n].tolist() for seed, n in ((1, 30), (2, 17))]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with Generator(path, hh=8, threads=2) as generator:
        alone = [generator.generate(prompt, **options).text for prompt in prompts]
        layers = generator.stats(layers=True).layers
        assert [(layer.tokens_kept, layer.evictions) for layer in layers] == [(8, 14)] * 2
        assert [one.text for one in generator.generate(prompts, **options)] == alone
    with Generator(path, hh=8, threads=1) as generator:
        assert [one.text for one in generator.generate(prompts, **options)] == alone


@reference
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        (
            "granite4h",
            {
                "expert_shared_feed_forward_length": 36,
                "expert_count": 0,
                "expert_used_count": 0,
                "attention.layer_norm_epsilon": 1e-5,
            },
        ),
        ("granite4h_moe", {"expert_feed_forward_length": 40, "ssm.time_step_rank": 4}),
        (
            "nemotron_h_moe",
            {
                "rope.dimension_count": 12,
                "rope.freq_base": 10000.0,
                "rope.scaling.finetuned": False,
                "expert_group_count": 1,
                "expert_weights_norm": True,
            },
        ),
        (
            "nemotron_h_moe",  # with a layer for further tokens
            {
                "block_count": 6,
                "nextn_predict_layers": 1,
                "attention.head_count_kv": [0, 0, 0, 2, 0, 2],
                "feed_forward_length": [0, 24, 0, 0, 24, 24],
            },
        ),
        ("falcon_h1", {"rope.scaling.type": "none"}),
    ],
)
def test_further_keys_of_llama_cpp(tmp_path: Path, name: str, keys: dict[str, Any]) -> None:
    path = make_file(tmp_path, name)
    prefix = read_metadata(path)["general.architecture"]
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
        list: GGUFValueType.ARRAY,
    }
    more = {f"{prefix}.{key}": (value, kinds[type(value)]) for key, value in keys.items()}
    other = changed(path, tmp_path / "more.gguf", more, {})
    with Generator(path) as one, Generator(other) as two:
        np.testing.assert_array_equal(one.logits([5, 6, 7]), two.logits([5, 6, 7]))


@reference
def test_info_about_layers_of_one_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json", str(make_file(tmp_path, "nemotron_h_moe"))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["feed_forward_width"], found["kv_heads"]) == (24, 2)


@reference
def test_nemotron_with_one_kind_of_epsilon(tmp_path: Path) -> None:
    """The norms are RMS norms, but config.json, and so files of llama.cpp, may say otherwise."""
    path = make_file(tmp_path, "nemotron_h")
    rms = "nemotron_h.attention.layer_norm_rms_epsilon"
    other = changed(path, tmp_path / "other.gguf", {}, {}, without=[rms])
    with Generator(path) as one, Generator(other) as two:
        np.testing.assert_array_equal(one.logits([5, 6, 7]), two.logits([5, 6, 7]))


@reference
@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("granite4h", "ssm.inner_size", 68, "is 68, expected ssm.time_step_rank 4 heads of a mul"),
        ("granite4h", "ssm.time_step_rank", 3, "is 64, expected ssm.time_step_rank 3 heads of a"),
        ("granite4h", "ssm.group_count", 3, "time_step_rank 4 is not a multiple of ssm.group_c"),
        ("granite4h", "ssm.state_size", 2000, "is 2000, expected at most 1024"),
        ("granite4h", "ssm.state_size", 32, r"has shape \[228, 32\], expected \[260, 32\]"),
        ("granite4h", "ssm.conv_kernel", 1, "is 1, expected 2 to 8"),
        ("granite4h", "attention.head_count_kv", [0, 0, 2], "has 3 counts, expected 4"),
        ("granite4h", "attention.head_count_kv", [2, 0, 2, 0], r"blk\.0\.attn_q\.weight is miss"),
        ("nemotron_h", "feed_forward_length", [0, 0, 40, 0, 40, 0], r"blk\.1\.ssm_in\.weight is "),
        ("nemotron_h", "feed_forward_length", [0, 40, 0, 40, 40, 0], "layer 3 has attention and a"),
        ("nemotron_h", "feed_forward_length", [0, 40, 0, 0, 44, 0], "differs between the layers"),
        ("nemotron_h", "attention.head_count_kv", 2, "layer 1 has attention and a feed-forward"),
    ],
)
def test_files_that_contradict_themselves(
    tmp_path: Path, name: str, key: str, value: Any, message: str
) -> None:
    path = make_file(tmp_path, name)
    prefix = read_metadata(path)["general.architecture"]
    kind = GGUFValueType.ARRAY if isinstance(value, list) else GGUFValueType.UINT32
    bad = changed(path, tmp_path / "bad.gguf", {f"{prefix}.{key}": (value, kind)}, {})
    with pytest.raises(ValueError, match=message):
        Generator(bad)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "vocab_size": 50,
    "mamba_n_heads": 4,
}
GRANITE = {"layer_types": ["mamba", "attention"], "num_local_experts": 0}


def metadata(model: str, **config: object) -> tuple[str, dict[str, Any]]:
    """The architecture and the metadata of a config.json."""
    given = {"architectures": [f"{model}ForCausalLM"], **SIZES, **config}
    family = family_of(given)
    whole = {**family.absent, **given}
    assert list(family.tensors(whole))
    return family.architecture, dict(family.metadata(whole))


def test_granites_with_attention_alone() -> None:
    kinds = {"layer_types": ["attention"] * 2}
    architecture, found = metadata("GraniteMoeHybrid", **GRANITE | kinds)
    assert architecture == "granite"
    assert found["rope.scaling.finetuned"] is False
    assert "ssm.state_size" not in found
    rope = {"num_local_experts": 4, "position_embedding_type": "rope"}
    architecture, found = metadata("GraniteMoeHybrid", **GRANITE | kinds | rope)
    assert architecture == "granitemoe"
    assert "rope.scaling.finetuned" not in found
    assert found["expert_shared_feed_forward_length"] == 1024


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ("GraniteMoeHybrid", GRANITE | {"mamba_d_head": 8}, "mamba_d_head is 8: 4 heads"),
        ("GraniteMoeHybrid", GRANITE | {"mamba_n_heads": 7}, "7 heads of this size"),
        ("GraniteMoeHybrid", GRANITE | {"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        ("GraniteMoeHybrid", GRANITE | {"time_step_limit": [0.0, 1.0]}, "time_step_limit is"),
        ("GraniteMoeHybrid", GRANITE | {"layer_types": ["mamba"]}, "layer_types must name one of"),
        ("Bamba", {"mlp_bias": True}, "mlp_bias is True"),
        ("FalconH1", {"mamba_d_ssm": 64, "ssm_multipliers": [1.0]}, "must have 5 numbers"),
        ("FalconH1", {"mamba_d_ssm": 64, "mamba_rms_norm": True}, "mamba_norm_before_gate is True"),
        ("NemotronH", {"hybrid_override_pattern": "M?"}, "must have the kinds of all layers"),
        ("NemotronH", {"layers_block_type": ["mlp", "moe"]}, "some layers are an MLP and some"),
        ("NemotronH", {"layers_block_type": ["moe"], "moe_latent_size": 8}, "moe_latent_size is 8"),
    ],
)
def test_refused_configs(model: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metadata(model, **config)


@pytest.mark.parametrize("limit", [None, [0.0, float("inf")], [0, {"__float__": "Infinity"}]])
def test_time_steps_without_a_limit(limit: object) -> None:
    metadata("GraniteMoeHybrid", **GRANITE, time_step_limit=limit)
