"""The paper's analyses, on models with known attention and on hand-computed numbers."""

from __future__ import annotations

import json
from math import log, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_bench.main import main
from h2o_bench.measurements.analyze import REMOVALS, associations
from h2o_bench.observations import (
    accumulated_attention,
    associate,
    attention_rows,
    cooccurrences,
    power_law,
    ranked,
    sparsity,
    spearman,
    uniform_attention,
)
from h2o_cpp import _core
from support.converted_files import make_file
from support.needs import packages
from support.scripted_opt import Gguf, Tensor, scripted_opt

N = 32  # tokens
TEXT = list(range(N))


def attentive(weights: NDArray[np.float64]) -> Gguf:
    """A model whose attention of head h to position j is proportional to weights[h, j].

    The embedding of position p is a unit vector, which the norm maps to (e_p - 1/n) / sd. The first
    key component of each head is log w * sqrt(head_dim) plus a constant independent of p, and the
    first query component is 1.
    """
    n_heads, n = weights.shape
    model = scripted_opt([], n_ctx=n)
    head_dim = n // n_heads
    sd = np.sqrt((1 / n) * (1 - 1 / n) + 1e-5)
    k, q_bias = np.zeros((n, n), np.float32), np.zeros(n, np.float32)
    k[::head_dim] = np.log(weights) * np.sqrt(head_dim) * sd
    q_bias[::head_dim] = 1
    values = {"attn_k.weight": k, "attn_q.bias": q_bias, "attn_norm.weight": np.ones(n, np.float32)}
    for name, value in values.items():
        model.tensors[f"blk.0.{name}"] = Tensor(value.shape[::-1], value.tobytes())
    return model


def open_model(gguf: Gguf, path: Path) -> _core.Model:
    return _core.Model(gguf.write(path / "model.gguf"), device="cpu", threads=1)


def test_uniform_attention(tmp_path: Path) -> None:
    model = open_model(scripted_opt([], n_ctx=N), tmp_path)
    rows = list(attention_rows(model, TEXT))
    for t, row in enumerate(rows):
        np.testing.assert_allclose(row, np.full((1, 2, t + 1), 1 / (t + 1)), rtol=1e-6)
    assert sparsity(rows).tolist() == [0]
    received = [sum(1 / (i + 1) for i in range(j, N)) for j in range(N)]
    np.testing.assert_allclose(uniform_attention(N), received, rtol=1e-12)
    accumulated = accumulated_attention(model, TEXT)
    np.testing.assert_allclose(accumulated, [[received, received]], rtol=N * 2.0**-24)


def test_attention_with_one_heavy_hitter(tmp_path: Path) -> None:
    """In head 0, position 3 has 1000 times the weight of the others; head 1 is uniform."""
    weights = np.ones((2, N))
    weights[0, 3] = 1000
    model = open_model(attentive(weights), tmp_path)
    rows = list(attention_rows(model, TEXT, kv_dtype="f32"))
    # A logit of up to log 1000 has N roundings of 2^-24; exp turns them into a relative error.
    for t, row in enumerate(rows):
        expected = weights[:, : t + 1] / weights[:, : t + 1].sum(axis=1, keepdims=True)
        np.testing.assert_allclose(row, [expected], rtol=log(1000) * N * 2.0**-24, atol=0)
    # After token 3, all others are below 1 % of it: t of t + 1, in one head of two.
    share = sum(t / (t + 1) for t in range(3, N)) / N / 2
    assert sparsity(rows) == pytest.approx([share], rel=1e-12)
    assert sparsity(rows, threshold=0.0009).tolist() == [0]

    accumulated = accumulated_attention(model, TEXT, kv_dtype="f32")
    summed = np.zeros((1, 2, N))
    for t, row in enumerate(rows):
        summed[:, :, : t + 1] += row
    np.testing.assert_allclose(accumulated, summed, rtol=N * 2.0**-24)
    assert accumulated[0, 0].argmax() == 3


