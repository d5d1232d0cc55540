"""Relevance of documents to a query, by the labels of a model that scores pairs of texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType
from numpy.typing import NDArray

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from support.changed_gguf import changed
from support.needs import packages
from support.opt_checkpoint import read_metadata, read_tensors
from support.random_models import RECIPES, make_model, reference_logits, save_checkpoint

QUERY = "The old man"
DOCUMENTS = ["A king went down to the sea.", "A boy", "He read a book </s> on a ship."]
STRING = GGUFValueType.STRING


def reranker(source: Path, target: Path, head: NDArray[np.float32], architecture: str) -> Path:
    """A copy of a model with labels and a template."""
    keys: dict[str, tuple[Any, GGUFValueType]] = {
        f"{architecture}.pooling_type": (4, GGUFValueType.UINT32),
        "tokenizer.chat_template.rerank": ("</s>Q: {query} D: {document}</s>", STRING),
    }
    return changed(source, target, keys, {"cls.output.weight": head})


@pytest.fixture(scope="module")
def head() -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(2, 192)).astype(np.float32)


@pytest.fixture(scope="module")
def generator(
    tiny_opt: Path, tmp_path_factory: pytest.TempPathFactory, head: NDArray[np.float32]
) -> Iterator[Generator]:
    path = tmp_path_factory.mktemp("rerank") / "model.gguf"
    with Generator(reranker(tiny_opt, path, head, "opt"), threads=1, max_sequences=2) as generator:
        yield generator


def prompt(generator: Generator, document: str) -> list[int]:
    """The template's special tokens around the texts, in which they are text."""
    end = generator.tokenizer.eos
    assert end is not None
    text = f"Q: {QUERY} D: {document}"
    return [end, *generator.tokenize(text, add_special=False), end]


def expected(generator: Generator, head: NDArray[np.float32]) -> NDArray[np.float64]:
    """By the hidden state of the last token."""
    hidden = generator.embed(
        [prompt(generator, one) for one in DOCUMENTS], pooling="last", normalize=False
    )
    exps = np.exp(hidden.astype(np.float64) @ head.T)
    shares: NDArray[np.float64] = exps[:, 0] / exps.sum(1)
    return shares


def test_relevance_is_the_share_of_the_first_label(
    generator: Generator, head: NDArray[np.float32]
) -> None:
    found = generator.rerank(QUERY, DOCUMENTS)
    assert found.dtype == np.float32
    assert generator.n_labels == 2
    np.testing.assert_allclose(found, expected(generator, head), rtol=0, atol=1e-5)
    assert len(set(found)) == 3
    [alone] = generator.rerank(QUERY, DOCUMENTS[1:2])
    assert alone == found[1]


def test_one_label_is_a_logit(
    generator: Generator, head: NDArray[np.float32], tiny_opt: Path, tmp_path: Path
) -> None:
    path = reranker(tiny_opt, tmp_path / "model.gguf", head[:1] - head[1:], "opt")
    with Generator(path, threads=1) as one:
        found = one.rerank(QUERY, DOCUMENTS)
    np.testing.assert_allclose(found, generator.rerank(QUERY, DOCUMENTS), rtol=0, atol=1e-5)


def test_invalid_arguments_are_rejected(
    generator: Generator, tiny_opt: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="documents must be a list of at least one text"):
        generator.rerank(QUERY, [])
    documents: Any = "a text"
    with pytest.raises(ValueError, match="documents must be a list"):
        generator.rerank(QUERY, documents)
    with pytest.raises(ValueError, match=r"documents\[1\] with the query has \d+ tokens"):
        generator.rerank(QUERY, ["a", "the king " * 2000])
    with Generator(tiny_opt) as plain:
        assert plain.n_labels == 0
        with pytest.raises(ValueError, match=r"scores no pairs of texts: its file has no cls\.out"):
            plain.rerank(QUERY, DOCUMENTS)
        with plain.engine() as engine, pytest.raises(ValueError, match="the model scores no texts"):
            engine.submit([5], pooling="rank")
    head = np.ones((2, 192), np.float32)
    path = changed(tiny_opt, tmp_path / "bare.gguf", {}, {"cls.output.weight": head})
    with Generator(path) as bare, pytest.raises(ValueError, match="no template `rerank`"):
        bare.rerank(QUERY, DOCUMENTS)


def test_unknown_pooling_types_are_named(tiny_opt: Path, tmp_path: Path) -> None:
    keys = {"opt.pooling_type": (7, GGUFValueType.UINT32)}
    with (
        Generator(changed(tiny_opt, tmp_path / "model.gguf", keys, {})) as generator,
        pytest.raises(ValueError, match="pooling_type is 7, which is unknown"),
    ):
        generator.embed("a")


