"""`h2o-cpp imatrix`: the sums of squared inputs of every matrix equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from h2o_cpp import BUNDLED_MODEL, Policy, _core
from h2o_cpp.cli import main
from h2o_cpp.model.session import open_model, open_session
from h2o_cpp.quantize import make_imatrix, quantize
from h2o_cpp.quantize.imatrix import read_imatrix
from support.converted_files import make_file
from support.needs import packages
from support.opt_checkpoint import read_tensors
from support.random_models import (
    RECIPES,
    float32_tolerance,
    make_model,
    random_tokens,
)

TEXT = "The old man looked at the sea, and said that no ship would ever come again. " * 20

Sums = dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]]


def sums_of(file: Path, tokens: NDArray[np.int64]) -> Sums:
    """The core's sums over a text evaluated in two chunks."""
    model = open_model(file, device="cpu", threads=2, exact=True)
    session = open_session(
        model, Policy.full(), n_ctx=len(tokens), n_batch=len(tokens), kv_dtype="f32"
    )
    matrix = _core.ImportanceMatrix(model)
    ids = tokens.astype(np.int32)
    for part in (ids[:7], ids[7:]):
        session.step([(0, part)])
    matrix.end()
    session.reset(0)
    session.step([(0, ids)])  # after end(): not counted
    return {name: (squares, counts) for name, squares, counts in matrix.sums()}


MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@packages("torch", "transformers")
def test_sums_equal_transformers(tmp_path: Path) -> None:
    import torch

    recipe = RECIPES["llama_gqa4"]
    model = make_model(recipe, 5)
    path = make_file(model, tmp_path)
    tokens = random_tokens(2)
    found = sums_of(path, tokens)

    inputs: dict[str, NDArray[np.float64]] = {}

    def record_input(name: str) -> Any:
        def hook(_module: object, args: tuple[Any, ...]) -> None:
            inputs[name] = args[0].detach().numpy()[0]

        return hook

    for layer in range(recipe.n_layers):
        for name, module in MODULES.items():
            of = model.model.layers[layer].get_submodule(module)
            of.register_forward_pre_hook(record_input(f"blk.{layer}.{name}.weight"))
    with torch.no_grad():
        model.double()(torch.as_tensor(tokens)[None])

    assert found.keys() == inputs.keys()
    for name, (squares, counts) in found.items():
        x = inputs[name]
        np.testing.assert_array_equal(counts, [len(tokens)])
        # |(x + e)^2 - x^2| is about 2 |x e| for each token.
        error = 2 * np.abs(x).max() * float32_tolerance(recipe, x) * len(tokens)
        np.testing.assert_allclose(squares[0], (x**2).sum(0), rtol=0, atol=error, err_msg=name)


def test_expert_counts_equal_routed_tokens(data: Path) -> None:
    file = data / "golden" / "qwen3moe.gguf"
    tokens = np.arange(20) % 11
    found = sums_of(file, tokens)
    metadata = _core.GgufFile(file).metadata()
    n_used = metadata["qwen3moe.expert_used_count"]
    n_experts = metadata["qwen3moe.expert_count"]
    for layer in range(metadata["qwen3moe.block_count"]):
        blk = f"blk.{layer}."
        router, n_tokens = found[f"{blk}ffn_gate_inp.weight"]
        np.testing.assert_array_equal(n_tokens, [len(tokens)])
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            squares, counts = found[f"{blk}{name}.weight"]
            assert squares.shape == (n_experts, router.shape[1])
            assert counts.sum() == n_used * len(tokens)
            # The same numbers, summed in another order in float64.
            np.testing.assert_allclose(squares.sum(0), n_used * router[0], rtol=1e-13)
        down, down_counts = found[f"{blk}ffn_down_exps.weight"]
        np.testing.assert_array_equal(down_counts, counts)
        assert (down.any(axis=1) == (counts > 0)).all()