@pytest.mark.parametrize("name", ["llama_gqa2_tied", "opt"])
@packages("torch", "transformers")
def test_attention_rows_equal_transformers(tmp_path: Path, name: str) -> None:
    import torch

    from support.random_models import RECIPES, make_model, random_tokens

    reference: Any = make_model(RECIPES[name], 11)
    path = make_file(reference, tmp_path)
    tokens = random_tokens(11)
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = reference.double()(torch.tensor(tokens[None]), output_attentions=True)
    attention = np.stack([layer[0].numpy() for layer in attentions.attentions])
    ours = _core.Model(path, device="cpu", threads=1)
    n_layers, n_heads, n, _ = attention.shape
    groups = attention.reshape(n_layers, ours.n_kv_heads, n_heads // ours.n_kv_heads, n, n)
    expected = groups.sum(axis=2)
    for t, row in enumerate(attention_rows(ours, tokens.tolist(), kv_dtype="f32")):
        np.testing.assert_allclose(row, expected[:, :, t, : t + 1], rtol=0, atol=1e-4)


def test_sparsity_of_no_rows_is_rejected() -> None:
    with pytest.raises(ValueError, match="no rows"):
        sparsity([])


def test_power_law_fit_of_exact_data() -> None:
    law = power_law(np.array([r**-1.5 for r in range(1, 201)]))
    assert law.exponent == pytest.approx(1.5, rel=1e-9)
    assert law.r_squared == pytest.approx(1, rel=1e-9)
    total = sum(r**-1.5 for r in range(1, 201))
    tops = [sum(r**-1.5 for r in range(1, k + 1)) / total for k in (10, 20, 40)]
    assert law.top_shares == pytest.approx(tops, rel=1e-9)


def test_power_law_excludes_sinks_and_newest_tokens() -> None:
    scores = np.array([r**-0.7 for r in range(1, 401)])
    scores[:4] = 100  # 1 % of 400
    scores[200:] = 1e-9
    assert power_law(scores).exponent == pytest.approx(0.7, rel=1e-9)


def test_power_law_of_equal_scores() -> None:
    law = power_law(np.full(40, 0.25))
    assert (law.exponent, law.r_squared) == (0, 1)
    assert law.top_shares == pytest.approx((0.05, 0.1, 0.2), rel=1e-12)
    with pytest.raises(ValueError, match="19 tokens"):
        power_law(np.ones(19))


def test_ranked_sorts_each_head() -> None:
    scores = np.array([[1.0, 5.0, 3.0], [4.0, 0.0, 2.0]])
    assert ranked(scores).tolist() == [4.5, 2.5, 0.5]


def test_cooccurrences() -> None:
    """By hand, for 7 8 7 7 9. Window 1: 7-8, 8-7, 7-9. Window 2 adds 7-7, 8-7, 7-9."""
    tokens = [7, 8, 7, 7, 9]
    assert cooccurrences(tokens, window=1).tolist() == [3, 2, 3, 3, 1]
    assert cooccurrences(tokens, window=2).tolist() == [5, 3, 5, 5, 2]
    assert cooccurrences([4], window=3).tolist() == [0]


def test_spearman() -> None:
    # Ranks 1 2 3 4 5 and 2 1 4 3 5: 1 - 6 * (1 + 1 + 1 + 1 + 0) / (5 * 24)
    a = np.array([10.0, 20, 30, 40, 50])
    assert spearman(a, np.array([0.2, 0.1, 7, 6, 1000])) == pytest.approx(0.8, rel=1e-12)
    assert spearman(a, -(a**3)) == pytest.approx(-1, rel=1e-12)
    # Ranks 1 2 3 and, tied, 1.5 1.5 3: covariance 1.5, variances 2 and 1.5
    tied = spearman(np.array([1.0, 2, 3]), np.array([5.0, 5, 9]))
    assert tied == pytest.approx(1.5 / np.sqrt(2 * 1.5), rel=1e-12)
    assert spearman(a, np.ones(5)) == pytest.approx(nan, nan_ok=True)


def test_associate_overlap() -> None:
    a = np.arange(10.0)
    same = associate(a, a, top=0.3)
    assert (same.overlap, same.overlap_by_chance) == (1, 0.3)
    assert associate(a, -a, top=0.3).overlap == 0
    # 9 and 8 are in the top 3 of b; 0 to 7 tie for the remaining place, 1/8 each, and of these
    # only 7 is in the top 3 of a.
    b = np.array([0.0] * 8 + [1, 2])
    assert associate(a, b, top=0.3).overlap == pytest.approx((2 + 1 / 8) / 3, rel=1e-12)


def test_command(tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "The old man went down to the sea, and his son went with him to see the ships. "
    (tmp_path / "text.txt").write_text(text * 8, encoding="utf-8")
    arguments = [str(tiny_opt), str(tmp_path / "text.txt"), "--text-tokens", "60"]
    assert main(["analyze", *arguments, "--json", str(tmp_path / "o.json")]) == 0
    out = capsys.readouterr().out
    rows = [json.loads(line)["row"] for line in (tmp_path / "o.json").read_text().splitlines()]
    tables = {
        name: [row for row in rows if row["table"] == name]
        for name in ("layers", "removal", "co-occurrence")
    }
    assert [row["layer"] for row in tables["layers"]] == [*map(str, range(6)), "uniform"]
    full, *rest = tables["removal"]
    assert (full["evicted"], full["kept"]) == ("none", 60)
    assert {row["evicted"] for row in rest} == {*REMOVALS}
    assert all(row["of full"] == row["perplexity"] / full["perplexity"] for row in rest)
    # the perplexity is above 1 and below that of a uniform distribution
    assert 0 < log(full["perplexity"]) < log(4096)
    assert len(tables["co-occurrence"]) == 3
    assert "### removal" in out


def test_undefined_correlation_is_null_in_json() -> None:
    """The co-occurrences of one repeated token do not vary."""
    rows = [*associations([5] * 30, np.ones(30))]
    text = json.dumps(rows, allow_nan=False)
    assert json.loads(text)[0]["Spearman"] is None


def test_command_rejects_short_text_and_bad_options(
    tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The old man.", encoding="utf-8")
    command = ["analyze", str(tiny_opt), str(tmp_path / "text.txt")]
    assert main(command) == 1
    assert "the text has 5 tokens, expected at least 20" in capsys.readouterr().err
    assert main([*command, "--text-tokens", "0"]) == 1
    assert "text_tokens=0" in capsys.readouterr().err
