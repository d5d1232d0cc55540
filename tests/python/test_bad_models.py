"""Well-formed GGUF files with invalid models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType

from h2o_cpp import Generator, KVCache, Policy, _core
from support.changed_gguf import changed
from support.llama_gguf import write_gguf
from support.needs import LINUX

N_EMBD, HEAD_DIM = 48, 12  # of tests/data/golden/llama_gqa2_tied.gguf

F32, F64, STRING = GGUFValueType.FLOAT32, GGUFValueType.FLOAT64, GGUFValueType.STRING
U32, BOOL = GGUFValueType.UINT32, GGUFValueType.BOOL


def test_unchanged_copy_has_same_logits(llama: Path, tmp_path: Path) -> None:
    tokens = np.arange(3, 20)
    with (
        Generator(llama) as original,
        Generator(changed(llama, tmp_path / "m.gguf", {}, {})) as copy,
    ):
        np.testing.assert_array_equal(original.logits(tokens), copy.logits(tokens))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.rope.freq_base": (1e-50, F64)}, "freq_base"),
        ({"llama.rope.freq_base": (float("nan"), F32)}, "freq_base"),
        ({"llama.attention.layer_norm_rms_epsilon": (1e-50, F64)}, "layer_norm_rms_epsilon"),
        ({"llama.attention.scale": (-1.0, F32)}, "attention.scale"),
        (
            {"llama.rope.scaling.type": ("\x1b[2J" * 1000, STRING)},
            r"scaling.type is '\?\[2J.*\.\.\.'",
        ),
        (
            {
                "llama.rope.scaling.type": ("yarn", STRING),
                "llama.rope.scaling.attn_factor": (1e29, F32),
                "llama.rope.scaling.yarn_attn_factor": (1e29, F32),
            },
            "magnitude",
        ),
    ],
)
def test_numbers_out_of_range(
    llama: Path, tmp_path: Path, keys: dict[str, tuple[Any, GGUFValueType]], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"m\.gguf.*{message}") as error:
        Generator(changed(llama, tmp_path / "m.gguf", keys, {}))
    assert len(str(error.value)) < 1000


# Keys that change the arithmetic but no tensor: an unsupported value, and the neutral one.
ARITHMETIC = {
    "attention.causal": (False, True, BOOL),
    "attention.clamp_kqv": (8.0, 0.0, F32),
    "attention.max_alibi_bias": (8.0, 0.0, F32),
    "attn_logit_softcapping": (50.0, 0.0, F32),
    "embedding_scale": (12.0, 1.0, F32),
    "expert_used_count": (2, 0, U32),
    "final_logit_softcapping": (30.0, 0.0, F32),
    "logit_scale": (0.0625, 1.0, F32),
    "residual_scale": (0.22, 1.0, F32),
}


@pytest.mark.parametrize("key", ARITHMETIC)
def test_unsupported_arithmetic_is_rejected(llama: Path, tmp_path: Path, key: str) -> None:
    other, neutral, kind = ARITHMETIC[key]
    file = changed(llama, tmp_path / "neutral.gguf", {f"llama.{key}": (neutral, kind)}, {})
    with Generator(llama) as original, Generator(file) as copy:
        tokens = np.arange(3, 20)
        np.testing.assert_array_equal(original.logits(tokens), copy.logits(tokens))
    shown = str(other).lower() if kind is BOOL else rf"{other:g}"
    with pytest.raises(ValueError, match=rf"key 'llama\.{key}' is {shown}, which h2o does not"):
        Generator(changed(llama, tmp_path / "m.gguf", {f"llama.{key}": (other, kind)}, {}))


@pytest.mark.parametrize(
    ("key", "value", "kind", "shown"),
    [
        ("attention.kv_lora_rank", 512, U32, "512"),
        ("attention.q_lora_rank", 1536, U32, "1536"),
        ("ssm.state_size", 16, U32, "16"),
        ("rope.scaling.yarn_log_multiplier", 0.1, F32, "0.1"),
        ("something.of_tomorrow", "yes", STRING, "'yes'"),
    ],
)
def test_unknown_keys_are_rejected(
    llama: Path, tmp_path: Path, key: str, value: Any, kind: GGUFValueType, shown: str
) -> None:
    with pytest.raises(ValueError, match=rf"key 'llama\.{key}' is {shown}, which h2o does not"):
        Generator(changed(llama, tmp_path / "m.gguf", {f"llama.{key}": (value, kind)}, {}))


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [
        ("mamba2", "state-space"),
        ("kimi-linear", "linear attention"),
        ("rwkv7", "RWKV"),
        ("glm-dsa", "multi-head latent attention"),
        ("gemma3n", "several residual streams"),
        ("mimo2", "values of another size than keys"),
        ("step35", "gates of attention by head"),
        ("afmoe", "a tensor of gates of attention's outputs"),
        ("neo-bert", "an encoder"),
    ],
)
def test_unsupported_architecture_names_missing_feature(
    tmp_path: Path, architecture: str, missing: str
) -> None:
    write_gguf(tmp_path / "m.gguf", {}, {}, architecture)
    message = (
        rf"m\.gguf.*'{architecture}' is not supported: it needs .*{missing}.*supported: .*llama"
    )
    with pytest.raises(ValueError, match=message):
        Generator(tmp_path / "m.gguf")


def test_unknown_architecture_lists_supported_ones(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, {}, "mamba 2")
    with pytest.raises(ValueError, match=r"'mamba 2' is not supported; supported: .*llama"):
        Generator(tmp_path / "m.gguf")


@pytest.mark.parametrize("divisor", [0.0, float("nan"), 1e-45])
def test_invalid_rope_frequencies_are_rejected(llama: Path, tmp_path: Path, divisor: float) -> None:
    divisors = np.full(HEAD_DIM // 2, divisor, np.float32)
    with pytest.raises(ValueError, match="rotary frequency"):
        Generator(changed(llama, tmp_path / "m.gguf", {}, {"rope_freqs.weight": divisors}))


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "x\n"])
def test_unused_tensors_are_rejected(llama: Path, tmp_path: Path, name: str) -> None:
    """Otherwise the forward pass would silently ignore them."""
    extra = {name: np.ones(HEAD_DIM, np.float32)}
    with pytest.raises(ValueError, match="is not part of a 'llama' model"):
        Generator(changed(llama, tmp_path / "m.gguf", {}, extra))


@pytest.mark.parametrize("large", [6e4, -6e4])  # about the largest f16 value
@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8_0", "q5_0", "q4_0"])
def test_scores_are_finite_with_large_keys(large: float, kv_dtype: str) -> None:
    random = np.random.default_rng(0)
    cache = KVCache(2, 1, 32, Policy.h2o(3, 3), kv_dtype=kv_dtype)
    for step in range(40):
        q, k, v = (random.normal(size=(1 + step % 9, n, 32)).astype(np.float32) for n in (2, 1, 1))
        if step % 3 == 0:
            k[-1, 0, 5] = large
        cache.attend(q, k, v)
        assert np.all(np.isfinite(cache.scores()))
        assert len(cache.positions()) == min(len(cache), 6)


def test_core_rejects_invalid_arguments() -> None:
    """The core is private, but must not crash."""
    with pytest.raises(ValueError, match="n_vocab is 0"):
        _core.Sampler(0, _core.Sampling())
    with pytest.raises(TypeError):
        _core.Session(None, _core.SessionOptions())  # type: ignore[arg-type]


@LINUX  # RLIMIT_AS
def test_failure_to_start_threads_raises(tiny_opt: Path) -> None:
    """It raises, and the process survives."""
    program = f"""
