"""Gemma 4: heads whose size differs between layers, keys as values, layers that share a cache."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, TokenType
from numpy.typing import NDArray

from h2o_cpp import Generator, Policy, capacity
from h2o_cpp.budget.cache_memory import ModelShape
from h2o_cpp.convert import convert
from h2o_cpp.convert.conversion import FAMILIES
from h2o_cpp.convert.vocabulary import read_vocabulary
from h2o_cpp.model.chat_template import ChatTemplate
from h2o_cpp.model.session import open_model, open_session
from h2o_cpp.reply import ToolCall
from support.changed_gguf import changed
from support.converted_files import check_evicts, make_file
from support.h2o_rules import ReferenceCache
from support.needs import packages
from support.opt_checkpoint import write_json
from support.random_models import (
    GEMMAS,
    N_CTX,
    N_VOCAB,
    Recipe,
    float32_tolerance,
    make_model,
    random_tokens,
    randomize,
    reference_logits,
    save_checkpoint,
)
from support.rounded_weights import check_rounded_weights
from support.tokenizer_files import REPLACE, SPACES, template, write_sentencepiece_json
from support.vocabularies import sentence_pieces, tokenizer_of

pytestmark = packages("torch", "transformers", "safetensors")


@pytest.fixture(scope="module", params=GEMMAS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return make_model(GEMMAS[name], 41).double()


@pytest.fixture(scope="module")
def path(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_file(make_model(GEMMAS[name], 41), tmp_path_factory.mktemp("gemma4"))


class Reference:
    """The model with a ReferenceCache for each layer that has keys; attention in numpy.

    Layers that share a cache look at it one after another; it evicts once all have.
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        self.model, config = model, model.config
        self.layers = list(model.model.layers)
        self.windows = [layer.self_attn.sliding_window or 0 for layer in self.layers]
        self.caches: list[ReferenceCache] = []
        for layer, window in zip(self.layers, self.windows, strict=True):
            attention = layer.self_attn
            weight = attention.o_proj.weight.detach().numpy()
            if attention.is_kv_shared_layer:
                # The last layer of the kind that has keys.
                source = max(
                    i
                    for i, other in enumerate(self.layers[: len(self.caches)])
                    if not other.self_attn.is_kv_shared_layer
                    and other.self_attn.layer_type == attention.layer_type
                )
                cache = self.caches[source]
                assert cache.output_weight is not None
                cache.output_weight = np.concatenate([cache.output_weight, weight])
            else:
                n_kv_heads = attention.k_proj.out_features // attention.head_dim
                policy_here = self._policy(policy, window)
                cache = ReferenceCache(
                    config.num_attention_heads, n_kv_heads, policy_here, output_weight=weight
                )
            self.caches.append(cache)
        self.n_read = 0

    @staticmethod
    def _policy(policy: Policy, window: int) -> Policy:
        """A layer with a window keeps what it can still see."""
        if not window:
            return policy
        return Policy.window(min(window - 1, policy.budget or window - 1))

    def _rotated(self, x: NDArray[np.float64], layer_type: str) -> NDArray[np.float64]:
        """Heads x [n, heads, d]: dimensions (i, i + d / 2), by the rows' positions."""
        frequencies = getattr(self.model.model.rotary_emb, f"{layer_type}_inv_freq").numpy()
        angles = np.outer(self.n_read + np.arange(len(x)), frequencies.astype(np.float64))
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def _attend(self, index: int, x: Any) -> Any:
        import torch

        attention, cache = self.layers[index].self_attn, self.caches[index]
        n, size = len(x), attention.head_dim

        def heads(projected: Any, norm: Any) -> NDArray[np.float64]:
            normalized: NDArray[np.float64] = norm(projected.reshape(n, -1, size)).numpy()
            return normalized

        kind = attention.layer_type
        if not attention.is_kv_shared_layer:
            k = attention.k_proj(x)
            v = k if attention.v_proj is None else attention.v_proj(x)
            cache.store(self._rotated(heads(k, attention.k_norm), kind), heads(v, attention.v_norm))
        q = self._rotated(heads(attention.q_proj(x), attention.q_norm), kind)
        first = not attention.is_kv_shared_layer
        # Logits are not scaled.
        out = cache.look(q * np.sqrt(size), self.windows[index], first=first)
        if all(other is not cache for other in self.caches[index + 1 :]):
            cache.evict(n)
        return attention.o_proj(torch.from_numpy(out.reshape(n, -1)))

    def _inputs(self, tokens: Any, x: Any) -> Any:
        """The embeddings [n, n_layers, size] of tokens for each layer, if there are any."""
        model, size = self.model.model, self.model.config.hidden_size_per_layer_input
        if not size:
            return None
        n = len(tokens)
        projected = model.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        projected = model.per_layer_projection_norm(projected.reshape(n, -1, size))
        own = model.embed_tokens_per_layer.weight[tokens].reshape(n, -1, size)
        return (projected + own * size**0.5) * 0.5**0.5

    def read(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The logits after each token of a chunk."""
        import torch

        with torch.no_grad():
            x = self.model.model.embed_tokens(torch.as_tensor(tokens))
            inputs = self._inputs(torch.as_tensor(tokens), x)
            for i, layer in enumerate(self.layers):
                attended = self._attend(i, layer.input_layernorm(x))
                x = x + layer.post_attention_layernorm(attended)
                out = layer.mlp(layer.pre_feedforward_layernorm(x))
                if layer.enable_moe_block:
                    _, weights, chosen = layer.router(x)
                    experts = layer.experts(layer.pre_feedforward_layernorm_2(x), chosen, weights)
                    out = layer.post_feedforward_layernorm_1(out)
                    out = out + layer.post_feedforward_layernorm_2(experts)
                x = x + layer.post_feedforward_layernorm(out)
                if inputs is not None:
                    gate = torch.nn.functional.gelu(
                        layer.per_layer_input_gate(x), approximate="tanh"
                    )
                    out = layer.per_layer_projection(gate * inputs[:, i])
                    x = x + layer.post_per_layer_input_norm(out)
                x = x * layer.layer_scalar
            logits = self.model.lm_head(self.model.model.norm(x))
            if (cap := self.model.config.final_logit_softcapping) is not None:
                logits = cap * torch.tanh(logits / cap)
        self.n_read += len(tokens)
        found: NDArray[np.float64] = logits.numpy()
        return found


@pytest.mark.parametrize("n_batch", [1, 7, 64])
@pytest.mark.parametrize(
    "policy",
    [
        Policy.full(),
        Policy.h2o(4, 5),
        Policy.h2o(3, 4, sinks=2, value_norm="output"),
        Policy.h2o(4, 3, decay=0.9),
        Policy.h2o(4, 3, score="question", decay=0.9),
    ],
    ids=["full", "h2o", "outputs", "decay", "question"],
)
def test_evicts_as_a_reference_does(
    name: str, model: Any, path: Path, policy: Policy, n_batch: int
) -> None:
    """In decode (chunks of one token) and prefill."""
    check_evicts(Reference(model, policy), path, GEMMAS[name], policy, n_batch, seed=42)


@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
def test_rounded_weights_change_logits_within_bound(
    tmp_path: Path, name: str, outtype: str
) -> None:
    recipe = GEMMAS[name]
    if name == "gemma4_moe":  # every expert, as any rounding can change the choice of some
        options = recipe.options | {"top_k_experts": recipe.options["num_experts"]}
        recipe = dataclasses.replace(recipe, options=options)
    check_rounded_weights(tmp_path, recipe, outtype, seed=43)


def test_the_cache_has_the_heads_of_each_layer(name: str, path: Path) -> None:
    shape = ModelShape.of_file(path)
    options = GEMMAS[name].options
    sizes = {size for _, size in shape.layer_heads}
    assert sizes == {options["head_dim"], options["global_head_dim"]}
    with Generator(path, memory="200KiB", hh=8, threads=1) as generator:
        assert generator.max_sequences == capacity(path, "200KiB", hh=8)
        assert generator.stats().cache_bytes <= 200 * 1024


def test_continues_from_a_snapshot(path: Path) -> None:
    tokens = random_tokens(44).tolist()
    with Generator(path, hh=9, threads=1) as generator:
        whole = generator.stream(tokens[:20], max_tokens=8, temperature=0, ignore_eos=True)
        text = "".join(whole)
        first = generator.stream(tokens[:20], max_tokens=3, temperature=0, ignore_eos=True)
        begun = "".join(first)
        snapshot = first.save()
        generator.generate([tokens], max_tokens=1)
        rest = generator.stream([], after=snapshot, max_tokens=5, temperature=0, ignore_eos=True)
        assert begun + "".join(rest) == text


@pytest.mark.parametrize("threads", [1, 3])
def test_sequences_do_not_affect_each_other(path: Path, threads: int) -> None:
    """In chunks longer than the free slots, whose rows are staged until all layers have read."""
    model = open_model(path, device="cpu", threads=threads)
    options: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": 40}
    texts = [random_tokens(seed).astype(np.int32) for seed in range(2)]
    alone = [open_session(model, Policy.h2o(4, 3), **options) for _ in texts]
    together = open_session(model, Policy.h2o(4, 3), n_sequences=2, **options)
    for begin, end in ((0, 5), (5, 20), (20, 21), (21, 40)):
        parts = [text[begin:end] for text in texts]
        expected = [
            session.step([(0, part)])[-1] for session, part in zip(alone, parts, strict=True)
        ]
        np.testing.assert_array_equal(together.step(list(enumerate(parts))), expected)


def test_what_is_refused(name: str, path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"archive": "f16", "hh": 8}, "heads whose size differs between layers do not support"),
        ({"positions": "rolling", "hh": 8}, "uses original positions in some layers"),
    ]
    if name == "gemma4_shared":
        refused.append(({"draft": "lookup"}, "layers that share a cache do not support drafts"))
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            Generator(path, threads=1, **options)


def test_sizes_in_the_first_checkpoints() -> None:
    """They name the sizes of layers without a window, where later ones list them."""
    family = FAMILIES["Gemma4ForCausalLM"]
    config = {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "intermediate_size": 96,
        "vocab_size": 100,
        "hidden_size_per_layer_input": 0,
        "head_dim": 16,
        "attention_k_eq_v": True,
    }
    full = {"head_dim": 32, "num_key_value_heads": 2}
    listed = {"per_layer_config": {"5": full}}
    named = {"global_head_dim": 32, "num_global_key_value_heads": 2}
    given = {**family.absent, **config}
    assert family.metadata(given | named) == family.metadata(given | listed)
    assert family.metadata(given | named)["attention.head_count_kv"] == [4, 4, 4, 4, 4, 2]
    with pytest.raises(ValueError, match="sizes of their own"):
        family.metadata(given | {"per_layer_config": {"0": full}})


TEXT = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": N_CTX,
    "head_dim": 10,
    "global_head_dim": 16,
    "sliding_window": 6,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
# Options of the text model and of the encoders of images and sound.
ENCODERS: dict[str, tuple[dict[str, Any], ...]] = {
    "Gemma4": (
        {"hidden_size_per_layer_input": 0},
        SIZES | {"intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8},
        SIZES | {"output_proj_dims": 16, "subsampling_conv_channels": [4, 4]},
    ),
    "Gemma4Unified": ({}, {"mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32}, {}),
}


@pytest.mark.parametrize("model_class", ENCODERS)
def test_encoders_are_not_converted(tmp_path: Path, model_class: str) -> None:
    import transformers

    text, vision, audio = ENCODERS[model_class]
    config = getattr(transformers, f"{model_class}Config")(
        text_config=TEXT | text, vision_config=vision, audio_config=audio
    )
    model = getattr(transformers, f"{model_class}ForConditionalGeneration")(config)
    save_checkpoint(randomize(model, 45), tmp_path)
    notes = convert(tmp_path, tmp_path / "model.gguf", "f32")
    assert notes[0] == "only the model of text is converted, not the encoder of images"
    tokens = random_tokens(45)
    expected = reference_logits(model, tokens)
    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        logits = generator.logits(tokens)
    tolerance = float32_tolerance(Recipe(model_class, 32, 4, 40, n_layers=3), expected)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


def test_files_have_the_keys_and_tensors_that_llama_cpp_reads(name: str, path: Path) -> None:
    """By its loader; each tensor is of its list for the architecture."""
    from gguf import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES, GGUFReader

    reader = GGUFReader(path)
    keys = {key.removeprefix("gemma4.") for key in reader.fields if key.startswith("gemma4.")}
    assert keys == {
        "context_length",
        "embedding_length",
        "embedding_length_per_layer_input",
        "block_count",
        "feed_forward_length",
        "vocab_size",
        *(["final_logit_softcapping"] if "final_logit_softcapping" in GEMMAS[name].options else []),
        *(
            ["expert_count", "expert_used_count", "expert_feed_forward_length"]
            if name == "gemma4_moe"
            else []
        ),
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.dimension_count",
        "rope.dimension_count_swa",
        *(
            f"attention.{key}"
            for key in (
                *("head_count", "head_count_kv", "layer_norm_rms_epsilon", "shared_kv_layers"),
                *("key_length", "key_length_swa", "value_length", "value_length_swa"),
                *("sliding_window", "sliding_window_pattern"),
            )
        ),
    }
    known = {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[MODEL_ARCH.GEMMA4]}
    names = {re.sub(r"blk\.\d+", "blk.{bid}", tensor.name) for tensor in reader.tensors}
    assert {re.sub(r"\.(weight|scale)$", "", found) for found in names} <= known
    [divisors] = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    half = len(divisors) // 2
    assert divisors[:half].tolist() == [1.0] * half
    assert (divisors[half:] > 1e29).all()


def test_layers_may_have_keys_that_are_not_read(tmp_path: Path) -> None:
    """Files of Google's checkpoints have those of layers that read others'."""
    path = make_file(make_model(GEMMAS["gemma4_shared"], 46), tmp_path)
    unread = {
        "blk.3.attn_k.weight": np.ones((20, 32), np.float32),
        "blk.3.attn_v.weight": np.ones((20, 32), np.float32),
        "blk.3.attn_k_norm.weight": np.ones(10, np.float32),
    }
    more = changed(path, tmp_path / "more.gguf", {}, unread)
    tokens = random_tokens(46)
    logits = []
    for file in (path, more):
        with Generator(file, kv_dtype="f32") as generator:
            logits.append(generator.logits(tokens))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_layers_without_keys_to_read_are_refused(tmp_path: Path) -> None:
    path = make_file(make_model(GEMMAS["gemma4_shared"], 47), tmp_path)
    key = "gemma4.attention.shared_kv_layers"
    few = changed(path, tmp_path / "few.gguf", {key: (4, GGUFValueType.UINT32)}, {})
    with pytest.raises(ValueError, match="is 4 of 5, but no layer before has keys and values"):
        Generator(few)


def test_calls_begin_with_a_token_that_is_text() -> None:
    """Files have the markers of calls as text, so that programs can read them."""
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
    metadata = sentence_pieces(*((marker, 4) for marker in markers), add_space_prefix=False)
    tokenizer = tokenizer_of(metadata)
    source = """{{ messages[0].content }}{{ tools }}<|tool_call>call:f{x:<|"|>a<|"|>}"""
    function = {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}
    turn = ChatTemplate(source, tokenizer).turn(
        [{"role": "user", "content": "Hi"}], tools=[{"type": "function", "function": function}]
    )
    trigger = turn.call_trigger()
    assert trigger is not None
    assert tokenizer.token_text(trigger[0]) == "<|tool_call>"
    reply = turn.parse('<|channel>thought\nHm.<channel|><|tool_call>call:f{x:<|"|>a<|"|>}')
    assert (reply.reasoning, reply.calls) == ("Hm.", [ToolCall("f", '{"x": "a"}')])


def test_tokens_of_a_checkpoint(tmp_path: Path) -> None:
    """Merges of pieces, in an order that no scores of pieces have."""
    from tokenizers import Tokenizer

    save_checkpoint(make_model(GEMMAS["gemma4"], 48), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    texts = ["<unk>", "<bos>", "<eos>", "<turn|>", "<|channel>", "<|tool_response>"]
    texts += [f"<0x{byte:02X}>" for byte in range(256)]
    texts += ["\u2581", "a", "b", "ab", "aba", "\u2581a"]
    write_json(tmp_path / "config.json", config | {"vocab_size": len(texts)})
    write_sentencepiece_json(
        tmp_path,
        added_tokens=[
            {"id": i, "content": texts[i], "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for i in range(6)
        ],
        normalizer=REPLACE,
        pre_tokenizer=SPACES,
        post_processor=template(["<bos>"], []),
        model__vocab={text: i for i, text in enumerate(texts)},
        model__merges=["ab a", "a b", "\u2581 a"],
    )
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    write_json(tmp_path / "tokenizer_config.json", settings)
    vocabulary = read_vocabulary(
        tmp_path,
        {"eos_token_id": [2, 3, 5]},
        size=len(texts),
        add_bos=False,
        control_tokens=frozenset(),
        visible_tokens=FAMILIES["Gemma4ForCausalLM"].visible_tokens,
        piece_merges=True,
    )
    assert (vocabulary.model, vocabulary.merges) == ("gemma4", ["ab a", "a b", "\u2581 a"])
    assert vocabulary.special_ids == {"unknown": 0, "bos": 1, "eos": 2, "eot": 3}
    assert vocabulary.flags == {"add_space_prefix": False, "add_bos_token": True}
    assert vocabulary.types[4] is TokenType.USER_DEFINED
    metadata = {
        "tokenizer.ggml.model": vocabulary.model,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in vocabulary.types],
        "tokenizer.ggml.merges": vocabulary.merges,
        **{f"tokenizer.ggml.{k}_token_id": id for k, id in vocabulary.special_ids.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in vocabulary.flags.items()},
    }
    ours = tokenizer_of(metadata)
    assert ours.end_tokens == {2, 3, 5}
    file = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": None}
    theirs = Tokenizer.from_str(json.dumps(file))
    for text in ("abab a", "", " a\u00e9", "a<|channel>b"):
        assert ours.encode(text) == [1, *theirs.encode(text).ids]
