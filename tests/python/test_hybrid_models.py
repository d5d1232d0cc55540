"""Models of which some layers have a recurrent state (Qwen3.5): what shows or counts a cache.

Some layers of Nemotron-H have neither.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType

from h2o_cpp import Generator, Policy, capacity
from h2o_cpp._core import GgufFile
from h2o_cpp.cli import main
from h2o_cpp.cli.token_colors import keeper_shares
from h2o_cpp.convert import convert
from h2o_cpp.files.stored_metadata import store_metadata
from h2o_cpp.generation.record import Record
from h2o_cpp.measure.heads import RETRIEVAL_HEADS
from h2o_cpp.measure.inspection import inspect
from h2o_cpp.model.session import open_model
from h2o_cpp.model.tokenizer import Tokenizer
from support.changed_gguf import changed
from support.needs import packages
from support.random_models import HYBRIDS, STATE_SPACES, make_model, save_checkpoint

pytestmark = packages("torch", "transformers", "safetensors")

TEXT = "the old man and the sea " * 3


RECIPES = HYBRIDS | {name: STATE_SPACES[name] for name in ("granite4h", "nemotron_h")}


@pytest.fixture(scope="module", params=RECIPES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    recipe = dataclasses.replace(RECIPES[request.param], n_ctx=256)
    save_checkpoint(make_model(recipe, seed=5), folder)
    convert(folder, folder / f"{request.param}.gguf", "f32")
    return folder / f"{request.param}.gguf"


def recurrent_layers(hybrid: Path) -> set[int]:
    """Those without a cache."""
    kinds = RECIPES[hybrid.stem].config().layer_types
    return {i for i, kind in enumerate(kinds) if kind != "full_attention"}


def test_inspect_is_about_layers_with_a_cache(
    hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    options = ["-m", str(hybrid), "--hh", "12", "-t", "1", "--color", "never"]
    assert main(["inspect", TEXT, *options, "--json", str(output)]) == 0
    text, _, legend, _, *table = capsys.readouterr().out.splitlines()
    recurrent = recurrent_layers(hybrid)
    found = json.loads(output.read_text())
    n_layers = len(found["evicted_at"])
    for layer, row in enumerate(table[2 : 2 + n_layers]):
        expected = "no cache" if layer in recurrent else "12"
        assert row.split(" | ")[:2] == [f"| {layer}", expected]
    # The newest tokens are kept by every head of the others.
    assert "recent" in legend
    assert text.endswith(found["pieces"][-1])
    assert main(["inspect", TEXT, *options, "--layer", str(min(recurrent))]) == 0
    assert f"| {min(recurrent)} | no cache |" in capsys.readouterr().out


def test_shares_are_of_layers_with_a_cache(hybrid: Path) -> None:
    model = open_model(hybrid, device="cpu", threads=1)
    tokens = list(range(3, 23))
    found = inspect(model, Tokenizer.of_model(model), tokens, Policy.window(5))
    expected = [0.0] * 15 + [1.0] * 5
    assert keeper_shares(found.kept()) == expected
    with Generator(hybrid, policy=Policy.window(5), threads=1) as generator:
        generator.generate([tokens], max_tokens=1)
        kept = np.zeros((model.n_layers, model.n_kv_heads, len(tokens)), np.bool_)
        for head in np.ndindex(kept.shape[:2]):
            kept[head][generator.kept(*head)[0]] = True
        assert keeper_shares(kept) == expected
        with generator.engine() as engine:
            record = Record(kept_every=1)
            engine.submit(tokens, record=record, max_tokens=1, ignore_eos=True).result()
            assert record.kept is not None
            assert record.kept.shares.tolist() == expected


def test_statistics_of_layers(hybrid: Path) -> None:
    recurrent = recurrent_layers(hybrid)
    with Generator(hybrid, hh=8, threads=1) as generator:
        generator.generate([list(range(3, 33))], max_tokens=1)
        stats = generator.stats(layers=True)
    assert (stats.tokens_seen, stats.tokens_kept, stats.evictions) == (30, 8, 22)
    for i, layer in enumerate(stats.layers):
        kept = (0, 0) if i in recurrent else (8, 22)
        assert (layer.tokens_kept, layer.evictions) == kept


@pytest.mark.parametrize("options", [{}, {"hh": 0.2}, {"hh": 10, "positions": "original"}])
def test_capacity(hybrid: Path, options: dict[str, Any]) -> None:
    memory = 2_000_000
    n = capacity(hybrid, memory, **options)
    assert n > 1
    with Generator(hybrid, memory=memory, threads=1, **options) as generator:
        assert generator.max_sequences == n
        assert generator.stats().cache_bytes <= memory
    # It counts each of at most 9 arrays of a layer as if it were aligned separately.
    with Generator(hybrid, max_sequences=n + 1, threads=1, **options) as generator:
        stats = generator.stats()
    assert stats.cache_bytes > memory - (n + 1) * stats.n_layers * 9 * 64


@pytest.mark.parametrize("hybrid", HYBRIDS, indirect=True)
def test_capacity_of_metadata(hybrid: Path, tmp_path: Path) -> None:
    """Flags of unused layers do not count; invalid keys are an error, but not of info."""
    recurrent = recurrent_layers(hybrid)
    n_layers = HYBRIDS[hybrid.stem].n_layers
    flags = [i in recurrent for i in range(n_layers)] + [True]
    prefix = f"{GgufFile(hybrid).metadata()['general.architecture']}."
    more = {
        f"{prefix}block_count": (n_layers + 1, GGUFValueType.UINT32),
        f"{prefix}nextn_predict_layers": (1, GGUFValueType.UINT32),
        f"{prefix}attention.recurrent_layers": (flags, GGUFValueType.ARRAY),
    }
    path = changed(hybrid, tmp_path / "more.gguf", more, {})
    assert capacity(path, "1MiB") == capacity(hybrid, "1MiB")
    with Generator(path, memory="1MiB", threads=1) as generator:
        assert generator.max_sequences == capacity(hybrid, "1MiB")
    for key in ("ssm.state_size", "ssm.conv_kernel"):
        bad = {f"{prefix}{key}": (0, GGUFValueType.UINT32)}
        path = changed(hybrid, tmp_path / "bad.gguf", bad, {})
        with pytest.raises(ValueError, match=f"{key} is 0"):
            capacity(path, "1MiB")
        assert main(["info", str(path)]) == 0


def test_heads(hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only heads of layers with a cache are ranked, archived and accepted."""
    recurrent = recurrent_layers(hybrid)
    assert main(["heads", str(hybrid), "--samples", "1", "-t", "1", "--json"]) == 0
    ranked = json.loads(capsys.readouterr().out)
    assert ranked
    assert not {head["layer"] for head in ranked} & recurrent
    assert sum(head["share"] for head in ranked) == pytest.approx(1)
    path = tmp_path / "model.gguf"
    store_metadata(hybrid, path, {RETRIEVAL_HEADS: [0 if 0 in recurrent else 1]})
    with pytest.raises(ValueError, match=r"has head \d, whose layer has no cache"):
        Generator(path, hh=8, archive="f16", archive_heads=0.5)


def test_imatrix_and_quantize(hybrid: Path, tmp_path: Path) -> None:
    """The matrix has every product of the layers with a state."""
    text, matrix, small = (tmp_path / name for name in ("text", "matrix.gguf", "small.gguf"))
    text.write_text(TEXT)
    options = ["-t", "1", "-c", "32"]
    assert main(["imatrix", str(hybrid), str(text), "-o", str(matrix), *options]) == 0
    names = {tensor.name for tensor in GGUFReader(matrix).tensors}
    for tensor in GGUFReader(hybrid).tensors:
        product = len(tensor.shape) > 1 and not tensor.name.startswith(("token_", "output", "v."))
        of_products = not any(part in tensor.name for part in ("conv1d", "norm", "ssm_a", "ssm_d"))
        if product and of_products:
            assert f"{tensor.name}.in_sum2" in names
    assert main(["quantize", str(hybrid), str(small), "Q8_0", "--imatrix", str(matrix)]) == 0
    with Generator(small, threads=1) as generator:
        assert np.isfinite(generator.logits([1, 2, 3])).all()
