"""The engines for each model, as baselines of a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from h2o_bench.comparison import Baseline
from h2o_bench.engine_process import EngineError
from h2o_bench.models import Models
from support.shapes import config

OURS = "h2o.cpp"
SHARE = 0.2  # of a context, that bounded caches keep
ENGINES = "h2o_bench.engines"


def ours(path: Path, threads: int, *, name: str = OURS, **options: Any) -> Baseline:
    """This engine; options as for Generator."""
    return Baseline(name, f"{ENGINES}.h2o", {"path": str(path), "threads": threads, **options})


def llama_cpp(path: Path, threads: int, n_ctx: int, what: str = "", **options: Any) -> Baseline:
    """llama.cpp, which does not support `opt`; what: of the options, for its name."""
    options = {"path": str(path), "threads": threads, "n_ctx": n_ctx, **options}
    return Baseline(f"llama.cpp{what}", f"{ENGINES}.llama_cpp", options)


def ik_llama_cpp(path: Path, program: Path, threads: int, *, repack: bool) -> Baseline:
    """ik_llama.cpp with or without repacked weights; program: its llama-bench."""
    name = "ik_llama.cpp, repacked" if repack else "ik_llama.cpp"
    options = {"path": str(path), "program": str(program), "threads": threads, "repack": repack}
    return Baseline(name, f"{ENGINES}.ik_llama_cpp", options)


def openvino(path: Path, threads: int, n_vocab: int, **options: Any) -> Baseline:
    """OpenVINO GenAI, which reads architectures `llama` and `qwen2`."""
    kept = options.get("cache_tokens")
    name = "OpenVINO GenAI" if kept is None else f"OpenVINO GenAI, {kept} kept"
    options = {"path": str(path), "threads": threads, "n_vocab": n_vocab, **options}
    return Baseline(name, f"{ENGINES}.openvino", options)


def transformers(shape: str, threads: int, dtype: str) -> Baseline:
    """Random weights of a shape in f32 or bf16."""
    options = {"config": config(shape), "threads": threads, "dtype": dtype}
    return Baseline(f"transformers {dtype}", f"{ENGINES}.transformers", options)


def ctranslate2(models: Models, shape: str, threads: int, dtype: str) -> Baseline:
    """An OPT in int8 or float32."""
    name, module = f"CTranslate2 {dtype}", f"{ENGINES}.ctranslate2"
    try:
        path = str(models.ctranslate2(shape, dtype))
    except EngineError as error:
        return Baseline(name, module, {}, absent=str(error))
    n_vocab = config(shape)["vocab_size"]
    return Baseline(name, module, {"path": path, "threads": threads, "n_vocab": n_vocab})


def everyone(
    models: Models, shape: str, type_name: str, threads: int, n_ctx: int, ik: Path | None = None
) -> Iterator[Baseline]:
    """The engines for a shape and a type.

    transformers computes in f32 and bf16, so it is measured once, with F16; CTranslate2, with int8
    weights, with Q8_0. ik: ik_llama.cpp's llama-bench, if available.
    """
    path, sizes = models.gguf(shape, type_name), config(shape)
    yield ours(path, threads)
    if sizes["model_type"] != "opt":
        yield llama_cpp(path, threads, n_ctx)
        if ik is not None:
            for repack in (False, True):
                yield ik_llama_cpp(path, ik, threads, repack=repack)
    if sizes["model_type"] == "llama":
        yield openvino(path, threads, sizes["vocab_size"])
    if type_name == "F16":
        for dtype in ("bfloat16", "float32"):
            yield transformers(shape, threads, dtype)
    if type_name == "Q8_0" and sizes["model_type"] == "opt":
        yield ctranslate2(models, shape, threads, "int8")
