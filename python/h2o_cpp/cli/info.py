"""Describe a GGUF file: the model, its types and tokenizer, and the size of its cache."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from h2o_cpp import _core
from h2o_cpp.arguments import bytes_of, check_context
from h2o_cpp.budget.cache_memory import ModelShape, slab_bytes
from h2o_cpp.budget.policy import budget_policy
from h2o_cpp.budget.stored_budget import stored_budget
from h2o_cpp.cli.cache_options import add_n_ctx
from h2o_cpp.cli.options import add_model
from h2o_cpp.cli.output import mebibytes, print_table, put, put_json
from h2o_cpp.cli.parser import Parser
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.files.model_files import find_model
from h2o_cpp.options import CacheOptions

_LONG = 8  # longer arrays are counted, not shown
_CACHE_TOKENS = 1000
_BUDGETS = {"full": None, "hh_20": 0.2}  # to compare


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument("--metadata", action="store_true", help="list every metadata key")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="show how many sequences fit in SIZE of memory, such as 4GiB",
    )
    add_n_ctx(parser, "sequences of N tokens", "the trained context, up to 4096")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")


def run(args: argparse.Namespace) -> int:
    path = find_model(args.model)
    file = _core.GgufFile(path)
    metadata, tensors = file.metadata(), file.tensors()
    summary = _summarize(metadata, tensors, _shape(path))
    if args.memory is not None:
        summary["sequences"] = _fitting(path, args.memory, args.n_ctx, summary)
    short = {key: _short(value) for key, value in metadata.items()}
    if args.json:
        names = ("name", "type", "shape", "bytes")
        document = {"file": path, "gguf_version": file.version, **summary}
        document["metadata"] = short
        document["tensors"] = [dict(zip(names, tensor, strict=True)) for tensor in tensors]
        put_json(document)
        return 0

    match metadata.get("split.no", 0), metadata.get("split.count", 1):
        case int(number), int(count) if count > 1:
            part = f", file {number + 1} of {count}"
        case _:
            part = ""
    put(f"{path}: GGUF v{file.version}, {len(tensors)} tensors{part}")
    print_table({key.replace("_", " "): _text(key, value) for key, value in summary.items()})
    if args.metadata:
        put("\nmetadata", lines=True)
        print_table({key: json.dumps(value) for key, value in short.items()})
    if args.tensors:
        put("\ntensors", lines=True)
        for name, dtype, shape, nbytes in tensors:
            put(f"  {name:32} {dtype:6} {'x'.join(map(str, shape)):>16} {mebibytes(nbytes):>12}")
    return 0


def _fitting(
    path: str, memory: str, n_ctx: int | None, summary: Mapping[str, Any]
) -> dict[str, Any]:
    """How many sequences fit in memory, alone and beside all weights, with each of _BUDGETS."""
    file = ModelFile.find(path)
    if file.config.is_encoder:
        raise ValueError(f"--memory {memory} is for caches, and an encoder has none")

    def fit(n_bytes: int) -> dict[str, int]:
        return {
            name: max(0, n_bytes) // CacheOptions(hh=hh, n_ctx=n_ctx).slab_bytes(file)
            for name, hh in _BUDGETS.items()
        }

    n_bytes = bytes_of("memory", memory)
    return {
        "memory": memory,
        **fit(n_bytes),
        "beside_weights": fit(n_bytes - summary["bytes"]),
        "n_ctx": check_context(n_ctx, summary["context_length"]),
    }


def _shape(path: str) -> ModelShape | None:
    """None if it is not a model that can be run, or an encoder, which has no cache."""
    try:
        config = ModelFile.find(path).config
    except ValueError:
        return None
    return None if config.is_encoder else ModelShape.of(config)


def _summarize(
    metadata: Mapping[str, Any],
    tensors: list[tuple[str, str, tuple[int, ...], int]],
    shape: ModelShape | None,
) -> dict[str, Any]:
    """Properties of a file by name, without missing ones."""
    architecture = metadata.get("general.architecture", "")

    def of_model(key: str) -> Any:
        return metadata.get(f"{architecture}.{key}")

    ff = of_model("feed_forward_length")

    found = {
        "name": metadata.get("general.name"),
        "architecture": architecture,
        "context_length": of_model("context_length"),
        "layers": of_model("block_count"),
        "width": of_model("embedding_length"),
        "feed_forward_width": max(ff) if isinstance(ff, list) and ff else ff,  # of layers
        "heads": of_model("attention.head_count"),
        "kv_heads": shape.n_kv_heads if shape else of_model("attention.head_count_kv"),
        "tokenizer": metadata.get("tokenizer.ggml.model"),
        "pre_tokenizer": metadata.get("tokenizer.ggml.pre"),
        "tokens": len(metadata.get("tokenizer.ggml.tokens", ())) or None,
        "chat_template": "tokenizer.chat_template" in metadata,
        "budget": stored_budget(metadata),
        "parameters": sum(prod(shape) for _, _, shape, _ in tensors),
        "bytes": sum(nbytes for *_, nbytes in tensors),
        "types": dict(Counter(dtype for _, dtype, _, _ in tensors)),
        "cache": _cache(shape),
    }
    return {key: value for key, value in found.items() if value not in (None, "")}


def _cache(shape: ModelShape | None) -> dict[str, int] | None:
    """The bytes of caches with each of _BUDGETS."""
    if shape is None:
        return None
    sizes = {
        name: slab_bytes(
            shape,
            budget_policy(hh, None, _CACHE_TOKENS),
            n_ctx=_CACHE_TOKENS,
            kv_dtype="f16",
            positions="original",
        )
        for name, hh in _BUDGETS.items()
    }
    return {"n_tokens": _CACHE_TOKENS, **sizes}


def _text(key: str, value: Any) -> str:
    if key == "bytes":
        return mebibytes(value)
    if key == "cache":
        full, small = mebibytes(value["full"]), mebibytes(value["hh_20"])
        return f"{full} for {value['n_tokens']} tokens, {small} with --hh 0.2"
    if key == "sequences":
        what = f"of {value['n_ctx']} tokens in {value['memory']}"
        beside = value["beside_weights"]
        return (
            f"{value['full']:,} {what}, {value['hh_20']:,} with --hh 0.2; beside the weights "
            f"{beside['full']:,}, {beside['hh_20']:,} with --hh 0.2"
        )
    if key == "budget":
        return _budget_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{n} {dtype}" for dtype, n in value.items())
    return str(value)


def _budget_text(budget: Mapping[str, Any]) -> str:
    """The budget for --hh auto, and its measured cost."""
    hh, loss, heads = budget["hh"], budget["loss"], budget.get("archive_heads")
    text = f"--hh auto is {hh:g}" if isinstance(hh, float) else f"--hh auto is {hh!r}"
    for form, name in (
        (" by {}", "policy"), (" in {}", "kv_dtype"), (", archive in {}", "archive")
    ):  # fmt: skip
        text += "" if budget.get(name) is None else form.format(budget[name])
    text += f" of {heads:.0%} of the heads" if isinstance(heads, float) else ""
    text += f", {budget['archive_pages']} pages" if budget.get("archive_pages") is not None else ""
    if isinstance(loss, float):
        n_ctx = budget["n_ctx"]
        text += f", which costs {loss:.2%}" + (f" at {n_ctx} tokens" if n_ctx is not None else "")
    return text


def _short(value: Any) -> Any:
    if isinstance(value, list) and len(value) > _LONG:
        return f"[{len(value)} values]"
    return value
