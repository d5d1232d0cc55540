"""Random models of every family from Hugging Face transformers, and float32 tolerances."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.opt_checkpoint import write_tokenizer_json

N_VOCAB = 61
N_CTX = 40


_OLD_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
_CLASSES = {"GPT2": "GPT2LMHeadModel"}
# Gemma3Config is the config of the vision model.
_CONFIGS = {"Gemma3": "Gemma3Text", "Qwen3_5": "Qwen3_5Text", "Qwen3_5Moe": "Qwen3_5MoeText"}


@dataclass(frozen=True)
class Recipe:
    """A transformers model class and its config options."""

    model: str  # of transformers: "Llama", "OPT", ...
    n_embd: int
    n_heads: int
    n_ff: int
    n_layers: int = 2
    n_ctx: int = N_CTX
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        """The transformers config."""
        import transformers

        sizes: dict[str, Any] = {
            "hidden_size": self.n_embd,
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "vocab_size": N_VOCAB,
            "max_position_embeddings": self.n_ctx,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
        }
        if self.model == "OPT":
            sizes |= {"ffn_dim": self.n_ff, "word_embed_proj_dim": self.n_embd}
        elif self.model == "Mpt":  # the MLP has 4 times the width
            sizes["max_seq_len"] = sizes.pop("max_position_embeddings")
        elif self.model in ("GPT2", "GPTBigCode", "GPTJ"):
            sizes = {_OLD_NAMES.get(name, name): size for name, size in sizes.items()}
            sizes["n_inner"] = self.n_ff
        else:
            key = "ffn_hidden_size" if self.model == "Falcon" else "intermediate_size"
            sizes |= {key: self.n_ff}
        return getattr(transformers, f"{_CONFIGS.get(self.model, self.model)}Config")(
            **(sizes | self.options)
        )


def _rope(theta: float = 10000.0, **options: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **options}}


def _gqa(n_kv_heads: int, **options: object) -> dict[str, Any]:
    return {"num_key_value_heads": n_kv_heads, **options}


def _experts(n: int, used: int) -> dict[str, Any]:
    return {"num_experts": n, "num_experts_per_tok": used, "moe_intermediate_size": 24}


def _delta_net(n_k_heads: int, n_v_heads: int, size: int) -> dict[str, Any]:
    return {
        "linear_num_key_heads": n_k_heads,
        "linear_num_value_heads": n_v_heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
    }


def _routed(n: int, used: int, **options: object) -> dict[str, Any]:
    sizes = {"n_routed_experts": n, "num_experts_per_tok": used, "moe_intermediate_size": 24}
    return _gqa(2, **sizes, **options)


_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}
_LLAMA3_ROPE = _rope(
    500.0,
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_GPT_OSS_ROPE = _rope(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=10, truncate=False
)
_LONGROPE = _rope(
    rope_type="longrope",
    short_factor=[1 + 0.1 * i for i in range(8)],
    long_factor=[1 + 0.5 * i for i in range(8)],
) | {"original_max_position_embeddings": 10}
_FALCON = {"alibi": False, "bias": False, "parallel_attn": True}
_YARN_ROPE = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=10)
_YARN_MSCALE = _rope(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=10,
    mscale=0.7, mscale_all_dim=0.4,
)  # fmt: skip

# Gated DeltaNet in most layers, attention in the others.
HYBRIDS = {
    "qwen35_listed": Recipe(
        "Qwen3_5", 48, 3, 40, n_layers=3,
        options=_gqa(
            1, head_dim=16, tie_word_embeddings=True, linear_conv_kernel_dim=3,
            layer_types=["full_attention", "linear_attention", "full_attention"],
            **_delta_net(3, 3, 32),
        ),
    ),
    "qwen35": Recipe(
        "Qwen3_5", 64, 4, 40, n_layers=4,
        options=_gqa(
            2, head_dim=24, **_delta_net(2, 4, 16),
            **_rope(partial_rotary_factor=0.5, mrope_section=[2, 2, 2]),
        ),
    ),
    "qwen3next": Recipe(
        "Qwen3Next", 64, 4, 40, n_layers=4,
        options=_gqa(
            2, head_dim=16, shared_expert_intermediate_size=36, **_experts(6, 3),
            **_delta_net(2, 6, 16), **_rope(partial_rotary_factor=0.25),
        ),
    ),
    "qwen35moe": Recipe(
        "Qwen3_5Moe", 64, 4, 40, n_layers=4,
        options=_gqa(
            2, head_dim=16, shared_expert_intermediate_size=36, **_experts(6, 3),
            **_delta_net(2, 6, 16),
        ),
    ),
}  # fmt: skip

RECIPES = {
    "opt": Recipe("OPT", 32, 4, 128),
    "opt_odd_heads": Recipe("OPT", 39, 3, 50),
    "opt_one_head": Recipe("OPT", 24, 1, 17, n_layers=1),
    "opt_untied": Recipe("OPT", 48, 8, 100, n_layers=3, options={"tie_word_embeddings": False}),
    "opt_head_dim_one": Recipe("OPT", 16, 16, 33),
    "llama": Recipe("Llama", 32, 4, 88, options=_gqa(4)),
    "llama_gqa2_tied": Recipe("Llama", 48, 4, 80, options=_gqa(2, tie_word_embeddings=True)),
    "llama_gqa4": Recipe("Llama", 64, 4, 40, options=_gqa(1, **_rope(500000.0))),
    "llama_gqa8_biases": Recipe(
        "Llama", 48, 8, 33, options=_gqa(1, attention_bias=True, mlp_bias=True)
    ),
    "llama_head_dim": Recipe("Llama", 36, 6, 50, options=_gqa(3, head_dim=10)),
    "llama_linear": Recipe(
        "Llama", 32, 4, 48, options=_gqa(2, **_rope(rope_type="linear", factor=2.5))
    ),
    "llama_llama3": Recipe("Llama", 64, 4, 48, options=_gqa(2, **_LLAMA3_ROPE)),
    "llama_yarn": Recipe("Llama", 64, 4, 48, options=_gqa(2, **_YARN_ROPE)),
    "llama_yarn_mscale": Recipe("Llama", 64, 4, 48, options=_gqa(2, **_YARN_MSCALE)),
    "llama_dynamic": Recipe(
        "Llama", 32, 4, 48, options=_gqa(2, **_rope(rope_type="dynamic", factor=2.0))
    ),
    "mistral": Recipe("Mistral", 32, 4, 64, options=_gqa(2, sliding_window=None)),
    "mistral_window": Recipe("Mistral", 32, 4, 64, options=_gqa(2, sliding_window=7)),
    "ministral3": Recipe(
        "Ministral3", 64, 4, 40, n_ctx=4 * N_CTX,
        options=_gqa(
            2, head_dim=20,
            **_rope(
                rope_type="yarn", factor=16.0, original_max_position_embeddings=10,
                mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
            ),
        ),
    ),
    "qwen2_windows": Recipe(
        "Qwen2", 32, 4, 56, n_layers=3,
        options=_gqa(2, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "mixtral": Recipe(
        "Mixtral", 32, 4, 40, options=_gqa(2, num_local_experts=5, num_experts_per_tok=2)
    ),
    "qwen2moe": Recipe(
        "Qwen2Moe", 32, 4, 40, options=_gqa(2, shared_expert_intermediate_size=36, **_experts(6, 3))
    ),
    "qwen3moe": Recipe(
        "Qwen3Moe", 40, 4, 48, options=_gqa(2, head_dim=14, norm_topk_prob=True, **_experts(9, 4))
    ),
    "qwen3moe_sums": Recipe(
        "Qwen3Moe", 40, 4, 48, options=_gqa(2, head_dim=14, norm_topk_prob=False, **_experts(3, 1))
    ),
    "olmoe": Recipe(
        "Olmoe", 32, 4, 28, options=_gqa(2, num_experts=4, num_experts_per_tok=4)
    ),
    "ernie4_5_moe": Recipe(
        "Ernie4_5_Moe", 32, 4, 40, n_layers=3,
        options=_gqa(
            2, moe_num_experts=7, moe_k=3, moe_intermediate_size=24, moe_num_shared_experts=2,
        ),
    ),
    "ernie4_5_moe_alone": Recipe(
        "Ernie4_5_Moe", 32, 4, 40,
        options=_gqa(
            2, moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=0,
            moe_layer_start_index=0,
        ),
    ),
    "glm4_moe": Recipe(
        "Glm4Moe", 32, 4, 40, n_layers=3,
        options=_routed(7, 3, head_dim=12, attention_bias=True, routed_scaling_factor=1.7),
    ),
    "glm4_moe_groups": Recipe(
        "Glm4Moe", 32, 4, 40, n_layers=4,
        options=_routed(
            12, 3, head_dim=12, n_group=4, topk_group=2, use_qk_norm=True, norm_topk_prob=False,
            first_k_dense_replace=2, n_shared_experts=2,
        ),
    ),
    "solar_open": Recipe("SolarOpen", 32, 4, 40, options=_routed(6, 2, head_dim=12)),
    "dots1": Recipe(
        "Dots1", 32, 4, 40, n_layers=3,
        options=_routed(
            8, 3, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True,
            routed_scaling_factor=2.5, sliding_window=None,
        ) | _gqa(4),  # as llama.cpp requires
    ),
    "minimax_m2": Recipe(
        "MiniMaxM2", 32, 4, 24,
        options=_gqa(
            2, head_dim=12, num_local_experts=7, num_experts_per_tok=3,
            **_rope(5e6, partial_rotary_factor=0.5),
        ),
    ),
    "exaone_moe": Recipe(
        "ExaoneMoe", 32, 4, 40, n_layers=5,
        options=_gqa(2, num_shared_experts=1, sliding_window=7, **_experts(8, 3)),
    ),
    "phi3": Recipe("Phi3", 32, 4, 40, options=_gqa(2, sliding_window=9)),
    "phi3_partial": Recipe(
        "Phi3", 64, 4, 40, options=_gqa(1, **_rope(partial_rotary_factor=0.75))
    ),
    "phi3_longrope": Recipe("Phi3", 64, 4, 40, options=_gqa(2, **_LONGROPE)),
    "gpt2": Recipe("GPT2", 48, 4, 100),
    "starcoder": Recipe("GPTBigCode", 48, 4, 100),
    "gptj": Recipe("GPTJ", 48, 3, 64, options={"rotary_dim": 6}),
    "bloom": Recipe("Bloom", 32, 4, 128),
    "bloom_odd_heads": Recipe("Bloom", 36, 6, 144),
    "mpt": Recipe("Mpt", 32, 4, 128),
    "mpt_odd_heads": Recipe("Mpt", 36, 6, 144),
    "falcon": Recipe("Falcon", 32, 4, 100, options=_FALCON),
    "falcon_new": Recipe(
        "Falcon", 32, 4, 128,
        options=_FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon_heads": Recipe("Falcon", 32, 2, 50, options=_FALCON | {"multi_query": False}),
    "phi2": Recipe("Phi", 48, 4, 100),
    "phi2_whole": Recipe(
        "Phi", 32, 2, 100,
        options={"hidden_act": "gelu", **_rope(100.0, partial_rotary_factor=1.0)},
    ),
    "nemotron": Recipe("Nemotron", 32, 4, 100, options=_gqa(2)),
    "nemotron_biases": Recipe(
        "Nemotron", 32, 4, 100,
        options=_gqa(
            4, head_dim=12, attention_bias=True, mlp_bias=True, **_rope(partial_rotary_factor=1.0)
        ),
    ),
    "arcee": Recipe("Arcee", 64, 4, 100, options=_gqa(2, **_YARN_ROPE)),
    "granite": Recipe("Granite", 32, 4, 40, options=_gqa(2, **_MULTIPLIERS)),
    "granite4": Recipe(
        "GraniteMoeHybrid", 32, 4, 40,
        options=_gqa(
            2, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=36,
            layer_types=["full_attention"] * 2, position_embedding_type="rope",
            mamba_n_heads=4, **_MULTIPLIERS,
        ),
    ),
    "granitemoe": Recipe(
        "GraniteMoe", 32, 4, 40,
        options=_gqa(2, num_local_experts=5, num_experts_per_tok=2, **_MULTIPLIERS),
    ),
    "olmo2": Recipe("Olmo2", 32, 4, 40, options=_gqa(2)),
    "olmo3": Recipe("Olmo3", 32, 4, 40, n_layers=5, options=_gqa(2, sliding_window=7)),
    "olmo3_yarn": Recipe(
        "Olmo3", 64, 4, 40, n_layers=5,
        options=_gqa(
            2, sliding_window=6,
            rope_parameters={
                "full_attention": _YARN_ROPE["rope_parameters"] | {"attention_factor": 1.3},
                "sliding_attention": _rope()["rope_parameters"],
            },
        ),
    ),
    "glm": Recipe("Glm", 32, 4, 40, options=_gqa(2, head_dim=12)),
    "glm4": Recipe("Glm4", 32, 4, 40, options=_gqa(2, head_dim=12, attention_bias=False)),
    "ernie4_5": Recipe("Ernie4_5", 32, 4, 40, options=_gqa(2, head_dim=10)),
    "seed_oss": Recipe("SeedOss", 32, 4, 40, options=_gqa(2, head_dim=10)),
    "exaone4": Recipe(
        "Exaone4", 64, 4, 40,
        options=_gqa(
            2, sliding_window=None, layer_types=["full_attention"] * 2, **_LLAMA3_ROPE
        ),
    ),
    "exaone4_window": Recipe(
        "Exaone4", 32, 4, 40, n_layers=5,
        options=_gqa(2, sliding_window=7, sliding_window_pattern=4),
    ),
    "smollm3": Recipe("SmolLM3", 32, 4, 40, n_layers=5, options=_gqa(2)),
    "gemma": Recipe("Gemma", 32, 4, 40, options=_gqa(1, head_dim=10)),
    "gemma2": Recipe(
        "Gemma2", 32, 4, 40, n_layers=3,
        options=_gqa(
            2, head_dim=10, query_pre_attn_scalar=17, sliding_window=6,
            attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
        ),
    ),
    "gemma3": Recipe(
        "Gemma3", 32, 4, 40, n_layers=7,
        options=_gqa(2, head_dim=10, query_pre_attn_scalar=9, sliding_window=6),
    ),
    "starcoder2": Recipe("Starcoder2", 32, 4, 40, options=_gqa(2, sliding_window=9)),
    "stablelm": Recipe("StableLm", 64, 4, 40, options=_gqa(2, use_qkv_bias=True)),
    "stablelm_parallel": Recipe(
        "StableLm", 64, 4, 40, options=_gqa(4, use_parallel_residual=True)
    ),
    "cohere2": Recipe(
        "Cohere2", 32, 4, 40, n_layers=5, options=_gqa(2, sliding_window=7, logit_scale=0.3)
    ),
    "command_r": Recipe("Cohere", 32, 4, 40, options=_gqa(2, logit_scale=0.3)),
    "gpt_oss": Recipe(
        "GptOss", 32, 4, 40, n_layers=3,
        options=_gqa(
            2, head_dim=10, sliding_window=6, num_local_experts=5, num_experts_per_tok=2,
            **_GPT_OSS_ROPE,
        ),
    ),
    "gptneox": Recipe("GPTNeoX", 48, 3, 64, options={"hidden_act": "gelu"}),
    "gptneox_serial_tanh": Recipe(
        "GPTNeoX", 32, 2, 100,
        options={
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
            **_rope(100.0, partial_rotary_factor=1.0),
        },
    ),
    "qwen2": Recipe("Qwen2", 32, 4, 56, options=_gqa(2, tie_word_embeddings=True)),
    "qwen3": Recipe("Qwen3", 40, 4, 56, options=_gqa(2, head_dim=14)),
    **HYBRIDS,
}  # fmt: skip


def make_model(recipe: Recipe, seed: int) -> Any:
    """A causal language model in float32 with random parameters."""
    import transformers

    name = _CLASSES.get(recipe.model, f"{recipe.model}ForCausalLM")
    config = recipe.config()
    config._attn_implementation = "eager"  # others may ignore Gemma 2's softcap
    model: Any = getattr(transformers, name)(config)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # supports float64
    return randomize(model, seed)


def randomize(model: Any, seed: int) -> Any:
    """The model with all parameters random, including biases and norms."""
    import torch

    model.eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 1, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.mul_(0.2).add_(1)
            elif parameter.ndim >= 2:
                # keeps outputs at about the magnitude of inputs
                parameter.div_(parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of experts' scores, which are up to 1
                buffer.uniform_(-0.3, 0.3, generator=generator)
    return model


def save_checkpoint(model: Any, path: Path) -> None:
    """Save in HF format, with a small tokenizer."""
    model.save_pretrained(path)
    write_tokenizer_json(path)


def random_tokens(seed: int) -> NDArray[np.int64]:
    """N_CTX random token ids."""
    return np.random.default_rng(seed).integers(0, N_VOCAB, N_CTX)


def reference_logits(model: Any, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Logits [n, n_vocab] in float64."""
    import torch

    with torch.no_grad():
        logits: NDArray[np.float64] = (
            model.double()(torch.as_tensor(tokens)[None]).logits[0].numpy()
        )
    return logits