@packages("torch", "transformers", "safetensors")
@pytest.mark.parametrize("tied", [True, False])
def test_converted_qwen3_reranker(tmp_path: Path, tied: bool) -> None:
    """Relevance is the probability of yes, of these two tokens, as Qwen computes it."""
    import json

    recipe = RECIPES["qwen3"]
    model = make_model(recipe, 8)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
    path = tmp_path / "Qwen3-Reranker-tiny"
    save_checkpoint(model, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] |= {"yes": 20, "no": 21}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    convert(path, tmp_path / "model.gguf", "f32")
    file = read_metadata(tmp_path / "model.gguf")
    assert file["qwen3.classifier.output_labels"] == ["yes", "no"]
    assert file["qwen3.pooling_type"] == 4
    assert "{query}" in file["tokenizer.chat_template.rerank"]
    _, rows = read_tensors(tmp_path / "model.gguf")["cls.output.weight"]
    np.testing.assert_array_equal(rows, model.lm_head.weight.detach().numpy()[[20, 21]])

    tokens = [5, 6, 7, 8, 4]
    logits = reference_logits(model, np.array(tokens))[-1, [20, 21]]
    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator, generator.engine() as e:
        completion = e.submit(tokens, pooling="rank")
        completion.result()
        np.testing.assert_allclose(completion.embedding, logits, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def server(generator: Generator) -> Iterator[Any]:
    from support.serving import serving

    with serving(generator, template=None, max_queue=3) as server:
        yield server


@packages("fastapi", "uvicorn", "prometheus_client")
class TestServer:
    def ask(self, server: Any, path: str = "/v1/rerank", **body: Any) -> Any:
        answer = server.ask(path, {"query": QUERY, **body})
        assert answer.status == 200, answer.body
        return answer.json()

    def test_documents_are_sorted(self, server: Any, generator: Generator) -> None:
        found = self.ask(server, documents=DOCUMENTS)
        scores = generator.rerank(QUERY, DOCUMENTS)
        order = np.argsort(-scores).tolist()
        assert [one["index"] for one in found["results"]] == order
        assert [one["relevance_score"] for one in found["results"]] == pytest.approx(scores[order])
        n = sum(len(prompt(generator, document)) for document in DOCUMENTS)
        assert found["usage"] == {"prompt_tokens": n, "total_tokens": n}

    def test_the_best_and_their_texts(self, server: Any) -> None:
        texts = [{"text": document} for document in DOCUMENTS]
        all_of_them = self.ask(server, documents=DOCUMENTS)["results"]
        for path in ("/rerank", "/v2/rerank", "/v1/reranking"):
            body = self.ask(server, path, documents=texts, top_n=2, return_documents=True)
            [first, second] = body["results"]
            assert first == all_of_them[0] | {"document": texts[first["index"]]}
            assert second["index"] == all_of_them[1]["index"]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"documents": []}, "documents"),
            ({"documents": ["a"], "top_n": 0}, "top_n"),
            ({"documents": ["the king " * 2000]}, "tokens"),
            ({}, "documents"),
        ],
    )
    def test_invalid_requests(self, server: Any, body: Any, message: str) -> None:
        answer = server.ask("/v1/rerank", {"query": QUERY, **body})
        assert answer.status == 400
        assert message in answer.json()["error"]["message"]


@packages("fastapi", "uvicorn", "prometheus_client")
def test_models_without_labels_refuse(tiny_opt: Path) -> None:
    from support.serving import serving

    with Generator(tiny_opt, threads=1) as generator, serving(generator) as server:
        answer = server.ask("/v1/rerank", {"query": "a", "documents": ["b"]})
        assert answer.status == 400
        assert "scores no pairs of texts" in answer.json()["error"]["message"]


def test_labels_stay_in_the_file_when_it_is_quantized(
    tiny_opt: Path, tmp_path: Path, head: NDArray[np.float32]
) -> None:
    from h2o_cpp.quantize import quantize

    path = reranker(tiny_opt, tmp_path / "model.gguf", head, "opt")
    quantize(path, tmp_path / "q8.gguf", "q8_0")
    assert "cls.output.weight" in {
        tensor.name for tensor in GGUFReader(tmp_path / "q8.gguf").tensors
    }
    with Generator(path, threads=1) as one, Generator(tmp_path / "q8.gguf", threads=1) as other:
        found, rounded = (each.rerank(QUERY, DOCUMENTS) for each in (one, other))
    np.testing.assert_allclose(rounded, found, rtol=0, atol=0.1)
