"""Layers for multi-token prediction: their logits, and outputs with their drafts.

The last layer of a random model becomes one. transformers does not compute such layers, but has
the decoder layer that each consists of.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType
from numpy.typing import NDArray

from h2o_cpp import BUNDLED_MODEL, Generator, _core
from h2o_cpp.cli import main
from h2o_cpp.convert import convert
from h2o_cpp.model.session import open_model, open_session
from h2o_cpp.policy import Policy
from support.changed_gguf import changed
from support.needs import packages
from support.outputs import left
from support.random_models import (
    HYBRIDS,
    RECIPES,
    Recipe,
    float32_tolerance,
    make_model,
    random_tokens,
    save_checkpoint,
)

pytestmark = packages("torch", "transformers", "safetensors")

U32 = GGUFValueType.UINT32
# Their last layers have attention.
MODELS = {"glm4_moe": RECIPES["glm4_moe"], "qwen35_listed": HYBRIDS["qwen35_listed"]}


class Predicting:
    """A model whose last layer predicts the token after the next."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe = recipe
        self.reference = make_model(recipe, seed=11)
        save_checkpoint(self.reference, folder)
        convert(folder, folder / "whole.gguf", "f32")
        random = np.random.default_rng(3)
        n = recipe.n_embd
        norms = ("enorm", "hnorm", "shared_head_norm")
        self.nextn: dict[str, NDArray[np.float32]] = {
            name: random.normal(1, 0.3, size=n).astype(np.float32) for name in norms
        }
        self.nextn["eh_proj"] = random.normal(size=(n, 2 * n), scale=n**-0.5).astype(np.float32)
        last = recipe.n_layers - 1
        file = GGUFReader(folder / "whole.gguf")
        architecture = file.fields["general.architecture"].contents()
        self.path = changed(
            folder / "whole.gguf",
            folder / "model.gguf",
            {f"{architecture}.nextn_predict_layers": (1, U32)},
            {f"blk.{last}.nextn.{name}.weight": values for name, values in self.nextn.items()},
        )

    def logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Those of the layer, after each token but the last and the one after it, in float64."""
        import torch

        model = self.reference.double()
        inner, eps = model.model, model.config.rms_norm_eps

        def norm(x: Any, name: str) -> Any:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
            return x * scale * torch.as_tensor(self.nextn[name]).double()

        layers = inner.layers
        with torch.no_grad():
            ids = torch.as_tensor(tokens)[None]
            inner.layers = layers[:-1]
            kept, model.config.num_hidden_layers = model.config.num_hidden_layers, len(layers) - 1
            hidden = inner(ids).last_hidden_state
            inner.layers, model.config.num_hidden_layers = layers, kept
            embedded = inner.embed_tokens(ids[:, 1:])
            both = torch.cat([norm(embedded, "enorm"), norm(hidden[:, :-1], "hnorm")], dim=-1)
            x = both @ torch.as_tensor(self.nextn["eh_proj"]).double().T
            positions = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=torch.double).triu(1)
            x = layers[-1](
                x,
                position_embeddings=inner.rotary_emb(x, positions),
                attention_mask=mask[None, None],
                position_ids=positions,
            )
            x = x[0] if isinstance(x, tuple) else x
            found: NDArray[np.float64] = model.lm_head(norm(x, "shared_head_norm"))[0].numpy()
        return found


@pytest.fixture(scope="module", params=MODELS)
def predicting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    recipe = dataclasses.replace(MODELS[request.param], n_ctx=128)
    return Predicting(recipe, tmp_path_factory.mktemp("mtp"))


@pytest.mark.parametrize("chunks", [[19], [5, 1, 8, 5]])
def test_logits(predicting: Predicting, chunks: list[int]) -> None:
    tokens = random_tokens(4)[: sum(chunks) + 1]
    model = open_model(predicting.path, device="cpu", threads=1)
    predictor = _core.next_token_predictor(model)
    trunk, layer = (
        open_session(one, Policy.full(), n_ctx=128, n_batch=32, kv_dtype="f32")
        for one in (model, predictor)
    )
    found = []
    begin = 0
    for n in chunks:
        trunk.step([(0, tokens[begin : begin + n].astype(np.int32))])
        layer.set_hidden(trunk.hidden_states(0))
        found.append(layer.score(0, tokens[begin + 1 : begin + n + 1].astype(np.int32)))
        begin += n
    expected = predicting.logits(tokens)
    error = np.abs(np.concatenate(found) - expected).max()
    assert error < float32_tolerance(predicting.recipe, expected)


def test_hidden_states_are_those_of_the_next_step(predicting: Predicting) -> None:
    tokens = random_tokens(4)[:8].astype(np.int32)
    model = open_model(predicting.path, device="cpu", threads=1)
    trunk, layer = (
        open_session(one, Policy.full(), n_ctx=16, n_batch=8)
        for one in (model, _core.next_token_predictor(model))
    )
    trunk.step([(0, tokens)])
    states = trunk.hidden_states(0)
    for wrong in (states[:0], states[:, 1:], np.tile(states, (2, 1))):
        with pytest.raises(ValueError, match=f"{wrong.size} numbers of hidden states, expected "):
            layer.set_hidden(wrong)
    layer.set_hidden(states[:2])
    with pytest.raises(ValueError, match="3 tokens in one step, but hidden states of 2"):
        layer.score(0, tokens[1:4])
    layer.score(0, tokens[1:3])
    with pytest.raises(ValueError, match="2 tokens in one step, but hidden states of 0"):
        layer.score(0, tokens[3:5])
    with pytest.raises(ValueError, match="reads no hidden states of another model"):
        trunk.set_hidden(states)


@pytest.mark.parametrize("hh", [None, 9])
def test_nothing_differs_with_drafts(predicting: Predicting, hh: int | None) -> None:
    common: Any = {"hh": hh, "n_ctx": 100, "n_batch": 16, "max_sequences": 2, "threads": 1}
    random = np.random.default_rng(0)
    with (
        Generator(predicting.path, **common) as plain,
        Generator(predicting.path, draft="mtp", draft_max=3, **common) as drafted,
    ):
        for seed in range(6):
            prompt = random.integers(3, 60, size=int(random.integers(1, 40))).tolist()
            options: Any = {
                "temperature": float(random.choice([0, 0.7])),
                "seed": seed,
                "max_tokens": 40,
                "ignore_eos": True,
            }
            assert left(drafted, prompt, options) == left(plain, prompt, options)
        with drafted.engine() as engine:
            assert engine.stats().drafted_tokens > 0
        prompts = [[5, 6, 7] * 8, [9, 8], [3]]
        outputs = [one.text for one in plain.generate(prompts, max_tokens=30, temperature=0)]
        results = drafted.generate(prompts, max_tokens=30, temperature=0)
        assert [one.text for one in results] == outputs


def test_a_model_without_such_layers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no layers for multi-token prediction"):
        Generator(BUNDLED_MODEL, draft="mtp")
    assert main(["run", "a", "--draft", "mtp"]) == 1
    assert "no layers for multi-token prediction" in capsys.readouterr().err
