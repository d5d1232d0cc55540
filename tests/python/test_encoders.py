"""Embeddings and scores of encoders equal those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

pytest.importorskip("torch")
pytest.importorskip("transformers")

from h2o_cpp import Generator, Policy, Record
from h2o_cpp.cli import main
from h2o_cpp.convert import convert
from h2o_cpp.generation.request import Pooling
from h2o_cpp.options import capacity
from support import encoders
from support.changed_gguf import changed
from support.needs import packages
from support.opt_checkpoint import read_metadata

TEXTS = encoders.TEXTS
BERT = {
    "vocab_size": len(encoders.WORD_PIECES), "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 600,
    "type_vocab_size": 2,
}  # fmt: skip

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")

# Sums of up to 96 products of numbers near 1 in float32, in 3 layers with norms between.
TOLERANCE = 2e-5


def converted(model: Any, directory: Path, outtype: str = "f32", mode: str = "mean_tokens") -> Path:
    """The GGUF file of a model with BERT's tokenizer."""
    encoders.save(model, directory)
    encoders.write_word_pieces(directory)
    encoders.pooling(directory, mode)
    convert(directory, directory / "model.gguf", outtype)
    return directory / "model.gguf"


@pytest.fixture(scope="module")
def bert() -> Any:
    return encoders.make("BertModel", **BERT)


@pytest.fixture(scope="module")
def generator(bert: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
    with Generator(converted(bert, tmp_path_factory.mktemp("bert")), threads=2) as generator:
        yield generator


def test_embeddings_equal_transformers(bert: Any, generator: Generator) -> None:
    """Texts are shorter and longer than what the kernels read at once, in one batch."""
    rng = np.random.default_rng(1)
    sizes = (1, 2, 23, 24, 25, 49, 255, 256, 257, 600)
    texts = [rng.integers(4, BERT["vocab_size"], n).tolist() for n in sizes]
    states = [encoders.hidden_states(bert, text) for text in texts]
    expected: dict[Pooling, list[NDArray[np.float64]]] = {
        "mean": [x.mean(0) for x in states],
        "cls": [x[0] for x in states],
        "last": [x[-1] for x in states],
    }
    for pooling, vectors in expected.items():
        found = generator.embed(texts, pooling=pooling, normalize=False)
        np.testing.assert_allclose(found, np.stack(vectors), rtol=0, atol=TOLERANCE)


def test_batched_embeddings_equal_single_ones(generator: Generator) -> None:
    """Bit for bit, however many there are."""
    texts = TEXTS * 40
    for text, vector in zip(TEXTS, generator.embed(texts), strict=False):
        np.testing.assert_array_equal(generator.embed(text), vector)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("outtype", "least"), [("f16", 0.9999), ("bf16", 0.999), ("q8_0", 0.999)])
def test_rounded_weights(bert: Any, tmp_path: Path, outtype: str, least: float) -> None:
    """The cosine with the embedding of float32."""
    tokens = [2, 5, 6, 7, 3]
    expected = encoders.hidden_states(bert, tokens)[0]
    path = converted(bert, tmp_path, outtype, "cls_token")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert {types[f"blk.1.{name}.weight"] for name in MATRICES} == {outtype.upper()}
    with Generator(path, threads=1) as generator:
        found = generator.embed(tokens)
    assert found @ expected / np.linalg.norm(expected) > least


def test_file_of_a_converted_checkpoint(generator: Generator) -> None:
    """It has llama.cpp's keys."""
    file = read_metadata(generator.path)
    assert file["general.architecture"] == "bert"
    assert file["bert.attention.causal"] is False
    assert file["bert.pooling_type"] == 1
    assert file["tokenizer.ggml.model"] == "bert"
    assert file["tokenizer.ggml.token_type_count"] == 2
    assert file["tokenizer.ggml.normalizer.lowercase"] is True
    assert file["tokenizer.ggml.seperator_token_id"] == 3
    tokens = file["tokenizer.ggml.tokens"]
    assert {"▁the", "ing", "[CLS]"} < set(tokens)
    assert generator.is_encoder
    assert generator.default_pooling == "mean"


