"""Llama 4: attention in blocks of positions, and layers without positions."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_cpp import Policy
from h2o_cpp.convert.conversion import FAMILIES
from support.converted_files import check_evicts, make_file
from support.h2o_rules import ReferenceCache
from support.needs import packages
from support.opt_checkpoint import write_json
from support.random_models import (
    RECIPES,
    make_model,
    random_tokens,
    reference_logits,
)
from support.rounded_weights import check_rounded_weights

pytestmark = packages("torch", "transformers", "safetensors")


@pytest.fixture(scope="module", params=["llama4", "llama4_maverick"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return make_model(RECIPES[name], 51).double()


@pytest.fixture(scope="module")
def path(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_file(make_model(RECIPES[name], 51), tmp_path_factory.mktemp("llama4"))


class Reference:
    """The model with a ReferenceCache for each layer; attention in numpy."""

    def __init__(self, model: Any, policy: Policy) -> None:
        self.model, config = model, model.config
        block = config.attention_chunk_size
        # A layer that attends in blocks keeps what it may still see.
        newest = Policy.window(min(block - 1, policy.budget or block - 1))
        self.blocks = [block if rotates else 0 for rotates in config.no_rope_layers]
        self.caches = [
            ReferenceCache(
                config.num_attention_heads,
                config.num_key_value_heads,
                newest if block else policy,
            )
            for block in self.blocks
        ]
        self.n_read = 0

    def _attend(self, attention: Any, cache: ReferenceCache, block: int, x: Any) -> Any:
        import torch

        config, n = self.model.config, len(x)
        positions = self.n_read + torch.arange(n)
        q, k, v = (
            project(x).reshape(n, -1, config.head_dim)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if block:
            turns = torch.outer(positions.double(), self.model.model.rotary_emb.inv_freq.double())
            turns = torch.polar(torch.ones_like(turns), turns)[:, None]
            q, k = (
                torch.view_as_real(
                    torch.view_as_complex(heads.reshape(*heads.shape[:2], -1, 2)) * turns
                ).flatten(2)
                for heads in (q, k)
            )
            if config.use_qk_norm:
                q, k = (
                    heads / (heads.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
                    for heads in (q, k)
                )
        else:
            lengths = (positions + 1) // config.floor_scale
            q = q * (1 + config.attn_scale * torch.log1p(lengths.double()))[:, None, None]
        cache.store(k.numpy(), v.numpy())
        out = cache.look(q.numpy(), block, in_blocks=True)
        cache.evict(n)
        return attention.o_proj(torch.from_numpy(out.reshape(n, -1)))

    def read(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The logits after each token of a chunk."""
        import torch

        with torch.no_grad():
            x = self.model.model.embed_tokens(torch.as_tensor(tokens))
            for layer, cache, block in zip(
                self.model.model.layers, self.caches, self.blocks, strict=True
            ):
                x = x + self._attend(layer.self_attn, cache, block, layer.input_layernorm(x))
                out = layer.feed_forward(layer.post_attention_layernorm(x))
                x = x + (out[0] if layer.is_moe_layer else out)
            logits = self.model.lm_head(self.model.model.norm(x))
        self.n_read += len(tokens)
        found: NDArray[np.float64] = logits.numpy()
        return found


@pytest.mark.parametrize("n_batch", [1, 5, 64])
@pytest.mark.parametrize(
    "policy", [Policy.full(), Policy.h2o(4, 5), Policy.h2o(2, 3)], ids=["full", "9", "5"]
)
def test_evicts_as_a_reference_does(
    name: str, model: Any, path: Path, policy: Policy, n_batch: int
) -> None:
    """In decode (chunks of one token) and prefill, over blocks."""
    check_evicts(Reference(model, policy), path, RECIPES[name], policy, n_batch, seed=52)


@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
def test_rounded_weights_change_logits_within_bound(
    tmp_path: Path, name: str, outtype: str
) -> None:
    # One expert, as any rounding can change the choice of some.
    options = RECIPES[name].options | {"num_local_experts": 1, "use_qk_norm": True}
    check_rounded_weights(
        tmp_path, dataclasses.replace(RECIPES[name], options=options), outtype, seed=53
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_qk_norm": False}, "use_qk_norm is False: the number of experts"),
        ({"moe_layers": [0, 3]}, "moe_layers is .0, 3.: another order of layers"),
        ({"no_rope_layers": [1] * 6}, "no_rope_layers is .1, 1, 1, 1, 1, 1.: other layers"),
        ({"no_rope_layers": [], "no_rope_layer_interval": 3}, "interval is 3: other layers"),
        ({"attn_temperature_tuning": False}, "queries are not scaled by their positions"),
        ({"attn_temperature_tuning": 0}, "queries are not scaled by their positions"),
    ],
)
def test_what_files_cannot_express_is_refused(changed: dict[str, Any], message: str) -> None:
    config = make_model(RECIPES["llama4"], 0).config.to_dict()
    with pytest.raises(ValueError, match=message):
        FAMILIES["Llama4ForCausalLM"].metadata(config | changed)


@pytest.mark.parametrize(
    "other",
    [
        {"no_rope_layers": []},
        {"no_rope_layers": [], "no_rope_layer_interval": 4},
        {"no_rope_layers": None, "no_rope_layer_interval": 4},
    ],
)
def test_unrotated_layers_by_their_interval(
    model: Any, path: Path, tmp_path: Path, other: dict[str, Any]
) -> None:
    """The config.json of released checkpoints has it."""
    import transformers

    config = json.loads((path.parent / "config.json").read_text())
    write_json(tmp_path / "config.json", config | other)
    shutil.copy(path.parent / "model.safetensors", tmp_path)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).double()
    tokens = random_tokens(54)
    np.testing.assert_array_equal(reference_logits(found, tokens), reference_logits(model, tokens))
    family = FAMILIES["Llama4ForCausalLM"]
    assert family.metadata(config | other) == family.metadata(config)


def test_a_number_scales_queries_as_true_does() -> None:
    """transformers 4 only asked whether it is true; transformers 5 wants a bool."""
    config = make_model(RECIPES["llama4"], 0).config.to_dict()
    family = FAMILIES["Llama4ForCausalLM"]
    assert family.metadata(config | {"attn_temperature_tuning": 4}) == family.metadata(config)
