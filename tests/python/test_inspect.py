"""Inspection of the kept tokens, as data and as an HTML page."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Policy, _core
from h2o_cpp.measure import inspection
from h2o_cpp.measure.inspection import Inspection, inspect
from h2o_cpp.model.session import open_session
from h2o_cpp.model.tokenizer import Tokenizer
from support.h2o_rules import ReferenceCache
from support.scripted_opt import END, Tensor, scripted_opt
from support.vocabularies import sentence_pieces, tokenizer_of

HOSTILE = "</script><script>alert(1)</script><!-- <b>&amp; {{inspection}}"
POLICIES = [Policy.full(), Policy.window(7), Policy.sinks(2, 5), Policy.h2o(6, 5, sinks=1)]


N_CTX = 64
SCRIPT = list(range(100, 100 + N_CTX - 10))


class Attentive:
    """A scripted model whose layer has random Q and K weights, and ReferenceCache's inputs.

    Its values are zero, so it generates its script whatever is kept. The input of attention is the
    normalized unit vector of the position.
    """

    N_HEADS = 2

    def __init__(self, folder: Path) -> None:
        random = np.random.default_rng(5)
        # Normalized unit vectors have a length of about 8, so logits are about 64 * 0.15**2.
        w_q, w_k = random.normal(scale=0.15, size=(2, N_CTX, N_CTX)).astype(np.float32)
        file = scripted_opt(SCRIPT, N_CTX)
        file.tensors |= {
            "blk.0.attn_norm.weight": Tensor((N_CTX,), np.ones(N_CTX, np.float32).tobytes()),
            "blk.0.attn_q.weight": Tensor((N_CTX, N_CTX), w_q.tobytes()),
            "blk.0.attn_k.weight": Tensor((N_CTX, N_CTX), w_k.tobytes()),
        }
        self.model = _core.Model(file.write(folder / "model.gguf"), device="cpu", threads=1)
        self.tokenizer = Tokenizer.of_model(self.model)
        x = np.eye(N_CTX) - 1 / N_CTX
        x /= np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-5)
        shape = (N_CTX, self.N_HEADS, N_CTX // self.N_HEADS)
        self.q, self.k = ((x @ w.astype(np.float64).T).reshape(shape) for w in (w_q, w_k))


@pytest.fixture(scope="module")
def attentive(tmp_path_factory: pytest.TempPathFactory) -> Attentive:
    return Attentive(tmp_path_factory.mktemp("attentive"))


@pytest.mark.parametrize("policy", [Policy.h2o(6, 5), Policy.h2o(4, 3, sinks=2), Policy.h2o(5, 0)])
@pytest.mark.parametrize("n_batch", [1, 7])
def test_inspection_equals_reference(attentive: Attentive, policy: Policy, n_batch: int) -> None:
    n = 60
    found = inspect(
        attentive.model,
        attentive.tokenizer,
        list(range(n)),
        policy,
        n_batch=n_batch,
        kv_dtype="f32",
    )
    reference = ReferenceCache(attentive.N_HEADS, attentive.N_HEADS, policy)
    evicted_at = np.zeros((attentive.N_HEADS, n), np.int32)
    scores = np.zeros((attentive.N_HEADS, n))
    for begin in range(0, n, n_batch):
        rows = slice(begin, min(begin + n_batch, n))
        q, k = attentive.q[rows], attentive.k[rows]
        reference.attend(q, k, np.zeros_like(k))
        for head, kept in enumerate(reference.heads):
            evicted = set(range(rows.stop)) - {entry.position for entry in kept}
            for position in evicted:
                evicted_at[head, position] = evicted_at[head, position] or rows.stop
            for entry in kept:
                scores[head, entry.position] = entry.score
    # The cache's tolerance: sums of at most 60 probabilities with errors of about 1e-5.
    assert reference.margin > 1e-4
    np.testing.assert_array_equal(found.evicted_at[0], evicted_at)
    np.testing.assert_allclose(found.scores[0], scores, rtol=0, atol=1e-4)
    assert found.seen.tolist() == [*range(n_batch, n, n_batch), n]

    [kept_heads] = found.kept()
    summary = found.summary(0)
    assert summary.kept == policy.budget
    assert summary.evicted == n - summary.kept
    assert summary.oldest == min(kept[0].position for kept in reference.heads)
    assert summary.score_share == pytest.approx(scores[kept_heads].sum() / scores.sum(), abs=1e-4)
    common = set.intersection(*({e.position for e in kept} for kept in reference.heads))
    assert summary.common_share == len(common) / summary.kept
    of_head = scores[1][kept_heads[1]].sum() / scores[1].sum()
    assert found.summary(0, 1).score_share == pytest.approx(of_head, abs=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_after_every_step_equals_session(
    model: _core.Model, tokenizer: Tokenizer, tokens: list[int], policy: Policy
) -> None:
    found = inspect(model, tokenizer, tokens, policy)
    session = open_session(model, policy, n_ctx=model.n_ctx_train, n_batch=1)
    for i, token in enumerate(tokens):
        session.step([(0, np.array([token], np.int32))])
        kept = found.kept(i + 1)
        for layer, head in np.ndindex(kept.shape[:2]):
            positions, scores = session.kept(layer, head, 0)
            np.testing.assert_array_equal(np.flatnonzero(kept[layer, head]), positions)
    np.testing.assert_array_equal(found.scores[layer, head][positions], scores)
    assert found.tokens.tolist() == tokens
    assert found.n_prompt == len(tokens)


def test_window_of_n_evicts_token_i_after_i_plus_n_plus_1_tokens(
    model: _core.Model, tokenizer: Tokenizer, tokens: list[int]
) -> None:
    found = inspect(model, tokenizer, tokens, Policy.window(7))
    expected = [i + 8 if i + 8 <= len(tokens) else 0 for i in range(len(tokens))]
    assert (found.evicted_at == expected).all()
    assert found.summary(0) == inspection.Summary(7, len(tokens) - 7, len(tokens) - 7, None, 1.0)


def test_long_texts_are_inspected_less_often(
    model: _core.Model,
    tokenizer: Tokenizer,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = inspect(model, tokenizer, tokens, Policy.h2o(6, 5))
    n_heads = model.n_layers * model.n_kv_heads
    monkeypatch.setattr(inspection, "_MAX_LOOKS", n_heads * len(tokens) // 4)
    fewer = inspect(model, tokenizer, tokens, Policy.h2o(6, 5))
    assert fewer.seen.tolist() == [*range(4, len(tokens), 4), len(tokens)]
    # recorded at the first inspection at or after the eviction
    at = np.minimum(-(-every.evicted_at // 4) * 4, len(tokens))
    np.testing.assert_array_equal(fewer.evicted_at, at)


def test_greedy_continuation(attentive: Attentive) -> None:
    """After n tokens the scripted model generates SCRIPT[n - 1:] and then EOS."""

    def continued(n: int, max_tokens: int, n_ctx: int = N_CTX) -> Inspection:
        return inspect(
            attentive.model,
            attentive.tokenizer,
            [97] * n,
            Policy.h2o(4, 4),
            n_batch=3,
            n_ctx=n_ctx,
            max_tokens=max_tokens,
        )

    some = continued(5, 3)
    assert some.tokens.tolist() == [97] * 5 + SCRIPT[4:7]
    assert (some.n_prompt, some.seen.tolist()) == (5, [3, 5, 6, 7, 8])
    assert continued(5, 1000).tokens.tolist() == [97] * 5 + SCRIPT[4:]
    assert continued(5, 1000, n_ctx=9).tokens.tolist() == [97] * 5 + SCRIPT[4:8]


def test_pieces_are_printable(attentive: Attentive) -> None:
    tokens = [END, *"é日\n".encode(), 0x1B, 257, 0xFF, 98, 0xE6]
    found = inspect(attentive.model, attentive.tokenizer, tokens, Policy.full())
    assert found.pieces == [
        *["</s>", "<0xC3>", "é", "<0xE6>", "<0x97>", "日", "\n", "\\x1b", "ab"],
        *["\N{REPLACEMENT CHARACTER}", "b", "<0xE6>"],
    ]


def test_leading_space_of_sentencepiece_is_not_shown(model: _core.Model) -> None:
    tokenizer = tokenizer_of(sentence_pieces())
    found = inspect(model, tokenizer, tokenizer.encode("ab ab"), Policy.full())
    assert found.pieces == ["<s>", "ab", " ab"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": []}, "the text has 0 tokens"),
        ({"n_ctx": 4}, "expected 1 to n_ctx=4"),
        ({"n_ctx": -1}, "n_ctx=-1"),
        ({"n_batch": 0}, "n_batch=0"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"tokens": [2, 10**6]}, "1000000"),
    ],
)
def test_invalid_arguments_are_rejected(
    model: _core.Model,
    tokenizer: Tokenizer,
    tokens: list[int],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        inspect(model, tokenizer, **{"tokens": tokens, "policy": Policy.full(), **options})


def test_invalid_selections_are_rejected(
    model: _core.Model, tokenizer: Tokenizer, tokens: list[int]
) -> None:
    found = inspect(model, tokenizer, tokens, Policy.window(7))
    with pytest.raises(ValueError, match=f"seen={len(tokens) + 1}"):
        found.kept(len(tokens) + 1)
    with pytest.raises(ValueError, match=f"layer={model.n_layers}"):
        found.summary(model.n_layers)
    with pytest.raises(ValueError, match="kv_head=-1"):
        found.summary(0, -1)


@pytest.fixture(scope="module")
def found(model: _core.Model, tokenizer: Tokenizer, tokens: list[int]) -> Inspection:
    return inspect(model, tokenizer, tokens, Policy.h2o(6, 6))


class Page(HTMLParser):
    """Parses a page: its elements, its JSON block, and its open elements."""

    VOID = ("meta", "input")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.data = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1] == (
            "script",
            {"id": "data", "type": "application/json"},
        ):
            self.data += data


@pytest.mark.parametrize("piece", ["The", HOSTILE])
def test_html_page(found: Inspection, piece: str) -> None:
    found = replace(found, model=f"{piece}.gguf", pieces=[*found.pieces[:-1], piece])
    page = Page(found.to_html())
    assert page.open == []
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.elements)
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))

    data = json.loads(page.data)
    assert data == json.loads(json.dumps(found.to_dict()))
    assert data["model"] == f"{piece}.gguf"
    assert data["pieces"] == found.pieces
    assert data["tokens"] == found.tokens.tolist()
    assert data["policy"] == {"sinks": 0, "heavy": 6, "recent": 6}
    np.testing.assert_array_equal(data["evicted_at"], found.evicted_at)
    # rounded to four decimals: half a unit of the last one, and float64 rounding
    np.testing.assert_allclose(data["scores"], found.scores, rtol=0, atol=0.5e-4 + 1e-12)
