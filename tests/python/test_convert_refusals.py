"""Errors of the converter: each names the cause, and no file is written."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from h2o_cpp.convert import convert
from h2o_cpp.convert.checkpoint import open_tensors
from support import rotary_checkpoint
from support.needs import packages
from support.opt_checkpoint import (
    CONFIG,
    MERGES,
    TOKENS,
    make_checkpoint,
    random_weights,
    write_json,
    write_safetensors,
    write_shards,
    write_tokenizer_json,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "tiny")
    return tmp_path / "tiny"


def assert_refused(
    checkpoint: Path, message: str, error: type[Exception] = ValueError, outtype: str = "f16"
) -> None:
    """Check that conversion raises `error` with this message and writes no file."""
    output = checkpoint / "out"
    output.mkdir(exist_ok=True)
    with pytest.raises(error, match=re.escape(message)):
        convert(checkpoint, output / "out.gguf", outtype)
    assert not list(output.iterdir())


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@packages("torch")
def test_invalid_pytorch_files_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    import torch

    (checkpoint / "model.safetensors").unlink()
    weights = checkpoint / "pytorch_model.bin"
    exploit = Exploit(tmp_path / "exploited")
    for state in ({"a": exploit}, [1, 2], {"a": "text"}):
        torch.save(state, weights)
        assert_refused(checkpoint, "pytorch_model.bin: ")
    assert not exploit.path.exists()
    numbers = {name: torch.tensor(values).int() for name, values in random_weights(CONFIG).items()}
    torch.save(numbers, weights)
    assert_refused(checkpoint, "has an unsupported type, expected f64, f32, f16 or bf16")
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(checkpoint, "pytorch_model.bin: not a readable PyTorch weights file")


def test_pytorch_files_need_torch(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert_refused(checkpoint, "pip install torch")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_layer_norm_before", False),  # opt-350m
        ("_remove_final_layer_norm", True),
        ("activation_function", "gelu"),  # Galactica
        ("enable_bias", False),
        ("layer_norm_elementwise_affine", False),
        ("word_embed_proj_dim", 32),
        ("num_attention_heads", 7),
        ("hidden_size", None),
        ("ffn_dim", -1),
        ("num_hidden_layers", "2"),
        ("vocab_size", True),
        ("bos_token_id", 12),
        ("architectures", ["MptForCausalLM"]),
        ("architectures", None),
    ],
)
def test_unsupported_opt_config_is_rejected(
    checkpoint: Path, tmp_path: Path, key: str, value: object
) -> None:
    (checkpoint / "special_tokens_map.json").unlink()  # so that bos_token_id is read
    write_json(checkpoint / "config.json", CONFIG | {key: value})
    assert_refused(checkpoint, f"config.json: {key} ")
    assert_refused(checkpoint, repr(value))


@pytest.mark.parametrize(
    ("architecture", "needs"),
    [
        ("Mamba2ForCausalLM", "state-space"),
        ("NemotronHForCausalLM", "state-space"),
        ("Qwen3NextForCausalLM", "Gated DeltaNet"),
        ("DeepseekV3ForCausalLM", "multi-head latent attention"),
        ("LlavaForConditionalGeneration", "an encoder of pictures"),
    ],
)
def test_unsupported_architecture_names_missing_feature(
    checkpoint: Path, architecture: str, needs: str
) -> None:
    write_json(checkpoint / "config.json", CONFIG | {"architectures": [architecture]})
    assert_refused(checkpoint, f"architectures is '{architecture}', which needs ")
    assert_refused(checkpoint, needs)


def rope(**parameters: object) -> dict[str, object]:
    return {"rope_parameters": parameters}


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': the MLP does not use SiLU"),
        ("llama", {"num_attention_heads": 7}, "num_attention_heads is 7: "),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3: "),
        ("llama", {"head_dim": 15}, "head_dim is 15: "),
        ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ("llama", {"rope_theta": "1e4"}, "rope_theta must be a positive number"),
        ("llama", {"max_position_embeddings": None}, "max_position_embeddings must be"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", rope(rope_type="dynamic", factor=2.0), "rope_type is 'dynamic': "),
        ("llama", rope(rope_type="longrope"), "rope_type is 'longrope': "),
        ("llama", {"rope_scaling": {"type": "su"}}, "rope_type is 'su': "),
        ("llama", rope(rope_type="linear"), "factor must be a positive number, found None"),
        ("llama", rope(rope_type="yarn", factor=2, truncate=False), "truncate is False: "),
        ("llama", rope(rope_type="yarn", factor=2, mscale=1.0), "mscale is 1.0: "),
        ("llama", rope(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5: "),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "differs between layers"),
        (
            "llama",
            rope(
                rope_type="llama3",
                factor=8,
                low_freq_factor=2,
                high_freq_factor=1,
                original_max_position_embeddings=8,
            ),
            "high_freq_factor 1.0 must be above 2.0",
        ),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window must be true or false"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
            "sliding_window must be a",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types must name one of full_attention, sliding_attention for each of 2 layers",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias is True: "),
        ("qwen2", {"is_causal": False}, "is_causal is False: "),
        (
            "llama",
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
            "no_rope_layers is [1, 0]: not every fourth layer is unrotated",
        ),
        (
            "llama",
            {"architectures": ["GraniteForCausalLM"], "mlp_bias": True},
            "mlp_bias is True: there are biases",
        ),
        (
            "llama",
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "silu"},
            "hidden_activation is 'silu': the MLP does not use GELU",
        ),
        (
            "llama",
            {
                "architectures": ["Gemma3ForCausalLM"],
                "hidden_activation": "gelu_pytorch_tanh",
                "layer_types": ["full_attention", "linear"],
            },
            "layer_types must name one of",
        ),
        (
            "llama",
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "longrope", "long_factor": [1.0]},
            },
            "original_max_position_embeddings must be an integer",
        ),
        (
            "llama",
            {"architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu"},
            "hidden_act is 'gelu': the MLP does not use GELU's form with tanh",
        ),
        (
            "llama",
            {"architectures": ["StableLmForCausalLM"], "qk_layernorm": True},
            "qk_layernorm is True: q and k are normalized",
        ),
        (
            "llama",
            {"architectures": ["CohereForCausalLM"], "use_qk_norm": True},
            "use_qk_norm is True: q and k are normalized",
        ),
        ("gptneox", {"hidden_act": "relu"}, "hidden_act is 'relu': the MLP does not use GELU"),
        ("gptneox", {"attention_bias": False}, "attention_bias is False: "),
        ("gptneox", {"tie_word_embeddings": True}, "tie_word_embeddings is True: "),
        ("gptneox", {"num_attention_heads": 7}, "num_attention_heads is 7: "),
        ("gptneox", {"rotary_pct": 0.1}, "partial_rotary_factor is 0.1: "),
        ("gptneox", {"rotary_pct": 1.5}, "partial_rotary_factor is 1.5: "),
        ("gptneox", {"rotary_pct": "all"}, "partial_rotary_factor must be a positive number"),
        ("gptneox", {"use_parallel_residual": 1}, "use_parallel_residual must be true or false"),
    ],
)
def test_unsupported_config_of_other_families_is_rejected(
    tmp_path: Path, architecture: str, config: dict[str, object], message: str
) -> None:
    rotary_checkpoint.make_checkpoint(tmp_path, architecture)
    write_json(tmp_path / "config.json", rotary_checkpoint.CONFIGS[architecture] | config)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff", "[" * 100_000])
def test_malformed_config_json_is_rejected(checkpoint: Path, tmp_path: Path, text: str) -> None:
    (checkpoint / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(checkpoint, "config.json")


def test_wrong_tensors_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    for name, values, message in (
        ("decoder.layers.1.fc1.bias", None, "decoder.layers.1.fc1.bias is missing"),
        (
            "decoder.layers.1.fc1.bias",
            np.zeros((96, 1)),
            "has shape [96, 1], expected [96] by config.json",
        ),
        (
            "decoder.project_in.weight",
            np.zeros((64, 32)),
            "project_in.weight is unknown in architecture",
        ),
        ("decoder.embed_tokens.weight", np.full((12, 64), 1e6), "range of f16"),
    ):
        weights = random_weights(CONFIG)
        weights.pop(f"model.{name}", None)
        if values is not None:
            weights[f"model.{name}"] = values
        write_safetensors(checkpoint / "model.safetensors", weights)
        assert_refused(checkpoint, message)


def test_wrong_shards_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    weight_map = write_shards(checkpoint, ["a.safetensors", "b.safetensors"])
    index = checkpoint / "model.safetensors.index.json"
    write_json(index, {"weight_map": weight_map | {"more": "a.safetensors"}})
    assert_refused(checkpoint, "tensor more is not in shard a.safetensors")
    write_json(index, {"weight_map": {"x": "../tiny/a.safetensors"}})
    assert_refused(checkpoint, "weight_map")
    write_json(index, {"weight_map": weight_map})
    (checkpoint / "b.safetensors").unlink()
    assert_refused(checkpoint, "shard b.safetensors is missing")


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [
        ("config.json", FileNotFoundError, "config.json: no such file"),
        ("model.safetensors", FileNotFoundError, "no weights"),
        ("merges.txt", FileNotFoundError, "no tokenizer"),
    ],
)
def test_missing_files(checkpoint: Path, file: str, error: type[Exception], message: str) -> None:
    (checkpoint / file).unlink()
    assert_refused(checkpoint, message, error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("normalizer", {"type": "NFKC"}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": []}),
        ("pre_tokenizer.use_regex", False),
        ("pre_tokenizer.add_prefix_space", True),
        ("model.type", "Unigram"),
        ("model.byte_fallback", True),
        ("model.ignore_merges", True),
        ("model.dropout", 0.1),
        ("model.end_of_word_suffix", "</w>"),
        ("model.vocab", ["a"]),
        ("model.merges", []),
        ("model.merges", ["a b c"]),
        ("model.merges", ["a ab"]),  # aab is not a token
        ("added_tokens", [{"id": 4, "content": "</s>"}]),
        ("added_tokens", [{"id": 4, "content": "<new>"}]),
        ("added_tokens", [{"id": 12, "content": "<new>"}]),  # beyond vocab_size
        ("added_tokens", ["<new>"]),
    ],
)
def test_unsupported_tokenizers_are_rejected(checkpoint: Path, key: str, value: object) -> None:
    write_tokenizer_json(checkpoint, {key: value})
    assert_refused(checkpoint, str(checkpoint))


def test_error_names_tokenizer_setting(checkpoint: Path) -> None:
    write_tokenizer_json(checkpoint, {"pre_tokenizer": {"type": "Whitespace"}})
    assert_refused(
        checkpoint,
        "tokenizer.json: llama.cpp has no name for normalizer null"
        ' and pre_tokenizer {"type": "Whitespace"} with ignore_merges false',
    )
    write_json(checkpoint / "tokenizer_config.json", {"bos_token": "<begin>"})
    write_tokenizer_json(checkpoint)
    assert_refused(checkpoint, "bos_token '<begin>' is not in the vocabulary")
    write_json(checkpoint / "tokenizer_config.json", {"add_prefix_space": True})
    assert_refused(checkpoint, "tokenizer_config.json: add_prefix_space is true")


def test_more_tokens_than_vocab_size_are_rejected(checkpoint: Path) -> None:
    write_json(checkpoint / "vocab.json", {token: i for i, token in enumerate(TOKENS)} | {"c": 12})
    assert_refused(checkpoint, "token ids 0 to 12, but config.json has vocab_size 12")


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", ["decoder.layers.0.fc1.weight", "decoder.final_layer_norm.bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e300])
def test_non_finite_weights_are_rejected(
    checkpoint: Path, name: str, value: float, outtype: str
) -> None:
    """Includes a float64 value that overflows float32."""
    weights = {key: array.astype(np.float64) for key, array in random_weights(CONFIG).items()}
    weights[f"model.{name}"].flat[-1] = value
    write_safetensors(checkpoint / "model.safetensors", weights, dtype="F64")
    assert_refused(checkpoint, f"{name} has values that are NaN or infinite", outtype=outtype)


@pytest.mark.parametrize(
    ("outtype", "most"), [("f16", 65504), ("bf16", 2.0**128 - 2.0**120), ("q8_0", 127 * 65504)]
)
def test_weights_beyond_range_of_type_are_rejected(
    checkpoint: Path, outtype: str, most: float
) -> None:
    name = "decoder.layers.0.fc1.weight"
    weights = random_weights(CONFIG)
    weights[f"model.{name}"].flat[-1] = -most
    weights["model.decoder.final_layer_norm.bias"].flat[0] = np.finfo(np.float32).max  # stays f32
    write_safetensors(checkpoint / "model.safetensors", weights)
    convert(checkpoint, checkpoint / "most.gguf", outtype)
    (tensor, *_) = (t for t in GGUFReader(checkpoint / "most.gguf").tensors if "up.w" in t.name)
    assert np.isfinite(dequantize(tensor.data, tensor.tensor_type)).all()
    weights[f"model.{name}"].flat[-1] = np.nextafter(np.float32(most), np.float32(np.inf))
    write_safetensors(checkpoint / "model.safetensors", weights)
    assert_refused(checkpoint, f"beyond the range of {outtype}; use", outtype=outtype)


@pytest.mark.parametrize("key", ["max_position_embeddings", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [2**31, 2**63, 10**400])
def test_sizes_beyond_32_bits_are_rejected(checkpoint: Path, key: str, value: int) -> None:
    write_json(checkpoint / "config.json", CONFIG | {key: value})
    assert_refused(checkpoint, f"{key} must be an integer from 1 to 2^31 - 1, found {value}")


def test_malformed_merges_are_rejected(checkpoint: Path) -> None:
    (checkpoint / "merges.txt").write_bytes(b"\xff")
    assert_refused(checkpoint, "merges.txt: not UTF-8")
    (checkpoint / "merges.txt").write_text(f"{MERGES[0]}\nnonsense\n", encoding="utf-8")
    assert_refused(checkpoint, "merges.txt: malformed merge 'nonsense'")


def test_invalid_outputs_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        convert(checkpoint, tmp_path / "nowhere" / "out.gguf")
    with pytest.raises(ValueError, match="not a regular file"):
        convert(checkpoint, tmp_path)
    assert_refused(checkpoint, "unknown outtype 'q4_k'", outtype="q4_k")


def test_output_that_is_an_input_is_rejected(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by relative path, hard link or symbolic link."""
    weights = checkpoint / "model.safetensors"
    before = weights.read_bytes()
    monkeypatch.chdir(checkpoint)
    (tmp_path / "hard.gguf").hardlink_to(weights)
    (tmp_path / "soft.gguf").symlink_to(weights)
    (checkpoint / "beside.gguf").hardlink_to(weights)
    names = [weights, Path("model.safetensors"), Path("beside.gguf"), checkpoint / "config.json"]
    for output in (*names, tmp_path / "hard.gguf", tmp_path / "soft.gguf"):
        with pytest.raises(ValueError, match="a file of the checkpoint") as error:
            convert(checkpoint, output)
        assert str(error.value).startswith(f"{output}: the output is ")
    assert weights.read_bytes() == before
    Path("beside.gguf").unlink()
    for _ in range(2):  # another file in the checkpoint directory is fine
        convert(checkpoint, Path("beside.gguf"))


def test_corrupt_safetensors_are_rejected(tmp_path: Path) -> None:
    """Every truncation raises; a changed byte of the header raises or keeps shapes consistent."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.ones((2, 3)), "b": np.ones(4)})
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors: not a readable"):
            open_tensors(tmp_path)
    for i in range(len(good) - 40):
        for byte in b'\x00\xff"9.-[{':
            path.write_bytes(good[:i] + bytes([byte]) + good[i + 1 :])
            try:
                tensors = open_tensors(tmp_path)
            except ValueError:
                continue
            for tensor in tensors.values():
                assert tensor.read is None or tensor.read().shape == tensor.shape