def test_an_encoder_generates_no_text(
    generator: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "bert is an encoder, which gives embeddings"
    with pytest.raises(ValueError, match=why):
        generator.generate("the old man")
    with pytest.raises(ValueError, match=why):
        generator.logits([2, 5])
    with pytest.raises(ValueError, match=why):
        generator.read("the old man")
    assert main(["run", "--model", str(generator.path), "the"]) == 1
    assert why in capsys.readouterr().err


def test_an_encoder_has_no_cache(generator: Generator) -> None:
    path = generator.path
    with pytest.raises(ValueError, match="no cache: leave out the budget"):
        Generator(path, hh=0.5)
    with pytest.raises(ValueError, match="no cache: leave out the budget"):
        Generator(path, policy="window", hh=8)
    with pytest.raises(ValueError, match="an encoder has none"):
        Generator(path, memory="1MB")
    with pytest.raises(ValueError, match="cache_memory='1MB' is for caches, and an encoder has"):
        Generator(path, cache_memory="1MB")
    with pytest.raises(ValueError, match="leave out draft"):
        Generator(path, draft="lookup")
    generator.embed(TEXTS)
    stats = generator.stats(layers=False)
    assert (stats.cache_bytes, stats.evictions) == (0, 0)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"policy": Policy.window(2)}, "the budget and the policy"),
        ({"protect": 1}, "protect"),
        ({"record": Record()}, "the record of kept tokens"),
    ],
)
def test_texts_have_no_cache(generator: Generator, options: Any, what: str) -> None:
    with (
        generator.engine() as engine,
        pytest.raises(
            ValueError, match=f"bert is an encoder, which has no cache: leave out {what}"
        ),
    ):
        engine.submit([2, 5, 3], pooling="mean", **options)


def test_token_types(generator: Generator, tmp_path: Path) -> None:
    """Those after the second one are not read; absurdly many are refused."""
    [types] = [t.data for t in GGUFReader(generator.path).tensors if t.name == "token_types.weight"]
    more = {"token_types.weight": np.concatenate([types, np.full((5, 64), np.nan, np.float32)])}
    with Generator(changed(generator.path, tmp_path / "7.gguf", {}, more), threads=2) as other:
        np.testing.assert_array_equal(other.embed(TEXTS), generator.embed(TEXTS))
        pair = generator.tokenizer.encode_pair(*TEXTS[:2])
        np.testing.assert_array_equal(other.embed(pair), generator.embed(pair))
    absurd = {"token_types.weight": np.zeros((1025, 64), np.float32)}
    with pytest.raises(
        ValueError, match=r"token_types\.weight has 1025 rows, expected at most 1024"
    ):
        Generator(changed(generator.path, tmp_path / "1025.gguf", {}, absurd))


def test_texts_longer_than_the_context(generator: Generator) -> None:
    with pytest.raises(ValueError, match="has 601 tokens, expected at most n_ctx=600, the trained"):
        generator.embed([4] * 601)
    with Generator(generator.path, n_ctx=8, threads=1) as short:
        with pytest.raises(ValueError, match="n_ctx=8; n_ctx can be up to 600"):
            short.embed([4] * 9)
        np.testing.assert_array_equal(short.embed([4] * 8), generator.embed([4] * 8))


def test_embed_command(generator: Generator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "--model", str(generator.path), "the old man"]) == 0
    found = np.array(eval(capsys.readouterr().out))  # a list of numbers
    np.testing.assert_allclose(found, generator.embed("the old man"), rtol=0, atol=1e-7)