@packages("torch", "transformers")
def test_every_matrix_of_a_mixture_with_shared_experts_and_a_dense_layer(tmp_path: Path) -> None:
    path = make_file(make_model(RECIPES["glm4_moe"], 8), tmp_path)
    tokens = random_tokens(8)
    found = sums_of(path, tokens)
    tensors = read_tensors(path)
    matrices = {
        name for name, (_, values) in tensors.items() if name.startswith("blk.") and values.ndim > 1
    }
    assert found.keys() == matrices
    for name, (squares, counts) in found.items():
        experts = "_exps" in name
        assert squares.shape == (7 if experts else 1, tensors[name][1].shape[-1])
        assert counts.sum() == (3 if experts else 1) * len(tokens)
    # The experts of a layer share their input.
    (router, _), (shared, _) = (
        found[f"blk.1.{name}.weight"] for name in ("ffn_gate_inp", "ffn_up_shexp")
    )
    np.testing.assert_array_equal(router, shared)


def test_fused_matrices_are_counted_once(data: Path) -> None:
    found = sums_of(data / "golden" / "gptneox.gguf", np.arange(12))
    in_layer = [name.removeprefix("blk.0.") for name in found if name.startswith("blk.0.")]
    assert in_layer == [
        "attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"
    ]  # fmt: skip
    assert all((counts == 12).all() for _, counts in found.values())


def test_file_has_llama_cpp_format(tmp_path: Path) -> None:
    n_read = make_imatrix(BUNDLED_MODEL, TEXT, tmp_path / "a.gguf", n_ctx=64, n_chunks=3)
    assert n_read == 3 * 64
    reader = GGUFReader(tmp_path / "a.gguf")
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.type"] == "imatrix"
    assert values["imatrix.chunk_count"] == 3
    assert values["imatrix.chunk_size"] == 64
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes["blk.0.ffn_down.weight.in_sum2"] == [768, 1]
    assert shapes["blk.0.ffn_down.weight.counts"] == [1, 1]
    counts = next(t for t in reader.tensors if t.name == "blk.5.attn_q.weight.counts")
    assert counts.data.ravel().tolist() == [n_read]


def test_quantizing_with_imatrix_reduces_weighted_error(whole_blocks: Path, tmp_path: Path) -> None:
    assert main(["imatrix", str(whole_blocks), "-f", str(_text(tmp_path)),
                 "-o", str(tmp_path / "im.gguf"), "-c", "128"]) == 0  # fmt: skip
    importance = read_imatrix(tmp_path / "im.gguf")
    exact = read_tensors(whole_blocks)
    errors = []
    for imatrix in (None, tmp_path / "im.gguf"):
        quantize(whole_blocks, tmp_path / "q.gguf", "IQ4_NL", imatrix=imatrix, overwrite=True)
        rounded = read_tensors(tmp_path / "q.gguf")
        errors.append(sum(
            float((weight * (exact[name][1] - rounded[name][1]) ** 2).sum())
            for name, weight in importance.items()
        ))  # fmt: skip
    assert errors[1] < errors[0]


def test_existing_file_is_kept_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"mine")
    command = ["imatrix", "-m", str(BUNDLED_MODEL), "-f", str(_text(tmp_path)),
               "-o", str(tmp_path / "a.gguf"), "--chunks", "1"]  # fmt: skip
    assert main(command) == 1
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "a.gguf").read_bytes() == b"mine"
    assert main([*command, "--force"]) == 0
    assert read_imatrix(tmp_path / "a.gguf")


def test_missing_directory_is_found_first(tmp_path: Path) -> None:
    """Before the model is."""
    with pytest.raises(FileNotFoundError, match="none: no such directory"):
        make_imatrix(tmp_path / "no model", TEXT, tmp_path / "none" / "a.gguf")


def test_empty_text_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the text has no tokens"):
        make_imatrix(BUNDLED_MODEL, "", tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


def _text(directory: Path) -> Path:
    (directory / "text.txt").write_text(TEXT, encoding="utf-8")
    return directory / "text.txt"
