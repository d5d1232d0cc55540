"""Layers for multi-token prediction: their logits, and outputs with their drafts.

The last layer of a random model becomes one. It is in the checkpoint as each family has it, or, for
families whose conversion does not write it, in the file as llama.cpp has it.
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
from support.opt_checkpoint import Arrays, write_json, write_safetensors
from support.outputs import left
from support.random_models import (
    HYBRIDS,
    LATENTS,
    RECIPES,
    Recipe,
    float32_tolerance,
    make_model,
    random_tokens,
    save_checkpoint,
)
from support.renamed_checkpoints import LING_2, as_ling_2, read_checkpoint, renamed

pytestmark = packages("torch", "transformers", "safetensors")

U32 = GGUFValueType.UINT32


def _k_exaone() -> Recipe:
    """Its predicting layer has a window and no experts."""
    recipe = RECIPES["exaone_moe"]
    kinds = ["dense", *["sparse"] * 3, "dense"]
    return dataclasses.replace(recipe, options=recipe.options | {"mlp_layer_types": kinds})


# Their last layers have attention.
MODELS = {
    "glm4_moe": RECIPES["glm4_moe"],
    "qwen35_listed": HYBRIDS["qwen35_listed"],
    "deepseek_v3": LATENTS["deepseek_v3"],
    "glm4_moe_lite": LATENTS["glm4_moe_lite"],
    "exaone_moe": _k_exaone(),
    "ling_2": LING_2,
}
NORMS = {"enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}
K_EXAONE = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
    "eh_proj": "fc",
}


class Predicting:
    """A model whose last layer predicts the token after the next."""

    def __init__(self, name: str, recipe: Recipe, folder: Path) -> None:
        self.recipe = recipe
        self.reference = make_model(recipe, seed=11)
        random = np.random.default_rng(3)
        n = recipe.n_embd
        self.nextn: Arrays = {
            norm: random.normal(1, 0.3, size=n).astype(np.float32) for norm in NORMS
        }
        self.nextn["eh_proj"] = random.normal(size=(n, 2 * n), scale=n**-0.5).astype(np.float32)
        save_checkpoint(self.reference, folder)
        self.path = folder / "model.gguf"
        if name == "qwen35_listed":
            return self._change_file(folder)
        config, weights = read_checkpoint(folder)
        last = recipe.n_layers - 1
        config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
        for kinds in ("layer_types", "mlp_layer_types"):
            if kinds in config:
                config[kinds] = config[kinds][:last]
        names = NORMS | {"eh_proj": "eh_proj"}
        prefix, separate = f"model.layers.{last}.", name == "exaone_moe"
        if separate:
            names = K_EXAONE
            weights = {renamed(key, {prefix: "mtp.layers.0."}): weights[key] for key in weights}
        for key, values in self.nextn.items():
            weights[f"{'mtp.' if separate else prefix}{names[key]}.weight"] = values
        if name == "ling_2":
            config, weights = as_ling_2(config, weights)
        write_json(folder / "config.json", config)
        write_safetensors(folder / "model.safetensors", weights)
        convert(folder, self.path, "f32")

    def _change_file(self, folder: Path) -> None:
        convert(folder, folder / "whole.gguf", "f32")
        file = GGUFReader(folder / "whole.gguf")
        architecture = file.fields["general.architecture"].contents()
        last = self.recipe.n_layers - 1
        changed(
            folder / "whole.gguf",
            self.path,
            {f"{architecture}.nextn_predict_layers": (1, U32)},
            {f"blk.{last}.nextn.{name}.weight": values for name, values in self.nextn.items()},
        )

    def hidden(self, ids: Any) -> Any:
        """The hidden states of the other layers, after the last norm."""
        model, inner = self.reference, self.reference.model
        layers, n_layers = inner.layers, model.config.num_hidden_layers
        inner.layers, model.config.num_hidden_layers = layers[:-1], n_layers - 1
        hidden = inner(ids).last_hidden_state
        inner.layers, model.config.num_hidden_layers = layers, n_layers
        return hidden

    def logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Those of the layer, after each token but the last and the one after it, in float64."""
        import torch

        model = self.reference.double()
        inner, eps = model.model, model.config.rms_norm_eps

        def norm(x: Any, name: str) -> Any:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
            return x * scale * torch.as_tensor(self.nextn[name]).double()

        with torch.no_grad():
            ids = torch.as_tensor(tokens)[None]
            hidden = self.hidden(ids)
            embedded = inner.embed_tokens(ids[:, 1:])
            both = torch.cat([norm(embedded, "enorm"), norm(hidden[:, :-1], "hnorm")], dim=-1)
            x = both @ torch.as_tensor(self.nextn["eh_proj"]).double().T
            positions = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=torch.double).triu(1)
            if self.recipe.model == "ExaoneMoe":
                mask += torch.full_like(mask, -torch.inf).tril(-model.config.sliding_window)
            x = inner.layers[-1](
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
    return Predicting(request.param, recipe, tmp_path_factory.mktemp("mtp"))


def test_reference(predicting: Predicting) -> None:
    """The logits are those of transformers, for the families whose layer it has."""
    import torch
    from transformers.modeling_layers import MtpModel

    if not hasattr(predicting.reference.config, "num_mtp_layers"):
        return
    tokens = random_tokens(4)
    expected = predicting.logits(tokens)
    model = predicting.reference
    with torch.no_grad():
        ids = torch.as_tensor(tokens)[None]
        hidden = predicting.hidden(ids)
        predictor = MtpModel(model, 1).double()
        layer = predictor.layers[0]
        layer.mtp_block = model.model.layers[-1]
        names = {"enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "post_norm"}
        for name, values in predicting.nextn.items():
            getattr(layer, names.get(name, name)).weight.copy_(torch.as_tensor(values))
        positions = torch.arange(len(tokens) - 1)[None]
        found = predictor.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
        logits = model.lm_head(found)[0].numpy()
    # Its norms are in float32.
    atol = float32_tolerance(predicting.recipe, expected)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=atol)


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
