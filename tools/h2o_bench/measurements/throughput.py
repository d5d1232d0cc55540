"""Tokens per second of many sequences in equal memory, beside other engines.

Random weights in real shapes, random prompts, greedy outputs of a fixed length. Each engine runs as
many sequences as fit beside its weights in the same memory. Tokens/s: generated tokens divided by
the time of prefill and decode. MiB: peak of the process. **Factors**: tokens/s of h2o.cpp, hh=0.2
divided by this engine's. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from h2o_bench.baselines import (
    ENGINES,
    OURS,
    SHARE,
    ctranslate2,
    llama_cpp,
    openvino,
    ours,
    transformers,
)
from h2o_bench.comparison import Baseline, use_processors
from h2o_bench.engine_process import EngineError, EngineProcess
from h2o_bench.models import Models
from h2o_bench.results import Row
from h2o_cpp import _core, capacity
from h2o_cpp.arguments import bytes_of
from h2o_cpp.budget.cache_memory import ModelShape
from h2o_cpp.measure.traffic import weights
from support.shapes import config

BASE = f"{OURS}, hh={SHARE}"
_BLOCK = 32  # OpenVINO's block size in tokens
_PAD = 256  # llama.cpp's sequences have a multiple of this many tokens
_SECONDS = 300.0  # per cell


class Entry(NamedTuple):
    """An engine and its use of the memory."""

    baseline: Baseline
    weight_bytes: int
    text_bytes: float  # cache per sequence

    def sequences(self, memory: int) -> int:
        """The number of sequences whose caches fit beside the weights; 0 if none does."""
        return max(0, int((memory - self.weight_bytes) // self.text_bytes))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="OPT-125M,SmolLM2-135M", metavar="NAME,...")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--lengths", default="32,512,1024", metavar="N,...", help="of outputs")
    parser.add_argument("--memory", metavar="SIZE", help="(default: weights and some full caches)")
    parser.add_argument("--full-caches", type=float, default=3.0, metavar="X", help="how many")
    parser.add_argument("--models", type=Path, metavar="DIR", help="(default: temporary)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    use_processors(args.threads)
    lengths = [int(n) for n in args.lengths.split(",")]
    with nullcontext(args.models) if args.models else TemporaryDirectory() as directory:
        models = Models(Path(directory))
        for shape in args.shapes.split(","):
            path = models.gguf(shape, "F16")
            values = kv_values(ModelShape.of_file(path))
            caches = args.full_caches * 2 * values * (args.prompt + max(lengths))
            memory = int(path.stat().st_size + caches)
            memory = memory if args.memory is None else bytes_of("memory", args.memory)
            for n in lengths:
                case = {"model": f"{shape} in {memory >> 20} MiB", "case": f"{args.prompt} + {n}"}
                for entry in entries(models, shape, path, args.prompt, n, memory, args.threads):
                    for _ in range(args.rounds):
                        yield {**case, **run(entry, memory, args.prompt, n)}


def entries(
    models: Models, shape: str, path: Path, prompt: int, n: int, memory: int, threads: int
) -> Iterator[Entry]:
    """The engines for a shape; a sequence's bytes are K and V of all its tokens, as they store it.

    OpenVINO's cache is in u8 with two f32 per head and token. With eviction, a sequence needs its
    whole prompt temporarily, but prompts are read one by one.
    """
    sizes, whole = config(shape), ModelShape.of_file(path)
    n_ctx, values, f16 = prompt + n, kv_values(whole), path.stat().st_size
    for name, hh in ((f"{OURS}, full", None), (BASE, SHARE)):
        many = 2**50  # as in capacity()
        slab = many / capacity(path, many, hh=hh, n_ctx=n_ctx)
        yield Entry(ours(path, threads, name=name, n_ctx=n_ctx, hh=hh), f16, slab)
    if sizes["model_type"] != "opt":
        padded = -(-n_ctx // _PAD) * _PAD
        yield Entry(llama_cpp(path, threads, 64), f16, values * 2 * padded)
    if sizes["model_type"] == "llama":
        token_bytes = 2 * whole.n_layers * whole.n_kv_heads * (whole.head_dim + 8)
        pool = int((memory - f16) // token_bytes) // _BLOCK * _BLOCK
        one = openvino(path, threads, sizes["vocab_size"], pool_tokens=pool)
        yield Entry(one, f16, token_bytes * -(-n_ctx // _BLOCK) * _BLOCK)
        kept = max(3 * _BLOCK, int(SHARE * n_ctx) // _BLOCK * _BLOCK)
        one = openvino(path, threads, sizes["vocab_size"], cache_tokens=kept, pool_tokens=pool)
        evicting = one._replace(name=f"OpenVINO GenAI, {SHARE:.0%} kept")
        yield Entry(evicting, f16 + token_bytes * prompt, token_bytes * (kept + _BLOCK))
    files = _core.GgufShards(path).files
    n_weights = sum(prod(weight.shape) for weight in weights(files))
    for dtype, n_bytes in (("bfloat16", 2), ("float32", 4)):
        one = transformers(shape, threads, dtype)
        yield Entry(one, n_bytes * n_weights, n_bytes * values * n_ctx)
    if sizes["model_type"] == "opt":
        for dtype, n_bytes in (("int8", 1), ("float32", 4)):  # the cache is f32 in both cases
            one = ctranslate2(models, shape, threads, dtype)
            yield Entry(one, n_bytes * n_weights, 4 * values * n_ctx)


def run(entry: Entry, memory: int, prompt: int, n: int) -> Row:
    """The cells of an engine: a subprocess that loads the model, warms up and generates."""
    (name, module, options, absent), k = entry.baseline, entry.sequences(memory)
    if not k:
        needed = (entry.weight_bytes + entry.text_bytes) / 2**20
        absent = f"weights and one sequence take {needed:.0f} MiB"
    if absent:
        return {"engine": name, "absent": absent}
    if module == f"{ENGINES}.h2o":
        options = {**options, "n_sequences": k}
    try:
        with EngineProcess(module, options, timeout=_SECONDS) as engine:
            engine.batch(1, 16, 2)
            answer = engine.batch(k, prompt, n)
            version = engine.version
    except EngineError as error:
        return {"engine": name, "absent": str(error)}
    rates = [k * n / answer.seconds[0]]
    mib, computed = answer.peak_rss_bytes / 2**20, entry.weight_bytes + k * entry.text_bytes
    cells = {"tokens/s": rates, "MiB": mib, "computed MiB": computed / 2**20}
    return {"engine": name, "version": version, "sequences": float(k), **cells}


def kv_values(whole: ModelShape) -> int:
    """Values per token of a full cache."""
    return 2 * whole.n_layers * whole.n_kv_heads * whole.head_dim