import resource
from pathlib import Path
from h2o_cpp import _core
mapped = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**28, resource.RLIM_INFINITY))
try:
    _core.Model({str(tiny_opt)!r}, device="cpu", threads=1000)
except (RuntimeError, MemoryError):
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "refused\n", done.stderr


def test_positions_that_scale_queries_do_not_roll(llama: Path, tmp_path: Path) -> None:
    """Ministral 3 has this."""
    length = {"llama.attention.temperature_length": (16, GGUFValueType.UINT32)}
    scale = {"llama.attention.temperature_scale": (0.1, GGUFValueType.FLOAT32)}
    path = changed(llama, tmp_path / "m.gguf", {**length, **scale}, {})
    with pytest.raises(ValueError, match=r"original positions in the scale of its queries"):
        Generator(path, positions="rolling", policy=Policy.h2o(8, 8))
    with Generator(path, policy=Policy.h2o(8, 8)) as generator:
        assert not generator.endless
        output = generator.generate([5] * 30, max_tokens=-1, ignore_eos=True)
        assert output.completion_tokens == generator.n_ctx - 30 + 1
    with pytest.raises(ValueError, match="temperature_length"):  # unread without the scale
        Generator(changed(llama, tmp_path / "n.gguf", length, {}))


def test_counts_of_every_layer(llama: Path, tmp_path: Path) -> None:
    """Files of Granite 4 have it: an array of equal numbers is one number."""
    key, kind = "llama.attention.head_count_kv", GGUFValueType.ARRAY
    model = _core.Model(llama, device="cpu", threads=1)
    counts = [model.n_kv_heads] * model.n_layers
    with Generator(llama) as generator:
        expected = generator.logits([5, 6, 7])
    path = changed(llama, tmp_path / "m.gguf", {key: (counts, kind)}, {})
    with Generator(path) as generator:
        np.testing.assert_array_equal(generator.logits([5, 6, 7]), expected)
    with pytest.raises(ValueError, match=rf"{key} differs between layers"):
        Generator(changed(llama, tmp_path / "n.gguf", {key: ([1, 2], kind)}, {}))
