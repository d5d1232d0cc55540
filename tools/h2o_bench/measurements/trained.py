"""Small models, one per mechanism, trained on books: perplexity beside transformers, and evicting.

They are trained on BOOKS, unless DIR has their checkpoints: with Muon and AdamW, in bfloat16, and
in the last steps on sequences of 1536 tokens. TEXT must not be among the books; both engines read
windows of it in f32. With a budget, perplexity is divided by that of the full cache (± the standard
error, from the windows).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_bench.results import Row
from h2o_cpp.cli.argument_types import fractions
from h2o_cpp.convert import convert
from h2o_cpp.measure.budgets import Comparison
from h2o_cpp.measure.perplexity import stream_losses, token_losses
from h2o_cpp.measure.retrieval.measurement import standard_error
from h2o_cpp.measure.windows import windows
from h2o_cpp.model.session import open_model

_BEGINNING = 2  # of a text: a token
_SHORT, _LONG, _SHARE_LONG = 256, 1536, 0.25  # sequences, and the share of the steps with long ones
_BATCH, _RATE = _LONG, 4e-3  # tokens of a step, learning rate
_WARM_UP, _DECAY = 30, 0.5  # steps; the share of the steps in which the learning rate falls

_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "bos_token_id": _BEGINNING, "eos_token_id": _BEGINNING,
    "pad_token_id": 1,
}  # fmt: skip
# mechanism -> model_type, options
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "windows": ("gemma3_text", {
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 128,
        "query_pre_attn_scalar": 32,
    }),
    "experts": ("qwen3_moe", {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    }),
    "latent": ("deepseek_v2", {
        "kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 3,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    }),
    "delta_net": ("qwen3_5_text", {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
        },
    }),
    "mamba_2": ("granitemoehybrid", {
        "layer_types": ["mamba", "mamba", "attention"] * 2, "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 384,
        "attention_multiplier": 32**-0.5, "mamba_n_heads": 8, "mamba_d_head": 32,
        "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 64,
    }),
    "short_conv": ("lfm2", {
        "layer_types": ["conv", "conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False,
    }),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("books", type=Path, metavar="BOOKS")
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER.json")
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("models", type=Path, metavar="DIR")
    parser.add_argument("--mechanisms", default=",".join(_MODELS), metavar="NAME,...")
    parser.add_argument("--steps", type=int, default=600, help="of training, of 1536 tokens")
    parser.add_argument("-c", "--n-ctx", type=int, default=1500)
    parser.add_argument("--text-tokens", type=int, default=12_000)
    parser.add_argument("--policies", default="random,h2o,mean,contribution", metavar="NAME,...")
    parser.add_argument("--hh", type=fractions, default=[0.1, 0.2], metavar="X,...")
    parser.add_argument("--threads", type=int, default=1)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    text = tokenizer.encode(args.text.read_text("utf-8")).ids[: args.text_tokens]
    parts = list(windows(text, args.n_ctx, beginning=[_BEGINNING]))
    names = args.mechanisms.split(",")
    missing = [name for name in names if not (args.models / name / "config.json").exists()]
    books = tokenizer.encode(args.books.read_text("utf-8")).ids if missing else []
    for name in names:
        path = args.models / name
        if name in missing:
            model = _train(name, np.array(books), tokenizer.get_vocab_size(), args.steps)
            model.save_pretrained(path)
            tokenizer.save(str(path / "tokenizer.json"))
        convert(path, path / "model.gguf", "f32", progress=False)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        theirs = []
        for window in parts:
            with torch.no_grad():
                logits = model(torch.tensor(window[None, :-1]), use_cache=False).logits[0]
            theirs.append(token_losses(logits.numpy(), window[1:]).mean())
        yield {
            "mechanism": name,
            "model_type": _MODELS[name][0],
            "parameters": f"{model.num_parameters() / 1e6:.1f}M",
            "transformers": f"{np.exp(np.mean(theirs)):.4f}",
            **_ours(path / "model.gguf", parts, args),
        }


def _train(name: str, books: NDArray[np.int64], n_vocab: int, n_steps: int) -> Any:
    """A model of transformers, in f32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kind, options = _MODELS[name]
    config = AutoConfig.for_model(kind, **{**_SIZES, "vocab_size": n_vocab, **options})
    model: Any = AutoModelForCausalLM.from_config(config)
    model.train()
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and ".layers." in n]
    rest = [p for n, p in named if p.ndim != 2 or ".layers." not in n]
    optimizers: list[Any] = [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for step in range(n_steps):
        left = (n_steps - step) / n_steps
        length = _LONG if left <= _SHARE_LONG else _SHORT
        starts = torch.randint(len(books) - length, (_BATCH // length,))
        x = torch.tensor(np.stack([books[start : start + length] for start in starts]))
        x[:, 0] = _BEGINNING
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            rate = _RATE * min(1.0, (step + 1) / _WARM_UP, left / _DECAY)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            print(f"{name}, step {step}: {loss.item():.3f}", flush=True)
    return model


def _ours(path: Path, parts: Sequence[NDArray[np.int32]], args: argparse.Namespace) -> Row:
    """Perplexity with the full cache, and divided by it, with policies at budgets."""
    model = open_model(path, device="cpu", threads=args.threads)
    every = Comparison.of(
        args.policies.split(","), args.hh, n_ctx=args.n_ctx, n_batch=8, kv_dtype="f32"
    )
    row: dict[str, Any] = {}
    full: Any = 0.0
    for one in every.caches(model):
        session = every.session(model, one)
        losses = np.array([stream_losses(session, window.tolist()).mean() for window in parts])
        if one.name == "full":
            full, row["h2o.cpp"] = losses, f"{np.exp(losses.mean()):.4f}"
            continue
        more = losses - full
        text = f"{np.exp(more.mean()):.3f} ± {standard_error(more):.3f}"
        row[f"{one.name}, {one.budget:.0%}"] = text
    return row