def float32_tolerance(recipe: Recipe, logits: NDArray[np.float64]) -> float:
    """The tolerance of float32 logits against exact ones.

    A value passes through these many roundings in a row, each of relative size 2^-24 and random
    sign: for every layer the sums of the projections and of the feed-forward block, the dot
    product and the sum over the keys of attention, the norms; then the last norm and the output.
    Errors of random sign grow with the square root of their number; six standard deviations of
    that, relative to the largest logit, hold for every one of some thousands. Angles of rotary
    positions are computed in float32 by both sides, but from frequencies that may differ by one
    rounding: an error of position * 2^-24 radians. Gated DeltaNet is computed in float32 by both
    sides: three roundings of the state for each row, and three sums over a head.
    """
    layer = 8 * recipe.n_embd + 2 * recipe.n_ff + N_CTX
    if "linear_key_head_dim" in recipe.options:
        layer += 2 * 3 * (N_CTX + recipe.options["linear_key_head_dim"])
    roundings = recipe.n_layers * layer + 3 * recipe.n_embd
    angles = recipe.n_layers * N_CTX if recipe.model != "OPT" else 0
    return float((6 * np.sqrt(roundings) + angles) * 2.0**-24 * np.abs(logits).max())


def product_bits(backend: str, outtype: str) -> int:
    """Significant bits of the factors of products with weights of this type.

    A back end such as "cpu (x86_64_v4_amx, 2 threads)" rounds f16 weights and their inputs to bf16.
    """
    in_bf16 = re.match(r"cpu \(x86_64_v4_(bf16|amx),", backend) is not None
    bits = {"f32": 24, "f16": 11, "bf16": 8, "q8_0": 7}[outtype]
    return min(bits, 8) if in_bf16 and outtype in ("f16", "bf16") else bits


def products_error(recipe: Recipe, bits: int) -> float:
    """The tolerance of logits, relative to the largest, if factors have this many bits.

    Each of the at most 7 matrices of a layer and the 2 others adds an error of about 2^-bits of
    random sign. The error of one factor is uniform within it, so that of two is also below it.
    """
    return 6 * 2.0**-bits * float(np.sqrt(7 * recipe.n_layers + 2))