def test_info_command(generator: Generator, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(generator.path)
    assert main(["info", path]) == 0
    shown = capsys.readouterr().out
    assert "bert" in shown
    assert "cache" not in shown
    assert main(["info", path, "--memory", "1MiB"]) == 2
    assert "an encoder has none" in capsys.readouterr().err


def test_capacity_is_for_caches(generator: Generator) -> None:
    with pytest.raises(ValueError, match="an encoder, which has no cache"):
        capacity(generator.path, "1GiB")


# ---- Pairs of texts ----

QUERY, DOCUMENTS = "the old man", ["to the sea", "a [SEP] is", "naïve!"]


@pytest.mark.parametrize("n_labels", [1, 3])
def test_scores_equal_transformers(tmp_path: Path, n_labels: int) -> None:
    """The second text's tokens have the second type. None of several labels is the relevance."""
    import torch

    model = encoders.make("BertForSequenceClassification", **BERT, num_labels=n_labels)
    path = converted(model, tmp_path)
    original = encoders.write_word_pieces(tmp_path)
    expected = []
    for document in DOCUMENTS:
        # Special tokens in a text are text.
        pair = original.encode(QUERY, document.replace("[SEP]", "[ sep ]"))
        inputs = torch.tensor([pair.ids]), None, torch.tensor([pair.type_ids])
        with torch.no_grad():
            expected.append(model.double()(*inputs).logits[0].numpy())
    with Generator(path, threads=1) as generator:
        assert generator.n_labels == n_labels
        prompts = [generator.tokenizer.encode_pair(QUERY, document) for document in DOCUMENTS]
        with generator.engine() as engine:
            results = [engine.submit(prompt, pooling="rank") for prompt in prompts]
            found = []
            for result in results:
                result.result()
                found.append(result.embedding)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        with pytest.raises(ValueError, match="pooling_type is rank"):
            generator.embed("a")
        if n_labels > 1:
            with pytest.raises(ValueError, match="the model has 3 labels, expected 1"):
                generator.rerank(QUERY, DOCUMENTS)
            return
        scores = generator.rerank(QUERY, DOCUMENTS)
    shares = 1 / (1 + np.exp(-np.concatenate(expected)))
    np.testing.assert_allclose(scores, shares, rtol=0, atol=TOLERANCE)


def test_models_without_labels_score_nothing(generator: Generator) -> None:
    with pytest.raises(ValueError, match=r"its file has no cls\.output"):
        generator.rerank(QUERY, DOCUMENTS)


# ---- The server ----


@pytest.fixture(scope="module")
def server(generator: Generator) -> Iterator[Any]:
    from support.serving import serving

    with serving(generator, template=None) as server:
        yield server


@packages("fastapi", "uvicorn", "prometheus_client")
class TestServer:
    def test_embeddings(self, server: Any, generator: Generator) -> None:
        answer = server.ask("/v1/embeddings", {"input": TEXTS}).json()
        expected = generator.embed(TEXTS)
        for entry, vector in zip(answer["data"], expected, strict=True):
            np.testing.assert_allclose(entry["embedding"], vector, rtol=0, atol=1e-7)
        answer = server.ask("/api/embed", {"model": "tiny", "input": TEXTS}).json()
        np.testing.assert_allclose(answer["embeddings"], expected, rtol=0, atol=1e-7)

    def test_generation_is_refused(self, server: Any) -> None:
        answer = server.ask("/v1/completions", {"prompt": "the"})
        assert answer.status == 400
        assert b"is an encoder" in answer.body

    def test_capabilities(self, server: Any) -> None:
        answer = server.ask("/api/show", {"model": "tiny"}).json()
        assert answer["capabilities"] == ["embedding"]

    def test_ollama_truncates_long_texts(self, server: Any, generator: Generator) -> None:
        answer = server.ask("/api/embed", {"model": "tiny", "input": "sea " * 700}).json()
        assert answer["prompt_eval_count"] == 600
        answer = server.ask("/v1/embeddings", {"input": "sea " * 700})
        assert answer.status == 400
